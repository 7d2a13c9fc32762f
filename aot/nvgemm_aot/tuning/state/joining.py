"""Joins a tuning's measurements: second ones on a GPU, and those of several GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from nvgemm_runtime.bundle.ranking_entries import LEAST_REPEAT_S, Timing
from nvgemm_runtime.gemm.problem import Problem

from ...rankings.agreement import Relation, compare_repeat
from ...rankings.assess import assess
from ...rankings.entries import Entry, Operator, Origin, Rankings, merge
from ..outcome import Repeat, TuningOutcome
from .facts import Facts, facts_by_gpu
from .journal import Line


def outcomes_with_repeats(facts: Facts) -> dict[str, TuningOutcome]:
    """Returns the first outcomes by problem key, updated by their second measurements."""
    return {
        key: outcome if key not in facts.repeats else _with_repeat(outcome, facts.repeats[key])
        for key, outcome in facts.outcomes.items()
    }


def _with_repeat(first: TuningOutcome, repeat: Repeat) -> TuningOutcome:
    second = repeat.outcome
    wrong = second.wrong
    outcome = replace(
        first,
        kernels={id_: timing for id_, timing in first.kernels.items() if id_ not in wrong},
        wrong={**first.wrong, **wrong},
    )
    compared = compare_repeat(first, second)
    if compared.relation is Relation.CONTRADICTS:
        return replace(outcome, doubts=(*outcome.doubts, compared.reason))
    is_repeated = compared.relation is Relation.REPEATS and repeat.after_s >= LEAST_REPEAT_S
    return replace(outcome, repeated=repeat.after_s if is_repeated else None)


def outcomes_by_problem(lines: Iterable[Line]) -> dict[str, list[TuningOutcome]]:
    """Returns each GPU's outcome, with its second measurement, by problem key."""
    by_problem: dict[str, list[TuningOutcome]] = {}
    for facts in facts_by_gpu(lines).values():
        for key, outcome in outcomes_with_repeats(facts).items():
            by_problem.setdefault(key, []).append(outcome)
    return by_problem


def join_gpus(lines: Iterable[Line], operators: Mapping[str, Operator]) -> dict[str, TuningOutcome]:
    """Joins all GPUs' outcomes, as if each had tuned alone and their rankings were merged.

    `assess` picks each problem's measurement, confirms it, or doubts it. A kernel is wrong if it is
    wrong on one GPU.

    Args:
        lines: A tuning's journal.
        operators: Each kernel's operator, by the kernel's id.
    """
    return {
        key: _join(Problem.parse(key), outcomes, operators)
        for key, outcomes in outcomes_by_problem(lines).items()
    }


def _join(
    problem: Problem, outcomes: list[TuningOutcome], operators: Mapping[str, Operator]
) -> TuningOutcome:
    measured = [outcome for outcome in outcomes if outcome.kernels]
    wrong = {id_: fault for outcome in outcomes for id_, fault in outcome.wrong.items()}
    if not measured:
        return replace(outcomes[-1], wrong=wrong)
    entries = [_entry(problem, outcome, operators) for outcome in measured]
    (group,) = merge([Rankings(entries=tuple(entries))]).groups.values()
    assessed = assess(group)
    chosen = measured[entries.index(assessed.entry)]
    confirmed_by = assessed.confirmed_by or (() if assessed.doubts else chosen.confirmed_by)
    return replace(
        chosen,
        wrong=wrong,
        doubts=assessed.doubts,
        confirmed_by=confirmed_by,
        repeated=assessed.repeated,
    )


def _entry(problem: Problem, outcome: TuningOutcome, operators: Mapping[str, Operator]) -> Entry:
    """Returns an outcome as a ranking's entry; in one tuning, only conditions differ."""
    kernels: dict[Operator, Timing] = {}
    for id_, timing in outcome.kernels.items():
        kernels.setdefault(operators[id_], timing)
    return Entry(
        problem=problem,
        origin=Origin(arch="", toolchain={}, gpu="", by="", conditions=outcome.conditions),
        kernels=tuple(kernels.items()),
        aten=outcome.aten,
        triton=outcome.triton,
        doubts=outcome.doubts,
        repeated=outcome.repeated,
    )
