"""Matching on GPUs of several products: each is served by the rankings for its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from matching_headers import content, found, index, problem
from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import APART, Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.gemm.operands import Request
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.matching.device import DeviceFacts, TorchVersions
from nvgemm_runtime.matching.dispatch import decide_dispatch
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView
from nvgemm_runtime.matching.trust import Terms, decide
from synthetic_facts import H200

H100 = replace(H200, name="NVIDIA H100 80GB HBM3")
H20 = replace(H200, name="NVIDIA H20", multiprocessors=78)

PROBLEMS = (problem(16), problem(64))
VERSIONS = TorchVersions(torch="2.11.0+cu130", cuda="13.0")
CONDITIONS = Conditions(
    driver="580.95.05", torch=VERSIONS.torch, cuda="13.0", date="2026-11-21", launches=APART
)


def both_ranked(facts: DeviceFacts, order: tuple[str, ...], **how: bool) -> list[ProblemRanking]:
    """Confirmed measurements of all problems on a product, ATen the slowest."""
    source = RankingSource(kind="measurement", by="t", gpu=facts.name, conditions=CONDITIONS)
    return [
        ProblemRanking(
            problem=one,
            source=source,
            kernels=tuple((id_, 1000 + 100 * place) for place, id_ in enumerate(order)),
            measured=Measured(
                spreads_ns=(1,) * len(order),
                aten=Timing(time_ns=2000, spread_ns=1),
                triton=None,
                doubts=(),
                confirmed_by=("a" * 64, "b" * 64),
            ),
            **how,
        )
        for one in PROBLEMS
    ]


def ids() -> tuple[str, str]:
    first, second = (kernel.id for kernel in content(*PROBLEMS).kernels)
    return first, second


def for_two() -> BundleContent:
    """A kernel is the fastest on each product, the same one for every problem."""
    first, second = ids()
    return replace(
        content(*PROBLEMS),
        target=Target(arch="sm_90a"),
        device="H200",
        further_devices=("H100",),
        rankings=(
            *both_ranked(H200, (first, second)),
            *both_ranked(H100, (second, first), is_further=True),
        ),
    )


def header() -> Header:
    return encode_bundle(for_two())[1]


@pytest.mark.parametrize(("facts", "winner"), [(H200, 0), (H100, 1), (H20, 0)])
def test_a_gpu_is_served_by_the_ranking_for_its_product_or_by_the_first(
    facts: DeviceFacts, winner: int
) -> None:
    on = index(header(), facts=facts)
    for asked in PROBLEMS:
        match = found(on.match(asked, 16))
        assert match.kernels[0].kernel.id == ids()[winner]
        assert match.ranked_as == asked
        assert match.source.gpu == (H200 if facts is H20 else facts).name


@pytest.mark.parametrize(("facts", "winner"), [(H200, 0), (H100, 1)])
def test_what_was_measured_on_the_product_counts_and_nothing_else(
    facts: DeviceFacts, winner: int
) -> None:
    match = found(index(header(), facts=facts).match(PROBLEMS[0], 16))
    request = Request(problem=PROBLEMS[0], alignment_bytes=256)
    decision = decide(match, request, facts, VERSIONS, Terms(limit=4, trusts_measurements=True))
    assert decision.is_final
    assert [one.kernel.id for one in decision.kernels] == [ids()[winner]]
    assert f"confirmed by 2 GPUs on {facts.name}" in decision.why


@pytest.mark.parametrize(("facts", "winner"), [(H200, 0), (H100, 1)])
def test_a_dispatch_table_is_made_of_the_rankings_for_the_product(
    facts: DeviceFacts, winner: int
) -> None:
    rows = index(header(), facts=facts).ranked_sizes(PROBLEMS[0])
    assert all(len(of_size) == 1 for of_size in rows.values())
    request = Request(problem=PROBLEMS[0], alignment_bytes=256)
    decided = decide_dispatch(rows, request, facts, VERSIONS, Terms(limit=1))
    assert not decided.open_reasons
    assert set(decided.table.used) == {ids()[winner]}


def test_a_gpu_of_no_listed_product_says_whose_order_it_uses() -> None:
    match = found(index(header(), facts=H20).match(PROBLEMS[0], 16))
    request = Request(problem=PROBLEMS[0], alignment_bytes=256)
    decision = decide(match, request, H20, VERSIONS, Terms(limit=4, trusts_measurements=True))
    assert not decision.is_final
    assert decision.why == "measured on NVIDIA H200, this is NVIDIA H20"
    rows = index(header(), facts=H20).ranked_sizes(PROBLEMS[0])
    decided = decide_dispatch(rows, request, H20, VERSIONS, Terms(limit=1))
    assert not decided.table.has_kernels
    assert set(decided.open_reasons.values()) == {"measured on NVIDIA H200, this is NVIDIA H20"}


def test_an_estimate_for_another_product_says_so_too() -> None:
    base = for_two()
    source = RankingSource(kind="estimate", by="model", gpu=H200.name)
    rankings = tuple(
        replace(one, source=source, measured=None) for one in base.rankings if not one.is_further
    )
    alone = encode_bundle(replace(base, rankings=rankings, further_devices=()))[1]
    request = Request(problem=PROBLEMS[0], alignment_bytes=256)
    for facts, why in (
        (H200, ""),
        (H20, "ranked for NVIDIA H200, this is NVIDIA H20: the order is a guess here"),
    ):
        match = found(index(alone, facts=facts).match(PROBLEMS[0], 16))
        assert decide(match, request, facts, VERSIONS, Terms(limit=4)).why == why
        rows = index(alone, facts=facts).ranked_sizes(PROBLEMS[0])
        decided = decide_dispatch(rows, request, facts, VERSIONS, Terms(limit=1))
        assert set(decided.open_reasons.values()) == {why or "its ranking is an estimate"}


def test_a_bundle_that_ranks_for_the_product_comes_before_one_for_another() -> None:
    first, second = ids()
    estimate = RankingSource(kind="estimate", by="model", gpu=H100.name)
    own = tuple(
        ProblemRanking(problem=one, source=estimate, kernels=((second, None), (first, None)))
        for one in PROBLEMS
    )
    base = for_two()
    others = tuple(one for one in base.rankings if not one.is_further)
    views = [
        BundleView(name=name, header=encode_bundle(replace(base, rankings=rankings))[1])
        for name, rankings in (("other", others), ("own", own))
    ]
    match = found(Index(views, H100).match(PROBLEMS[0], 16))
    assert match.kernels[0].bundle.name == "own"
