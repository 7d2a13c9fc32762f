"""Matching: which kernels of which bundles serve a problem, or every reason why none does.

A pure function of explicit facts. A ranked problem gets the ranking that was shipped for it. Any
other problem of a bundled signature gets the kernels of the nearest ranked one, ordered by times
scaled to its sizes, or interpolated between two measured neighbours (`ranking`). Kernels serve all
sizes of their signature, so only the order is a guess.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..bundle.format import Header, Measured, RankingSource, Scope, UnservedReason
from ..gemm.group_limits import too_large
from ..gemm.problem import Problem, Signature
from .device import DeviceFacts, TorchVersions
from .nearest import Around
from .ranking import KernelTimes, order_between, waves
from .refusals import (
    describe_device,
    describe_fault,
    refusal,
)
from .thresholds import MAX_WORKSPACE_BYTES
from .trust import preference
from .usable_rankings import BundleView as BundleView
from .usable_rankings import (
    MatchedKernel,
    UsableRanking,
    index_by_alignment,
    usable_rankings,
)

if TYPE_CHECKING:
    from ..gemm.operands import Request


class Basis(str, enum.Enum):
    """How a problem was found."""

    DECLARED = "declared"
    SIGNATURE = "signature"


@dataclass(frozen=True, kw_only=True)
class Match:
    """Kernels that serve a problem.

    Attributes:
        basis: Whether the problem was declared, or another of its signature: one that was measured
            and not declared counts as another.
        ranked_as: The problem whose ranking is used.
        source: Where that ranking comes from.
        kernels: Best first; at least one.
        from_jit: Whether they come from the JIT cache, and no wheel serves the problem as well.
        measured: What was measured of this very problem; None where nothing was.
        is_complete: Whether building the ranking again would find no further kernel; see
            `Header.is_complete`.
    """

    basis: Basis
    ranked_as: Problem
    source: RankingSource
    kernels: tuple[MatchedKernel, ...]
    from_jit: bool = False
    measured: Measured | None = None
    is_complete: bool = True


@dataclass(frozen=True, kw_only=True)
class Miss:
    """No kernel serves a problem: every reason why not, most specific first."""

    reasons: tuple[str, ...]


class Index:
    """The kernels that one device can run, ready to be asked.

    Args:
        bundles: In order of preference. A problem takes its ranking from the first bundle that
            ranks it, unless others measured it on this GPU product: those come first, those
            measured beside this torch's ATen before the rest, newer before older.
        facts: The device.
        unusable: Why other bundles that were found could not even be opened.
        from_jit: Whether the bundles are those of the JIT cache.
        versions: Of the torch at hand; None where there is none.

    Attributes:
        refusals: Why bundles, or kernels of them, cannot serve this device.
    """

    def __init__(
        self,
        bundles: Sequence[BundleView],
        facts: DeviceFacts,
        unusable: Sequence[str] = (),
        *,
        from_jit: bool = False,
        versions: TorchVersions | None = None,
    ) -> None:
        self.bundles = tuple(bundles)
        self.facts = facts
        self._from_jit = from_jit
        self._ranked: dict[Problem, list[UsableRanking]] = {}
        self._unserved: dict[Problem, tuple[str, UnservedReason]] = {}
        self._with_refusals: list[tuple[BundleView, str]] = []
        refusals: list[str] = []
        for bundle in self.bundles:
            try:
                reason = refusal(bundle.header, facts)
                rankings, reasons = ([], [reason]) if reason else usable_rankings(bundle, facts)
            except Exception as error:  # Whatever is wrong with one bundle, the others are used.
                reason = describe_fault(error)
                rankings, reasons = [], [reason]
            refusals += (f"{bundle.name}: {one}" for one in reasons)
            if reasons:
                self._with_refusals.append((bundle, "; ".join(reasons)))
            for usable in rankings:
                ranking = usable.ranking
                if not ranking.is_declared and ranking.problem in self._declared:
                    usable.ranking = replace(ranking, is_declared=True)
                self._ranked.setdefault(ranking.problem, []).append(usable)
            if reason is None:
                for problem, why in bundle.header.unserved.items():
                    self._unserved.setdefault(problem, (bundle.name, why))
        for rankings in self._ranked.values():
            if len(rankings) == 1:  # nearly all
                continue
            # Stable: of equals, the one preferred.
            rankings.sort(key=self._measured_on, reverse=True)
            rankings.sort(key=lambda usable: preference(usable, facts, versions))
        self.refusals = (*refusals, *unusable)
        self._sizes = index_by_alignment(self._ranked, is_compact=True)
        self._sizes_with_gaps = self._sizes
        usables = itertools.chain.from_iterable(self._ranked.values())
        if any(usable.kernels_for_gaps is not usable.kernels for usable in usables):
            self._sizes_with_gaps = index_by_alignment(self._ranked, is_compact=False)

    def match(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Find the kernels for a problem.

        Args:
            problem: What is to be computed.
            alignment_bytes: Largest power of two that divides every pointer, and in bytes every
                contiguous extent and every stride other than that of 1, of the operands at hand.
            is_compact: Whether they lie without gaps; see `operands.Request`.
        """
        asked = problem, alignment_bytes, is_compact
        return self.match_ranked(*asked) or self.match_signature(*asked)

    def match_ranked(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | None:
        """The ranking that was shipped for a problem; None where there is none."""
        for usable in self._ranked.get(problem, ()):
            kernels = usable.aligned(alignment_bytes, is_compact)
            if kernels:
                basis = Basis.DECLARED if usable.ranking.is_declared else Basis.SIGNATURE
                found = self._match_with(basis, usable, kernels)
                return replace(found, measured=usable.ranking.measured)
        return None

    def match_signature(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Kernels of a problem's signature, as ranked for its nearest ranked problem."""
        indexed = self._sizes if is_compact else self._sizes_with_gaps
        by_alignment = indexed.get(problem.signature)
        if by_alignment is None:
            reasons = (*self._why_unserved(problem), self._why_no_signature(problem.signature))
            return Miss(reasons=(*reasons, *self.refusals))
        for needed, sizes in by_alignment:
            if needed <= alignment_bytes:
                around = sizes.around(problem)
                if self._can_interpolate(around):
                    kernels = self._interpolated(around, alignment_bytes, is_compact, problem)
                else:
                    near = around.nearest
                    kernels = self._scaled(near.aligned(alignment_bytes, is_compact), near, problem)
                kernels = _with_small_workspaces(kernels, problem)
                return self._match_with(Basis.SIGNATURE, around.nearest, kernels)
        reason = (
            f"operands are aligned to {alignment_bytes} bytes (pointers, contiguous extents and "
            f"strides), the kernels for {problem.signature.key} need {by_alignment[-1][0]}"
        )
        return Miss(reasons=(reason, *self.refusals))

    def ranked_sizes(self, problem: Problem) -> Mapping[int, Sequence[UsableRanking]]:
        """By m, the rankings of problems that have all else of a problem in common.

        Of several rankings of one problem, those first that are preferred.
        """
        return self._rows.get(all_but_m(problem), {})

    def left_out_sizes(self, problem: Problem) -> Mapping[int, str]:
        """By m, why declared problems that have all else in common with one have no kernel here.

        The build made none, or the bundle that declares them, or its kernels, are refused.
        """
        return self._left_out.get(all_but_m(problem), {})

    @functools.cached_property
    def _declared(self) -> frozenset[Problem]:
        """Every problem that any bundle declares, also one that is refused or has no kernel."""
        return frozenset(one for bundle in self.bundles for one in _declared_by(bundle.header))

    @functools.cached_property
    def _left_out(self) -> dict[Hashable, dict[int, str]]:
        reasons = [(one, f"{name}: {why.text}") for one, (name, why) in self._unserved.items()]
        for bundle, reason in self._with_refusals:
            told = f"{bundle.name}: {reason}"
            reasons += ((problem, told) for problem in _declared_by(bundle.header))
        rows: dict[Hashable, dict[int, str]] = {}
        for declared, reason in reasons:
            if declared not in self._ranked:
                rows.setdefault(all_but_m(declared), {}).setdefault(declared.m, reason)
        return rows

    @functools.cached_property
    def _rows(self) -> dict[Hashable, dict[int, list[UsableRanking]]]:
        rows: dict[Hashable, dict[int, list[UsableRanking]]] = {}
        for ranked, rankings in self._ranked.items():
            rows.setdefault(all_but_m(ranked), {})[ranked.m] = rankings
        return rows

    def _can_interpolate(self, around: Around[UsableRanking]) -> bool:
        """Whether what was measured of the rankings around a problem holds on this device.

        Interpolation counts waves, of which another product has others.
        """
        return self.facts.multiprocessors is not None and all(
            usable.holds_on(self.facts) for usable in (around.below, around.above)
        )

    def _interpolated(
        self,
        around: Around[UsableRanking],
        alignment_bytes: int,
        is_compact: bool,
        problem: Problem,
    ) -> tuple[MatchedKernel, ...]:
        """The kernels of two measured rankings, in the order that their times suggest between."""
        assert self.facts.multiprocessors is not None
        kernels = {
            served.kernel.id: served
            for usable in (around.below, around.above)
            for served in usable.aligned(alignment_bytes, is_compact)
        }
        order = order_between(
            problem,
            {kernel_id: served.kernel.design for kernel_id, served in kernels.items()},
            below=_kernel_times(around.below),
            above=_kernel_times(around.above),
            multiprocessors=self.facts.multiprocessors,
        )
        return tuple(kernels[kernel_id] for kernel_id in order)

    def _scaled(
        self, kernels: tuple[MatchedKernel, ...], usable: UsableRanking, problem: Problem
    ) -> tuple[MatchedKernel, ...]:
        """The kernels of a near problem in the order that this one's sizes suggest."""
        multiprocessors = self.facts.multiprocessors
        if multiprocessors is None or any(served.time_ns is None for served in kernels):
            return kernels
        near = usable.ranking.problem

        def scaled_time(served: MatchedKernel) -> float:
            assert served.time_ns is not None
            design = served.kernel.design
            here, there = (waves(design, sizes, multiprocessors) for sizes in (problem, near))
            return served.time_ns * here / there

        return tuple(sorted(kernels, key=scaled_time))  # stable: of equals, the one ranked first

    def _match_with(
        self, basis: Basis, usable: UsableRanking, kernels: tuple[MatchedKernel, ...]
    ) -> Match:
        return Match(
            basis=basis,
            ranked_as=usable.ranking.problem,
            source=usable.source,
            kernels=kernels,
            from_jit=self._from_jit,
            is_complete=usable.bundle.header.is_complete(usable.ranking),
        )

    def _measured_on(self, usable: UsableRanking) -> str:
        """When a ranking was measured, if that holds here: text that sorts like the days."""
        conditions = usable.source.conditions
        if conditions is None or not usable.holds_on(self.facts):
            return ""
        return conditions.date

    def _why_unserved(self, problem: Problem) -> tuple[str, ...]:
        """Why the build made no kernel for a problem, or for another of its signature."""
        if problem in self._unserved:
            bundle, why = self._unserved[problem]
            return (f"{bundle}: {why.text}",)
        others = [
            (other, bundle, why)
            for other, (bundle, why) in self._unserved.items()
            if other.signature == problem.signature
        ]
        for _, bundle, why in others:
            if why.scope is Scope.SIGNATURE:
                return (f"{bundle}: {why.text}",)
        return tuple(
            f"another problem of this signature, {other.key}: {bundle}: {why.text}"
            for other, bundle, why in others[:1]
        )

    def _why_no_signature(self, wanted: Signature) -> str:
        if wanted in self._sizes:
            return (
                f"rows or matrices of a, b or the result lie apart, and the kernels for "
                f"{wanted.key} take them without gaps; make copies in the same layout"
            )
        if self._sizes:
            return f"no bundled kernel computes {wanted.key} (bundled: {self._bundled})"
        if self.refusals or self.bundles:
            return f"no bundle serves this device ({describe_device(self.facts)})"
        return (
            "no bundle is installed: install a kernel wheel, or name bundles in NVGEMM_AOT_BUNDLES"
        )

    @functools.cached_property
    def _bundled(self) -> str:
        return ", ".join(sorted(signature.key for signature in self._sizes))


def all_but_m(problem: Problem) -> Hashable:
    """What problems have in common whose kernels one dispatch table names."""
    return problem.signature, problem.n, problem.k, problem.batch, problem.groups


def _declared_by(header: Header) -> Iterator[Problem]:
    """The problems that a bundle declares, with a kernel or without one."""
    yield from (ranking.problem for ranking in header.rankings if ranking.is_declared)
    yield from header.unserved


def _with_small_workspaces(
    kernels: tuple[MatchedKernel, ...], problem: Problem
) -> tuple[MatchedKernel, ...]:
    """The kernels that a problem does not make allocate much; all, if all do.

    A kernel that splits k is made for few tiles, and keeps an fp32 partial result of every one. Its
    ranking may be that of a much smaller problem.
    """
    small = tuple(
        served
        for served in kernels
        if served.kernel.workspace is None
        or served.kernel.workspace.size_bytes(problem) <= MAX_WORKSPACE_BYTES
    )
    return small or kernels


def _kernel_times(usable: UsableRanking) -> KernelTimes:
    times = {served.kernel.id: served.time_ns for served in usable.kernels}
    return KernelTimes(
        problem=usable.ranking.problem,
        times_ns={kernel_id: time for kernel_id, time in times.items() if time is not None},
    )


def _small_enough(found: Match, request: Request) -> Match | Miss:
    """Without kernels for which the problem is too large."""
    reasons = [
        too_large(served.kernel.provider, request.problem, request.out_row_bytes)
        for served in found.kernels
    ]
    if not any(reasons):
        return found
    kernels = tuple(one for one, reason in zip(found.kernels, reasons) if reason is None)
    if kernels:
        return replace(found, kernels=kernels)
    return Miss(reasons=tuple(dict.fromkeys(map(str, reasons))))


def first_served(
    match: Callable[[Problem, int, bool], Match | Miss], asked: Sequence[Request]
) -> tuple[Request, Match | Miss]:
    """Find the kernels for operands that can be read in several ways.

    Returns:
        The first reading that a kernel serves; or the first of all, and why none is served.
    """
    reasons: dict[str, None] = {}  # in order, each once
    for request in asked:
        found = match(request.problem, request.alignment_bytes, request.is_compact)
        if isinstance(found, Match):
            found = _small_enough(found, request)
        if isinstance(found, Match):
            return request, found
        reasons.update(dict.fromkeys(found.reasons))
    return asked[0], Miss(reasons=tuple(reasons))
