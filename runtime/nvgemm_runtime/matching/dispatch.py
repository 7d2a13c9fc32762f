"""Which kernel computes a GEMM of any m, from the measured rankings of its signature, n and k.

Pure functions of what was measured at some m. Nothing is interpolated: a kernel is used at an m
that was measured, or between two that were, if what was measured at both speaks for it. Everywhere
else ATen computes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..bundle.format import Timing
from ..gemm.operands import Request
from .device import DeviceFacts, TorchVersions
from .trust import Terms, why_another_aten, why_times_are_open, why_unlike_measured

if TYPE_CHECKING:
    from .usable_rankings import MatchedKernel, UsableRanking

TunedTogether = tuple[str, ...]
"""Files of bundles that one run of ``nvgemm-aot tune`` measures together."""

ATEN = ""
"""Stands for ATen where a kernel's id may stand."""

MARGIN = 0.02
"""A kernel is used between two measured m if at both it takes at most this part longer than the
fastest there."""

FEW_ROWS = 128
"""Up to this m, a kernel's tiles change little with m, and `MAX_RATIO_OF_FEW` holds."""

MAX_RATIO_OF_FEW = 16
"""Most that the larger of two measured m may be of the smaller, if a kernel is to be used between,
and the larger is at most `FEW_ROWS`.

Where `benchmarks.ranking` held such an m back on an H200, its neighbours 2.7 to 16 times apart,
kernels that were within `MARGIN` at both lost 0.3 % in the geometric mean, and 2.9 % at most."""

MAX_RATIO = 1.5
"""The same for more rows. There, with neighbours 3.4 to 4.7 times apart, such kernels lost 5.2 %
and 24 % at most: the number of waves decides, and changes in between. 1.5 is a choice; no m were
measured that near to each other."""

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
    """

    m: int
    kernels: Mapping[str, Contender]
    aten: Timing


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
        """The same for m in ``least..most`` (no end if None), without segments outside of it."""
        first = bisect_right(self.bounds, least)
        last = len(self.bounds) if most is None else bisect_right(self.bounds, most)
        return DispatchTable(bounds=self.bounds[first:last], kernels=self.kernels[first : last + 1])

    def without_aten(self, kernel_id: str) -> DispatchTable:
        """The same, with a kernel in the place of ATen."""
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
class Dispatch:
    """What measured rankings say of one GEMM at every m.

    Attributes:
        table: The kernel for each m.
        measured: Each kernel that was measured, by id.
        sizes: What was measured, by rising m.
        open: By m, why a problem's ranking, or its fastest kernels, are not used.
        declared: The m of problems that a bundle declares; others were measured beside them.
        doubtful: By m, the files of bundles whose measurements of that size are in doubt, or
            contradict each other.
    """

    table: DispatchTable
    measured: Mapping[str, MatchedKernel]
    sizes: tuple[MeasuredSize, ...]
    open: Mapping[int, str]
    declared: frozenset[int]
    doubtful: Mapping[int, tuple[TunedTogether, ...]]

    def doubtful_within(self, least: int, most: int | None) -> list[TunedTogether]:
        """The files of `doubtful` for m in ``least..most`` (no end if None), each run once."""
        found = (
            files
            for m, of_size in self.doubtful.items()
            if least <= m and (most is None or m <= most)
            for files in of_size
        )
        return list(dict.fromkeys(found))

    @property
    def needed(self) -> frozenset[str]:
        """The ids of the kernels without which the table would be another.

        Those that it names, and the fastest at each measured m, which the others are compared to.
        """
        fastest = (_fastest(_losses(size)) for size in self.sizes)
        return frozenset([*self.table.used, *filter(None, fastest)])


def decide_dispatch(
    rankings: Mapping[int, Sequence[UsableRanking]],
    request: Request,
    facts: DeviceFacts,
    versions: TorchVersions,
    terms: Terms,
    *,
    only_confirmed: bool = True,
    only_deterministic: bool = True,
) -> Dispatch:
    """Decide which kernel computes a GEMM at every m.

    Args:
        rankings: By m, the usable rankings of the request's signature, n, k and batch or groups,
            those first that are preferred.
        request: The GEMM at one m, and how its operands lie.
        facts: The device.
        versions: Of torch.
        terms: Of those, how ATen is set.
        only_confirmed: Whether a ranking counts only if several GPUs confirm it.
        only_deterministic: Whether to leave out kernels whose results depend on timing.
    """
    obstacle = why_unlike_measured(request) or why_another_aten(request, terms)
    sizes: list[MeasuredSize] = []
    measured: dict[str, MatchedKernel] = {}
    why_open: dict[int, str] = {}
    doubtful: dict[int, tuple[TunedTogether, ...]] = {}
    for m, of_size in sorted(rankings.items()):
        counting, reasons = _counting(of_size, request, facts, versions, only_confirmed)
        found = obstacle or reasons or _measured_size(m, counting, request)
        if isinstance(found, str):
            why_open[m] = found
            files = _contradicting_files(counting) or _doubtful_files(of_size)
            if files:
                doubtful[m] = files
            continue
        if only_deterministic:
            varying = {
                one.kernel.id
                for usable in of_size
                for one in usable.kernels
                if not one.kernel.is_deterministic
            }
            kept = {id_: one for id_, one in found.kernels.items() if id_ not in varying}
            is_won = bool(_losses(found))
            found = replace(found, kernels=kept)
            if is_won and not _losses(found):
                why_open[m] = "results of the kernels that are faster than ATen depend on timing"
        sizes.append(found)
        for usable in of_size:
            for one in usable.kernels:
                if one.kernel.id in found.kernels:
                    measured.setdefault(one.kernel.id, one)
    # Where m is contiguous in A, operands between two measured m are aligned unlike at either.
    may_bridge = request.problem.signature.layout.a_row_major
    table = make_table(sizes, may_bridge=may_bridge)
    return Dispatch(
        table=table,
        measured=measured,
        sizes=tuple(sizes),
        open=why_open,
        declared=frozenset(
            m for m, of_size in rankings.items() if any(one.ranking.is_declared for one in of_size)
        ),
        doubtful=doubtful,
    )


def _counting(
    rankings: Sequence[UsableRanking],
    request: Request,
    facts: DeviceFacts,
    versions: TorchVersions,
    only_confirmed: bool,
) -> tuple[list[UsableRanking], str]:
    """The rankings of one problem that count; if none does, also why."""
    reasons: dict[str, None] = {}  # in order, each once
    counting: list[UsableRanking] = []
    for usable in rankings:
        reason = _why_not_counted(usable, request, facts, versions, only_confirmed)
        if reason is None:
            counting.append(usable)
        else:
            reasons[reason] = None
    return counting, "" if counting else "; ".join(reasons)


def _measured_size(
    m: int, counting: Sequence[UsableRanking], request: Request
) -> MeasuredSize | str:
    """What rankings that count say of one problem; or that they contradict each other."""
    if _contradict(counting):
        names = " and ".join(usable.bundle.name for usable in counting)
        return f"{names} contradict each other on whether ATen is faster"
    first = counting[0]
    measured = first.ranking.measured
    assert measured is not None
    assert measured.aten is not None
    problem = replace(request.problem, m=m)
    kernels = {}
    for one in first.aligned(request.alignment_bytes, request.is_compact):
        assert one.time_ns is not None  # of a measured ranking
        timing = Timing(time_ns=one.time_ns, spread_ns=measured.spreads_ns[one.rank])
        workspace = one.kernel.workspace
        needed = one.kernel.workspace_bytes if workspace is None else workspace.size_bytes(problem)
        kernels[one.kernel.id] = Contender(timing=timing, workspace_bytes=needed)
    return MeasuredSize(m=m, kernels=kernels, aten=measured.aten)


def _contradict(counting: Iterable[UsableRanking]) -> bool:
    """Whether rankings differ on whether ATen is faster."""
    return len({_is_won_by_a_kernel(usable) for usable in counting}) > 1


def _contradicting_files(counting: Sequence[UsableRanking]) -> tuple[TunedTogether, ...]:
    """The files of bundles that contradict each other; none if they do not.

    `tune` joins them if they have the same target, device profile and toolchain.
    """
    if not _contradict(counting):
        return ()
    files: dict[Hashable, list[str]] = {}
    for usable in counting:
        header, opened = usable.bundle.header, usable.bundle.opened
        if opened is not None:
            alike = header.target, header.device, tuple(sorted(header.toolchain.items()))
            files.setdefault(alike, []).append(str(opened.path))
    return tuple(tuple(sorted(paths)) for paths in files.values())


def _doubtful_files(rankings: Iterable[UsableRanking]) -> tuple[TunedTogether, ...]:
    """The files of the bundles that measured a problem with doubts, each by itself."""
    return tuple(
        (str(usable.bundle.opened.path),)
        for usable in rankings
        if usable.ranking.measured is not None
        and usable.ranking.measured.doubts
        and usable.bundle.opened is not None
    )


def _why_not_counted(
    usable: UsableRanking,
    request: Request,
    facts: DeviceFacts,
    versions: TorchVersions,
    only_confirmed: bool,
) -> str | None:
    measured = usable.ranking.measured
    if measured is None or usable.source.conditions is None:
        return "its ranking is an estimate"
    kernels = usable.aligned(request.alignment_bytes, request.is_compact)
    reason = why_times_are_open(measured, usable.source, kernels, facts, versions)
    if reason is None and only_confirmed and not measured.is_confirmed:
        reason = f"{measured.standing}, and not confirmed by another GPU"
    return reason


def _is_won_by_a_kernel(usable: UsableRanking) -> bool:
    measured, best = usable.ranking.measured, usable.kernels[0].time_ns
    assert measured is not None
    assert measured.aten is not None
    assert best is not None
    return best < measured.aten.time_ns


def make_table(sizes: Iterable[MeasuredSize], *, may_bridge: bool = True) -> DispatchTable:
    """Make a table of what was measured at some m, each of them once.

    At a measured m the fastest computes. A kernel that is not told apart from it, and that beats
    ATen, may take its place. Between two measured m, a kernel may compute that beats ATen at both
    and is within `MARGIN` of the fastest at both, if these are near enough (`MAX_RATIO`) and it
    needs little memory. Of what may be used, it is what changes least often along m; of that, what
    takes the least time where it was measured. Everywhere else, ATen computes.

    Args:
        sizes: What was measured.
        may_bridge: Whether a kernel may compute between two measured m.
    """
    rising = sorted(sizes, key=lambda size: size.m)
    places: list[tuple[int, dict[str, float]]] = []
    for here, after in itertools.zip_longest(rising, rising[1:]):
        places.append((here.m, _allowed_at(here)))
        if after is None:
            places.append((here.m + 1, {ATEN: 0.0}))
        elif after.m > here.m + 1:
            between = _allowed_between(here, after) if may_bridge else {}
            places.append((here.m + 1, between or {ATEN: 0.0}))
    chosen = _with_fewest_changes([allowed for _, allowed in places])
    bounds, kernels = [], [ATEN]
    for (begin, _), kernel_id in zip(places, chosen):
        if kernel_id != kernels[-1]:
            bounds.append(begin)
            kernels.append(kernel_id)
    return DispatchTable(bounds=tuple(bounds), kernels=tuple(kernels))


def _losses(size: MeasuredSize) -> dict[str, float]:
    """Of kernels that beat ATen: the part that each takes longer than the fastest."""
    beating = {
        kernel_id: one.timing.time_ns
        for kernel_id, one in size.kernels.items()
        if one.timing.time_ns < size.aten.time_ns
    }
    least = min(beating.values(), default=0)
    return {kernel_id: time_ns / least - 1 for kernel_id, time_ns in beating.items()}


def _fastest(losses: Mapping[str, float]) -> str:
    """The kernel that loses least, or `ATEN` where none beats it."""
    return min(losses, key=lambda kernel_id: (losses[kernel_id], kernel_id), default=ATEN)


def _allowed_at(size: MeasuredSize) -> dict[str, float]:
    """What may compute at a measured m, with what it loses."""
    losses = _losses(size)
    fastest = _fastest(losses)
    if fastest == ATEN:
        return {ATEN: 0.0}
    reach = _latest(size.kernels[fastest].timing)
    allowed = {
        kernel_id: loss
        for kernel_id, loss in losses.items()
        if _earliest(size.kernels[kernel_id].timing) <= reach
    }
    if _earliest(size.aten) <= reach:
        allowed[ATEN] = size.aten.time_ns / size.kernels[fastest].timing.time_ns - 1
    return allowed


def _earliest(timing: Timing) -> int:
    return timing.time_ns - timing.spread_ns


def _latest(timing: Timing) -> int:
    return timing.time_ns + timing.spread_ns


def _allowed_between(below: MeasuredSize, above: MeasuredSize) -> dict[str, float]:
    """The kernels that may compute between two measured m, with what they lose at both."""
    if above.m > below.m * (MAX_RATIO_OF_FEW if above.m <= FEW_ROWS else MAX_RATIO):
        return {}
    low, high = _losses(below), _losses(above)
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
