"""Matching: which kernels of which bundles serve a problem, or every reason why none does.

A pure function of explicit facts. A declared problem gets the ranking that was shipped for it. Any
other problem of a bundled signature gets the kernels of the nearest declared one, ordered by their
times scaled to its sizes: kernels serve all sizes of their signature, so only the order is a guess.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .facts import DeviceFacts
from .format import Header, Kernel, Ranking, RankingSource
from .nearest import NearestSizes
from .problem import Problem, Signature
from .refusals import describe, refusal, unlaunchable, version_numbers
from .waves import waves

if TYPE_CHECKING:
    from .operands import Request


class Basis(str, enum.Enum):
    """How a problem was found."""

    DECLARED = "declared"
    SIGNATURE = "signature"


@dataclass(frozen=True, kw_only=True)
class BundleView:
    """A bundle as matching sees it.

    Attributes:
        name: Where it came from, for messages: distribution or path.
        header: What it says about itself.
    """

    name: str
    header: Header


@dataclass(frozen=True, kw_only=True)
class Served:
    """One kernel that serves a problem.

    Attributes:
        bundle: Position of its bundle in the index.
        kernel: Its entry.
        time_ns: Time that the ranking gives it for the problem it is ranked as, if any.
    """

    bundle: int
    kernel: Kernel
    time_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Match:
    """Kernels that serve a problem.

    Attributes:
        basis: Whether the problem was declared, or another of its signature.
        ranked_as: The declared problem whose ranking is used.
        source: Where that ranking comes from.
        kernels: Best first; at least one.
        from_jit: Whether they come from the JIT cache, and no wheel serves the problem as well.
    """

    basis: Basis
    ranked_as: Problem
    source: RankingSource
    kernels: tuple[Served, ...]
    from_jit: bool = False


@dataclass(frozen=True, kw_only=True)
class Miss:
    """No kernel serves a problem: every reason why not, most specific first."""

    reasons: tuple[str, ...]


class _Place:
    """A declared problem: which bundle ranks it, and what can be launched of its ranking."""

    __slots__ = ("bundle", "ranking", "served")

    def __init__(self, bundle: int, ranking: Ranking, served: tuple[Served, ...]) -> None:
        self.bundle = bundle
        self.ranking = ranking
        self.served = served

    @property
    def least_alignment(self) -> int:
        return min(served.kernel.alignment_bytes for served in self.served)


class Index:
    """The kernels that one device can run, ready to be asked.

    Args:
        bundles: In order of preference: the first that declares a problem ranks it.
        facts: The device.
        unusable: Why other bundles that were found could not even be opened.
        first_position: Position of the first bundle, as `Served.bundle` gives it.
        from_jit: Whether the bundles are those of the JIT cache.

    Attributes:
        refusals: Why bundles, or kernels of them, cannot serve this device.
    """

    def __init__(
        self,
        bundles: Sequence[BundleView],
        facts: DeviceFacts,
        unusable: Sequence[str] = (),
        *,
        first_position: int = 0,
        from_jit: bool = False,
    ) -> None:
        self.bundles = tuple(bundles)
        self.facts = facts
        self._first_position = first_position
        self._from_jit = from_jit
        self._declared: dict[Problem, list[_Place]] = {}
        self._unserved: dict[Problem, str] = {}
        refusals: list[str] = []
        for position, bundle in enumerate(self.bundles, start=first_position):
            reason = refusal(bundle.header, facts)
            if reason is not None:
                refusals.append(f"{bundle.name}: {reason}")
            else:
                refusals += (f"{bundle.name}: {why}" for why in self._add(position, bundle.header))
                for problem, why in bundle.header.unserved.items():
                    self._unserved.setdefault(problem, f"{bundle.name}: {why}")
        self.refusals = (*refusals, *unusable)
        self._sizes = _by_alignment(self._declared)

    def _add(self, position: int, header: Header) -> list[str]:
        """Take in a bundle's rankings; returns why some of its kernels are left out."""
        reasons = [unlaunchable(kernel) for kernel in header.kernels]
        for ranking in header.rankings:
            served = tuple(
                Served(bundle=position, kernel=header.kernels[place.kernel], time_ns=place.time_ns)
                for place in ranking.kernels
                if reasons[place.kernel] is None
            )
            if served:
                places = self._declared.setdefault(ranking.problem, [])
                places.append(_Place(position, ranking, served))
        counts = Counter(reason for reason in reasons if reason is not None)
        return [f"{count} kernels are left out: {why}" for why, count in sorted(counts.items())]

    def match(self, problem: Problem, alignment_bytes: int) -> Match | Miss:
        """Find the kernels for a problem.

        Args:
            problem: What is to be computed.
            alignment_bytes: Largest power of two that divides every pointer, and in bytes every
                contiguous extent and every stride other than that of 1, of the operands at hand.
        """
        declared = self.match_declared(problem, alignment_bytes)
        return declared or self.match_signature(problem, alignment_bytes)

    def match_declared(self, problem: Problem, alignment_bytes: int) -> Match | None:
        """The ranking that was shipped for a problem; None where there is none."""
        for place in self._declared.get(problem, ()):
            kernels = _aligned(place, alignment_bytes)
            if kernels:
                return self._found(Basis.DECLARED, place, kernels)
        return None

    def match_signature(self, problem: Problem, alignment_bytes: int) -> Match | Miss:
        """Kernels of a problem's signature, as ranked for its nearest declared problem."""
        by_alignment = self._sizes.get(problem.signature)
        if by_alignment is None:
            reasons = (*self._why_unserved(problem), self._why_no_signature(problem.signature))
            return Miss(reasons=(*reasons, *self.refusals))
        for needed, sizes in by_alignment:
            if needed <= alignment_bytes:
                place = sizes.find(problem)
                kernels = self._scaled(_aligned(place, alignment_bytes), place, problem)
                return self._found(Basis.SIGNATURE, place, kernels)
        reason = (
            f"operands are aligned to {alignment_bytes} bytes (pointers, contiguous extents and "
            f"strides), the kernels for {problem.signature.key} need {by_alignment[-1][0]}"
        )
        return Miss(reasons=(reason, *self.refusals))

    def _scaled(
        self, kernels: tuple[Served, ...], place: _Place, problem: Problem
    ) -> tuple[Served, ...]:
        """The kernels of a near problem in the order that this one's sizes suggest."""
        multiprocessors = self.facts.multiprocessors
        if multiprocessors is None or any(served.time_ns is None for served in kernels):
            return kernels
        near = place.ranking.problem

        def scaled_time(served: Served) -> float:
            assert served.time_ns is not None
            design = served.kernel.design
            here, there = (waves(design, sizes, multiprocessors) for sizes in (problem, near))
            return served.time_ns * here / there

        return tuple(sorted(kernels, key=scaled_time))  # stable: of equals, the one ranked first

    def _found(self, basis: Basis, place: _Place, kernels: tuple[Served, ...]) -> Match:
        return Match(
            basis=basis,
            ranked_as=place.ranking.problem,
            source=self._header(place).sources[place.ranking.source],
            kernels=kernels,
            from_jit=self._from_jit,
        )

    def _header(self, place: _Place) -> Header:
        return self.bundles[place.bundle - self._first_position].header

    def _why_unserved(self, problem: Problem) -> tuple[str, ...]:
        """Why the build made no kernel for a problem, or for another of its signature."""
        if problem in self._unserved:
            return (self._unserved[problem],)
        return tuple(
            f"{why} (of {other.key}, likewise)"
            for other, why in self._unserved.items()
            if other.signature == problem.signature
        )[:1]

    def _why_no_signature(self, wanted: Signature) -> str:
        if self._sizes:
            return f"no bundled kernel computes {wanted.key} (bundled: {self._bundled})"
        if self.refusals or self.bundles:
            return f"no bundle serves this device ({describe(self.facts)})"
        return (
            "no bundle is installed: pip install a kernel wheel, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        )

    @functools.cached_property
    def _bundled(self) -> str:
        return ", ".join(sorted(signature.key for signature in self._sizes))


_SizesByAlignment = list[tuple[int, NearestSizes[_Place]]]
"""Alignments in bytes, the largest first, and for each the problems with a kernel that needs no
more. Kernels of a signature mostly agree, so that there is one."""


def _by_alignment(declared: dict[Problem, list[_Place]]) -> dict[Signature, _SizesByAlignment]:
    of_signature: dict[Signature, list[tuple[Problem, list[_Place]]]] = {}
    for problem, places in declared.items():
        of_signature.setdefault(problem.signature, []).append((problem, places))
    indexed: dict[Signature, _SizesByAlignment] = {}
    for signature, problems in of_signature.items():
        needs = {place.least_alignment for _, places in problems for place in places}
        indexed[signature] = [
            (
                needed,
                NearestSizes(
                    (problem, able[0])
                    for problem, places in problems
                    if (able := [place for place in places if place.least_alignment <= needed])
                ),
            )
            for needed in sorted(needs, reverse=True)
        ]
    return indexed


def _aligned(place: _Place, alignment_bytes: int) -> tuple[Served, ...]:
    served = place.served
    if all(one.kernel.alignment_bytes <= alignment_bytes for one in served):
        return served
    return tuple(one for one in served if one.kernel.alignment_bytes <= alignment_bytes)


def first_served(
    match: Callable[[Problem, int], Match | Miss], asked: Sequence[Request]
) -> tuple[Request, Match | Miss]:
    """Find the kernels for operands that can be read in several ways.

    Args:
        match: `Index.match`.
        asked: Every reading, as `operands.requests` gives them; at least one.

    Returns:
        The first reading that a kernel serves; or the first of all, and why none is served.
    """
    reasons: dict[str, None] = {}  # in order, each once
    for request in asked:
        found = match(request.problem, request.alignment_bytes)
        if isinstance(found, Match):
            return request, found
        reasons.update(dict.fromkeys(found.reasons))
    return asked[0], Miss(reasons=tuple(reasons))


def preferred(bundles: Iterable[BundleView]) -> list[BundleView]:
    """Order bundles: newest compiler first, then by name."""
    by_name = sorted(bundles, key=lambda bundle: (bundle.name, bundle.header.build_key))
    return sorted(by_name, key=_compiler_version, reverse=True)  # stable: equals stay as they are


def _compiler_version(bundle: BundleView) -> tuple[int, ...]:
    return version_numbers(bundle.header.toolchain.get("nvidia-cutlass-dsl", ""))
