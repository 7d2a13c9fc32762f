"""Rewrites a bundle's content with measured rankings, and prunes kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nvgemm_runtime.bundle.format import canonical_json, sha256_hex
from nvgemm_runtime.bundle.ranking_entries import (
    ESTIMATE,
    Measured,
    RankingSource,
    Scope,
    Timing,
    UnservedReason,
    choose_rankings,
)
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError, count_text
from nvgemm_runtime.gemm.problem import Problem

from ..bundle.content import BuiltKernel, BundleContent, ProblemRanking, read_content
from ..bundle.parts.build_keys import content_document
from ..bundle.parts.join_contents import difference, join_contents
from ..rankings.agreement import ATEN, TRITON, contender_name
from ..rankings.intervals import TimeInterval, contending, interval_of, is_decided
from ..rankings.join_rankings import joining
from ..rankings.pruning import keep_ranked
from .correctness.judgement import rejected_kernels
from .outcome import TuningOutcome

LEFT_UNDECIDED = "one of the fastest was dropped later, and those left were not told apart"


def read_together(bundles: Sequence[Bundle]) -> BundleContent:
    """Joins bundle contents with the same target, toolchain and device profiles.

    A problem that several bundles rank for a GPU product gets all their kernels, in the order that
    `join_rankings.joining` describes. Kernels not measured for the problem come last, without a
    time; `tuned_content` drops them if they get none.

    Raises:
        BundleFormatError: If a bundle is damaged.
        TuningError: If the bundles differ in target, device profiles or toolchain.
    """
    for bundle in bundles:
        bundle.check_body()
    contents = [read_content(bundle) for bundle in bundles]
    different = difference(
        [(bundle.path, content) for bundle, content in zip(bundles, contents)],
        {"target": "target", "device": "devices", "toolchain": "toolchain"},
    )
    if different is not None:
        raise TuningError(f"{different}; tune them one by one")
    return join_contents(contents, joining(contents[0].target, keeps_untimed=True))


def rankings_to_measure(content: BundleContent, gpu: str) -> list[ProblemRanking]:
    """Returns a ranking per problem to measure on a GPU product, with every kernel for the problem.

    It is the product's own ranking. A product without one gets a further ranking without times,
    with the kernels that it uses until then. Kernels from other products' rankings come last,
    unless their operator is in the ranking: such code differs only by another product's cluster
    limits.
    """
    kernels = {kernel.id: kernel for kernel in content.kernels}
    ids_by_problem: dict[Problem, list[str]] = {}
    for ranking in content.rankings:
        ids_by_problem.setdefault(ranking.problem, []).extend(id_ for id_, _ in ranking.kernels)
    result = []
    for ranking in choose_rankings(content.rankings, gpu, gpu_of=lambda ranking: ranking.gpu):
        known_operators = {_operator(kernels[id_]) for id_, _ in ranking.kernels}
        added = [
            id_
            for id_ in dict.fromkeys(ids_by_problem[ranking.problem])
            if _operator(kernels[id_]) not in known_operators
        ]
        own_ranking = ranking
        if ranking.gpu != gpu:
            own_ranking = replace(
                ranking,
                source=RankingSource(kind=ESTIMATE, by=ranking.source.by, gpu=gpu),
                kernels=tuple((id_, None) for id_, _ in ranking.kernels),
                measured=None,
                is_further=True,
            )
        untimed = ((id_, None) for id_ in added)
        result.append(replace(own_ranking, kernels=(*own_ranking.kernels, *untimed)))
    return result


def _operator(kernel: BuiltKernel) -> tuple[str, str]:
    return kernel.provider, kernel.operator


def with_rankings(
    content: BundleContent, measured: Iterable[ProblemRanking], gpu: str
) -> BundleContent:
    """Adds the rankings to measure that a content lacks for a GPU product."""
    own_problems = {ranking.problem for ranking in content.rankings if ranking.gpu == gpu}
    first_problems = {ranking.problem for ranking in content.rankings if not ranking.is_further}
    added = (
        replace(ranking, is_further=ranking.is_further or ranking.problem in first_problems)
        for ranking in measured
        if ranking.problem not in own_problems
    )
    return replace(content, rankings=(*content.rankings, *added))


def _add_doubt(ranking: ProblemRanking, measured: Measured, doubt: str) -> ProblemRanking:
    return replace(ranking, measured=replace(measured, doubts=(*measured.doubts, doubt)))


def tuned_content(
    content: BundleContent,
    outcomes: Mapping[str, TuningOutcome],
    *,
    broken: Mapping[str, str],
    program: str,
    gpu: str,
) -> BundleContent:
    """Returns a content with a GPU's measured rankings and without wrong kernels.

    Rankings for other products stay. A kernel that is wrong, or fails, for any problem leaves all
    rankings, for whatever product, and the bundle. A declared problem without a kernel left becomes
    unserved, with the reason; an undeclared one is dropped.

    Args:
        content: Content before tuning.
        outcomes: Outcomes by problem key; problems without one keep their ranking.
        broken: Errors by name, for contenders that left the GPU unusable.
        program: Program and version that measures and writes the new bundle.
        gpu: GPU product, as its driver names it.

    Raises:
        TuningError: If no correct kernel is left.
    """
    wrong = rejected_kernels(outcomes, broken)
    rankings, unserved = [], dict(content.unserved)
    for ranking in content.rankings:
        outcome = outcomes.get(ranking.problem.key)
        if ranking.gpu != gpu:
            tuned = ranking
        elif outcome is not None:
            tuned = _apply_outcome(ranking, outcome, by=program, gpu=gpu)
        else:
            tuned = _drop_unmeasured_kernels(ranking)
        tuned = _drop_wrong_kernels(tuned, wrong)
        if tuned.kernels:
            rankings.append(tuned)
        elif tuned.is_declared:
            unserved[tuned.problem] = UnservedReason(
                text=_unserved_reason(ranking, wrong), scope=Scope.PROBLEM
            )
    kernels = tuple(kernel for kernel in content.kernels if kernel.id not in wrong)
    if not kernels or not rankings:
        reasons = "; ".join(_unserved_reason(ranking, wrong) for ranking in content.rankings[:1])
        raise TuningError(
            f"{len(content.kernels) - len(kernels)} of "
            f"{count_text(len(content.kernels), 'kernel')} were dropped, and no problem has one "
            f"left, so no bundle is written; {reasons}"
        )
    ranked = {ranking.problem for ranking in rankings}
    return replace(
        content,
        generator=program,
        kernels=kernels,
        rankings=tuple(rankings),
        unserved={problem: why for problem, why in unserved.items() if problem not in ranked},
    )


def _apply_outcome(
    ranking: ProblemRanking, outcome: TuningOutcome, *, by: str, gpu: str
) -> ProblemRanking:
    return replace(
        ranking,
        source=RankingSource(kind="measurement", by=by, gpu=gpu, conditions=outcome.conditions),
        kernels=tuple((id_, timing.time_ns) for id_, timing in outcome.kernels.items()),
        measured=Measured(
            spreads_ns=tuple(timing.spread_ns for timing in outcome.kernels.values()),
            aten=outcome.aten,
            triton=outcome.triton,
            doubts=outcome.doubts,
            confirmed_by=outcome.confirmed_by,
            repeated=outcome.repeated,
        ),
    )


def _drop_unmeasured_kernels(ranking: ProblemRanking) -> ProblemRanking:
    """Drops unmeasured kernels from a measured ranking."""
    if ranking.source.kind != "measurement":
        return ranking
    timed = tuple(entry for entry in ranking.kernels if entry[1] is not None)
    return replace(ranking, kernels=timed)


def _unserved_reason(ranking: ProblemRanking, wrong: Mapping[str, str]) -> str:
    ids = [id_ for id_, _ in ranking.kernels if id_ in wrong]
    if not ids:
        return "none of its kernels was measured"
    example = f"{contender_name(ids[0])}: {wrong[ids[0]]}"
    return f"dropped when tuned: all of {count_text(len(ids), 'kernel')} made for it, {example}"


def _drop_wrong_kernels(ranking: ProblemRanking, wrong: Mapping[str, str]) -> ProblemRanking:
    """Drops wrong kernels from a ranking; doubts it if they kept others from being told apart.

    Confirmation and repetition concern the kernels that may be the fastest. If such a kernel is
    dropped, the ranking loses both.
    """
    wrong_ids = {id_ for id_, _ in ranking.kernels if id_ in wrong}
    remaining = keep_ranked(ranking, {id_ for id_, _ in ranking.kernels} - wrong_ids)
    if (
        not wrong_ids
        or not remaining.kernels
        or ranking.measured is None
        or remaining.measured is None
    ):
        return remaining
    intervals = _intervals(ranking, ranking.measured)
    remaining_intervals = {
        name: interval for name, interval in intervals.items() if name not in wrong_ids
    }
    if wrong_ids.isdisjoint(contending(intervals)):
        return remaining
    measured = replace(remaining.measured, confirmed_by=(), repeated=None)
    if is_decided(remaining_intervals):
        return replace(remaining, measured=measured)
    return _add_doubt(remaining, measured, LEFT_UNDECIDED)


def _intervals(ranking: ProblemRanking, measured: Measured) -> dict[str, TimeInterval]:
    """Returns the intervals that decided the race, by contender."""
    torchs_own = {ATEN: measured.aten, TRITON: measured.triton}
    timings = {**torchs_own, **_kernel_timings(ranking, measured)}
    return {name: interval_of(timing) for name, timing in timings.items() if timing is not None}


def _kernel_timings(ranking: ProblemRanking, measured: Measured) -> dict[str, Timing]:
    """Returns timings by id, for measured kernels."""
    return {
        id_: Timing(time_ns=time_ns, spread_ns=spread_ns)
        for (id_, time_ns), spread_ns in zip(ranking.kernels, measured.spreads_ns)
        if time_ns is not None
    }


def with_build_key(content: BundleContent, made_from: str) -> BundleContent:
    """Sets a build key: a digest over the original's key and the new rankings."""
    document = {"tuned": made_from, **content_document(content)}
    return replace(content, build_key=sha256_hex(canonical_json(document)))


def previous_outcome(ranking: ProblemRanking, gpu: str) -> TuningOutcome | None:
    """Returns an earlier tuning's outcome on the same GPU product, or None."""
    measured, source = ranking.measured, ranking.source
    if measured is None or source.conditions is None or source.gpu != gpu:
        return None
    return TuningOutcome(
        kernels=_kernel_timings(ranking, measured),
        aten=measured.aten,
        triton=measured.triton,
        wrong={},
        doubts=measured.doubts,
        conditions=source.conditions,
        confirmed_by=measured.confirmed_by,
        repeated=measured.repeated,
    )
