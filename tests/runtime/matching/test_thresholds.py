"""Thresholds over m: which kernel computes at which m, from what was measured at some."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.bundle.ranking_entries import Timing
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.matching.thresholds import (
    ATEN,
    FAR,
    FEW_ROWS,
    MARGIN,
    MAX_RATIO,
    MAX_RATIO_OF_FEW,
    MAX_WORKSPACE_BYTES,
    MIN_GAIN,
    Contender,
    DispatchTable,
    MeasuredSize,
    Tiling,
    intervals_along,
    kernels_that_decide,
    make_table,
)
from synthetic_content import SIGNATURE


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


def make(
    sizes: Sequence[MeasuredSize], *, tiling: Tiling | None = None, may_bridge: bool = True
) -> DispatchTable:
    return make_table(intervals_along(sizes, tiling=tiling, may_bridge=may_bridge))


def table(*sizes: MeasuredSize, **how: bool) -> dict[int, str]:
    """By the first m of each segment: who computes."""
    made = make(sizes, **how)
    return dict(zip((0, *made.bounds), made.kernels))


def tiling(*, multiprocessors: int = 132, **rows: int) -> Tiling:
    """Kernels whose tiles have that many rows, and 256 columns of 4096."""
    designs = {
        name: KernelDesign(
            tile=(tile_rows, 256, 64),
            ctas_per_tile=1,
            cluster=(1, 1),
            fallback_cluster=None,
            scheduler="static",
        )
        for name, tile_rows in rows.items()
    }
    problem = Problem(signature=SIGNATURE, m=1, n=4096, k=4096)
    return Tiling(problem=problem, designs=designs, multiprocessors=multiprocessors)


def waves(tile_rows: int, m: int) -> int:
    return math.ceil(math.ceil(m / tile_rows) * 16 / 132)


SAME_WAVES = tiling(multiprocessors=10**6, x=64, y=64)
"""So many multiprocessors that every m takes one wave."""


def test_one_measured_m_says_nothing_of_others() -> None:
    assert table(size(16, x=900)) == {0: ATEN, 16: "x", 17: ATEN}


def test_nothing_measured_is_aten_everywhere() -> None:
    assert table() == {0: ATEN}
    assert not make([]).has_kernels
    assert make([]).at(7) == ATEN


def test_where_no_kernel_gained_enough_on_aten_it_computes() -> None:
    for of_aten, name in ((1 - MIN_GAIN - 0.001, "x"), (1 - MIN_GAIN + 0.001, ATEN), (1.001, ATEN)):
        x = round(100_000 * of_aten)
        made = make([size(16, aten=100_000, x=x), size(24, aten=100_000, x=x)])
        assert made.at(16) == made.at(20) == made.at(24) == name


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
        (1000, 1000 * MAX_RATIO, True),
        (1000, 1000 * MAX_RATIO + 1, False),
    ],
)
def test_measured_sizes_far_apart_say_nothing_of_what_lies_between(
    low: int, high: int, is_bridged: bool
) -> None:
    made = make([size(low, x=900), size(high, x=900)], tiling=SAME_WAVES)
    assert (made.at(low + 1) == "x") == is_bridged
    assert made.at(low) == made.at(high) == "x"


def test_where_waves_are_not_known_nothing_is_bridged_beyond_few_rows() -> None:
    sizes = [size(100, x=900), size(120, x=900), size(140, x=900)]
    made = make(sizes)
    assert [made.at(m) for m in (110, 130)] == ["x", ATEN]


def test_a_kernel_computes_where_its_last_wave_is_full_and_not_where_it_has_just_begun() -> None:
    """Of 132 multiprocessors, 16 tiles for 128 rows: up to 41 times 128 rows are 5 waves."""
    assert [waves(128, m) for m in (4096, 4224, 4225, 5248, 5249, 8192)] == [4, 4, 5, 5, 6, 8]
    sizes = [size(4096, aten=4120, x=4000), size(8192, aten=8240, x=8000)]
    made = make(sizes, tiling=tiling(x=128))
    assert made.at(4097) == "x", "as many waves as at 4096"
    assert made.at(4225) == made.at(5000) == ATEN, "five waves for hardly more rows"
    assert made.at(5121) == made.at(5248) == "x", "the fifth wave is full"
    assert made.at(5249) == ATEN


def test_a_computed_gain_that_is_too_small_does_not_count() -> None:
    for gain, name in ((MIN_GAIN + 0.001, "x"), (MIN_GAIN - 0.001, ATEN)):
        x = round(100_000 * (1 - gain))
        sizes = [size(1024, aten=100_000, x=x), size(1536, aten=100_000, x=x)]
        assert make(sizes, tiling=SAME_WAVES).at(1300) == name


def test_a_kernel_that_is_far_behind_at_one_end_does_not_compute_between() -> None:
    for behind, name in ((FAR - 0.001, "x"), (FAR + 0.001, ATEN)):
        x = round(100_000 * (1 + behind))
        sizes = [size(1024, aten=130_000, x=90_000), size(1536, aten=110_000, y=100_000, x=x)]
        assert make(sizes, tiling=SAME_WAVES).at(1300) == name


def test_a_kernel_that_aten_just_beats_at_one_end_may_compute_where_it_is_faster() -> None:
    sizes = [size(1024, aten=1000, x=800), size(1536, aten=1000, x=1010)]
    made = make(sizes, tiling=SAME_WAVES)
    assert (made.at(1040), made.at(1535), made.at(1536)) == ("x", ATEN, ATEN)


def test_a_kernel_that_aten_beats_at_both_ends_does_not_compute_whatever_is_computed() -> None:
    """Its waves are fullest between: at 128 rows each it needs 5 at 4225, and 5 at 5248."""
    rows = tiling(x=128)
    for behind, name in ((-1, "x"), (1, ATEN)):
        sizes = [
            size(low, aten=10_000 * of, x=10_000 * of + behind)
            for low, of in ((4225, 5), (5249, 6))
        ]
        assert make(sizes, tiling=rows).at(5248) == name


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
    assert make(sizes).at(9) in (ATEN, "y")


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
    most = one.aten.time_ns * (1 - MIN_GAIN)
    beating = {name: time for name, time in beating.items() if time <= most}
    if not beating:
        return {ATEN}
    spread = one.aten.spread_ns
    latest = min(beating.values()) + spread
    allowed = {name for name, time in beating.items() if time - spread <= latest}
    return allowed | ({ATEN} if one.aten.time_ns - spread <= latest else set())


def few_that_may_compute_between(low: MeasuredSize, high: MeasuredSize) -> set[str]:
    if high.m > MAX_RATIO_OF_FEW * low.m:
        return {ATEN}
    sets = []
    for one in (low, high):
        times = [k.timing.time_ns for k in one.kernels.values()]
        best = min([*times, one.aten.time_ns])
        sets.append(
            {
                name
                for name, k in one.kernels.items()
                if k.timing.time_ns <= one.aten.time_ns * (1 - MIN_GAIN)
                and k.timing.time_ns / best - 1 <= MARGIN
            }
        )
    return sets[0] & sets[1] or {ATEN}


ROWS = {"w": 64, "x": 128, "y": 192, "z": 256}


def many_that_may_compute_between(
    low: MeasuredSize, high: MeasuredSize
) -> Iterator[tuple[int, set[str]]]:
    """The same by the first m of each place, of kernels with tiles of `ROWS`."""

    def least(one: MeasuredSize) -> int:
        times = [k.timing.time_ns for k in one.kernels.values()]
        gaining = [time for time in times if time <= one.aten.time_ns * (1 - MIN_GAIN)]
        return min(gaining, default=one.aten.time_ns)

    near = {
        name
        for name in low.kernels.keys() & high.kernels.keys()
        if all(one.kernels[name].timing.time_ns <= (1 + FAR) * least(one) for one in (low, high))
        and any(one.kernels[name].timing.time_ns < one.aten.time_ns for one in (low, high))
    }
    if high.m > MAX_RATIO * low.m:
        near = set()

    def along(m: int, *times: float) -> float:
        share = math.log(m / low.m) / math.log(high.m / low.m)
        return math.exp(math.log(times[0]) * (1 - share) + math.log(times[1]) * share)

    def time(name: str, m: int) -> float:
        waves_ns = (
            one.kernels[name].timing.time_ns / waves(ROWS[name], one.m) for one in (low, high)
        )
        return along(m, *waves_ns) * waves(ROWS[name], m)

    # Others have no say in what is allowed, nor in where places begin.
    near = {
        name
        for name in near
        if any(
            time(name, m) <= along(m, low.aten.time_ns, high.aten.time_ns) * (1 - MIN_GAIN)
            for m in range(low.m + 1, high.m)
        )
    }
    begins = {low.m + 1} | {
        m for name in near for m in range(1, high.m, ROWS[name]) if low.m < m < high.m
    }
    for m, following in itertools.pairwise([*sorted(begins), high.m]):
        allowed = set(near)
        for at in (m, following - 1):
            times = {name: time(name, at) for name in near}
            aten = along(at, low.aten.time_ns, high.aten.time_ns)
            allowed &= {
                name
                for name, ns in times.items()
                if ns <= aten * (1 - MIN_GAIN) and ns <= (1 + MARGIN) * min(times.values())
            }
        yield m, allowed or {ATEN}


def allowed_along(sizes: Sequence[MeasuredSize]) -> Iterator[tuple[int, set[str]]]:
    """Each place of a table by its first m: what may compute there."""
    for low, high in itertools.zip_longest(sizes, sizes[1:]):
        yield low.m, may_compute_at(low)
        if high is None:
            yield low.m + 1, {ATEN}
        elif high.m > low.m + 1 and high.m <= FEW_ROWS:
            yield low.m + 1, few_that_may_compute_between(low, high)
        elif high.m > low.m + 1:
            yield from many_that_may_compute_between(low, high)


def test_a_table_uses_what_it_may_with_as_few_changes_as_can_be() -> None:
    for seed in range(150):
        check_uses_what_it_may(random.Random(seed))


def check_uses_what_it_may(source: random.Random) -> None:
    sizes = made_up(source)
    made = make(sizes, tiling=tiling(**ROWS))
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
    assert make(sizes, tiling=tiling(**ROWS)) == made, "whatever the order"


def made_up_of_many_rows(source: random.Random) -> list[MeasuredSize]:
    """Near sizes, and kernels that are near each other and ATen."""
    return [
        size(
            m,
            aten=m * 1000,
            spread=source.choice((0, m * 2)),
            **{name: round(m * source.uniform(fastest, 1040)) for name in ROWS},
        )
        for m in sorted(source.sample(range(256, 2049, 128), 6))
        for fastest in (source.choice((900, 960, 985)),)
    ]


@pytest.mark.parametrize("of", [made_up, made_up_of_many_rows])
def test_kernels_that_do_not_decide_change_nothing(
    of: Callable[[random.Random], list[MeasuredSize]],
) -> None:
    for seed in range(150):
        source = random.Random(seed)
        check_others_change_nothing(of(source), source)


def check_others_change_nothing(sizes: list[MeasuredSize], source: random.Random) -> None:
    places = intervals_along(sizes, tiling=tiling(**ROWS))
    made = make_table(places)
    needed = kernels_that_decide(places, made)
    others = sorted({name for one in sizes for name in one.kernels}.difference(needed))
    # Some of the others may stay, for other tables.
    kept = needed.union(source.sample(others, source.randrange(len(others) + 1)))
    fewer = [
        replace(one, kernels={name: k for name, k in one.kernels.items() if name in kept})
        for one in sizes
    ]
    assert make(fewer, tiling=tiling(**ROWS)) == made


def test_a_kernel_that_gains_too_little_makes_no_other_one_seem_far_behind() -> None:
    """It may be pruned, and then the other one would be near enough."""
    gaining = size(1024, aten=100_000, little=round(100_000 * (1 - MIN_GAIN / 2)), x=104_000)
    sizes = [gaining, size(2048, aten=200_000, little=190_000, x=160_000)]
    without = [
        replace(one, kernels={name: k for name, k in one.kernels.items() if name != "little"})
        for one in sizes
    ]
    rows = tiling(little=128, x=128)
    assert make(sizes, tiling=rows) == make(without, tiling=rows)
    assert make(sizes, tiling=rows).at(2000) == "x"


def test_kernels_that_nothing_is_compared_to_do_not_decide() -> None:
    sizes = [size(1024, x=800, y=1040, z=2000), size(1536, x=1200, y=1240, z=3000, aten=1400)]
    places = intervals_along(sizes, tiling=tiling(x=128, y=128, z=128))
    assert kernels_that_decide(places, make_table(places)) == {"x"}


def test_a_part_of_a_table_says_the_same() -> None:
    for seed in range(30):
        check_part(random.Random(seed))


def check_part(source: random.Random) -> None:
    made = make(made_up(source))
    least = source.randrange(1, 3000)
    most = source.choice([None, least, least + source.randrange(2000)])
    part = made.within(least, most)
    for m in source.sample(range(least, (most or 4100) + 1), min(50, (most or 4100) - least + 1)):
        assert part.at(m) == made.at(m)
    if most == least:
        assert part == DispatchTable(bounds=(), kernels=(made.at(least),))


def test_a_table_without_aten_says_the_same_elsewhere() -> None:
    for seed in range(30):
        check_without_aten(random.Random(seed))


def check_without_aten(source: random.Random) -> None:
    made = make(made_up(source))
    for usual in ("another", next(iter(made.used), "another")):
        without = made.without_aten(usual)
        assert ATEN not in without.kernels
        assert all(here != after for here, after in itertools.pairwise(without.kernels))
        for m in source.sample(range(4100), 50):
            assert without.at(m) == (made.at(m) or usual)
