"""Joins the rankings that several bundles have for one problem and GPU product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from nvgemm_runtime.bundle.encode import measured_json, source_json
from nvgemm_runtime.bundle.format import canonical_json
from nvgemm_runtime.bundle.ranking_entries import APART, Measured, Timing
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import CPU, Target
from nvgemm_runtime.matching.device import cuda_major

from ..bundle.content import BuiltKernel, ProblemRanking
from ..bundle.parts.join_contents import JoinRankings
from .agreement import Agreement, Measurement, Relation, compare, gpu_name

UNMEASURED = 5
"""Evidence rank of an estimate."""


@dataclass(frozen=True, kw_only=True)
class Superseded:
    """A measurement that another one for the problem and product replaces.

    Attributes:
        problem: The problem.
        gpu: The GPU product.
        kept: Day and GPU of the measurement that stays.
        dropped: Day and GPU of the one whose times are dropped.
        relation: Relation between the two.
        reason: Reason for a contradiction or for neither.
    """

    problem: Problem
    gpu: str
    kept: str
    dropped: str
    relation: Relation
    reason: str


def joining(
    target: Target,
    *,
    keeps_untimed: bool,
    on_superseded: Callable[[Superseded], None] | None = None,
) -> JoinRankings:
    """Returns a function that joins rankings for one problem and product, in any order.

    The most reliable ranking sets the order: confirmed, repeated, measured once, with doubts, then
    measured with another CUDA version or back to back with dependent-launch kernels, then
    estimated. Between equals the newest wins, then the one with most kernels. The ranking becomes
    uncertain if a measurement without doubts contradicts it, and confirmed if measurements on other
    GPUs confirm it (see `agreement`). Times from two sources do not compare: kernels that only
    another ranking has come last, without a time.

    Args:
        target: The bundles' target.
        keeps_untimed: True to keep kernels without a time in a measured ranking, because it will be
            measured again; a bundle cannot hold them.
        on_superseded: Called for each measurement whose times are dropped.
    """
    cuda: set[str | None] = {target.cuda}
    if target.arch == CPU:
        cuda.add(None)  # by torch's build

    def join(
        rankings: Sequence[ProblemRanking], kernels: Mapping[str, BuiltKernel]
    ) -> ProblemRanking:
        unique = {_canonical(ranking): ranking for ranking in rankings}
        ordered = [unique[key] for key in sorted(unique)]
        ordered.sort(key=lambda ranking: len(ranking.kernels), reverse=True)
        ordered.sort(key=_date, reverse=True)
        ordered.sort(key=lambda ranking: evidence_rank(ranking, kernels, cuda))
        base, *others = ordered
        if not others:
            return base
        joined = _add_kernels(base, others, keeps_untimed=keeps_untimed)
        joined = _add_failures(joined, others, kernels)
        return _compare(joined, others, on_superseded)

    return join


def measurement_of(ranking: ProblemRanking) -> Measurement | None:
    """Returns a ranking's measurement, with kernels by id, or None for an estimate."""
    measured, conditions = ranking.measured, ranking.source.conditions
    if measured is None or conditions is None:
        return None
    return Measurement(
        kernels={
            id_: Timing(time_ns=time_ns, spread_ns=spread_ns)
            for (id_, time_ns), spread_ns in zip(ranking.kernels, measured.spreads_ns)
            if time_ns is not None
        },
        aten=measured.aten,
        triton=measured.triton,
        doubts=measured.doubts,
        conditions=conditions,
    )


def evidence_rank(
    ranking: ProblemRanking, kernels: Mapping[str, BuiltKernel], cuda: Collection[str | None]
) -> int:
    """Rates a ranking by its evidence, 0 for the strongest, for CUDA major versions or None."""
    measured, conditions = ranking.measured, ranking.source.conditions
    if measured is None or conditions is None:
        return UNMEASURED
    may_overlap = conditions.launches != APART and any(
        kernels[id_].design.dependent_launch for id_, _ in ranking.kernels
    )
    if may_overlap or cuda_major(conditions.cuda) not in cuda:
        return 4
    if measured.doubts:
        return 3
    return 0 if measured.is_confirmed else 1 if measured.is_repeated else 2


def _canonical(ranking: ProblemRanking) -> bytes:
    """Returns a text that is equal for equal rankings, wherever they come from."""
    return canonical_json(
        [
            source_json(ranking.source),
            ranking.kernels,
            ranking.measured and measured_json(ranking.measured),
            [
                [failure.operator, failure.reason, failure.is_transient]
                for failure in ranking.missing
            ],
            ranking.is_declared,
        ]
    )


def _date(ranking: ProblemRanking) -> str:
    conditions = ranking.source.conditions
    return "" if conditions is None else conditions.date


def _add_kernels(
    base: ProblemRanking, others: Sequence[ProblemRanking], *, keeps_untimed: bool
) -> ProblemRanking:
    """Adds the other rankings' kernels: in order of their times if all come from one model."""
    if base.measured is not None and not keeps_untimed:
        return base
    known_ids = {id_ for id_, _ in base.kernels}
    times: dict[str, int | None] = {}
    for ranking in others:
        is_comparable = base.measured is None and ranking.source == base.source
        for id_, time_ns in ranking.kernels:
            if id_ not in known_ids:
                times.setdefault(id_, time_ns if is_comparable else None)
    kernels = (*base.kernels, *times.items())
    known_times = [time_ns for _, time_ns in kernels if time_ns is not None]
    base_times = known_times[: len(base.kernels)]
    if times and len(known_times) == len(kernels) and base_times == sorted(base_times):
        kernels = tuple(sorted(kernels, key=lambda entry: entry[1] or 0))
    return replace(base, kernels=kernels)


def _add_failures(
    base: ProblemRanking, others: Sequence[ProblemRanking], kernels: Mapping[str, BuiltKernel]
) -> ProblemRanking:
    """Adds kernels that did not compile for the other rankings, unless they compiled elsewhere."""
    ranked = [id_ for ranking in (base, *others) for id_, _ in ranking.kernels]
    compiled = {kernels[id_].operator for id_ in ranked}
    missing = {failure for ranking in (base, *others) for failure in ranking.missing}
    return replace(
        base,
        missing=tuple(
            sorted(
                (failure for failure in missing if failure.operator not in compiled),
                key=lambda failure: (failure.operator, failure.reason, failure.is_transient),
            )
        ),
    )


def _compare(
    ranking: ProblemRanking,
    others: Sequence[ProblemRanking],
    on_superseded: Callable[[Superseded], None] | None,
) -> ProblemRanking:
    """Compares a measured ranking with the other measurements for its problem and product."""
    kept, measured = measurement_of(ranking), ranking.measured
    if kept is None or measured is None:
        return ranking
    agreement = Agreement(kept)
    doubts = list(measured.doubts)
    for other in others:
        dropped = measurement_of(other)
        if dropped is None or other.measured is None:
            continue
        if _has_all_times(kept, dropped):
            if kept.kernels == dropped.kernels:
                measured = _with_evidence_of(measured, other.measured)
            if _has_evidence_of(measured, other.measured):
                continue
        compared = compare(dropped, kept)
        if compared.relation is Relation.CONTRADICTS:
            doubts.append(compared.reason)
        elif compared.relation is Relation.CONFIRMS:
            agreement.add(dropped)
        if on_superseded is not None:
            on_superseded(
                Superseded(
                    problem=ranking.problem,
                    gpu=ranking.gpu,
                    kept=_when_and_where(kept),
                    dropped=_when_and_where(dropped),
                    relation=compared.relation,
                    reason=compared.reason,
                )
            )
    confirmed_by = measured.confirmed_by
    if len(agreement.gpus) > max(1, len(confirmed_by)):
        confirmed_by = agreement.gpus
    return replace(
        ranking,
        measured=replace(measured, doubts=tuple(dict.fromkeys(doubts)), confirmed_by=confirmed_by),
    )


def _with_evidence_of(measured: Measured, other: Measured) -> Measured:
    """Adds what another bundle says on how often the same measurement was made.

    GPUs that confirm it must agree by pairs, so two lists of them are not joined.
    """
    has_more = set(measured.confirmed_by) <= set(other.confirmed_by)
    return replace(
        measured,
        repeated=max(measured.repeated or 0, other.repeated or 0) or None,
        confirmed_by=other.confirmed_by if has_more else measured.confirmed_by,
    )


def _has_evidence_of(measured: Measured, other: Measured) -> bool:
    return (other.repeated or 0) <= (measured.repeated or 0) and (
        set(other.confirmed_by) <= set(measured.confirmed_by)
    )


def _has_all_times(kept: Measurement, dropped: Measurement) -> bool:
    """Returns True if two bundles have one measurement, and the kept one has all its times."""
    return (
        (kept.conditions, kept.aten, kept.triton)
        == (dropped.conditions, dropped.aten, dropped.triton)
        and dropped.kernels.items() <= kept.kernels.items()
        and set(dropped.doubts) <= set(kept.doubts)
    )


def _when_and_where(measurement: Measurement) -> str:
    conditions = measurement.conditions
    return f"{conditions.date} on GPU {gpu_name(conditions)}"
