"""Tables that say which kernel computes a GEMM of any m."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nvgemm_aot.bundle.content import ProblemRanking
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle.format import Conditions, Header, Measured, RankingSource, Timing
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.gemm.operands import Request
from nvgemm_runtime.gemm.problem import Layout, Problem, Signature
from nvgemm_runtime.matching.device import DeviceFacts, TorchVersions
from nvgemm_runtime.matching.dispatch import (
    ATEN,
    FEW_ROWS,
    MARGIN,
    MAX_RATIO,
    MAX_RATIO_OF_FEW,
    MAX_WORKSPACE_BYTES,
    Contender,
    Dispatch,
    DispatchTable,
    MeasuredSize,
    decide_dispatch,
    make_table,
)
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.trust import Terms
from nvgemm_runtime.matching.usable_rankings import BundleView
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import H200


def size(m: int, aten: int = 1000, spread: int = 0, **kernels: int) -> MeasuredSize:
    """What kernels took at an m, in nanoseconds."""
    return MeasuredSize(
        m=m,
        kernels={
            name: Contender(timing=Timing(time_ns=time, spread_ns=spread))
            for name, time in kernels.items()
        },
        aten=Timing(time_ns=aten, spread_ns=spread),
    )


def table(*sizes: MeasuredSize, **how: bool) -> dict[int, str]:
    """By the first m of each segment: who computes."""
    made = make_table(sizes, **how)
    return dict(zip((0, *made.bounds), made.kernels))


def test_one_measured_m_says_nothing_of_others() -> None:
    assert table(size(16, x=900)) == {0: ATEN, 16: "x", 17: ATEN}


def test_nothing_measured_is_aten_everywhere() -> None:
    assert table() == {0: ATEN}
    assert not make_table([]).has_kernels
    assert make_table([]).at(7) == ATEN


def test_where_aten_was_faster_or_equal_it_computes() -> None:
    assert table(size(16, x=1000), size(17, x=1001)) == {0: ATEN}


def test_a_kernel_that_is_good_at_both_ends_computes_between_and_not_beyond() -> None:
    assert table(size(16, x=900), size(24, x=950)) == {0: ATEN, 16: "x", 25: ATEN}


def test_a_kernel_that_was_measured_at_one_end_alone_does_not_compute_between() -> None:
    assert table(size(16, x=900), size(24, y=950)) == {
        0: ATEN, 16: "x", 17: ATEN, 24: "y", 25: ATEN,
    }  # fmt: skip


def test_a_kernel_behind_by_more_than_the_margin_at_one_end_does_not_compute_between() -> None:
    behind = int(900 * (1 + MARGIN)) + 1
    assert table(size(16, x=900, y=behind), size(24, x=behind, y=900)) == {
        0: ATEN, 16: "x", 17: ATEN, 24: "y", 25: ATEN,
    }  # fmt: skip
    near = behind - 2
    assert ATEN not in list(table(size(16, x=900, y=near), size(24, x=near, y=900)).values())[1:-1]


def test_a_kernel_that_aten_beats_at_one_end_does_not_compute_between() -> None:
    assert table(size(16, x=900), size(24, aten=899, x=900)) == {0: ATEN, 16: "x", 17: ATEN}


@pytest.mark.parametrize(
    ("low", "high", "is_bridged"),
    [
        (1, MAX_RATIO_OF_FEW, True),
        (1, MAX_RATIO_OF_FEW + 1, False),
        (8, FEW_ROWS, True),
        (120, FEW_ROWS + 1, True),
        (FEW_ROWS - 64, FEW_ROWS + 1, False),
        (1000, int(1000 * MAX_RATIO), True),
        (1000, int(1000 * MAX_RATIO) + 1, False),
    ],
)
def test_measured_sizes_far_apart_say_nothing_of_what_lies_between(
    low: int, high: int, is_bridged: bool
) -> None:
    made = make_table([size(low, x=900), size(high, x=900)])
    assert (made.at(low + 1) == "x") == is_bridged
    assert made.at(low) == made.at(high) == "x"


def test_what_may_not_be_bridged_is_not() -> None:
    sizes = [size(16, x=900), size(24, x=900)]
    assert table(*sizes, may_bridge=False) == {0: ATEN, 16: "x", 17: ATEN, 24: "x", 25: ATEN}


def test_a_kernel_that_needs_much_memory_computes_where_it_was_measured_alone() -> None:
    sizes = [
        replace(
            one,
            kernels={"x": replace(one.kernels["x"], workspace_bytes=MAX_WORKSPACE_BYTES + more)},
        )
        for one, more in ((size(16, x=900), 0), (size(24, x=900), 1))
    ]
    assert table(*sizes) == {0: ATEN, 16: "x", 17: ATEN, 24: "x", 25: ATEN}


def test_of_those_not_told_apart_the_one_next_to_it_computes() -> None:
    sizes = [
        size(8, spread=5, x=500, y=600),
        size(9, spread=5, x=505, y=500),
        size(10, spread=5, x=500, y=600),
    ]
    assert table(*sizes) == {0: ATEN, 8: "x", 11: ATEN}
    told_apart = replace(sizes[1], kernels=size(9, spread=1, x=505, y=500).kernels)
    assert table(sizes[0], told_apart, sizes[2]) == {0: ATEN, 8: "x", 9: "y", 10: "x", 11: ATEN}


def test_a_kernel_that_is_slower_than_aten_takes_no_place_of_a_faster_one() -> None:
    """However close they are: a table is never to be slower than ATen where it was measured."""
    sizes = [
        size(8, spread=50, x=500, y=600),
        size(9, aten=505, spread=50, x=510, y=500),
        size(10, spread=50, x=500, y=600),
    ]
    assert make_table(sizes).at(9) in (ATEN, "y")


def made_up(source: random.Random) -> list[MeasuredSize]:
    ms = sorted(source.sample([*range(1, 40), *range(100, 4000, 50)], source.randrange(7)))
    names = "wxyz"[: source.randrange(1, 5)]
    return [
        size(
            m,
            aten=source.randrange(90, 110),
            spread=source.randrange(4),
            **{name: source.randrange(90, 110) for name in names if source.random() < 0.8},
        )
        for m in ms
    ]


def may_compute_at(one: MeasuredSize) -> set[str]:
    beating = {name: k.timing.time_ns for name, k in one.kernels.items()}
    beating = {name: time for name, time in beating.items() if time < one.aten.time_ns}
    if not beating:
        return {ATEN}
    spread = one.aten.spread_ns
    latest = min(beating.values()) + spread
    allowed = {name for name, time in beating.items() if time - spread <= latest}
    return allowed | ({ATEN} if one.aten.time_ns - spread <= latest else set())


def may_compute_between(low: MeasuredSize, high: MeasuredSize) -> set[str]:
    ratio = MAX_RATIO_OF_FEW if high.m <= FEW_ROWS else MAX_RATIO
    if high.m > ratio * low.m:
        return {ATEN}
    sets = []
    for one in (low, high):
        times = [k.timing.time_ns for k in one.kernels.values()]
        best = min([*times, one.aten.time_ns])
        sets.append(
            {
                name
                for name, k in one.kernels.items()
                if k.timing.time_ns < one.aten.time_ns and k.timing.time_ns / best - 1 <= MARGIN
            }
        )
    return sets[0] & sets[1] or {ATEN}


def allowed_along(sizes: Sequence[MeasuredSize]) -> Iterator[tuple[int, set[str]]]:
    """Each place of a table by its first m: what may compute there."""
    for low, high in itertools.zip_longest(sizes, sizes[1:]):
        yield low.m, may_compute_at(low)
        if high is None:
            yield low.m + 1, {ATEN}
        elif high.m > low.m + 1:
            yield low.m + 1, may_compute_between(low, high)


@pytest.mark.parametrize("seed", range(150))
def test_a_table_uses_what_it_may_with_as_few_changes_as_can_be(seed: int) -> None:
    source = random.Random(seed)
    sizes = made_up(source)
    made = make_table(sizes)
    places = list(allowed_along(sizes))
    for begin, allowed in places:
        assert made.at(begin) in allowed
    assert made.at(0) == ATEN
    assert made.at(10**9) == ATEN
    assert list(made.bounds) == sorted(set(made.bounds))
    assert len(made.kernels) == len(made.bounds) + 1
    assert all(one != other for one, other in itertools.pairwise(made.kernels))
    chosen = [made.at(begin) for begin, _ in places]

    def changes(names: Sequence[str]) -> int:
        return sum(one != other for one, other in itertools.pairwise(names))

    if len(places) <= 9:
        fewest = min(
            map(changes, itertools.product(*(allowed for _, allowed in places))), default=0
        )
        assert changes(chosen) == fewest
    source.shuffle(sizes)
    assert make_table(sizes) == made, "whatever the order"


@pytest.mark.parametrize("seed", range(30))
def test_a_part_of_a_table_says_the_same(seed: int) -> None:
    source = random.Random(seed)
    made = make_table(made_up(source))
    least = source.randrange(1, 3000)
    most = source.choice([None, least, least + source.randrange(2000)])
    part = made.within(least, most)
    for m in source.sample(range(least, (most or 4100) + 1), min(50, (most or 4100) - least + 1)):
        assert part.at(m) == made.at(m)
    if most == least:
        assert part == DispatchTable(bounds=(), kernels=(made.at(least),))


@pytest.mark.parametrize("seed", range(30))
def test_a_table_without_aten_says_the_same_elsewhere(seed: int) -> None:
    source = random.Random(seed)
    made = make_table(made_up(source))
    for usual in ("another", next(iter(made.used), "another")):
        without = made.without_aten(usual)
        assert ATEN not in without.kernels
        assert all(here != after for here, after in itertools.pairwise(without.kernels))
        for m in source.sample(range(4100), 50):
            assert without.at(m) == (made.at(m) or usual)


# From rankings of bundles.

VERSIONS = TorchVersions(torch="2.11.0+cu130", cuda="13.0")
CONDITIONS = Conditions(driver="580.95.05", torch="2.11.0+cu130", cuda="13.0", date="2026-11-21")
SOURCE = RankingSource(kind="measurement", by="a test", gpu="NVIDIA H200", conditions=CONDITIONS)
GPUS = ("a" * 64, "b" * 64)


def bundle(
    times: Mapping[int, Sequence[int]],
    *,
    aten: int | None = 1000,
    seed: int = 0,
    signature: Signature = SIGNATURE,
    source: RankingSource = SOURCE,
    workspace: TileWorkspace | None = None,
    alignments: Sequence[int] = (16, 16, 16),
    **measured: Any,
) -> Header:
    """By m, what kernels 0, 1 and 2 took; on two GPUs of one product."""
    content = synthetic_content(kernels=3, problems=1, seed=seed)
    kernels = tuple(
        replace(
            kernel,
            signature=signature,
            workspace=workspace,
            alignment_bytes=alignment,
            calling_convention="tvm_ffi:gemm(a,b,out,workspace,stream)"
            if workspace
            else kernel.calling_convention,
        )
        for kernel, alignment in zip(content.kernels, alignments)
    )
    rankings = []
    for m, of_size in times.items():
        order = sorted(range(len(of_size)), key=of_size.__getitem__)
        facts = {"triton": None, "doubts": (), "confirmed_by": GPUS, **measured}
        rankings.append(
            ProblemRanking(
                problem=Problem(signature=signature, m=m, n=4096, k=4096),
                source=source,
                kernels=tuple((kernels[at].id, of_size[at]) for at in order),
                measured=Measured(
                    spreads_ns=(1,) * len(of_size),
                    aten=None if aten is None else Timing(time_ns=aten, spread_ns=1),
                    **facts,
                ),
            )
        )
    target = replace(content.target, arch="sm_90a")
    return encode_bundle(
        replace(content, target=target, device="H200", kernels=kernels, rankings=tuple(rankings))
    )[1]


def dispatch(
    *headers: Header,
    m: int = 16,
    signature: Signature = SIGNATURE,
    facts: DeviceFacts = H200,
    versions: TorchVersions = VERSIONS,
    only_confirmed: bool = True,
    terms: Mapping[str, Any] | None = None,
    **request: Any,
) -> Dispatch:
    index = Index(
        [BundleView(name=f"b{i}", header=one) for i, one in enumerate(headers)],
        facts,
        versions=versions,
    )
    problem = Problem(signature=signature, m=m, n=4096, k=4096)
    return decide_dispatch(
        index.ranked_sizes(problem),
        Request(**{"problem": problem, "alignment_bytes": 32, **request}),
        facts,
        versions,
        Terms(limit=1, **(terms or {})),
        only_confirmed=only_confirmed,
    )


TIMES = {16: (500, 600, 700), 24: (500, 600, 700)}


def test_confirmed_rankings_make_a_table_whose_kernels_are_known() -> None:
    header = bundle(TIMES)
    made = dispatch(header)
    first = header.kernels[header.rankings[0].kernels[0].kernel].id
    assert made.table == DispatchTable(bounds=(16, 25), kernels=(ATEN, first, ATEN))
    assert made.table.used == (first,)
    assert made.measured[first].bundle.name == "b0"
    assert len(made.measured) == 3
    assert made.open == {}
    assert [one.m for one in made.sizes] == [16, 24]


WITHOUT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another product": ({}, {"facts": replace(H200, name="NVIDIA H200 NVL")}, "NVIDIA H200 NVL"),
    "another CUDA": (
        {}, {"versions": replace(VERSIONS, cuda="13.1")}, "torch uses 13.1"
    ),
    "another torch": (
        {}, {"versions": replace(VERSIONS, torch="2.12.0")}, "this is 2.12.0"
    ),
    "doubts": ({"doubts": ("it was hot",)}, {}, "it was hot"),
    "one GPU": ({"confirmed_by": ()}, {}, "measured once"),
    "no ATen": ({"aten": None}, {}, "ATen was not measured"),
    "gaps": ({}, {"is_compact": False}, "without gaps"),
    "less alignment": ({}, {"alignment_bytes": 16}, "aligned to 32 bytes or more"),
    "slow accumulation": ({}, {"terms": {"is_precise": True}}, "use_fast_accum"),
    "a setting": ({}, {"terms": {"aten_setting": "x is y"}}, "x is y"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_what_does_not_hold_leaves_aten(name: str) -> None:
    measured, how, why = WITHOUT[name]
    made = dispatch(bundle(TIMES, **measured), **how)
    assert made.table == DispatchTable(bounds=(), kernels=(ATEN,))
    assert made.measured == {}
    assert list(made.open) == [16, 24]
    assert all(why in reason for reason in made.open.values())


def test_estimates_leave_aten() -> None:
    made = dispatch(estimated(bundle(TIMES)))
    assert not made.table.has_kernels
    assert made.open == {16: "its ranking is an estimate", 24: "its ranking is an estimate"}


def estimated(header: Header) -> Header:
    rankings = tuple(replace(one, measured=None) for one in header.rankings)
    return replace(header, rankings=rankings)


def test_what_was_measured_once_counts_where_that_is_enough() -> None:
    once = bundle(TIMES, confirmed_by=())
    assert dispatch(once, only_confirmed=False).table.has_kernels


def test_doubts_of_one_size_leave_the_others() -> None:
    made = dispatch(
        bundle({16: TIMES[16]}), bundle({24: TIMES[24]}, seed=1, doubts=("it was hot",))
    )
    assert (made.table.at(16), made.table.at(20), made.table.at(24)) == (
        *made.table.used, ATEN, ATEN,
    )  # fmt: skip
    assert list(made.open) == [24]


def test_kernels_of_two_bundles_share_a_table() -> None:
    made = dispatch(bundle({16: TIMES[16]}), bundle({24: TIMES[24]}, seed=1))
    assert {made.measured[one].bundle.name for one in made.table.used} == {"b0", "b1"}
    assert made.table.at(20) == ATEN, "neither was measured at both"


def test_two_bundles_with_one_verdict_do_not_disturb_each_other() -> None:
    made = dispatch(bundle(TIMES), bundle(TIMES, seed=1))
    assert len(made.table.used) == 1
    assert made.open == {}


def test_bundles_that_contradict_each_other_leave_aten() -> None:
    made = dispatch(bundle(TIMES), bundle({16: TIMES[16]}, seed=1, aten=400))
    assert made.table.at(16) == made.table.at(20) == ATEN
    assert made.table.at(24) != ATEN
    assert "b0 and b1 contradict each other" in made.open[16]


@pytest.mark.parametrize("is_second_deterministic", [False, True])
def test_where_only_kernels_win_whose_results_depend_on_timing_it_is_said(
    is_second_deterministic: bool,
) -> None:
    header = bundle({16: (500, 600, 1100)})
    varying = {0, 1} - ({1} if is_second_deterministic else set())
    kernels = tuple(
        replace(kernel, is_deterministic=place not in varying)
        for place, kernel in enumerate(header.kernels)
    )
    made = dispatch(replace(header, kernels=kernels))
    assert made.table.has_kernels == is_second_deterministic
    assert list(made.open) == ([] if is_second_deterministic else [16])


def test_a_ranking_that_does_not_hold_contradicts_none() -> None:
    doubtful = bundle(TIMES, seed=1, aten=400, doubts=("it was hot",))
    assert dispatch(bundle(TIMES), doubtful).open == {}


def test_of_bundles_measured_with_several_releases_of_torch_each_serves_its_own() -> None:
    """Also where they contradict each other; ATen's times are 1000 with the one, 400 with others.

    The bundles' order makes no difference.
    """
    later = replace(SOURCE, conditions=replace(CONDITIONS, torch="2.12.0+cu130"))
    other_cuda = replace(SOURCE, conditions=replace(CONDITIONS, torch="2.12.0", cuda="13.2"))
    headers = [
        bundle(TIMES),
        bundle(TIMES, seed=1, source=later, aten=400),
        bundle(TIMES, seed=2, source=other_cuda, aten=550),
    ]
    for ordered in (headers, headers[::-1]):
        for torch, cuda, aten in [
            ("2.11.0+cu130", "13.0", 1000),
            ("2.11.3", "13.0", 1000),
            ("2.12.1+cu130", "13.0", 400),
            ("2.12.1+cu132", "13.2", 550),
        ]:
            made = dispatch(*ordered, versions=TorchVersions(torch=torch, cuda=cuda))
            assert [size.aten.time_ns for size in made.sizes] == [aten, aten]
            assert made.table.has_kernels is (aten > 500)
            assert made.open == {}
        none = dispatch(*ordered, versions=TorchVersions(torch="2.13.0", cuda="13.0"))
        assert none.sizes == ()
        assert list(none.open) == [16, 24]
        for why in none.open.values():
            for torch in ("2.11.0+cu130", "2.12.0+cu130", "2.12.0"):
                assert f"ATen was measured with torch {torch}, this is 2.13.0" in why


def test_triton_makes_no_kernel_worse_than_aten() -> None:
    made = dispatch(bundle(TIMES, triton=Timing(time_ns=300, spread_ns=1)))
    assert made.table.at(16) != ATEN


def test_kernels_that_need_more_alignment_are_not_there() -> None:
    """Without the fastest, what is left was not compared to the end."""
    made = dispatch(bundle(TIMES, alignments=(64, 16, 16)))
    assert not made.table.has_kernels
    assert "the kernel that was measured to be the fastest does not serve" in made.open[16]


def test_nothing_is_bridged_where_m_is_contiguous_in_a() -> None:
    signature = replace(SIGNATURE, layout=Layout.NN)
    header = bundle(TIMES, signature=signature)
    made = dispatch(header, signature=signature)
    assert made.table.at(16) == made.table.at(24) != ATEN
    assert made.table.at(20) == ATEN


def test_workspaces_are_counted_at_the_larger_m() -> None:
    per_tile = MAX_WORKSPACE_BYTES // (4096 // 64)
    workspace = TileWorkspace(
        tile=(16, 64),
        tiles_multiple=(1, 1),
        zeroed_once=0,
        zeroed_per_tile=0,
        scratch_per_tile=per_tile,
    )
    made = dispatch(bundle(TIMES, workspace=workspace))
    assert (made.table.at(16) != ATEN, made.table.at(20), made.table.at(24) != ATEN) == (
        True, ATEN, True,
    )  # fmt: skip


def test_other_sizes_of_n_and_k_are_another_table() -> None:
    index = Index([BundleView(name="b", header=bundle(TIMES))], H200, versions=VERSIONS)
    assert list(index.ranked_sizes(Problem(signature=SIGNATURE, m=16, n=4096, k=4096))) == [
        16,
        24,
    ]
    assert index.ranked_sizes(Problem(signature=SIGNATURE, m=16, n=4096, k=2048)) == {}
