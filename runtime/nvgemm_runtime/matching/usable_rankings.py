"""Rankings that a device can use, by problem and by signature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..bundle.format import Kernel
from ..bundle.ranking_entries import Ranking, RankingSource
from ..bundle.unknown_parts import doubt_about
from ..errors import count_text
from ..gemm.problem import Problem, Signature
from .device import DeviceFacts, TorchVersions
from .matches import BundleView, MatchedKernel
from .nearest import NearestSizes
from .refusals import kernel_refusals, needs_compact, timing_refusal
from .trust import holds_here, why_aten_is_open


def launchable(
    bundle: BundleView, ranking: Ranking, reasons: Sequence[str | None]
) -> tuple[MatchedKernel, ...]:
    """Returns a ranking's kernels that have no refusal; ``reasons`` is by kernel index."""
    kernels = bundle.header.kernels
    return tuple(
        MatchedKernel(bundle=bundle, kernel=kernels[entry.kernel], rank=rank, time_ns=entry.time_ns)
        for rank, entry in enumerate(ranking.kernels)
        if reasons[entry.kernel] is None
    )


def _doubted_if_incomplete(ranking: Ranking, unlaunchable: int) -> Ranking:
    """Returns a ranking; a measured one is in doubt if some kernels cannot be launched.

    Unlaunchable kernels stay in it, because `MatchedKernel.rank` counts them.
    """
    if ranking.measured is None or not unlaunchable:
        return ranking
    doubt = doubt_about(unlaunchable, len(ranking.kernels), "cannot be launched here")
    measured = replace(ranking.measured, doubts=(*ranking.measured.doubts, doubt))
    return replace(ranking, measured=measured)


def _nondeterministic_kernels(
    kernels: Sequence[Kernel], reasons: Sequence[str | None], facts: DeviceFacts
) -> frozenset[int]:
    """Returns the indices of kernels refused only because their results depend on timing."""
    wants_determinism = facts.wants_determinism
    return frozenset(
        index
        for index, (kernel, reason) in enumerate(zip(kernels, reasons))
        if reason is not None and reason == timing_refusal(kernel, wants_determinism)
    )


def _without_kernels(ranking: Ranking, positions: Collection[int]) -> Ranking:
    """Returns a ranking without the kernels at these indices; the same object if it has none."""
    ranks = [rank for rank, entry in enumerate(ranking.kernels) if entry.kernel not in positions]
    if len(ranks) == len(ranking.kernels):
        return ranking
    measured = ranking.measured
    if measured is not None:
        measured = replace(measured, spreads_ns=tuple(measured.spreads_ns[rank] for rank in ranks))
    kernels = tuple(ranking.kernels[rank] for rank in ranks)
    return replace(ranking, kernels=kernels, measured=measured)


def _least_time_ns(ranking: Ranking, positions: Collection[int]) -> int | None:
    """Returns the least time among the kernels at these indices; None without a time."""
    times = (entry.time_ns for entry in ranking.kernels if entry.kernel in positions)
    return min((time for time in times if time is not None), default=None)


class UsableRanking:
    """Ranking of a problem, with the kernels that a device can launch.

    Attributes:
        bundle: Bundle that contains it.
        ranking: Bundle's ranking, without nondeterministic kernels if the program wants
            determinism; in doubt if other measured kernels cannot be launched; declared if another
            bundle declares its problem.
        least_excluded_ns: Least time among the removed nondeterministic kernels; None if all
            remain.
        kernels: Launchable kernels, best first; at least one.
        kernels_for_gaps: Launchable kernels that accept gaps between rows or matrices.
        source: Ranking source: the bundle's, unless a confirmation replaces it.
    """

    __slots__ = ("bundle", "kernels", "kernels_for_gaps", "least_excluded_ns", "ranking", "source")

    def __init__(
        self,
        bundle: BundleView,
        ranking: Ranking,
        kernels: tuple[MatchedKernel, ...],
        kernels_for_gaps: tuple[MatchedKernel, ...],
        least_excluded_ns: int | None = None,
        source: RankingSource | None = None,
    ) -> None:
        self.bundle = bundle
        self.ranking = ranking
        self.kernels = kernels
        self.kernels_for_gaps = kernels_for_gaps
        self.least_excluded_ns = least_excluded_ns
        self.source = source or bundle.header.sources[ranking.source]

    def holds_on(self, facts: DeviceFacts) -> bool:
        """Returns True if this is a measurement whose kernel order holds on a device."""
        kernels = (served.kernel for served in self.kernels)
        return holds_here(self.ranking, self.source, facts, kernels)

    def kernels_for(self, is_compact: bool) -> tuple[MatchedKernel, ...]:
        """Returns the kernels for compact operands, or for operands with gaps."""
        return self.kernels if is_compact else self.kernels_for_gaps

    def aligned(self, alignment_bytes: int, is_compact: bool) -> tuple[MatchedKernel, ...]:
        """Returns the kernels that accept operands with this alignment and compactness."""
        kernels = self.kernels_for(is_compact)
        if all(matched.kernel.alignment_bytes <= alignment_bytes for matched in kernels):
            return kernels
        return tuple(
            matched for matched in kernels if matched.kernel.alignment_bytes <= alignment_bytes
        )


def preference(usable: UsableRanking, facts: DeviceFacts, versions: TorchVersions | None) -> int:
    """Returns the sort key among several rankings of one problem; the least is preferred.

    Returns:
        0 if measured on this GPU product with this torch's ATen; 1 if with another ATen; 2 for
        other rankings for this product; 3 for another product.
    """
    measured, conditions = usable.ranking.measured, usable.source.conditions
    if usable.source.gpu != facts.name:
        return 3
    if measured is None or conditions is None or not usable.holds_on(facts):
        return 2
    if versions is None or why_aten_is_open(measured, conditions, versions) is not None:
        return 1
    return 0


def usable_rankings(
    bundle: BundleView, facts: DeviceFacts
) -> tuple[list[UsableRanking], list[str]]:
    """Returns the rankings of a bundle that a device uses, and reasons for excluded kernels."""
    header = bundle.header
    reasons = kernel_refusals(header, facts)
    compact = {kernel.id for kernel in header.kernels if needs_compact(kernel.calling_convention)}
    varying = _nondeterministic_kernels(header.kernels, reasons, facts)
    rankings = []
    for whole in header.rankings_on(facts.name):
        ranking = _without_kernels(whole, varying) if varying else whole
        served = launchable(bundle, ranking, reasons)
        if served:
            with_gaps = served
            if compact:
                with_gaps = tuple(matched for matched in served if matched.kernel.id not in compact)
            unlaunchable = len(ranking.kernels) - len(served)
            least_ns = _least_time_ns(whole, varying) if varying else None
            usable = _doubted_if_incomplete(ranking, unlaunchable)
            rankings.append(UsableRanking(bundle, usable, served, with_gaps, least_ns))
    counts = Counter(reason for reason in reasons if reason is not None)
    refusals = [
        f"{count_text(count, 'kernel')} {'is' if count == 1 else 'are'} left out: {reason}"
        for reason, count in sorted(counts.items())
    ]
    return rankings, refusals


SizesByAlignment = list[tuple[int, NearestSizes[UsableRanking]]]
"""Alignments in bytes, largest first, each with the problems that have a kernel for it. Kernels
with one signature mostly agree, so there usually is a single entry."""


def index_by_alignment(
    ranked: Mapping[Problem, Sequence[UsableRanking]], *, is_compact: bool
) -> dict[Signature, SizesByAlignment]:
    """Groups ranked problems by signature and alignment, for compact operands or others."""
    by_signature: dict[Signature, list[tuple[Problem, UsableRanking, int]]] = {}
    for problem, rankings in ranked.items():
        for ranking in rankings:
            if kernels := ranking.kernels_for(is_compact):
                least = min(served.kernel.alignment_bytes for served in kernels)
                by_signature.setdefault(problem.signature, []).append((problem, ranking, least))
    return {
        signature: [
            (needed, NearestSizes(_first_per_problem(entries, needed)))
            for needed in sorted({least for _, _, least in entries}, reverse=True)
        ]
        for signature, entries in by_signature.items()
    }


def _first_per_problem(
    entries: Iterable[tuple[Problem, UsableRanking, int]], alignment_bytes: int
) -> Iterator[tuple[Problem, UsableRanking]]:
    """Yields each problem with its first ranking that has a kernel for this alignment."""
    previous: Problem | None = None
    for problem, ranking, needed in entries:  # a problem's rankings are adjacent
        if needed <= alignment_bytes and problem is not previous:
            previous = problem
            yield problem, ranking
