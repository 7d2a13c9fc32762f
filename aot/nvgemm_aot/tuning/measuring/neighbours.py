"""Winners at neighbouring m, which are likely to be fast at an m between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from nvgemm_runtime.gemm.problem import Problem

from ...bundle.content import ProblemRanking
from ..outcome import TuningOutcome


class Neighbours:
    """Finds the kernels that won at the next smaller and larger m; true if there are any.

    ``known`` are outcomes by problem key from earlier tunings.
    """

    def __init__(
        self,
        rankings: Sequence[ProblemRanking],
        known: Mapping[str, TuningOutcome] = MappingProxyType({}),
    ) -> None:
        self._known = known
        self._lines: dict[Problem, list[Problem]] = {}
        for problem in sorted(ranking.problem for ranking in rankings):
            self._lines.setdefault(replace(problem, m=1), []).append(problem)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def winners(self, problem: Problem, outcomes: Mapping[str, TuningOutcome]) -> list[str]:
        """Returns the two neighbours' fastest kernel ids, as far as measured."""
        line = self._lines.get(replace(problem, m=1), [])
        if problem not in line:
            return []
        index = line.index(problem)
        near = [*line[max(0, index - 1) : index], *line[index + 1 : index + 2]]
        all_outcomes = {**self._known, **outcomes}
        keys = [neighbour.key for neighbour in near]
        measured = [all_outcomes[key] for key in keys if key in all_outcomes]
        return list(
            dict.fromkeys(next(iter(outcome.kernels)) for outcome in measured if outcome.kernels)
        )
