"""Index that finds the bundled kernels for a problem, or every reason for a miss.

A pure function over explicit facts. A ranked problem gets its own ranking. Another problem with a
bundled signature gets the nearest ranked problem's kernels, ordered by times scaled to its sizes or
interpolated between two measured neighbours (`ranking`). Kernels serve all sizes of their
signature, so only the order is a guess.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..bundle.confirmations import Confirmations
from ..bundle.format import Header
from ..bundle.ranking_entries import Scope, UnservedReason
from ..gemm.group_limits import too_large_reason
from ..gemm.problem import Problem, Signature
from .confirmed_rankings import ConfirmedMeasured, confirmed_rankings, confirmed_times
from .device import DeviceFacts, TorchVersions
from .matches import Basis, BundleView, Match, MatchedKernel, Miss
from .nearest import Around
from .ranking import KernelTimes, order_between, waves
from .refusals import (
    describe_device,
    describe_fault,
    refusal,
)
from .thresholds import MAX_WORKSPACE_BYTES
from .usable_rankings import UsableRanking, index_by_alignment, preference, usable_rankings

if TYPE_CHECKING:
    from ..gemm.operands import Request

_log = logging.getLogger(__name__)


class Index:
    """Kernels that one device can run, indexed by problem.

    Args:
        bundles: Bundles in order of preference. A problem uses the first ranking in that order, but
            measurements on this GPU product come first: those with this torch's ATen, then newer
            ones.
        facts: Device.
        unusable: Reasons why other bundles could not be opened.
        from_jit: True if the bundles are the JIT cache's.
        versions: Versions of torch; None without torch.
        confirmations: Confirmations in order of preference; those for this GPU product and torch
            replace measured rankings.

    Attributes:
        refusals: Reasons why bundles, or some kernels in them, cannot serve this device.
    """

    def __init__(
        self,
        bundles: Sequence[BundleView],
        facts: DeviceFacts,
        unusable: Sequence[str] = (),
        *,
        from_jit: bool = False,
        versions: TorchVersions | None = None,
        confirmations: Sequence[Confirmations] = (),
    ) -> None:
        self.bundles = tuple(bundles)
        self.facts = facts
        self._from_jit = from_jit
        self._ranked: dict[Problem, list[UsableRanking]] = {}
        self._unserved: dict[Problem, tuple[str, UnservedReason]] = {}
        self._with_refusals: list[tuple[BundleView, str]] = []
        refusals: list[str] = []
        serving: list[BundleView] = []
        for bundle in self.bundles:
            try:
                reason = refusal(bundle.header, facts)
                rankings, reasons = ([], [reason]) if reason else usable_rankings(bundle, facts)
            except Exception as error:  # A faulty bundle must not prevent use of the others.
                reason = describe_fault(error)
                rankings, reasons = [], [reason]
            refusals += (f"{bundle.name}: {text}" for text in reasons)
            if reasons:
                self._with_refusals.append((bundle, "; ".join(reasons)))
            for usable in rankings:
                ranking = usable.ranking
                if not ranking.is_declared and ranking.problem in self._declared:
                    usable.ranking = replace(ranking, is_declared=True)
                self._ranked.setdefault(ranking.problem, []).append(usable)
            if reason is None:
                serving.append(bundle)
                for problem, why in bundle.header.unserved.items():
                    self._unserved.setdefault(problem, (bundle.name, why))
        for rankings in self._ranked.values():
            if len(rankings) == 1:  # most problems
                continue
            # Stable sorts: ties stay in bundle order.
            rankings.sort(key=self._measured_on, reverse=True)
            rankings.sort(key=lambda usable: preference(usable, facts, versions))
        self.refusals = (*refusals, *unusable)
        self._confirmed = self._confirm(serving, confirmations, versions)
        self._sizes = index_by_alignment(self._ranked, is_compact=True)
        self._sizes_with_gaps = self._sizes
        usables = itertools.chain.from_iterable(self._ranked.values())
        if any(usable.kernels_for_gaps is not usable.kernels for usable in usables):
            self._sizes_with_gaps = index_by_alignment(self._ranked, is_compact=False)

    def match(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Finds the kernels for a problem.

        Args:
            problem: Problem to compute.
            alignment_bytes: Largest power of two that divides every pointer and, in bytes, every
                contiguous extent and every stride other than 1.
            is_compact: True if operands have no gaps; see `operands.Request`.
        """
        arguments = problem, alignment_bytes, is_compact
        return self.match_ranked(*arguments) or self.match_signature(*arguments)

    def match_ranked(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | None:
        """Returns the match from a problem's own ranking; None without one."""
        for usable in self._rankings_to_match(problem):
            kernels = usable.aligned(alignment_bytes, is_compact)
            if kernels:
                basis = Basis.DECLARED if usable.ranking.is_declared else Basis.SIGNATURE
                match = self._match_with(basis, usable, kernels)
                return replace(match, measured=usable.ranking.measured)
        return None

    def match_signature(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Finds kernels with a problem's signature, as ranked for the nearest ranked problem."""
        indexed = self._sizes if is_compact else self._sizes_with_gaps
        by_alignment = indexed.get(problem.signature)
        if by_alignment is None:
            reasons = (*self.why_unserved(problem), self._why_no_signature(problem.signature))
            return Miss(reasons=(*reasons, *self.refusals))
        for needed, sizes in by_alignment:
            if needed <= alignment_bytes:
                around = sizes.around(problem)
                if self._can_interpolate(around):
                    kernels = self._ordered_by_interpolation(
                        around, alignment_bytes, is_compact, problem
                    )
                else:
                    near = around.nearest
                    kernels = self._ordered_by_scaled_times(
                        near.aligned(alignment_bytes, is_compact), near, problem
                    )
                kernels = _with_small_workspaces(kernels, problem)
                return self._match_with(Basis.SIGNATURE, around.nearest, kernels)
        reason = why_misaligned(problem.signature, alignment_bytes, by_alignment[-1][0])
        return Miss(reasons=(reason, *self.refusals))

    def ranked_sizes(self, problem: Problem) -> Mapping[int, Sequence[UsableRanking]]:
        """Returns the rankings by m for problems that otherwise equal ``problem``.

        A problem's rankings are in order of preference.
        """
        return self._rows.get(all_but_m(problem), {})

    def missing_sizes(self, problem: Problem) -> Mapping[int, str]:
        """Returns the reasons for missing kernels by m, for declared problems that otherwise match.

        The build made no kernel, or the bundle or its kernels are refused.
        """
        return self._left_out.get(all_but_m(problem), {})

    def _confirm(
        self,
        bundles: Sequence[BundleView],
        confirmations: Sequence[Confirmations],
        versions: TorchVersions | None,
    ) -> dict[Problem, UsableRanking]:
        """Returns the confirmed rankings that count here; none if an error shows a fault."""
        if versions is None or not confirmations:
            return {}
        try:
            ids = {kernel.id for bundle in bundles for kernel in bundle.header.kernels}
            times_by_key = confirmed_times(confirmations, self.facts, versions, ids)
            confirmed = confirmed_rankings(bundles, self.facts, times_by_key)
        except Exception:  # A fault must not prevent use of the bundles.
            _log.warning("confirmations left out because of an internal error", exc_info=True)
            return {}
        for problem, usable in confirmed.items():
            if problem in self._declared:
                usable.ranking = replace(usable.ranking, is_declared=True)
        return confirmed

    def _rankings_to_match(self, problem: Problem) -> Sequence[UsableRanking]:
        """Returns a problem's rankings; a confirmed one first if it decides alone."""
        rankings = self._ranked.get(problem, ())
        confirmed = self._confirmed.get(problem)
        if confirmed is None or not _confirmation(confirmed).decides_alone:
            return rankings
        return (confirmed, *rankings)

    @functools.cached_property
    def _declared(self) -> frozenset[Problem]:
        """Problems that any bundle declares, including refused ones and ones without a kernel."""
        return frozenset(
            problem for bundle in self.bundles for problem in _declared_by(bundle.header)
        )

    @functools.cached_property
    def _left_out(self) -> dict[Hashable, dict[int, str]]:
        reasons = [
            (problem, f"{name}: {why.text}") for problem, (name, why) in self._unserved.items()
        ]
        for bundle, reason in self._with_refusals:
            text = f"{bundle.name}: {reason}"
            reasons += ((problem, text) for problem in _declared_by(bundle.header))
        rows: dict[Hashable, dict[int, str]] = {}
        for declared, reason in reasons:
            if declared not in self._ranked:
                rows.setdefault(all_but_m(declared), {}).setdefault(declared.m, reason)
        return rows

    @functools.cached_property
    def _rows(self) -> dict[Hashable, dict[int, list[UsableRanking]]]:
        rows: dict[Hashable, dict[int, list[UsableRanking]]] = {}
        for ranked, rankings in self._ranked.items():
            confirmed = self._confirmed.get(ranked)
            if confirmed is not None:
                # Without doubts, it replaces ATen's time with another torch.
                is_doubtful = bool(_confirmation(confirmed).doubts)
                rankings = [confirmed, *rankings] if is_doubtful else [confirmed]
            rows.setdefault(all_but_m(ranked), {})[ranked.m] = rankings
        return rows

    def _can_interpolate(self, around: Around[UsableRanking]) -> bool:
        """Returns True if both surrounding rankings are measurements that hold on this device.

        Interpolation counts waves, which depend on the GPU product.
        """
        return self.facts.multiprocessors is not None and all(
            usable.holds_on(self.facts) for usable in (around.below, around.above)
        )

    def _ordered_by_interpolation(
        self,
        around: Around[UsableRanking],
        alignment_bytes: int,
        is_compact: bool,
        problem: Problem,
    ) -> tuple[MatchedKernel, ...]:
        """Returns two measured rankings' kernels, ordered by interpolated times."""
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

    def _ordered_by_scaled_times(
        self, kernels: tuple[MatchedKernel, ...], usable: UsableRanking, problem: Problem
    ) -> tuple[MatchedKernel, ...]:
        """Returns a nearby problem's kernels, ordered by times scaled to this problem."""
        multiprocessors = self.facts.multiprocessors
        if multiprocessors is None or any(served.time_ns is None for served in kernels):
            return kernels
        near = usable.ranking.problem

        def scaled_time(served: MatchedKernel) -> float:
            assert served.time_ns is not None
            design = served.kernel.design
            own_waves, near_waves = (
                waves(design, sizes, multiprocessors) for sizes in (problem, near)
            )
            return served.time_ns * own_waves / near_waves

        return tuple(sorted(kernels, key=scaled_time))  # stable: ties stay in rank order

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
        """Returns the measurement date if it holds here, as sortable text; empty otherwise."""
        conditions = usable.source.conditions
        if conditions is None or not usable.holds_on(self.facts):
            return ""
        return conditions.date

    def serves(self, signature: Signature) -> bool:
        """Returns True if a kernel with a signature is ranked."""
        return signature in self._sizes

    def why_unserved(self, problem: Problem) -> tuple[str, ...]:
        """Returns why the build made no kernel for a problem, or for another with its signature."""
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

    def _why_no_signature(self, signature: Signature) -> str:
        if signature in self._sizes:
            return why_gaps(signature)
        if self._sizes:
            return why_not_bundled(signature, self._bundled)
        return why_no_bundle(self.facts, has_bundles=bool(self.refusals or self.bundles))

    @functools.cached_property
    def _bundled(self) -> str:
        return ", ".join(sorted(signature.key for signature in self._sizes))


def _confirmation(usable: UsableRanking) -> ConfirmedMeasured:
    measured = usable.ranking.measured
    assert isinstance(measured, ConfirmedMeasured)
    return measured


def all_but_m(problem: Problem) -> Hashable:
    """Returns the key that all problems in one dispatch table share."""
    return problem.signature, problem.n, problem.k, problem.batch, problem.groups


def why_misaligned(signature: Signature, alignment_bytes: int, needed_bytes: int) -> str:
    """Returns the reason to serve no operands with less than the needed alignment."""
    return (
        f"operands are aligned to {alignment_bytes} bytes (pointers, contiguous extents and "
        f"strides), the kernels for {signature.key} need {needed_bytes}"
    )


def why_gaps(signature: Signature) -> str:
    """Returns the reason to serve no operands with gaps."""
    return (
        f"a, b or the result has gaps between rows or matrices, and the kernels for "
        f"{signature.key} take none; make copies in the same layout"
    )


def why_not_bundled(signature: Signature, bundled: str) -> str:
    """Returns the reason to serve no problem with a signature; ``bundled`` has the others."""
    return f"no bundled kernel computes {signature.key} (bundled: {bundled})"


def why_no_bundle(facts: DeviceFacts, *, has_bundles: bool) -> str:
    """Returns the reason to serve nothing on a device."""
    if has_bundles:
        return f"no bundle serves this device ({describe_device(facts)})"
    return "no bundle is installed: install a kernel wheel, or name bundles in NVGEMM_AOT_BUNDLES"


def _declared_by(header: Header) -> Iterator[Problem]:
    """Yields the problems that a bundle declares, with or without a kernel."""
    yield from (ranking.problem for ranking in header.rankings if ranking.is_declared)
    yield from header.unserved


def _with_small_workspaces(
    kernels: tuple[MatchedKernel, ...], problem: Problem
) -> tuple[MatchedKernel, ...]:
    """Returns the kernels with small workspaces for a problem; all kernels if none has one.

    A kernel that splits k is made for few tiles, and keeps an fp32 partial result for each. Its
    ranking may be for a much smaller problem.
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


def _without_too_large(match: Match, request: Request) -> Match | Miss:
    """Removes kernels for which the problem is too large."""
    reasons = [
        too_large_reason(served.kernel.provider, request.problem, request.out_row_bytes)
        for served in match.kernels
    ]
    if not any(reasons):
        return match
    kernels = tuple(served for served, reason in zip(match.kernels, reasons) if reason is None)
    if kernels:
        return replace(match, kernels=kernels)
    return Miss(reasons=tuple(dict.fromkeys(map(str, reasons))))


def match_first_reading(
    match: Callable[[Problem, int, bool], Match | Miss], readings: Sequence[Request]
) -> tuple[Request, Match | Miss]:
    """Finds kernels for operands that can be read in several ways.

    Returns:
        The first reading that a kernel serves and its match; or the first reading and all reasons.
    """
    reasons: dict[str, None] = {}  # in order, each once
    for request in readings:
        result = match(request.problem, request.alignment_bytes, request.is_compact)
        if isinstance(result, Match):
            result = _without_too_large(result, request)
        if isinstance(result, Match):
            return request, result
        reasons.update(dict.fromkeys(result.reasons))
    return readings[0], Miss(reasons=tuple(reasons))
