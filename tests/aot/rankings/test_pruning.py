"""Pruning leaves what is looked up by m as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import header_without_offsets
from nvgemm_aot.rankings.prune_kernels import prune
from nvgemm_aot.rankings.pruning import keep_winners
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.gemm.operands import Request
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.matching.device import TorchVersions
from nvgemm_runtime.matching.dispatch import decide_dispatch
from nvgemm_runtime.matching.evidence import Evidence
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView
from nvgemm_runtime.matching.thresholds import ATEN, DispatchTable
from nvgemm_runtime.matching.trust import Terms
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import H200

HOWS = [keep_winners, lambda content: prune(content)[0]]
Prune = Callable[[BundleContent], BundleContent]

CONDITIONS = Conditions(driver="580.95.05", torch="2.11.0+cu130", cuda="13.0", date="2026-11-21")
SOURCE = RankingSource(kind="measurement", by="a test", gpu="NVIDIA H200", conditions=CONDITIONS)
LATER = replace(SOURCE, conditions=replace(CONDITIONS, torch="2.12.0+cu130"))
GPUS = ("a" * 64, "b" * 64)


def bundle(kernels: int) -> BundleContent:
    content = synthetic_content(kernels=kernels, problems=1)
    target = replace(content.target, arch="sm_90a")
    return replace(content, target=target, device="H200", rankings=())


def ranking(
    m: int,
    times: Mapping[BuiltKernel, int],
    *,
    n: int = 4096,
    spread: int = 1,
    aten: int = 1000,
    confirmed: bool = True,
    repeated: int | None = None,
    source: RankingSource = SOURCE,
) -> ProblemRanking:
    order = sorted(times.items(), key=lambda one: one[1])
    return ProblemRanking(
        problem=Problem(signature=SIGNATURE, m=m, n=n, k=4096),
        source=source,
        kernels=tuple((kernel.id, time) for kernel, time in order),
        measured=Measured(
            spreads_ns=(spread,) * len(order),
            aten=Timing(time_ns=aten, spread_ns=spread),
            triton=None,
            doubts=(),
            confirmed_by=GPUS if confirmed else (),
            repeated=repeated,
        ),
    )


def table(
    header: Header,
    *,
    n: int = 4096,
    torch: str = "2.11.0+cu130",
    evidence: Evidence = Evidence.DEFAULT,
    only_deterministic: bool = True,
) -> DispatchTable:
    versions = TorchVersions(torch=torch, cuda="13.0")
    problem = Problem(signature=SIGNATURE, m=1, n=n, k=4096)
    index = Index([BundleView(name="b", header=header)], H200, versions=versions)
    return decide_dispatch(
        index.ranked_sizes(problem),
        Request(problem=problem, alignment_bytes=32),
        H200,
        versions,
        Terms(limit=1),
        evidence=evidence,
        only_deterministic=only_deterministic,
    ).table


@pytest.mark.parametrize("how", HOWS)
def test_a_kernel_that_bridges_a_gap_and_wins_nowhere_stays(how: Prune) -> None:
    content = bundle(6)
    low, high, bridge, *others = content.kernels
    # Third at both ends, and within 2 % of the fastest; others are between it and the fastest.
    rankings = (
        ranking(16, {low: 500, others[0]: 503, bridge: 508, high: 700}),
        ranking(32, {high: 500, others[1]: 503, bridge: 508, low: 700}),
    )
    content = replace(content, rankings=rankings)
    before = table(header_without_offsets(content))
    assert before.at(20) == bridge.id, "else this shows nothing"
    pruned = how(content)
    assert table(header_without_offsets(pruned)) == before
    assert others[2].id not in {kernel.id for kernel in pruned.kernels}


@pytest.mark.parametrize("how", HOWS)
def test_a_kernel_that_bridges_nothing_goes(how: Prune) -> None:
    content = bundle(5)
    low, high, bridge, *others = content.kernels
    # The same times, but too far from each other: ATen computes between.
    rankings = (
        ranking(16, {low: 500, others[0]: 503, bridge: 508, high: 700}),
        ranking(512, {high: 500, others[1]: 503, bridge: 508, low: 700}),
    )
    content = replace(content, rankings=rankings)
    assert table(header_without_offsets(content)).at(20) == ATEN
    assert bridge.id not in {kernel.id for kernel in how(content).kernels}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("seed", range(12))
def test_every_table_is_the_same_after_pruning(how: Prune, seed: int) -> None:
    source = random.Random(seed)
    content = bundle(9)
    kernels = tuple(
        replace(kernel, is_deterministic=source.random() < 0.7) for kernel in content.kernels
    )
    rankings = tuple(
        ranking(
            m,
            {one: source.randint(490, 520) for one in source.sample(kernels, 6)},
            n=n,
            spread=source.choice((0, 2)),
            aten=source.choice((480, 505, 540, 1000)),
            confirmed=source.random() < 0.5,
            repeated=source.choice((None, 120)),
            source=source.choice((SOURCE, SOURCE, LATER)),
        )
        for n in (1024, 4096)
        for m in (1, 2, 4, 16, 32, 64, 96, 128, 160, 192, 384, 512, 640, 768)
    )
    content = replace(content, kernels=kernels, rankings=rankings)
    before, after = header_without_offsets(content), header_without_offsets(how(content))
    hows = [
        {"n": n, "torch": torch, "evidence": evidence, "only_deterministic": deterministic}
        for n in (1024, 4096)
        for torch in ("2.11.0+cu130", "2.12.0+cu130")
        for evidence in Evidence
        for deterministic in (False, True)
    ]
    assert any(table(before, **one).has_kernels for one in hows)
    assert [table(after, **one) for one in hows] == [table(before, **one) for one in hows]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("gpu", "stays"), [("NVIDIA H200", False), ("NVIDIA of tomorrow", True)])
def test_of_many_rows_every_kernel_stays_where_the_number_of_multiprocessors_is_not_known(
    how: Prune, gpu: str, stays: bool
) -> None:
    """Which kernel a table names between two m depends on waves, which then cannot be counted."""
    content = bundle(5)
    times = {kernel: 500 + 100 * place for place, kernel in enumerate(content.kernels)}
    source = replace(SOURCE, gpu=gpu)
    rankings = tuple(ranking(m, times, source=source) for m in (1024, 1536))
    pruned = how(replace(content, rankings=rankings))
    assert (len(pruned.kernels) == len(content.kernels)) is stays
