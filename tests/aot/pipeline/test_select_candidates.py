from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from fake_provider import candidate
from made_rankings import entry
from nvgemm_aot.pipeline.select_candidates import (
    LEAST_DYNAMIC_NS,
    LEAST_K_TILES,
    MAX_PER_SHAPE,
    SPLIT_GAIN,
    Estimate,
    prefer_measured,
    select,
)
from nvgemm_aot.providers import Candidate
from nvgemm_aot.providers.base import DYNAMIC_PERSISTENT, BlockShape
from nvgemm_aot.providers.heuristics.estimates import MatmulHeuristics
from nvgemm_aot.rankings.assess import assess
from nvgemm_aot.rankings.entries import Operator
from nvgemm_aot.rankings.usable import Usable
from nvgemm_aot.targets.profile import load_profile
from nvgemm_runtime.gemm.problem import Problem, Signature

BF16 = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")


def problem(m: int = 1024, n: int = 4096, k: int = 4096, signature: Signature = BF16) -> Problem:
    return Problem(signature=signature, m=m, n=n, k=k)


def tiled(*tiles: tuple[int, int, int]) -> tuple[Candidate, ...]:
    return tuple(candidate(f"tile{tile}", BF16, tile=tile) for tile in tiles)


def times(by_tile: Mapping[tuple[int, int, int], int | None]) -> Estimate:
    def estimate(problem: Problem, shape: BlockShape) -> int | None:
        return by_tile[shape.tile]

    return estimate


def test_keeps_the_fastest_by_estimate_best_first() -> None:
    small, middle, large = (64, 64, 64), (128, 128, 64), (256, 128, 64)
    selection = select(
        problem(),
        tiled(small, middle, large),
        times({small: 3000, middle: 2000, large: 1000}),
        2,
    )
    assert [c.candidate.design.tile for c in selection.choices] == [large, middle]
    assert [c.time_ns for c in selection.choices] == [1000, 2000]


def test_every_candidate_is_kept_or_has_a_reason() -> None:
    offered = tiled((64, 64, 64), (128, 64, 64), (256, 64, 64))
    selection = select(problem(), offered, lambda *_: 1000, 1)
    kept = {choice.candidate.operator for choice in selection.choices}
    rejected = {rejection.operator: rejection.reason for rejection in selection.rejections}
    assert kept | rejected.keys() == {c.operator for c in offered}
    assert not kept & rejected.keys()
    assert all("estimate 1000 ns), limit 1" in reason for reason in rejected.values())


def test_candidates_without_estimate_come_last() -> None:
    known, unknown = (64, 64, 64), (128, 128, 64)
    selection = select(problem(), tiled(unknown, known), times({known: 9999, unknown: None}), 8)
    assert [c.time_ns for c in selection.choices] == [9999, None]


def test_variants_of_one_shape_do_not_crowd_out_other_shapes() -> None:
    fast = tuple(candidate(f"fast{i}", BF16, preference=i) for i in range(6))
    slow = candidate("slow", BF16, tile=(128, 128, 64))
    selection = select(
        problem(), (*fast, slow), times({(64, 64, 64): 1000, (128, 128, 64): 2000}), 4
    )
    names = [choice.candidate.operator for choice in selection.choices]
    assert names == ["fast0", "fast1", "slow"]
    assert len(names) == MAX_PER_SHAPE + 1


@pytest.mark.parametrize(
    ("m", "expected_tile_m"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (64, 32)]
)
def test_small_m_gets_the_kernel_made_for_it_however_slow_the_estimate(
    m: int, expected_tile_m: int
) -> None:
    ordinary = tiled((64, 64, 64), (128, 64, 64), (128, 128, 64))
    made = tuple(
        candidate(f"tgv{rows}", BF16, tile=(rows, 64, 128), swapped=True) for rows in (8, 16, 32)
    )

    def estimate(problem: Problem, shape: BlockShape) -> int:
        return 10**6 if shape.swapped else 1000

    selection = select(problem(m), (*ordinary, *made), estimate, 2)
    tiles = [choice.candidate.design.tile[0] for choice in selection.choices]
    assert len(tiles) == 2
    assert tiles[-1] == expected_tile_m


def test_large_m_gets_no_place_for_small_kernels() -> None:
    made = candidate("tgv", BF16, tile=(8, 64, 128), swapped=True)

    def estimate(problem: Problem, shape: BlockShape) -> int:
        return 10**6 if shape.swapped else 1000

    selection = select(problem(65), (*tiled((64, 64, 64)), made), estimate, 1)
    assert [choice.candidate.operator for choice in selection.choices] == ["tile(64, 64, 64)"]


def test_estimates_know_every_type_groups_and_batches() -> None:
    device = load_profile("B200")
    model = MatmulHeuristics(
        device.heuristics_gpu,
        device.shared_memory_per_block_bytes.value,
        device.sm_count.value,
    )

    def estimate(key: str, tile_k: int, **counts: int) -> int:
        asked = Problem(signature=Signature.parse(key), m=4096, n=4096, k=4096, **counts)
        shape = BlockShape(tile=(128, 128, tile_k), cluster=(1, 1))
        time_ns = model.estimate_ns(asked, shape)
        assert time_ns is not None
        return time_ns

    bf16 = estimate("mm/tn/bf16xbf16/fp32/bf16", 64)
    fp8 = estimate("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32", 128)
    fp4 = estimate("mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16", 256)
    assert bf16 > fp8 > fp4
    assert estimate("mm/tn/bf16xbf16/fp32/bf16/bias", 64) == bf16
    grouped = estimate("grouped_mm/tn/bf16xbf16/fp32/bf16", 64, groups=8)
    rows = Problem(
        signature=Signature.parse("bmm/tn/bf16xbf16/fp32/bf16"), m=512, n=4096, k=4096, batch=8
    )
    assert grouped == model.estimate_ns(rows, BlockShape(tile=(128, 128, 64), cluster=(1, 1)))


def splitting(tile: tuple[int, int, int], splits: int, name: str = "") -> Candidate:
    whole = candidate(f"tile{tile} split {splits}{name}", BF16, tile=tile)
    return replace(whole, block_shape=replace(whole.block_shape, splits=splits))


def test_at_most_a_quarter_of_the_kernels_split_k_and_none_stands_first() -> None:
    tiles = ((64, 64, 64), (128, 128, 64), (256, 128, 64))
    offered = (
        *tiled(*tiles),
        *(splitting(tile, splits) for tile in tiles for splits in (2, 4, 8)),
    )

    def estimate(problem: Problem, shape: BlockShape) -> int:
        return shape.tile[0] * 1000 // shape.splits

    for limit, most in ((1, 0), (2, 1), (4, 1), (8, 2)):
        selection = select(problem(), offered, estimate, limit)
        parts = [choice.candidate.block_shape.splits for choice in selection.choices]
        assert parts[0] == 1
        assert sum(splits > 1 for splits in parts) == most
        assert len(parts) == min(limit, len(tiles) + most)
        times = [choice.time_ns for choice in selection.choices]
        assert times == sorted(times, key=lambda time: time or 0)
        reasons = {one.operator: one.reason for one in selection.rejections}
        assert len(reasons) + len(parts) == len(offered)
    assert "2 that split k rank higher" in reasons.values()


def test_a_split_stands_first_where_corrected_estimates_say_that_it_gains_much() -> None:
    tiles = ((64, 64, 64), (128, 128, 64), (256, 128, 64))
    splits = tuple(splitting(tile, 4) for tile in tiles)
    offered = (*tiled(*tiles), *splits)

    def chosen(split_ns: int, *, corrected: bool) -> list[int]:
        def estimate(problem: Problem, shape: BlockShape) -> int:
            return (split_ns if shape.splits > 1 else 1000) + shape.tile[0] - 64

        correct = (lambda problem, candidates, times: list(times)) if corrected else None
        choices = select(problem(), offered, estimate, 4, correct).choices
        times = [choice.time_ns for choice in choices]
        assert times == sorted(times, key=lambda time: time or 0)
        return [choice.candidate.block_shape.splits for choice in choices]

    def alone() -> int:
        choices = select(problem(), offered, lambda *_: 1000, 1, lambda *_: times_of_splits).choices
        return choices[0].candidate.block_shape.splits

    enough = round(1000 * SPLIT_GAIN)
    times_of_splits = [100 if one.block_shape.splits > 1 else 1000 for one in offered]
    assert alone() == 1, "a single kernel must serve deterministic programs"
    assert chosen(enough, corrected=True) == [4, 4, 1, 1]
    assert chosen(enough + 1, corrected=True) == [1, 4, 1, 1]
    assert chosen(enough, corrected=False) == [1, 4, 1, 1]


def test_each_part_of_a_split_has_some_tiles_of_k() -> None:
    tile = (64, 64, 64)
    offered = (*tiled(tile), splitting(tile, 4))
    least = LEAST_K_TILES * 4 * 64

    def chosen(k: int) -> tuple[list[int], list[str]]:
        estimate: Estimate = lambda _, shape: 1000 // shape.splits  # noqa: E731
        found = select(problem(k=k), offered, estimate, 4, lambda *given: list(given[2]))
        parts = [choice.candidate.block_shape.splits for choice in found.choices]
        return parts, [one.reason for one in found.rejections]

    assert chosen(least) == ([4, 1], [])
    assert chosen(least - 64) == ([1], [f"4 parts need a k of {least} or more, 4 tiles each"])


def test_a_split_that_was_measured_counts_however_few_tiles_its_parts_have() -> None:
    tile = (64, 64, 64)
    [whole], split = tiled(tile), splitting(tile, 4)
    short = problem(k=LEAST_K_TILES * 64)
    estimated = select(short, (whole, split), lambda *_: 1000, 4)
    assert [choice.candidate for choice in estimated.choices] == [whole]
    times = {split.operator: 500, whole.operator: 700}
    usable = Usable(
        assessment=assess([entry(times, problem=short, provider=split.provider)]),
        operators=tuple(Operator(provider=split.provider, operator=name) for name in times),
    )
    chosen = prefer_measured(estimated, (whole, split), usable, 4).choices
    assert [(choice.candidate, choice.time_ns) for choice in chosen] == [(split, 500), (whole, 700)]


def dynamic(tile: tuple[int, int, int]) -> Candidate:
    static = candidate(f"dynamic tile{tile}", BF16, tile=tile, preference=4)
    return replace(static, design=replace(static.design, scheduler=DYNAMIC_PERSISTENT))


def test_at_most_an_eighth_of_the_kernels_are_twins_with_a_dynamic_schedule() -> None:
    tiles = tuple((64, 16 * number, 64) for number in range(1, 17))
    offered = (*tiled(*tiles), *map(dynamic, tiles))

    def estimate(problem: Problem, shape: BlockShape) -> int:
        return LEAST_DYNAMIC_NS + 1000 * shape.tile[1]

    for limit, most in ((1, 0), (7, 0), (8, 1), (16, 2)):
        selection = select(problem(), offered, estimate, limit)
        names = [choice.candidate.operator for choice in selection.choices]
        assert sum(name.startswith("dynamic") for name in names) == most
        assert len(names) == limit
        for name in names:
            twin = name.removeprefix("dynamic ")
            assert names.index(twin) <= names.index(name)
        assert len(selection.rejections) + len(names) == len(offered)
    reasons = {one.reason for one in selection.rejections}
    assert "at most 2 of 16 may differ by a dynamic schedule alone" in reasons


def test_a_short_kernel_has_no_twin_with_a_dynamic_schedule() -> None:
    tile = (128, 128, 64)
    offered = (*tiled(tile), dynamic(tile))
    for time_ns, count in ((LEAST_DYNAMIC_NS - 1, 1), (None, 1), (LEAST_DYNAMIC_NS, 2)):
        selection = select(problem(), offered, times({tile: time_ns}), 8)
        assert len(selection.choices) == count
        assert len(selection.rejections) == 2 - count


def test_a_dynamic_schedule_without_a_static_twin_is_a_kernel_as_any_other() -> None:
    tiles = ((64, 64, 64), (128, 128, 64))
    selection = select(problem(), tuple(map(dynamic, tiles)), lambda *_: 1000, 4)
    assert len(selection.choices) == 2


def test_where_all_kernels_split_k_two_of_a_tile_do() -> None:
    tile = (64, 64, 64)
    offered = tuple(splitting(tile, splits) for splits in (2, 4, 8))
    selection = select(problem(), offered, lambda _, shape: 1000 * shape.splits, 16)
    assert [c.candidate.block_shape.splits for c in selection.choices] == [2, 4]
    assert "2 of the same block shape rank higher" in {one.reason for one in selection.rejections}


def test_splitting_pays_where_tiles_leave_multiprocessors_idle() -> None:
    """An H200 has 132 of them."""
    device = load_profile("H200")
    model = MatmulHeuristics(
        device.heuristics_gpu,
        device.shared_memory_per_block_bytes.value,
        device.sm_count.value,
    )

    def estimates(m: int, n: int, k: int) -> list[int]:
        shape = BlockShape(tile=(64, 16, 128), cluster=(1, 1), swapped=True)
        found = [
            model.estimate_ns(problem(m, n, k), replace(shape, splits=splits))
            for splits in (1, 2, 4, 8)
        ]
        assert None not in found
        return [time for time in found if time is not None]

    few = estimates(16, 1024, 8192)  # 16 tiles
    assert few == sorted(few, reverse=True), "eight parts fill the device"
    some = estimates(16, 4096, 14336)  # 64 tiles: two parts fill it
    assert min(some) == some[1]
    many = estimates(256, 28672, 4096)  # it is full without
    assert min(many) == many[0]


def test_a_problem_that_no_candidate_can_run_says_why_for_each() -> None:
    selection = select(problem(k=12), tiled((64, 64, 64), (128, 64, 64)), lambda *_: 1, 8)
    assert not selection.choices
    assert len(selection.rejections) == 2
    assert all("k = 12" in rejection.reason for rejection in selection.rejections)


def test_a_large_tile_of_the_transposed_problem_is_not_made_for_small_m() -> None:
    """Its rows beyond 64 would be wasted: the place is for tiles of few rows."""
    large = candidate("large", BF16, tile=(256, 128, 64), swapped=True)
    narrow = candidate("narrow", BF16, tile=(32, 128, 64), swapped=True)

    def estimate(problem: Problem, shape: BlockShape) -> int:
        return 10**6 if shape.swapped else 1000

    ordinary = tiled((64, 64, 64), (128, 64, 64), (128, 128, 64))
    selection = select(problem(16), (*ordinary, large), estimate, 2)
    assert "large" not in {choice.candidate.operator for choice in selection.choices}
    selection = select(problem(16), (*ordinary, large, narrow), estimate, 2)
    assert [choice.candidate.operator for choice in selection.choices][-1] == "narrow"


def test_a_correction_decides_the_order_and_the_times() -> None:
    slow, fast = tiled((64, 64, 64), (128, 64, 64))
    estimate = times({(64, 64, 64): 1000, (128, 64, 64): 2000})

    def correct(
        problem: Problem, candidates: Sequence[Candidate], found: Sequence[int | None]
    ) -> list[int | None]:
        assert [*found] == [1000, 2000]
        return [3000, 1500]

    selection = select(problem(), (slow, fast), estimate, 2, correct)
    assert [(c.candidate, c.time_ns) for c in selection.choices] == [(fast, 1500), (slow, 3000)]


def test_operators_of_one_name_from_two_providers_have_a_fixed_order() -> None:
    mine = candidate("same", BF16)
    theirs = replace(mine, provider="a_provider")
    for offered in ((mine, theirs), (theirs, mine)):
        selection = select(problem(), offered, lambda *_: 1000, 1)
        assert [choice.candidate for choice in selection.choices] == [theirs]


def test_quacks_kernels_are_not_chosen_for_rows_of_groups_that_are_too_long() -> None:
    signature = Signature.parse("grouped_mm/tn/bf16xbf16/fp32/bf16")
    offered = (
        replace(candidate("one", signature), provider="quack"),
        candidate("other", signature, tile=(128, 128, 64)),
    )

    def chosen(n: int) -> tuple[list[str], list[str]]:
        wide = Problem(signature=signature, m=1024, n=n, k=4096, groups=8)
        selection = select(wide, offered, lambda *_: 1000, 8)
        names = [choice.candidate.operator for choice in selection.choices]
        return sorted(names), [rejection.reason for rejection in selection.rejections]

    assert chosen(49152) == (["one", "other"], [])
    assert chosen(65536) == (
        ["other"],
        [
            "rows of the result lie 131072 bytes apart, quack's kernels of groups take at most "
            "98304; divide B's columns into several products"
        ],
    )
