"""Dispatch thresholds: a table from m to kernel, built from measurements at some m.

A kernel runs only if it beats ATen by the gain that counts there (`evidence.Evidence`), at least
`MIN_GAIN`. At a measured m, the fastest runs, or one that is indistinguishable from it. Between two
measured m up to `FEW_ROWS`, a kernel may run if it was among the fastest at both. For more rows,
its time is computed from its waves of tiles (`ranking.curve_between`) and must be below ATen's.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..bundle.format import KernelDesign
from ..bundle.ranking_entries import Timing
from ..gemm.problem import Problem
from .ranking import curve_between

ATEN = ""
"""Marks ATen where a kernel id is expected."""

MARGIN = 0.02
"""Contenders within this fraction of an interval's fastest are considered equally good."""

FEW_ROWS = 128
"""Up to this m, a kernel's tiles change little with m: a result at two measured m within
`MAX_RATIO_OF_FEW` also holds between them."""

MAX_RATIO_OF_FEW = 16
"""Largest ratio between two measured m, up to `FEW_ROWS`, to use a kernel between them.

In `benchmarks.ranking` on an H200, with such an m held back and neighbours 2.7 to 16 times apart,
kernels within `MARGIN` at both lost 0.3 % in the geometric mean, and at most 2.9 %."""

MAX_RATIO = 2
"""Largest ratio between two measured m, above `FEW_ROWS`, to use a kernel between them.

Chosen with `FAR`, and with `MIN_GAIN` between measured m, from times for two n and k on an H200, at
held-back m. For two other n and k on another H200, tables took 1.005 times as long as the best
choice, ATen alone 1.008 times (`benchmarks.dispatch`)."""

FAR = 0.05
"""Above `FEW_ROWS`, a kernel slower than the fastest by this fraction at either measured m is not
used between them, whatever its computed time."""

MIN_GAIN = 0.02
"""Least fraction by which a kernel must beat ATen to be used; ATen is safe.

At a measured m, another GPU of the product may disagree. Two H200s confirmed kernels that a third
compared with ATen: ATen was over 1 % faster in 5 of 28 comparisons with a smaller gain, and in 1 of
38 with a larger one (`benchmarks.ranking gpus`). Between two measured m with more rows, ATen's
waves are unknown."""

MAX_WORKSPACE_BYTES = 64 << 20
"""For undeclared sizes, kernels with larger workspaces are excluded if others serve."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Kernel's measurement at one m.

    Attributes:
        timing: Time and its spread.
        workspace_bytes: Memory needed in addition to operands.
    """

    timing: Timing
    workspace_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """Measurements at one m.

    Attributes:
        m: Rows in A.
        kernels: Measured kernels by id.
        aten: ATen's time.
        least_gain: Least fraction by which a kernel must beat ATen here.
    """

    m: int
    kernels: Mapping[str, Contender]
    aten: Timing
    least_gain: float = MIN_GAIN


@dataclass(frozen=True, kw_only=True)
class DispatchTable:
    """Kernel for every m.

    Attributes:
        bounds: Ascending first m of each segment after the first, which begins at 0.
        kernels: Kernel id per segment, or `ATEN`. Neighbours differ.
    """

    bounds: tuple[int, ...]
    kernels: tuple[str, ...]

    def at(self, m: int) -> str:
        """Returns the kernel id for an m, or `ATEN`."""
        return self.kernels[bisect_right(self.bounds, m)]

    def within(self, least: int, most: int | None) -> DispatchTable:
        """Returns the table for m in ``least..most`` (no end if None), without other segments."""
        first = bisect_right(self.bounds, least)
        last = len(self.bounds) if most is None else bisect_right(self.bounds, most)
        return DispatchTable(bounds=self.bounds[first:last], kernels=self.kernels[first : last + 1])

    def without_aten(self, kernel_id: str) -> DispatchTable:
        """Returns the table with ATen replaced by a kernel."""
        bounds: list[int] = []
        kernels: list[str] = []
        for bound, current in zip((0, *self.bounds), self.kernels):
            replacement = kernel_id if current == ATEN else current
            if not kernels or replacement != kernels[-1]:
                bounds.append(bound)
                kernels.append(replacement)
        return DispatchTable(bounds=tuple(bounds[1:]), kernels=tuple(kernels))

    @property
    def used(self) -> tuple[str, ...]:
        """Ids of the table's kernels, each once."""
        return tuple(dict.fromkeys(filter(None, self.kernels)))

    @property
    def has_kernels(self) -> bool:
        """True if the table names a kernel."""
        return any(self.kernels)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Facts that determine each kernel's number of tile waves at an m.

    Attributes:
        problem: GEMM, at any m.
        designs: Kernel designs by id.
        multiprocessors: Multiprocessors on the measured GPU.
    """

    problem: Problem
    designs: Mapping[str, KernelDesign]
    multiprocessors: int

    def step_rows(self, kernel_id: str) -> int:
        """Returns the rows in A after which a kernel needs another row of tiles."""
        return self.designs[kernel_id].tile[0]

    def times_between(
        self, kernel_id: str, below: MeasuredSize, above: MeasuredSize
    ) -> Callable[[int], float]:
        """Returns a kernel's computed nanoseconds as a function of m, between two measured m."""
        low, high = (size.kernels[kernel_id].timing.time_ns for size in (below, above))
        return curve_between(
            self.designs[kernel_id],
            self.problem,
            (below.m, low),
            (above.m, high),
            self.multiprocessors,
        )


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Interval of m with the same allowed contenders.

    Attributes:
        begin: First m. The interval ends where the next one begins.
        allowed: Fraction by which each exceeds the fastest time, by kernel id or `ATEN`. Never
            empty.
        compared: Ids of the kernels whose times decide ``allowed`` here, and where the intervals
            between two measured m begin.
    """

    begin: int
    allowed: Mapping[str, float]
    compared: frozenset[str] = frozenset()


def intervals_along(
    sizes: Iterable[MeasuredSize], *, tiling: Tiling | None, may_bridge: bool = True
) -> list[Interval]:
    """Returns the allowed contenders for every m from the smallest measured one on.

    At a measured m: the fastest, and contenders indistinguishable from it, which are kernels that
    also beat ATen, or ATen.

    Between two measured m up to `FEW_ROWS`: kernels that beat ATen at both and are within `MARGIN`
    of the fastest at both. For more rows: kernels faster than ATen at one, within `FAR` of the
    fastest at both, with a computed time below ATen's by the larger `least_gain` and within
    `MARGIN` of the least. In both cases, only if the two m are near enough and the kernel needs
    little workspace. Everywhere else: ATen.

    Args:
        sizes: Measurements, each m once.
        tiling: Tile waves per kernel; None if unknown, in which case only ATen runs between two
            measured m above `FEW_ROWS`.
        may_bridge: True if kernels may run between measured m at all.
    """
    rising = sorted(sizes, key=lambda size: size.m)
    intervals: list[Interval] = []
    for size, next_size in itertools.zip_longest(rising, rising[1:]):
        intervals.append(_interval_at(size))
        if next_size is None or (next_size.m > size.m + 1 and not may_bridge):
            intervals.append(Interval(begin=size.m + 1, allowed=_ONLY_ATEN))
        elif next_size.m > size.m + 1:
            intervals += _intervals_between(size, next_size, tiling)
    return intervals


def kernels_that_decide(intervals: Iterable[Interval], table: DispatchTable) -> frozenset[str]:
    """Returns the ids of the kernels that a bundle must keep for an unchanged `table`.

    Args:
        intervals: Input to the table.
        table: Result from `make_table` for these intervals.
    """
    return frozenset(table.used).union(*(interval.compared for interval in intervals))


def make_table(intervals: Sequence[Interval]) -> DispatchTable:
    """Chooses one contender per interval: fewest changes, then least loss.

    ATen runs before the first interval.
    """
    chosen = _choose_with_fewest_changes([interval.allowed for interval in intervals])
    bounds, kernels = [], [ATEN]
    for interval, kernel_id in zip(intervals, chosen):
        if kernel_id != kernels[-1]:
            bounds.append(interval.begin)
            kernels.append(kernel_id)
    return DispatchTable(bounds=tuple(bounds), kernels=tuple(kernels))


_ONLY_ATEN: Mapping[str, float] = {ATEN: 0.0}


def gains_enough(time_ns: int, aten: Timing, least_gain: float = MIN_GAIN) -> bool:
    """Returns True if a time is below ATen's by ``least_gain``."""
    return time_ns <= aten.time_ns * (1 - least_gain)


def beating_aten(size: MeasuredSize) -> dict[str, float]:
    """Returns the kernels that beat ATen by this size's least gain, by id.

    Returns:
        Fraction by which each exceeds the fastest time.
    """
    beating = {
        kernel_id: contender.timing.time_ns
        for kernel_id, contender in size.kernels.items()
        if gains_enough(contender.timing.time_ns, size.aten, size.least_gain)
    }
    fastest_ns = min(beating.values(), default=0)
    return {kernel_id: time_ns / fastest_ns - 1 for kernel_id, time_ns in beating.items()}


def _fastest(losses: Mapping[str, float]) -> str:
    """Returns the kernel with the least loss, or `ATEN` if there is none."""
    return min(losses, key=lambda kernel_id: (losses[kernel_id], kernel_id), default=ATEN)


def _interval_at(size: MeasuredSize) -> Interval:
    """Returns the allowed contenders at a measured m, with their losses."""
    losses = beating_aten(size)
    fastest = _fastest(losses)
    if fastest == ATEN:
        return Interval(begin=size.m, allowed=_ONLY_ATEN)
    latest_ns = _latest(size.kernels[fastest].timing)
    allowed = {
        kernel_id: loss
        for kernel_id, loss in losses.items()
        if _earliest(size.kernels[kernel_id].timing) <= latest_ns
    }
    if _earliest(size.aten) <= latest_ns:
        allowed[ATEN] = size.aten.time_ns / size.kernels[fastest].timing.time_ns - 1
    return Interval(begin=size.m, allowed=allowed, compared=frozenset({fastest}))


def _earliest(timing: Timing) -> int:
    return timing.time_ns - timing.spread_ns


def _latest(timing: Timing) -> int:
    return timing.time_ns + timing.spread_ns


def _intervals_between(
    below: MeasuredSize, above: MeasuredSize, tiling: Tiling | None
) -> Iterator[Interval]:
    """Yields the intervals between two measured m."""
    begin = below.m + 1
    if above.m <= FEW_ROWS:
        is_near = above.m <= below.m * MAX_RATIO_OF_FEW
        allowed = _allowed_between_few(below, above) if is_near else {}
        yield Interval(begin=begin, allowed=allowed or _ONLY_ATEN)
        return
    times: dict[str, Callable[[int], float]] = {}
    starts = {begin}
    if tiling is not None and above.m <= below.m * MAX_RATIO:
        for kernel_id in sorted(_near_at_both(below, above)):
            time_ns = tiling.times_between(kernel_id, below, above)
            steps = _steps(begin, above.m, tiling.step_rows(kernel_id))
            if _beats_aten_somewhere(time_ns, steps, below, above):
                times[kernel_id] = time_ns
                starts.update(steps)
    if not times:
        yield Interval(begin=begin, allowed=_ONLY_ATEN)
        return
    compared = frozenset(times)
    least_gain = _least_gain_between(below, above)
    for first, last in _ranges(sorted(starts), above.m):
        # Waves change only at an interval's first m, so both ends decide for all m between.
        ends = [
            _allowed_at_computed(
                {kernel_id: time_ns(m) for kernel_id, time_ns in times.items()},
                _aten_ns(m, below, above) * (1 - least_gain),
            )
            for m in (first, last)
        ]
        allowed = {name: max(end[name] for end in ends) for name in ends[0] if name in ends[1]}
        yield Interval(begin=first, allowed=allowed or _ONLY_ATEN, compared=compared)


def _steps(begin: int, end: int, rows: int) -> list[int]:
    """Returns ``begin``, and each later m before ``end`` at which another tile row begins."""
    return [begin, *range(begin + -begin % rows + 1, end, rows)]


def _ranges(starts: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
    """Yields the first and last m of each interval that begins at one of ``starts``."""
    for first, following in itertools.zip_longest(starts, starts[1:], fillvalue=end):
        yield first, following - 1


def _beats_aten_somewhere(
    time_ns: Callable[[int], float],
    steps: Sequence[int],
    below: MeasuredSize,
    above: MeasuredSize,
) -> bool:
    """Returns True if a kernel's computed time gains enough on ATen anywhere between two m.

    Between two steps, its time relative to ATen's is monotonic, so the ends suffice.
    """
    least_gain = _least_gain_between(below, above)
    return any(
        time_ns(m) <= _aten_ns(m, below, above) * (1 - least_gain)
        for span in _ranges(steps, above.m)
        for m in span
    )


def _least_gain_between(below: MeasuredSize, above: MeasuredSize) -> float:
    """Returns the least fraction by which a kernel must beat ATen between two measured m."""
    return max(below.least_gain, above.least_gain)


def _allowed_at_computed(times_ns: Mapping[str, float], most_ns: float) -> dict[str, float]:
    """Returns the kernels that may run at computed times, with their losses."""
    fastest_ns = min(times_ns.values())
    limit_ns = min(most_ns, fastest_ns * (1 + MARGIN))
    return {
        name: time_ns / fastest_ns - 1 for name, time_ns in times_ns.items() if time_ns <= limit_ns
    }


def _aten_ns(m: int, below: MeasuredSize, above: MeasuredSize) -> float:
    """Returns ATen's time between two measured m, interpolated on log-log scales."""
    share = math.log(m / below.m) / math.log(above.m / below.m)
    return float(below.aten.time_ns ** (1 - share) * above.aten.time_ns**share)


def _near_at_both(below: MeasuredSize, above: MeasuredSize) -> set[str]:
    """Returns kernels within `FAR` of the fastest at both m and faster than ATen at one."""
    return {
        kernel_id
        for kernel_id in below.kernels.keys() & above.kernels.keys()
        if above.kernels[kernel_id].workspace_bytes <= MAX_WORKSPACE_BYTES
        and all(
            size.kernels[kernel_id].timing.time_ns <= (1 + FAR) * _least_ns(size)
            for size in (below, above)
        )
        and any(
            size.kernels[kernel_id].timing.time_ns < size.aten.time_ns for size in (below, above)
        )
    }


def _least_ns(size: MeasuredSize) -> int:
    """Returns the fastest contender's time at a measured m: ATen's if no kernel gains enough."""
    fastest = _fastest(beating_aten(size))
    return size.aten.time_ns if fastest == ATEN else size.kernels[fastest].timing.time_ns


def _allowed_between_few(below: MeasuredSize, above: MeasuredSize) -> dict[str, float]:
    """Returns the kernels that may run between two small measured m, with their summed losses."""
    low, high = beating_aten(below), beating_aten(above)
    return {
        kernel_id: low[kernel_id] + high[kernel_id]
        for kernel_id in low.keys() & high.keys()
        if max(low[kernel_id], high[kernel_id]) <= MARGIN
        and above.kernels[kernel_id].workspace_bytes <= MAX_WORKSPACE_BYTES
    }


def _choose_with_fewest_changes(intervals: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns one contender per interval: fewest changes, then least loss.

    Dynamic programming: the best path to a contender extends a best path to the previous interval.
    Ties are broken by id, so that the result is deterministic.
    """
    best: dict[str, tuple[int, float]] = {}
    history: list[dict[str, str]] = []
    for allowed in intervals:
        costs_here: dict[str, tuple[int, float]] = {}
        predecessors: dict[str, str] = {}
        for kernel_id in sorted(allowed):
            costs = {
                previous: (changes + (previous != kernel_id), loss)
                for previous, (changes, loss) in best.items()
            }
            previous = min(costs, key=lambda name: (costs[name], name), default=kernel_id)
            changes, loss = costs.get(previous, (0, 0.0))
            costs_here[kernel_id], predecessors[kernel_id] = (
                (changes, loss + allowed[kernel_id]),
                previous,
            )
        best = costs_here
        history.append(predecessors)
    chosen: list[str] = []
    current = min(best, key=lambda name: (best[name], name), default=ATEN)
    for predecessors in reversed(history):
        chosen.append(current)
        current = predecessors[current]
    return chosen[::-1]
