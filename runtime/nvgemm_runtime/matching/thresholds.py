"""Which kernel computes at which m: thresholds, from what was measured at some m.

A kernel computes nowhere unless it beats ATen by the least gain that counts there
(`evidence.Evidence`), which is `MIN_GAIN` or more. At a measured m the fastest computes,
or what is not told apart from it. Between two measured m, up to `FEW_ROWS`, a kernel may compute
that was among the fastest at both. For more rows, what a kernel takes in between is computed from
its waves of tiles (`ranking.curve_between`), and that must be less than ATen takes.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..bundle.format import KernelDesign, Timing
from ..gemm.problem import Problem
from .ranking import curve_between

ATEN = ""
"""Stands for ATen where a kernel's id may stand."""

MARGIN = 0.02
"""Contenders of a place that take at most this part longer than its fastest are as good as it."""

FEW_ROWS = 128
"""Up to this m, a kernel's tiles change little with m: what holds at two measured m, not further
apart than `MAX_RATIO_OF_FEW`, holds between them."""

MAX_RATIO_OF_FEW = 16
"""Most that the larger of two measured m may be of the smaller, if a kernel is to be used between,
and the larger is at most `FEW_ROWS`.

Where `benchmarks.ranking` held such an m back on an H200, its neighbours 2.7 to 16 times apart,
kernels that were within `MARGIN` at both lost 0.3 % in the geometric mean, and 2.9 % at most."""

MAX_RATIO = 2
"""Most that the larger of two measured m may be of the smaller for more rows.

This, `FAR`, and `MIN_GAIN` between two measured m were chosen by times of two n and k on an H200,
at held-back m. At m of two others on another H200, tables took 1.005 times as long as the best,
and ATen alone 1.008 times (`benchmarks.dispatch`)."""

FAR = 0.05
"""For more rows, a kernel that takes this part longer than the fastest at either of two measured m
is not used between them, whatever is computed."""

MIN_GAIN = 0.02
"""The least part by which a kernel's time must be below ATen's for it to be used; ATen is safe.

At a measured m, another GPU of the product may see it otherwise. Of 28 comparisons with a third
H200, of kernels that two H200s confirm with a smaller gain, ATen was faster by over 1 % there in 5,
and in 1 of 38 where the gain was larger (`benchmarks.ranking gpus`). Between two measured m of more
rows, ATen's waves are not known."""

MAX_WORKSPACE_BYTES = 64 << 20
"""For sizes that were not declared: kernels that need more memory are left out if others serve."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What a kernel took at one m.

    Attributes:
        timing: Its time, and what that varies by.
        workspace_bytes: Memory that it needs there besides its operands.
    """

    timing: Timing
    workspace_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """What was measured at one m.

    Attributes:
        m: Rows of A.
        kernels: By id, the kernels that were measured.
        aten: ATen's time.
        least_gain: The least part by which a kernel's time must be below ATen's here.
    """

    m: int
    kernels: Mapping[str, Contender]
    aten: Timing
    least_gain: float = MIN_GAIN


@dataclass(frozen=True, kw_only=True)
class DispatchTable:
    """A kernel for every m.

    Attributes:
        bounds: Rising: the first m of each segment but the first, which begins at 0.
        kernels: Of each segment the kernel's id, or `ATEN`. Neighbours differ.
    """

    bounds: tuple[int, ...]
    kernels: tuple[str, ...]

    def at(self, m: int) -> str:
        """The kernel's id for an m, or `ATEN`."""
        return self.kernels[bisect_right(self.bounds, m)]

    def within(self, least: int, most: int | None) -> DispatchTable:
        """The part for m in ``least..most`` (no end if None), without segments outside of it."""
        first = bisect_right(self.bounds, least)
        last = len(self.bounds) if most is None else bisect_right(self.bounds, most)
        return DispatchTable(bounds=self.bounds[first:last], kernels=self.kernels[first : last + 1])

    def without_aten(self, kernel_id: str) -> DispatchTable:
        """The table with a kernel in the place of ATen."""
        bounds: list[int] = []
        kernels: list[str] = []
        for bound, one in zip((0, *self.bounds), self.kernels):
            named = kernel_id if one == ATEN else one
            if not kernels or named != kernels[-1]:
                bounds.append(bound)
                kernels.append(named)
        return DispatchTable(bounds=tuple(bounds[1:]), kernels=tuple(kernels))

    @property
    def used(self) -> tuple[str, ...]:
        """The ids of the kernels that it names, each once."""
        return tuple(dict.fromkeys(filter(None, self.kernels)))

    @property
    def has_kernels(self) -> bool:
        """Whether it names any kernel."""
        return any(self.kernels)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """What decides how many waves of tiles each kernel needs at an m.

    Attributes:
        problem: The GEMM, at any m.
        designs: Of each kernel, by id.
        multiprocessors: Of the GPU on which times were measured.
    """

    problem: Problem
    designs: Mapping[str, KernelDesign]
    multiprocessors: int

    def step_rows(self, kernel_id: str) -> int:
        """Rows of A after which a kernel needs another row of tiles."""
        return self.designs[kernel_id].tile[0]

    def times_between(
        self, kernel_id: str, below: MeasuredSize, above: MeasuredSize
    ) -> Callable[[int], float]:
        """Nanoseconds that a kernel should take at an m between two where it was measured."""
        low, high = (size.kernels[kernel_id].timing.time_ns for size in (below, above))
        return curve_between(
            self.designs[kernel_id],
            self.problem,
            (below.m, low),
            (above.m, high),
            self.multiprocessors,
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Values of m for which the same contenders are allowed.

    Attributes:
        begin: The first m. The next place begins where this one ends.
        allowed: Ids of kernels, or `ATEN`: the part that each takes longer than the fastest. Never
            empty.
        compared: Ids of the kernels whose times decide what is allowed here, and where the places
            of its interval begin.
    """

    begin: int
    allowed: Mapping[str, float]
    compared: frozenset[str] = frozenset()


def places_along(
    sizes: Iterable[MeasuredSize], *, tiling: Tiling | None, may_bridge: bool = True
) -> list[Place]:
    """What may compute at every m from the least measured one on.

    At a measured m that is the fastest, and what is not told apart from it: a kernel that beats
    ATen too, or ATen.

    Between two measured m of at most `FEW_ROWS`, it is a kernel that beats ATen at both and is
    within `MARGIN` of the fastest at both. For more rows, it is a kernel that was faster than ATen
    at one of them and is within `FAR` of the fastest at both, and whose computed time is less than
    ATen's by the larger `least_gain` of the two and within `MARGIN` of the least. Both only if the
    two m are near enough and the kernel needs little memory. Everywhere else it is ATen.

    Args:
        sizes: What was measured, each m once.
        tiling: How many waves the kernels need; None if that is not known, so that nothing is used
            between two measured m of more rows than `FEW_ROWS`.
        may_bridge: Whether a kernel may compute between two measured m at all.
    """
    rising = sorted(sizes, key=lambda size: size.m)
    places: list[Place] = []
    for here, after in itertools.zip_longest(rising, rising[1:]):
        places.append(_place_at(here))
        if after is None or (after.m > here.m + 1 and not may_bridge):
            places.append(Place(begin=here.m + 1, allowed=_ONLY_ATEN))
        elif after.m > here.m + 1:
            places += _between(here, after, tiling)
    return places


def kernels_that_decide(places: Iterable[Place], table: DispatchTable) -> frozenset[str]:
    """The kernels that a bundle must keep for `table` to stay what it is.

    Args:
        places: What the table was made of.
        table: The result of `make_table`, whose kernels are among them.
    """
    return frozenset(table.used).union(*(place.compared for place in places))


def make_table(places: Sequence[Place]) -> DispatchTable:
    """Choose one of what each place allows: what changes least often, then what loses least.

    Before the first place, ATen computes.
    """
    chosen = _with_fewest_changes([place.allowed for place in places])
    bounds, kernels = [], [ATEN]
    for place, kernel_id in zip(places, chosen):
        if kernel_id != kernels[-1]:
            bounds.append(place.begin)
            kernels.append(kernel_id)
    return DispatchTable(bounds=tuple(bounds), kernels=tuple(kernels))


_ONLY_ATEN: Mapping[str, float] = {ATEN: 0.0}


def gains_enough(time_ns: int, aten: Timing, least_gain: float = MIN_GAIN) -> bool:
    """Whether a time is below ATen's by ``least_gain``."""
    return time_ns <= aten.time_ns * (1 - least_gain)


def beating_aten(size: MeasuredSize) -> dict[str, float]:
    """The kernels that beat ATen by the least gain that counts at this size, by id.

    Returns:
        The part that each takes longer than the fastest.
    """
    beating = {
        kernel_id: one.timing.time_ns
        for kernel_id, one in size.kernels.items()
        if gains_enough(one.timing.time_ns, size.aten, size.least_gain)
    }
    least = min(beating.values(), default=0)
    return {kernel_id: time_ns / least - 1 for kernel_id, time_ns in beating.items()}


def _fastest(losses: Mapping[str, float]) -> str:
    """The kernel that loses least, or `ATEN` where none beats it."""
    return min(losses, key=lambda kernel_id: (losses[kernel_id], kernel_id), default=ATEN)


def _place_at(size: MeasuredSize) -> Place:
    """What may compute at a measured m, with what it loses."""
    losses = beating_aten(size)
    fastest = _fastest(losses)
    if fastest == ATEN:
        return Place(begin=size.m, allowed=_ONLY_ATEN)
    reach = _latest(size.kernels[fastest].timing)
    allowed = {
        kernel_id: loss
        for kernel_id, loss in losses.items()
        if _earliest(size.kernels[kernel_id].timing) <= reach
    }
    if _earliest(size.aten) <= reach:
        allowed[ATEN] = size.aten.time_ns / size.kernels[fastest].timing.time_ns - 1
    return Place(begin=size.m, allowed=allowed, compared=frozenset({fastest}))


def _earliest(timing: Timing) -> int:
    return timing.time_ns - timing.spread_ns


def _latest(timing: Timing) -> int:
    return timing.time_ns + timing.spread_ns


def _between(below: MeasuredSize, above: MeasuredSize, tiling: Tiling | None) -> Iterator[Place]:
    """The places between two measured m."""
    begin = below.m + 1
    if above.m <= FEW_ROWS:
        is_near = above.m <= below.m * MAX_RATIO_OF_FEW
        allowed = _allowed_between_few(below, above) if is_near else {}
        yield Place(begin=begin, allowed=allowed or _ONLY_ATEN)
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
        yield Place(begin=begin, allowed=_ONLY_ATEN)
        return
    compared = frozenset(times)
    least_gain = _least_gain_between(below, above)
    for first, last in _spans(sorted(starts), above.m):
        # Waves change at the first m of a place alone: what holds at both ends holds between.
        ends = [
            _allowed_at_computed(
                {kernel_id: time_ns(m) for kernel_id, time_ns in times.items()},
                _aten_ns(m, below, above) * (1 - least_gain),
            )
            for m in (first, last)
        ]
        allowed = {name: max(end[name] for end in ends) for name in ends[0] if name in ends[1]}
        yield Place(begin=first, allowed=allowed or _ONLY_ATEN, compared=compared)


def _steps(begin: int, end: int, rows: int) -> list[int]:
    """``begin``, and each later m before ``end`` at which another row of tiles begins."""
    return [begin, *range(begin + -begin % rows + 1, end, rows)]


def _spans(starts: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
    """The first and the last m of each stretch that begins at one of ``starts``."""
    for first, following in itertools.zip_longest(starts, starts[1:], fillvalue=end):
        yield first, following - 1


def _beats_aten_somewhere(
    time_ns: Callable[[int], float],
    steps: Sequence[int],
    below: MeasuredSize,
    above: MeasuredSize,
) -> bool:
    """Whether a kernel's computed time between two measured m ever gains enough on ATen's.

    Between two of its steps, its time over ATen's rises or falls, so both ends say it.
    """
    least_gain = _least_gain_between(below, above)
    return any(
        time_ns(m) <= _aten_ns(m, below, above) * (1 - least_gain)
        for span in _spans(steps, above.m)
        for m in span
    )


def _least_gain_between(below: MeasuredSize, above: MeasuredSize) -> float:
    """The least part by which a kernel's time must be below ATen's between two measured m."""
    return max(below.least_gain, above.least_gain)


def _allowed_at_computed(times_ns: Mapping[str, float], most_ns: float) -> dict[str, float]:
    """The kernels that may compute where these times were computed, with what they lose."""
    least = min(times_ns.values())
    reach = min(most_ns, least * (1 + MARGIN))
    return {name: time_ns / least - 1 for name, time_ns in times_ns.items() if time_ns <= reach}


def _aten_ns(m: int, below: MeasuredSize, above: MeasuredSize) -> float:
    """ATen's time between two measured m, interpolated on logarithmic scales."""
    share = math.log(m / below.m) / math.log(above.m / below.m)
    return float(below.aten.time_ns ** (1 - share) * above.aten.time_ns**share)


def _near_at_both(below: MeasuredSize, above: MeasuredSize) -> set[str]:
    """Kernels within `FAR` of the fastest at two measured m, faster than ATen at one of them."""
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
    """The time of what computes fastest at a measured m: ATen, where no kernel beats it enough."""
    fastest = _fastest(beating_aten(size))
    return size.aten.time_ns if fastest == ATEN else size.kernels[fastest].timing.time_ns


def _allowed_between_few(below: MeasuredSize, above: MeasuredSize) -> dict[str, float]:
    """The kernels that may compute between two measured m of few rows, with their losses' sum."""
    low, high = beating_aten(below), beating_aten(above)
    return {
        kernel_id: low[kernel_id] + high[kernel_id]
        for kernel_id in low.keys() & high.keys()
        if max(low[kernel_id], high[kernel_id]) <= MARGIN
        and above.kernels[kernel_id].workspace_bytes <= MAX_WORKSPACE_BYTES
    }


def _with_fewest_changes(places: Sequence[Mapping[str, float]]) -> list[str]:
    """One of what each place allows: with the fewest changes, then with the least loss.

    The best way to each choice of a place is made of the best ways to those of the place before it.
    Equally good ones are told apart by id, so that the result depends on nothing else.
    """
    best: dict[str, tuple[int, float]] = {}
    came_from: list[dict[str, str]] = []
    for allowed in places:
        ways: dict[str, tuple[int, float]] = {}
        before: dict[str, str] = {}
        for one in sorted(allowed):
            costs = {
                other: (changes + (other != one), loss) for other, (changes, loss) in best.items()
            }
            other = min(costs, key=lambda name: (costs[name], name), default=one)
            changes, loss = costs.get(other, (0, 0.0))
            ways[one], before[one] = (changes, loss + allowed[one]), other
        best = ways
        came_from.append(before)
    chosen: list[str] = []
    at = min(best, key=lambda name: (best[name], name), default=ATEN)
    for before in reversed(came_from):
        chosen.append(at)
        at = before[at]
    return chosen[::-1]
