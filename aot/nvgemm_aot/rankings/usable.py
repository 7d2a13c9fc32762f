"""Which measurements a build can use, and the measured rankings that it makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from nvgemm_runtime.bundle.format import (
    APART,
    MEASUREMENT,
    CompileFailure,
    Measured,
    RankingSource,
    canonical_json,
    sha256_hex,
)
from nvgemm_runtime.errors import count_text
from nvgemm_runtime.gemm.problem import Problem

from ..bundle.content import ProblemRanking
from ..providers import UNSTATED_RECIPES, recipe_name
from .agreement import ATEN
from .assess import STANDINGS, Assessment, assess
from .entries import Entry, Operator, Rankings
from .intervals import contending, interval_of, is_decided

LEFT_UNDECIDED = "one of the fastest is not in this bundle, and those left were not told apart"


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What measurements must have been taken of, to hold for a build.

    Attributes:
        arch: The target's architecture.
        gpu: The GPU product of the target's device profile, as its driver names it.
        toolchains: By name of each provider, the versions of what shapes its code, and its recipe
            (`recipe_name`).
        beside: Other products that the same build ranks for: what was measured on them is used
            there.
    """

    arch: str
    gpu: str
    toolchains: Mapping[str, Mapping[str, str]]
    beside: Collection[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Usable:
    """The measurement of one problem that a build uses.

    Attributes:
        assessment: What all measurements of the problem come to.
        operators: The kernels that the build can compile as they were measured, fastest first.
    """

    assessment: Assessment
    operators: tuple[Operator, ...]

    @property
    def front(self) -> tuple[Operator, ...]:
        """The kernels that may be the fastest of all kernels."""
        intervals = {one: interval_of(timing) for one, timing in self.assessment.entry.kernels}
        leading = contending({one.name: interval for one, interval in intervals.items()})
        return tuple(one for one in self.operators if one.name in leading)


@dataclass(frozen=True, kw_only=True)
class UsableRankings:
    """What a build of one target uses of rankings.

    Attributes:
        problems: By problem.
        own: Those of which a file of the user's has measurements that fit.
        notes: What it does not use, and why. Of shipped measurements, of which few are for any one
            target, that is only what another version of a provider or compiler rules out.
    """

    problems: Mapping[Problem, Usable]
    own: frozenset[Problem]
    notes: tuple[str, ...]

    def digest(self, problems: Iterable[Problem]) -> str | None:
        """Digest of what is used for problems; None where that is nothing."""
        used = [
            [
                *_facts(self.problems[problem]),
                [one.name for one in self.problems[problem].operators],
            ]
            for problem in problems
            if problem in self.problems
        ]
        return sha256_hex(canonical_json(used)) if used else None


def _facts(usable: Usable) -> list[object]:
    found, entry = usable.assessment, usable.assessment.entry
    return [
        entry.problem.key,
        entry.origin.document,
        entry.origin.conditions.date,
        [[one.name, timing.time_ns, timing.spread_ns] for one, timing in entry.kernels],
        [timing and [timing.time_ns, timing.spread_ns] for timing in (entry.aten, entry.triton)],
        found.doubts,
        found.confirmed_by,
        *([] if found.repeated is None else [found.repeated]),
    ]


def find_usable(rankings: Rankings, basis: Basis) -> UsableRankings:
    """Find what a build can use of rankings."""
    notes: Counter[tuple[str, str]] = Counter()
    found: dict[Problem, list[Usable]] = {}
    own: set[Problem] = set()
    for (problem, _), entries in rankings.groups.items():
        origin = entries[0].origin
        if origin.arch == basis.arch and origin.gpu in basis.beside:
            continue
        of_user = sum(not entry.is_shipped for entry in entries)
        why = _why_not(entries[0], basis)
        if why is not None:
            notes["measurement", why] += of_user
            continue
        assessment = assess(entries)
        operators = []
        for operator, _ in assessment.entry.kernels:
            why = _why_not_kernel(operator, assessment.entry, basis)
            if why is None:
                operators.append(operator)
            elif of_user or operator.provider in basis.toolchains:
                notes["time", why] += 1
        if operators:
            usable = Usable(assessment=assessment, operators=tuple(operators))
            found.setdefault(problem, []).append(usable)
            own |= {problem} if of_user else set()
    return UsableRankings(
        problems={problem: max(several, key=_merit) for problem, several in found.items()},
        own=frozenset(own),
        notes=tuple(
            f"{count_text(count, noun)} {why}"
            for (noun, why), count in sorted(notes.items())
            if count
        ),
    )


def _why_not(entry: Entry, basis: Basis) -> str | None:
    """Why measurements are not used, to follow their number."""
    origin = entry.origin
    if origin.arch != basis.arch:
        return (
            f"of {origin.arch} kernels, not used for {basis.arch}: measure a bundle of {basis.arch}"
        )
    if origin.gpu != basis.gpu:
        return (
            f"taken on {origin.gpu}, not used for {basis.arch} on "
            f"{basis.gpu}: add it to the target's devices, or measure on this one"
        )
    return None


def _why_not_kernel(operator: Operator, entry: Entry, basis: Basis) -> str | None:
    """Why times of kernels are not used, to follow their number."""
    wanted = basis.toolchains.get(operator.provider)
    if wanted is None:
        return (
            f"of kernels of {operator.provider} not used: this build has the providers "
            f"{', '.join(basis.toolchains)}; add it to the manifest's `providers`, or name none"
        )
    for name, version in wanted.items():
        found = entry.origin.toolchain.get(name, "none")
        if found == "none" and name == recipe_name(operator.provider):
            found = UNSTATED_RECIPES.get(operator.provider, version)  # older bundles state none
        if found != version:
            can_be_had = found != "none" and name != recipe_name(operator.provider)
            return (
                f"of kernels of {operator.provider} not used: measured with {name} "
                f"{found}, this build has {version}; "
                f"{'install that version, or measure again' if can_be_had else 'measure again'}"
            )
    return None


def _merit(usable: Usable) -> tuple[bool, int, str]:
    """Of several kinds of measurement of a problem, the one with the greatest counts."""
    standing = STANDINGS.index(usable.assessment.standing)
    conditions = usable.assessment.entry.origin.conditions
    return conditions.launches == APART, standing, conditions.date


def measured_ranking(
    usable: Usable,
    ids: Mapping[Operator, str],
    missing: tuple[CompileFailure, ...] = (),
) -> ProblemRanking | None:
    """The measured ranking of a problem, of kernels that were built.

    Args:
        usable: What was measured.
        ids: The built kernels' ids.
        missing: Kernels that were chosen and did not compile.

    Returns:
        The ranking, with a doubt if kernels that may be the fastest are missing; None where none
        of the measured kernels was built.
    """
    assessment, entry = usable.assessment, usable.assessment.entry
    allowed = set(usable.operators)
    times: dict[str, tuple[int, int]] = {}
    gone = set()
    for operator, timing in entry.kernels:
        if operator in allowed and operator in ids:
            times.setdefault(ids[operator], (timing.time_ns, timing.spread_ns))
        else:
            gone.add(operator.name)
    if not times:
        return None
    doubts = list(assessment.doubts)
    intervals = {one.name: interval_of(timing) for one, timing in entry.kernels}
    if entry.aten is not None:
        intervals[ATEN] = interval_of(entry.aten)
    left = {name: one for name, one in intervals.items() if name not in gone}
    if not gone.isdisjoint(contending(intervals)) and not is_decided(left):
        doubts.append(LEFT_UNDECIDED)
    is_whole = gone.isdisjoint(contending(intervals))
    return ProblemRanking(
        problem=entry.problem,
        source=RankingSource(
            kind=MEASUREMENT,
            by=entry.origin.by,
            gpu=entry.origin.gpu,
            conditions=entry.origin.conditions,
        ),
        kernels=tuple((id_, time_ns) for id_, (time_ns, _) in times.items()),
        measured=Measured(
            spreads_ns=tuple(spread_ns for _, spread_ns in times.values()),
            aten=entry.aten,
            triton=entry.triton,
            doubts=tuple(doubts),
            confirmed_by=assessment.confirmed_by if is_whole and not doubts else (),
            repeated=assessment.repeated if is_whole and not doubts else None,
        ),
        missing=missing,
    )
