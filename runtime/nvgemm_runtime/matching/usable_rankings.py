"""The rankings that a device can use, by the problem they are of and by signature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..bundle.format import Header, Kernel, Ranking, RankingSource
from ..bundle.reader import Bundle
from ..bundle.unknown_parts import doubt_about
from ..errors import count_text
from ..gemm.problem import Problem, Signature
from .device import DeviceFacts
from .nearest import NearestSizes
from .refusals import kernel_refusals, needs_compact, timing_refusal, version_numbers
from .trust import holds_here


@dataclass(frozen=True, kw_only=True)
class BundleView:
    """A bundle as matching sees it.

    Attributes:
        name: What messages call it.
        header: What it says about itself.
        origin: What brought it, where it is installed, named or kept.
        opened: The bundle, where its kernels are to be loaded.
    """

    name: str
    header: Header
    origin: str = ""
    opened: Bundle | None = None


def newest_compiler_first(bundles: Iterable[BundleView]) -> list[BundleView]:
    """Order bundles: newest compiler first, then by name."""
    by_name = sorted(bundles, key=lambda bundle: (bundle.name, bundle.header.build_key))
    return sorted(by_name, key=_compiler_version, reverse=True)  # stable: equals stay as they are


def _compiler_version(bundle: BundleView) -> tuple[int, ...]:
    return version_numbers(bundle.header.toolchain.get("nvidia-cutlass-dsl", ""))


@dataclass(frozen=True, kw_only=True)
class MatchedKernel:
    """A kernel that serves a problem.

    Attributes:
        bundle: The bundle that holds it.
        kernel: Its entry.
        rank: Its position in the ranking that it was taken from.
        time_ns: Time that a ranking gives it for the problem it was taken from, if any.
    """

    bundle: BundleView
    kernel: Kernel
    rank: int
    time_ns: int | None


def launchable(
    bundle: BundleView, ranking: Ranking, reasons: Sequence[str | None]
) -> tuple[MatchedKernel, ...]:
    """The kernels of a ranking but for those that there are reasons against, by their position."""
    kernels = bundle.header.kernels
    return tuple(
        MatchedKernel(bundle=bundle, kernel=kernels[one.kernel], rank=rank, time_ns=one.time_ns)
        for rank, one in enumerate(ranking.kernels)
        if reasons[one.kernel] is None
    )


def _with_doubt(ranking: Ranking, gone: int) -> Ranking:
    """A ranking of which some kernels cannot be launched: one that was measured is in doubt.

    It keeps those kernels, for `MatchedKernel.rank` counts them.
    """
    if ranking.measured is None or not gone:
        return ranking
    doubt = doubt_about(gone, len(ranking.kernels), "cannot be launched here")
    measured = replace(ranking.measured, doubts=(*ranking.measured.doubts, doubt))
    return replace(ranking, measured=measured)


def _left_out_for_timing(
    kernels: Sequence[Kernel], reasons: Sequence[str | None], facts: DeviceFacts
) -> frozenset[int]:
    """Positions of the kernels that nothing is against but that results depend on timing."""
    wanted = facts.wants_determinism
    return frozenset(
        place
        for place, (kernel, reason) in enumerate(zip(kernels, reasons))
        if reason is not None and reason == timing_refusal(kernel, wanted)
    )


def _without_kernels(ranking: Ranking, positions: Collection[int]) -> Ranking:
    """A ranking of the other kernels alone; the same if none is at these positions."""
    kept = [place for place, one in enumerate(ranking.kernels) if one.kernel not in positions]
    if len(kept) == len(ranking.kernels):
        return ranking
    measured = ranking.measured
    if measured is not None:
        measured = replace(measured, spreads_ns=tuple(measured.spreads_ns[one] for one in kept))
    kernels = tuple(ranking.kernels[place] for place in kept)
    return replace(ranking, kernels=kernels, measured=measured)


def _least_time_ns(ranking: Ranking, positions: Collection[int]) -> int | None:
    """The least time that a ranking gives a kernel at these positions; None where it has none."""
    times = (one.time_ns for one in ranking.kernels if one.kernel in positions)
    return min((time for time in times if time is not None), default=None)


class UsableRanking:
    """A ranking of a problem, and which of its kernels a device can launch.

    Attributes:
        bundle: The bundle that has it.
        ranking: As the bundle has it, but without kernels that a program that wants equal results
            leaves out, in doubt where other measured kernels cannot be launched, and declared where
            another bundle declares its problem.
        least_left_out_ns: The least time of the kernels that it is without; None if it has all.
        kernels: Those that can be launched, best first; at least one.
        kernels_for_gaps: Those of them that take operands with gaps between rows or matrices.
    """

    __slots__ = ("bundle", "kernels", "kernels_for_gaps", "least_left_out_ns", "ranking")

    def __init__(
        self,
        bundle: BundleView,
        ranking: Ranking,
        kernels: tuple[MatchedKernel, ...],
        kernels_for_gaps: tuple[MatchedKernel, ...],
        least_left_out_ns: int | None = None,
    ) -> None:
        self.bundle = bundle
        self.ranking = ranking
        self.kernels = kernels
        self.kernels_for_gaps = kernels_for_gaps
        self.least_left_out_ns = least_left_out_ns

    @property
    def source(self) -> RankingSource:
        """Where its order comes from."""
        return self.bundle.header.sources[self.ranking.source]

    def holds_on(self, facts: DeviceFacts) -> bool:
        """Whether it is a measurement whose order of kernels holds on a device."""
        kernels = (served.kernel for served in self.kernels)
        return holds_here(self.ranking, self.source, facts, kernels)

    def kernels_for(self, is_compact: bool) -> tuple[MatchedKernel, ...]:
        """The kernels for operands that are compact, or are not."""
        return self.kernels if is_compact else self.kernels_for_gaps

    def aligned(self, alignment_bytes: int, is_compact: bool) -> tuple[MatchedKernel, ...]:
        """The kernels for operands that are so aligned, and are compact or not."""
        kernels = self.kernels_for(is_compact)
        if all(one.kernel.alignment_bytes <= alignment_bytes for one in kernels):
            return kernels
        return tuple(one for one in kernels if one.kernel.alignment_bytes <= alignment_bytes)


def usable_rankings(
    bundle: BundleView, facts: DeviceFacts
) -> tuple[list[UsableRanking], list[str]]:
    """The rankings of a bundle that a device uses, and why some kernels are left out."""
    header = bundle.header
    reasons = kernel_refusals(header, facts)
    compact = {kernel.id for kernel in header.kernels if needs_compact(kernel.calling_convention)}
    varying = _left_out_for_timing(header.kernels, reasons, facts)
    rankings = []
    for whole in header.rankings_on(facts.name):
        ranking = _without_kernels(whole, varying) if varying else whole
        served = launchable(bundle, ranking, reasons)
        if served:
            with_gaps = served
            if compact:
                with_gaps = tuple(one for one in served if one.kernel.id not in compact)
            gone = len(ranking.kernels) - len(served)
            least_ns = _least_time_ns(whole, varying) if varying else None
            usable = _with_doubt(ranking, gone)
            rankings.append(UsableRanking(bundle, usable, served, with_gaps, least_ns))
    counts = Counter(reason for reason in reasons if reason is not None)
    told = [
        f"{count_text(count, 'kernel')} {'is' if count == 1 else 'are'} left out: {why}"
        for why, count in sorted(counts.items())
    ]
    return rankings, told


SizesByAlignment = list[tuple[int, NearestSizes[UsableRanking]]]
"""Alignments in bytes, the largest first, and for each the problems with a kernel that needs no
more. Kernels of a signature mostly agree, so that there is one."""


def index_by_alignment(
    ranked: Mapping[Problem, Sequence[UsableRanking]], *, is_compact: bool
) -> dict[Signature, SizesByAlignment]:
    """Ranked problems by signature and alignment, for operands that are compact, or are not."""
    of_signature: dict[Signature, list[tuple[Problem, UsableRanking, int]]] = {}
    for problem, rankings in ranked.items():
        for ranking in rankings:
            if kernels := ranking.kernels_for(is_compact):
                least = min(one.kernel.alignment_bytes for one in kernels)
                of_signature.setdefault(problem.signature, []).append((problem, ranking, least))
    return {
        signature: [
            (needed, NearestSizes(_first_that_serves(found, needed)))
            for needed in sorted({least for _, _, least in found}, reverse=True)
        ]
        for signature, found in of_signature.items()
    }


def _first_that_serves(
    least: Iterable[tuple[Problem, UsableRanking, int]], alignment_bytes: int
) -> Iterator[tuple[Problem, UsableRanking]]:
    """For each problem the first ranking that has a kernel for such an alignment."""
    seen: Problem | None = None
    for problem, ranking, needed in least:  # rankings of a problem one after the other
        if needed <= alignment_bytes and problem is not seen:
            seen = problem
            yield problem, ranking
