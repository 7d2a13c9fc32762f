"""Estimates for groups: how rows are spread, what is counted, and what a build makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_provider import FakeProvider, candidate
from nvgemm_aot.manifest.parse import Declared
from nvgemm_aot.pipeline.target_plan import look_up_plan, make_plan
from nvgemm_aot.providers import load_provider
from nvgemm_aot.providers.base import DYNAMIC_PERSISTENT
from nvgemm_aot.providers.heuristics.group_times import (
    DATA,
    ROUTINGS,
    GroupTimes,
    TileCost,
    design_name,
    load_group_times,
    read_group_times,
    routed_counts,
    spread_rows,
    work_of,
)
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import Problem, Signature

ROWS = Signature.parse("grouped_mm/tn/bf16xbf16/fp32/bf16")
TERMS = Signature.parse("k_grouped_mm/nt/bf16xbf16/fp32/bf16")
SM_COUNT = 132
SHIPPED = json.loads((files("nvgemm_aot.providers.heuristics") / DATA).read_text(encoding="utf-8"))[
    "architectures"
]
LARGE = candidate("large", ROWS, tile=(128, 256, 64))
SMALL = candidate("small", ROWS, tile=(64, 128, 64))


def times(**costs: TileCost) -> GroupTimes:
    """Costs of kernels by name, of a launch 1 us, of memory nothing."""
    named = {"large": LARGE, "small": SMALL}
    return GroupTimes(
        arch="sm_90a",
        source="a test",
        providers=(FakeProvider.name,),
        launch_ns=1000.0,
        bytes_per_ns=1e9,
        costs={design_name(named[name]): cost for name, cost in costs.items()},
        unknown={"grouped_mm": TileCost(step=100.0, rest=10.0)},
    )


def problem(m: int, *, groups: int = 8, n: int = 4096, k: int = 4096) -> Problem:
    return Problem(signature=ROWS, m=m, n=n, k=k, groups=groups)


@given(st.integers(0, 300_000), st.integers(1, 300), st.sampled_from(ROUTINGS))
def test_every_row_has_a_group(rows: int, groups: int, routing: str) -> None:
    counts = spread_rows(rows, groups, routing)
    assert (len(counts), sum(counts)) == (groups, rows)
    assert min(counts) >= 0


def test_routings_differ_as_they_say() -> None:
    even, skewed, few = (spread_rows(65536, 32, routing) for routing in ROUTINGS)
    assert set(even) == {2048}
    assert len(set(skewed)) > 16
    assert max(skewed) > 2 * 2048 > 2048 > min(skewed) > 0
    assert [count == 0 for count in few] == [group % 4 != 0 for group in range(32)]
    # Large groups do not stand side by side: their tiles would be one wave's, and hide the rest.
    assert abs(skewed.index(max(skewed)) - skewed.index(sorted(skewed)[-2])) > 1


def test_a_group_of_few_rows_has_a_whole_tile() -> None:
    even = work_of(problem(1024), LARGE, [128] * 8, SM_COUNT)
    ragged = work_of(problem(1024), LARGE, [129] * 7 + [121], SM_COUNT)
    assert (even.tiles, ragged.tiles) == (1, 2)
    assert ragged.steps == 2 * 4096 // 64


def test_blocks_of_a_cluster_along_m_share_a_group() -> None:
    pair = replace(LARGE, block_shape=replace(LARGE.block_shape, cluster=(2, 1)))
    counts = [64] * 66  # a tile each, of 16 along n: 1056 of 132 blocks
    assert work_of(problem(64 * 66, groups=66), LARGE, counts, SM_COUNT).tiles == 8
    assert work_of(problem(64 * 66, groups=66), pair, counts, SM_COUNT).tiles == 16


def test_groups_without_rows_read_no_weights() -> None:
    all_used = work_of(problem(64), SMALL, [8] * 8, SM_COUNT)
    one_used = work_of(problem(64), SMALL, [64] + [0] * 7, SM_COUNT)
    assert all_used.moved_bytes - one_used.moved_bytes == 2 * 7 * 4096 * 4096


def test_a_long_group_along_k_is_waited_for() -> None:
    one = candidate("one", TERMS, tile=(128, 128, 64))
    weights = Problem(signature=TERMS, m=1024, n=1024, k=8 * 2112, groups=8)
    even = work_of(weights, one, [2112] * 8, SM_COUNT)
    skewed = work_of(weights, one, [8 * 2112] + [0] * 7, SM_COUNT)
    assert even.steps == 4 * 33
    assert skewed.steps == 8 * 33
    assert even.tiles == skewed.tiles == 4  # a group without terms has its result filled


def test_tiles_of_unlike_length_even_out_only_where_they_are_handed_out() -> None:
    static = candidate("one", TERMS, tile=(128, 128, 64), cluster=(2, 1))
    dynamic = replace(static, design=replace(static.design, scheduler=DYNAMIC_PERSISTENT))
    assert design_name(dynamic) == f"{design_name(static)} dynamic"
    weights = Problem(signature=TERMS, m=1024, n=640, k=64 * 330, groups=4)
    counts = [64 * steps for steps in (200, 1, 29, 100)]
    clusters = SM_COUNT // 2
    tiles = [steps for steps in (200, 1, 29, 100) for _ in range(4 * 5)]  # of a cluster
    busiest = max(sum(tiles[place::clusters]) for place in range(clusters))
    assert work_of(weights, static, counts, SM_COUNT).steps == busiest
    assert work_of(weights, dynamic, counts, SM_COUNT).steps == max(200, sum(tiles) / clusters)


def test_of_two_kernels_the_one_that_has_less_to_do_is_first() -> None:
    costs = times(large=TileCost(step=1000.0, rest=500.0), small=TileCost(step=300.0, rest=100.0))
    many = costs.corrected(problem(65536), (LARGE, SMALL), (), SM_COUNT)
    few = costs.corrected(problem(64), (LARGE, SMALL), (), SM_COUNT)
    assert many[0] is not None
    assert many[1] is not None
    assert many[0] < many[1]
    assert few[0] is not None
    assert few[1] is not None
    assert few[1] < few[0]


@pytest.mark.parametrize(
    ("epilogue", "columns"),
    [("bias", 0), ("add", 4096), ("swiglu_halves_ups", 4096), ("swiglu_halves_gradient", 8192)],
)
def test_what_is_read_for_each_row_of_the_result_is_moved_too(epilogue: str, columns: int) -> None:
    plain = problem(64)
    signature = replace(plain.signature, epilogue=Epilogue.parse(epilogue))
    other = replace(plain, signature=signature)
    moved = [work_of(one, SMALL, [8] * 8, SM_COUNT).moved_bytes for one in (plain, other)]
    written = 2 * 64 * (other.out_n - plain.out_n)
    assert moved[1] - moved[0] == written + 2 * 64 * columns


def test_memory_bounds_a_product_of_few_rows() -> None:
    slow = replace(times(large=TileCost(step=1e-6, rest=0.0)), bytes_per_ns=1.0)
    (found,) = slow.corrected(problem(8), (LARGE,), (), SM_COUNT)
    moved = work_of(problem(8), LARGE, routed_counts(problem(8), "even"), SM_COUNT).moved_bytes
    assert found == pytest.approx(1000 + moved, rel=0.2)


def test_an_unknown_design_costs_by_its_area() -> None:
    (found,) = times().corrected(problem(128, groups=1), (LARGE,), (), SM_COUNT)
    assert found == pytest.approx(1000 + 64 * 200 + 20, rel=0.01)


def test_plain_problems_keep_their_corrections() -> None:
    plain = Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m64n64k64")
    assert times().applies_to(problem(8), (LARGE,))
    assert not times().applies_to(plain, (LARGE,))
    assert not times().applies_to(problem(8), (replace(LARGE, provider="another"),))


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda one: one["arch"])
def test_every_design_that_is_offered_was_measured(shipped: dict[str, object]) -> None:
    read = read_group_times(shipped)
    target = build_target(read.arch)
    for key in ("grouped_mm/tn", "grouped_mm/tt", "k_grouped_mm/nt"):
        signature = Signature.parse(f"{key}/bf16xbf16/fp32/bf16")
        offered = load_provider("quack").enumerate(signature, target).candidates
        assert {design_name(one) for one in offered} <= read.costs.keys()


def test_an_architecture_without_costs_has_none() -> None:
    assert load_group_times("sm_100f") is None


@pytest.mark.parametrize(
    ("key", "slowest_us"),
    [
        # The best kernel took an H200 917 us.
        ("grouped_mm/tt/bf16xbf16/fp32/bf16/g128m196608n768k2048", 1000),
        # By the model of plain GEMMs a tile of 64 x 128 stood first, which took over 3000 us.
        ("k_grouped_mm/nt/bf16xbf16/fp32/bf16/g128m1536n2048k196608", 2000),
        # By static schedules an H100 took 1000 us or more, where rows are spread with skew.
        ("k_grouped_mm/nt/bf16xbf16/fp32/bf16/g128m768n2048k196608", 1000),
    ],
)
def test_a_build_ranks_groups_by_them(tmp_path: Path, key: str, slowest_us: int) -> None:
    declared = (Declared(problem=Problem.parse(key), candidates=4),)
    target = build_target("sm_90a", "H200")
    lookup = look_up_plan(declared, target, load_provider("quack"), Cache(tmp_path))
    plan = make_plan(lookup, Cache(tmp_path))
    shipped = load_group_times("sm_90a")
    assert shipped is not None
    assert plan.source.by == shipped.name
    first, time_ns = plan.problems[0].choices[0]
    assert plan.candidates[first].block_shape.tile[0] >= 128
    assert time_ns is not None
    assert time_ns < 1000 * slowest_us
    chosen = [plan.candidates[place] for place, _ in plan.problems[0].choices]
    dynamic = [one for one in chosen if one.design.scheduler == DYNAMIC_PERSISTENT]
    assert bool(dynamic) is key.startswith("k_")
    assert len(dynamic) != 1  # it is no twin of a static one, of which one is enough


def test_a_plan_names_all_that_estimated_it(tmp_path: Path) -> None:
    keys = (
        "grouped_mm/tn/bf16xbf16/fp32/bf16/g8m64n256k256",
        "mm/tn/bf16xbf16/fp32/bf16/m64n256k256",
    )
    declared = tuple(Declared(problem=Problem.parse(key), candidates=1) for key in keys)
    target = build_target("sm_90a", "H200")
    lookup = look_up_plan(declared, target, load_provider("quack"), Cache(tmp_path))
    assert lookup.correction is not None
    assert lookup.group_times is not None
    by = make_plan(lookup, Cache(tmp_path)).source.by
    for one in (lookup.correction, lookup.group_times):
        assert one.name in by


def test_costs_are_part_of_the_plan_s_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = (Declared(problem=problem(64), candidates=1),)
    target = build_target("sm_90a", "H200")
    provider = load_provider("quack")
    before = look_up_plan(declared, target, provider, Cache(tmp_path)).key
    monkeypatch.setattr("nvgemm_aot.pipeline.target_plan.find_group_times", lambda target: times())
    assert look_up_plan(declared, target, provider, Cache(tmp_path)).key != before
