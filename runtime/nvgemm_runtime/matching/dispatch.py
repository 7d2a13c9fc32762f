"""Dispatch by m: combines the measured rankings for a signature, n and k.

Pure functions over measurements at some m: which rankings count, and the table that they make
(`thresholds`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..bundle.ranking_entries import Timing
from ..gemm.group_limits import too_large_reason
from ..gemm.operands import Request
from .confirmed_rankings import ConfirmedMeasured
from .device import DeviceFacts, TorchVersions
from .evidence import Evidence
from .thresholds import (
    MIN_GAIN,
    Contender,
    DispatchTable,
    MeasuredSize,
    Tiling,
    beating_aten,
    gains_enough,
    intervals_along,
    kernels_that_decide,
    make_table,
)
from .trust import (
    Terms,
    why_another_aten,
    why_another_gpu,
    why_another_release,
    why_times_are_open,
    why_unlike_measured,
)

if TYPE_CHECKING:
    from .matches import MatchedKernel
    from .usable_rankings import UsableRanking

TunedTogether = tuple[str, ...]
"""Bundle paths that one ``nvgemm-aot tune`` run measures together."""


CONFIRM_STEP = "on this GPU, run: nvgemm-aot confirm"
"""Next step where kernels were not measured on this GPU product with this torch's ATen."""

_NONDETERMINISTIC = "results of the kernels that are faster than ATen depend on timing"
"""Reason to leave a size to ATen if the program wants determinism."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Measured dispatch for one GEMM at every m.

    Attributes:
        table: Kernel for each m.
        measured: Measured kernels by id.
        sizes: Measurements, by ascending m.
        open_reasons: Reasons not to use a problem's ranking or its fastest kernels, by m.
        declared: Each m that a bundle declares; others were measured in addition.
        doubtful: Paths to bundles whose measurements are in doubt or contradict each other, by m;
            empty if no measurement by ``nvgemm-aot tune`` could count.
        unconfirmed: Paths to bundles whose measurements lack only a second GPU's confirmation, by
            m.
        to_confirm: Each m at which no ranking counts because none was measured on this GPU product
            with this torch's ATen; see `CONFIRM_STEP`.
        held_back: Reasons not to use a faster kernel, by m: one GPU repeated its measurement, and
            the gain is too small for that evidence.
        mismatch: Reason why no measurement could count for these operands, or None.
        needed: Ids of the kernels that determine the table: the ones in it, and the ones they are
            compared to.
    """

    table: DispatchTable
    measured: Mapping[str, MatchedKernel]
    sizes: tuple[MeasuredSize, ...]
    open_reasons: Mapping[int, str]
    declared: frozenset[int]
    doubtful: Mapping[int, tuple[TunedTogether, ...]]
    unconfirmed: Mapping[int, tuple[TunedTogether, ...]]
    to_confirm: frozenset[int]
    held_back: Mapping[int, str]
    mismatch: str | None
    needed: frozenset[str]

    def doubtful_within(self, least: int, most: int | None) -> list[TunedTogether]:
        """Returns `doubtful` paths for m in ``least..most`` (no end if None), each run once."""
        return _files_within(self.doubtful, least, most)

    def unconfirmed_within(self, least: int, most: int | None) -> list[TunedTogether]:
        """Returns `unconfirmed` paths like `doubtful_within`."""
        return _files_within(self.unconfirmed, least, most)


def _files_within(
    by_m: Mapping[int, tuple[TunedTogether, ...]], least: int, most: int | None
) -> list[TunedTogether]:
    selected = (
        files
        for m, files_at_m in by_m.items()
        if least <= m and (most is None or m <= most)
        for files in files_at_m
    )
    return list(dict.fromkeys(selected))


def decide_dispatch(
    rankings: Mapping[int, Sequence[UsableRanking]],
    request: Request,
    facts: DeviceFacts,
    versions: TorchVersions,
    terms: Terms,
    *,
    evidence: Evidence = Evidence.DEFAULT,
    only_deterministic: bool = True,
    savings_ns: Mapping[int, int | None] | None = None,
) -> Dispatch:
    """Decides which kernel computes a GEMM at every m.

    Args:
        rankings: Usable rankings by m, for the request's signature, n, k and batch or groups;
            preferred ones first.
        request: GEMM at one m, with its operands' layout.
        facts: Device.
        versions: Versions of torch.
        terms: Offer terms; only the ATen settings are used.
        evidence: Evidence that a ranking needs to count.
        only_deterministic: True to exclude kernels whose results depend on timing.
        savings_ns: Nanoseconds by m that other bundled kernels save on ATen's measured time; None
            for an unknown number, which excludes the m.
    """
    obstacle = why_unlike_measured(request) or why_another_aten(request, terms)
    sizes: list[MeasuredSize] = []
    measured: dict[str, MatchedKernel] = {}
    why_open: dict[int, str] = {}
    doubtful: dict[int, tuple[TunedTogether, ...]] = {}
    unconfirmed: dict[int, tuple[TunedTogether, ...]] = {}
    to_confirm: set[int] = set()
    held_back: dict[int, str] = {}
    for m, size_rankings in sorted(rankings.items()):
        counting, reasons = _counting_rankings(size_rankings, request, facts, versions, evidence)
        size = obstacle or reasons or _measured_size(m, counting, request, evidence)
        if not isinstance(size, str) and savings_ns is not None:
            size = _with_savings(size, savings_ns.get(m, 0))
        if isinstance(size, str):
            why_open[m] = size
            confirming = (_needs_confirming(usable, facts, versions) for usable in size_rankings)
            if not obstacle and all(confirming):
                to_confirm.add(m)
            files = _contradicting_files(counting) or _doubtful_files(size_rankings)
            if files and not obstacle:  # with an obstacle, a new measurement would not count either
                doubtful[m] = files
            once, _ = _counting_rankings(size_rankings, request, facts, versions, Evidence.ONCE)
            if once and not counting and not obstacle:
                unconfirmed[m] = _separate_paths(once)
            continue
        faster = beating_aten(size)
        is_won = bool(faster) or _excluded_kernel_gains(counting[0], size)
        if not is_won and beating_aten(replace(size, least_gain=MIN_GAIN)):
            held_back[m] = _why_held_back(size)
            unconfirmed[m] = _separate_paths(counting)
        problem = replace(request.problem, m=m)
        unusable: dict[str, str] = {}
        for matched in (kernel for usable in size_rankings for kernel in usable.kernels):
            reason = too_large_reason(matched.kernel.provider, problem, request.out_row_bytes)
            if reason is None and only_deterministic and not matched.kernel.is_deterministic:
                reason = _NONDETERMINISTIC
            if reason is not None:
                unusable[matched.kernel.id] = reason
        usable_kernels = {
            id_: contender for id_, contender in size.kernels.items() if id_ not in unusable
        }
        size = replace(size, kernels=usable_kernels)
        if is_won and not beating_aten(size):
            why_open[m] = "; ".join({unusable[id_]: None for id_ in faster}) or _NONDETERMINISTIC
        sizes.append(size)
        for usable in size_rankings:
            for matched in usable.kernels:
                if matched.kernel.id in size.kernels:
                    measured.setdefault(matched.kernel.id, matched)
    # If A is contiguous along m, alignment between two measured m differs from both.
    may_bridge = request.problem.signature.layout.a_row_major
    tiling = None
    # A grouped product's waves depend on the distribution over groups, which is unknown here.
    if facts.multiprocessors is not None and not request.problem.signature.op.has_groups:
        designs = {id_: matched.kernel.design for id_, matched in measured.items()}
        tiling = Tiling(
            problem=request.problem, designs=designs, multiprocessors=facts.multiprocessors
        )
    without_times = why_open.keys() - {size.m for size in sizes}
    unknown = _unknown_sizes(rankings, without_times)
    intervals = intervals_along([*sizes, *unknown], tiling=tiling, may_bridge=may_bridge)
    table = make_table(intervals)
    return Dispatch(
        table=table,
        measured=measured,
        sizes=tuple(sizes),
        open_reasons=why_open,
        declared=frozenset(
            m
            for m, size_rankings in rankings.items()
            if any(usable.ranking.is_declared for usable in size_rankings)
        ),
        doubtful=doubtful,
        unconfirmed=unconfirmed,
        to_confirm=frozenset(to_confirm),
        held_back=held_back,
        mismatch=obstacle,
        needed=kernels_that_decide(intervals, table),
    )


def _unknown_sizes(
    rankings: Mapping[int, Sequence[UsableRanking]], without_times: Iterable[int]
) -> list[MeasuredSize]:
    """Returns sizes at which ATen runs because a confirmed table has no usable times there.

    Another torch's times decided the table at these m too, so kernels must not run across them.
    """
    is_confirmed = any(
        isinstance(usable.ranking.measured, ConfirmedMeasured)
        for size_rankings in rankings.values()
        for usable in size_rankings
    )
    if not is_confirmed:
        return []
    never_compared = Timing(time_ns=1, spread_ns=0)  # there is no kernel to compare it with
    return [MeasuredSize(m=m, kernels={}, aten=never_compared) for m in without_times]


def _excluded_kernel_gains(usable: UsableRanking, size: MeasuredSize) -> bool:
    """Returns True if an excluded nondeterministic kernel gains enough on ATen."""
    time_ns = usable.least_excluded_ns
    return time_ns is not None and gains_enough(time_ns, size.aten, size.least_gain)


def _why_held_back(size: MeasuredSize) -> str:
    fastest_ns = min(contender.timing.time_ns for contender in size.kernels.values())
    return (
        f"a kernel gains {1 - fastest_ns / size.aten.time_ns:.1%}, below the "
        f"{size.least_gain:.0%} that a measurement repeated on one GPU needs"
    )


def _counting_rankings(
    rankings: Sequence[UsableRanking],
    request: Request,
    facts: DeviceFacts,
    versions: TorchVersions,
    evidence: Evidence,
) -> tuple[list[UsableRanking], str]:
    """Returns one problem's rankings with the strongest evidence; else none and the reasons."""
    reasons: dict[str, None] = {}  # in order, each once
    counting: dict[float, list[UsableRanking]] = {}
    for usable in rankings:
        least_gain = _least_gain(usable, request, facts, versions, evidence)
        if isinstance(least_gain, str):
            reasons[least_gain] = None
        else:
            counting.setdefault(least_gain, []).append(usable)
    return (counting[min(counting)], "") if counting else ([], "; ".join(reasons))


def _measured_size(
    m: int, counting: Sequence[UsableRanking], request: Request, evidence: Evidence
) -> MeasuredSize | str:
    """Returns the measurement of one problem, or a text if its rankings contradict each other."""
    if _contradict(counting):
        names = " and ".join(usable.bundle.name for usable in counting)
        return f"{names} contradict each other on whether ATen is faster"
    first = counting[0]
    measured = first.ranking.measured
    assert measured is not None
    assert measured.aten is not None
    problem = replace(request.problem, m=m)
    kernels = {}
    for matched in first.aligned(request.alignment_bytes, request.is_compact):
        assert matched.time_ns is not None  # measured rankings have times
        timing = Timing(time_ns=matched.time_ns, spread_ns=measured.spreads_ns[matched.rank])
        workspace = matched.kernel.workspace
        workspace_bytes = (
            matched.kernel.workspace_bytes if workspace is None else workspace.size_bytes(problem)
        )
        kernels[matched.kernel.id] = Contender(timing=timing, workspace_bytes=workspace_bytes)
    least_gain = evidence.least_gain(measured)
    assert least_gain is not None  # _least_gain excluded the others
    return MeasuredSize(m=m, kernels=kernels, aten=measured.aten, least_gain=least_gain)


def _with_savings(size: MeasuredSize, savings_ns: int | None) -> MeasuredSize | str:
    """Returns a measurement whose ATen time is as short as other bundled kernels make it."""
    if savings_ns is None:
        return "a kernel computes the product alone at this m, where it was not measured"
    time_ns = max(1, size.aten.time_ns - savings_ns)
    return replace(size, aten=replace(size.aten, time_ns=time_ns))


def _contradict(counting: Iterable[UsableRanking]) -> bool:
    """Returns True if rankings disagree on whether ATen is faster."""
    return len({_kernel_beats_aten(usable) for usable in counting}) > 1


def _contradicting_files(counting: Sequence[UsableRanking]) -> tuple[TunedTogether, ...]:
    """Returns paths to bundles that contradict each other; empty if they agree.

    `tune` merges bundles with equal target, device profile and toolchain.
    """
    if not _contradict(counting):
        return ()
    files: dict[Hashable, list[str]] = {}
    for usable in counting:
        header, opened = usable.bundle.header, usable.bundle.opened
        if opened is not None:
            alike = header.target, header.devices, tuple(sorted(header.toolchain.items()))
            files.setdefault(alike, []).append(str(opened.path))
    return tuple(tuple(sorted(paths)) for paths in files.values())


def _doubtful_files(rankings: Iterable[UsableRanking]) -> tuple[TunedTogether, ...]:
    """Returns paths to bundles whose measurements are in doubt, each separately."""
    return _separate_paths(
        usable
        for usable in rankings
        if usable.ranking.measured is not None
        and usable.ranking.measured.doubts
        and not isinstance(usable.ranking.measured, ConfirmedMeasured)
    )


def _separate_paths(rankings: Iterable[UsableRanking]) -> tuple[TunedTogether, ...]:
    """Returns bundle paths, to be tuned one by one."""
    opened = (usable.bundle.opened for usable in rankings)
    return tuple((str(bundle.path),) for bundle in opened if bundle is not None)


def _least_gain(
    usable: UsableRanking,
    request: Request,
    facts: DeviceFacts,
    versions: TorchVersions,
    evidence: Evidence,
) -> float | str:
    """Returns the gain on ATen that a ranking's kernels need, or the reason to ignore it."""
    measured = usable.ranking.measured
    if measured is None or usable.source.conditions is None:
        return why_another_gpu(usable.source, facts) or "its ranking is an estimate"
    kernels = usable.aligned(request.alignment_bytes, request.is_compact)
    reason = why_times_are_open(measured, usable.source, kernels, facts, versions)
    if reason is not None:
        return reason
    least_gain = evidence.least_gain(measured)
    if least_gain is None:
        return f"{measured.standing}, and neither repeated nor confirmed by another GPU"
    return least_gain


def _needs_confirming(usable: UsableRanking, facts: DeviceFacts, versions: TorchVersions) -> bool:
    """Returns True if only a confirmation on this GPU product with this torch could count."""
    measured, conditions = usable.ranking.measured, usable.source.conditions
    if isinstance(measured, ConfirmedMeasured):
        return bool(measured.doubts)
    if measured is None or conditions is None or usable.source.gpu != facts.name:
        return True
    return why_another_release(conditions.torch, conditions.cuda, versions) is not None


def _kernel_beats_aten(usable: UsableRanking) -> bool:
    measured, best = usable.ranking.measured, usable.kernels[0].time_ns
    assert measured is not None
    assert measured.aten is not None
    assert best is not None
    return best < measured.aten.time_ns
