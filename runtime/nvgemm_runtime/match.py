"""Matching: which kernels of which bundles serve a problem, or every reason why none does.

A pure function of explicit facts. A declared problem gets the ranking that was shipped for it. Any
other problem of a bundled signature gets the ranking of the nearest declared one: kernels serve all
sizes of their signature, so only the order is a guess.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .facts import DeviceFacts
from .format import Header, Kernel, Ranking, RankingSource
from .problem import Problem, Signature


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
        time_ns: Time that the ranking gives it for the ranked problem, if any.
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
    """

    basis: Basis
    ranked_as: Problem
    source: RankingSource
    kernels: tuple[Served, ...]


@dataclass(frozen=True, kw_only=True)
class Miss:
    """No kernel serves a problem: every reason why not, most specific first."""

    reasons: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """A declared problem: which bundle's ranking it is."""

    bundle: int
    ranking: Ranking


class _Sizes:
    """The declared problems of one signature, for finding the nearest."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, int], list[tuple[int, _Place]]] = {}
        self._logs: list[tuple[float, float, float, tuple[int, int, int]]] = []

    def add(self, place: _Place) -> None:
        problem = place.ranking.problem
        self._rows.setdefault((problem.n, problem.k, problem.batch), []).append((problem.m, place))

    def finish(self) -> None:
        for row in self._rows.values():
            row.sort(key=lambda entry: entry[0])
        self._logs = [
            (math.log2(n), math.log2(k), math.log2(batch), (n, k, batch))
            for n, k, batch in sorted(self._rows)
        ]

    def nearest(self, problem: Problem) -> _Place:
        """The declared problem of closest sizes: by n, k and batch first, then by m.

        Closeness is the ratio of sizes. m comes last because it varies at run time, while n and k
        are a model's weights.
        """
        n, k, batch = math.log2(problem.n), math.log2(problem.k), math.log2(problem.batch)
        best = min(
            self._logs,
            key=lambda row: abs(row[0] - n) + abs(row[1] - k) + abs(row[2] - batch),
        )
        row = self._rows[best[3]]
        at = bisect_left(row, problem.m, key=lambda entry: entry[0])
        around = row[max(0, at - 1) : at + 1]
        return min(around, key=lambda entry: abs(math.log2(entry[0] / problem.m)))[1]


class Index:
    """The kernels that one device can run, ready to be asked.

    Args:
        bundles: In order of preference: the first that declares a problem ranks it.
        facts: The device.
    """

    def __init__(self, bundles: Sequence[BundleView], facts: DeviceFacts) -> None:
        self.bundles = tuple(bundles)
        self.facts = facts
        self.refusals = tuple(
            f"{bundle.name}: {reason}"
            for bundle in bundles
            if (reason := refusal(bundle.header, facts)) is not None
        )
        self._declared: dict[Problem, _Place] = {}
        self._sizes: dict[Signature, _Sizes] = {}
        for position, bundle in enumerate(bundles):
            if refusal(bundle.header, facts) is None:
                for ranking in bundle.header.rankings:
                    self._add(_Place(position, ranking))
        for sizes in self._sizes.values():
            sizes.finish()

    def _add(self, place: _Place) -> None:
        problem = place.ranking.problem
        if problem not in self._declared:
            self._declared[problem] = place
            self._sizes.setdefault(problem.signature, _Sizes()).add(place)

    def match(self, problem: Problem, alignment_bytes: int) -> Match | Miss:
        """Find the kernels for a problem.

        Args:
            problem: What is to be computed.
            alignment_bytes: Largest power of two that divides every pointer, and every stride but
                the one that is 1 times its element size, of the operands at hand.
        """
        place = self._declared.get(problem)
        basis = Basis.DECLARED
        if place is None:
            basis = Basis.SIGNATURE
            sizes = self._sizes.get(problem.signature)
            if sizes is None:
                return Miss(reasons=(self._why_no_signature(problem.signature), *self.refusals))
            place = sizes.nearest(problem)
        header = self.bundles[place.bundle].header
        kernels = tuple(
            Served(
                bundle=place.bundle,
                kernel=header.kernels[ranked.kernel],
                time_ns=ranked.time_ns,
            )
            for ranked in place.ranking.kernels
            if header.kernels[ranked.kernel].alignment_bytes <= alignment_bytes
        )
        if not kernels:
            needed = min(header.kernels[r.kernel].alignment_bytes for r in place.ranking.kernels)
            reason = (
                f"operands are aligned to {alignment_bytes} bytes (pointers and strides), "
                f"the kernels for {problem.signature.key} need {needed}"
            )
            return Miss(reasons=(reason,))
        return Match(
            basis=basis,
            ranked_as=place.ranking.problem,
            source=header.sources[place.ranking.source],
            kernels=kernels,
        )

    def _why_no_signature(self, wanted: Signature) -> str:
        if not self.bundles:
            return (
                "no bundle is installed: pip install a kernel wheel, or name bundles in "
                "NVGEMM_AOT_BUNDLES"
            )
        if not self._sizes:
            return f"no bundle serves this device ({describe(self.facts)})"
        bundled = ", ".join(sorted(signature.key for signature in self._sizes))
        return f"no bundled kernel computes {wanted.key} (bundled: {bundled})"


def refusal(header: Header, facts: DeviceFacts) -> str | None:
    """Why a device cannot run a bundle's kernels, or None."""
    target = header.target
    if target.platform != facts.platform:
        return f"built for platform {target.platform}, this is {facts.platform}"
    if (target.arch == "cpu") != (facts.kind == "cpu"):
        return f"built for {target.arch}, this device is {describe(facts)}"
    if facts.capability is None:
        return None
    if not target.runs_on(facts.capability):
        return f"{target.arch} kernels do not run on {describe(facts)}"
    if target.cuda != facts.cuda:
        return f"built for {target.cuda}, torch uses {facts.cuda or 'no CUDA'}"
    library = facts.runtime_library
    if library is None:
        return (
            "the library that kernels call is not installed; "
            f"run: pip install nvidia-cutlass-dsl-libs-{target.cuda}"
        )
    built_with = header.toolchain.get(f"nvidia-cutlass-dsl-libs-{target.cuda}")
    if built_with is not None and not _compatible(built_with, library.version):
        return (
            f"built with nvidia-cutlass-dsl-libs-{target.cuda} {built_with}, "
            f"{library.version} is installed: versions must agree in major and minor, and the "
            "installed one must not be older"
        )
    return None


def describe(facts: DeviceFacts) -> str:
    """A device in words."""
    if facts.capability is None:
        return facts.name
    return f"{facts.name}, compute capability {facts.capability[0]}.{facts.capability[1]}"


def _compatible(built_with: str, installed: str) -> bool:
    built, found = _numbers(built_with), _numbers(installed)
    return built[:2] == found[:2] and found >= built


def _numbers(version: str) -> tuple[int, ...]:
    leading: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        leading.append(int(part))
    return tuple(leading)


def preferred(bundles: Iterable[BundleView]) -> list[BundleView]:
    """Order bundles: newest compiler first, then by name."""

    def newest_first(bundle: BundleView) -> tuple[list[int], str, str]:
        version = bundle.header.toolchain.get("nvidia-cutlass-dsl", "0")
        return [-number for number in _numbers(version)], bundle.name, bundle.header.build_key

    return sorted(bundles, key=newest_first)
