"""Selects the measurements that a build can use and makes measured rankings from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from nvgemm_runtime.bundle.format import canonical_json, sha256_hex
from nvgemm_runtime.bundle.ranking_entries import (
    APART,
    MEASUREMENT,
    CompileFailure,
    Measured,
    RankingSource,
)
from nvgemm_runtime.errors import count_text
from nvgemm_runtime.gemm.problem import Problem

from ..bundle.content import ProblemRanking
from ..providers import UNRECORDED_RECIPES, recipe_name
from .agreement import ATEN
from .assess import STANDINGS, Assessment, assess
from .entries import Entry, Operator, Rankings
from .intervals import contending, interval_of, is_decided

LEFT_UNDECIDED = "one of the fastest is not in this bundle, and those left were not told apart"


@dataclass(frozen=True, kw_only=True)
class RankingBasis:
    """Conditions that measurements must meet to be valid for a build.

    Attributes:
        arch: The target's architecture.
        gpu: The GPU product's driver name.
        toolchains: Versions by provider for everything that shapes its code, and its recipe
            (`recipe_name`).
        other_gpus: Other products that the same build ranks for. Measurements on them are used
            there.
    """

    arch: str
    gpu: str
    toolchains: Mapping[str, Mapping[str, str]]
    other_gpus: Collection[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Usable:
    """The measurement that a build uses for one problem.

    Attributes:
        assessment: Combined result of all measurements.
        operators: The measured kernels that the build can compile unchanged, fastest first.
    """

    assessment: Assessment
    operators: tuple[Operator, ...]

    @property
    def front(self) -> tuple[Operator, ...]:
        """Kernels that may be the fastest."""
        intervals = {
            operator: interval_of(timing) for operator, timing in self.assessment.entry.kernels
        }
        leading = contending({operator.name: interval for operator, interval in intervals.items()})
        return tuple(operator for operator in self.operators if operator.name in leading)


@dataclass(frozen=True, kw_only=True)
class UsableRankings:
    """Measurements that one target's build uses.

    Attributes:
        problems: Usable measurement by problem.
        user_problems: Problems for which a measurement in the user's own files fits.
        notes: Unused measurements, with the reasons. Most shipped measurements are for other
            targets, so the notes list a shipped one only if a provider's or compiler's version
            rules it out.
    """

    problems: Mapping[Problem, Usable]
    user_problems: frozenset[Problem]
    notes: tuple[str, ...]

    def digest(self, problems: Iterable[Problem]) -> str | None:
        """Returns a digest for the measurements of problems, or None if there are none."""
        used = [
            [
                *_digest_facts(self.problems[problem]),
                [operator.name for operator in self.problems[problem].operators],
            ]
            for problem in problems
            if problem in self.problems
        ]
        return sha256_hex(canonical_json(used)) if used else None


def _digest_facts(usable: Usable) -> list[object]:
    assessment, entry = usable.assessment, usable.assessment.entry
    return [
        entry.problem.key,
        entry.origin.document,
        entry.origin.conditions.date,
        [[operator.name, timing.time_ns, timing.spread_ns] for operator, timing in entry.kernels],
        [timing and [timing.time_ns, timing.spread_ns] for timing in (entry.aten, entry.triton)],
        assessment.doubts,
        assessment.confirmed_by,
        *([] if assessment.repeated is None else [assessment.repeated]),
    ]


def find_usable(rankings: Rankings, basis: RankingBasis) -> UsableRankings:
    """Selects the measurements that a build can use."""
    notes: Counter[tuple[str, str]] = Counter()
    by_problem: dict[Problem, list[Usable]] = {}
    user_problems: set[Problem] = set()
    for (problem, _), entries in rankings.groups.items():
        origin = entries[0].origin
        if origin.arch == basis.arch and origin.gpu in basis.other_gpus:
            continue
        user_count = sum(not entry.is_shipped for entry in entries)
        reason = _measurement_misfit(entries[0], basis)
        if reason is not None:
            notes["measurement", reason] += user_count
            continue
        assessment = assess(entries)
        operators = []
        for operator, _ in assessment.entry.kernels:
            reason = _kernel_misfit(operator, assessment.entry, basis)
            if reason is None:
                operators.append(operator)
            elif user_count or operator.provider in basis.toolchains:
                notes["time", reason] += 1
        if operators:
            usable = Usable(assessment=assessment, operators=tuple(operators))
            by_problem.setdefault(problem, []).append(usable)
            user_problems |= {problem} if user_count else set()
    return UsableRankings(
        problems={
            problem: max(alternatives, key=_merit) for problem, alternatives in by_problem.items()
        },
        user_problems=frozenset(user_problems),
        notes=tuple(
            f"{count_text(count, noun)} {reason}"
            for (noun, reason), count in sorted(notes.items())
            if count
        ),
    )


def _measurement_misfit(entry: Entry, basis: RankingBasis) -> str | None:
    """Returns why measurements are not used, as a text that follows their number."""
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


def _kernel_misfit(operator: Operator, entry: Entry, basis: RankingBasis) -> str | None:
    """Returns why a kernel's times are not used, as a text that follows their number."""
    toolchain = basis.toolchains.get(operator.provider)
    if toolchain is None:
        return (
            f"of kernels of {operator.provider} not used: this build has the providers "
            f"{', '.join(basis.toolchains)}; add it to the manifest's `providers`, or name none"
        )
    for name, version in toolchain.items():
        measured_version = entry.origin.toolchain.get(name, "none")
        if measured_version == "none" and name == recipe_name(operator.provider):
            measured_version = UNRECORDED_RECIPES.get(
                operator.provider, version
            )  # older bundles lack it
        if measured_version != version:
            can_be_had = measured_version != "none" and name != recipe_name(operator.provider)
            return (
                f"of kernels of {operator.provider} not used: measured with {name} "
                f"{measured_version}, this build has {version}; "
                f"{'install that version, or measure again' if can_be_had else 'measure again'}"
            )
    return None


def _merit(usable: Usable) -> tuple[bool, int, str]:
    """Returns a sort key for a problem's measurements; the greatest counts."""
    standing = STANDINGS.index(usable.assessment.standing)
    conditions = usable.assessment.entry.origin.conditions
    return conditions.launches == APART, standing, conditions.date


def measured_ranking(
    usable: Usable,
    ids: Mapping[Operator, str],
    missing: tuple[CompileFailure, ...] = (),
) -> ProblemRanking | None:
    """Returns a problem's measured ranking, with only the kernels that were built.

    Args:
        usable: Measurements.
        ids: The built kernels' ids.
        missing: Chosen kernels that did not compile.

    Returns:
        The ranking, with a doubt if kernels that may be the fastest are missing, or None if no
        measured kernel was built.
    """
    assessment, entry = usable.assessment, usable.assessment.entry
    allowed = set(usable.operators)
    times: dict[str, tuple[int, int]] = {}
    absent = set()
    for operator, timing in entry.kernels:
        if operator in allowed and operator in ids:
            times.setdefault(ids[operator], (timing.time_ns, timing.spread_ns))
        else:
            absent.add(operator.name)
    if not times:
        return None
    doubts = list(assessment.doubts)
    intervals = {operator.name: interval_of(timing) for operator, timing in entry.kernels}
    if entry.aten is not None:
        intervals[ATEN] = interval_of(entry.aten)
    remaining = {name: interval for name, interval in intervals.items() if name not in absent}
    if not absent.isdisjoint(contending(intervals)) and not is_decided(remaining):
        doubts.append(LEFT_UNDECIDED)
    is_whole = absent.isdisjoint(contending(intervals))
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
