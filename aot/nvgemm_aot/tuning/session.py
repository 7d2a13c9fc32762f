"""Measures problems in turn, for a tuning that may be interrupted between problems."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nvgemm_runtime.bundle.ranking_entries import Conditions
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.gemm.problem import Problem

from ..bundle.content import ProblemRanking
from ..rankings.agreement import (
    ATEN,
    TRITON,
    Relation,
    compare,
    confirming_gpus,
    contender_name,
    gpu_name,
)
from .contenders import Contenders, Run
from .correctness.judgement import rejected_kernels
from .measuring.gpu import Bench
from .measuring.neighbours import Neighbours
from .measuring.other_work import OtherWork
from .measuring.problem_times import BrokenDeviceError, Effort, measure
from .outcome import TuningOutcome
from .rewrite import previous_outcome
from .state.tuning_state import TuningState

_log = logging.getLogger(__name__)

OUT_OF_BUDGET = "the budget is spent; the same command continues"
OUT_OF_MEMORY = "its operands do not fit into GPU memory; the same command tries again: "

Progress = Callable[[int, int], None]
"""Called before the first problem and after each, with the number done and the total."""


class Running(Protocol):
    """Makes a context that is entered while a contender runs on the problem with a key."""

    def __call__(self, contender: str, key: str) -> contextlib.AbstractContextManager[None]:
        """Returns the context."""


def unwatched(contender: str, key: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context without a watchdog."""
    return contextlib.nullcontext()


class UnusableGpuError(TuningError):
    """A contender left the GPU unusable for this process; the state records it."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Tuning run: measures the problems that its state lacks.

    ``elapsed_s`` returns the seconds since the run began; `TuningOptions` has ``budget_s``.
    """

    contenders: Contenders
    bench: Bench
    state: TuningState
    budget_s: float | None
    elapsed_s: Callable[[], float]
    running: Running = unwatched
    neighbours: Neighbours = field(default_factory=lambda: Neighbours(()))
    warned_gpus: set[str] = field(default_factory=set)

    def lacking_neighbours(self, rankings: Sequence[ProblemRanking]) -> list[ProblemRanking]:
        """Returns problems that were measured without a kernel that won at a neighbouring m."""
        outcomes = self.state.outcomes
        return [
            ranking
            for ranking in rankings
            if ranking.problem.key in outcomes and self._unmeasured_neighbours(ranking.problem)
        ]

    def _unmeasured_neighbours(self, problem: Problem) -> list[str]:
        if not self.neighbours:
            return []
        outcome = self.state.outcomes.get(problem.key)
        measured_ids = set() if outcome is None else outcome.kernels.keys() | outcome.wrong.keys()
        wrong = rejected_kernels(self.state.outcomes, self.state.broken)
        left_out = self.state.left_out(problem.key)
        return [
            id_
            for id_ in self.neighbours.winners(problem, self.state.outcomes)
            if id_ not in measured_ids | left_out | wrong.keys()
            and self.contenders.serves(id_, problem)
        ]

    def unmeasured(self, rankings: Sequence[ProblemRanking]) -> list[ProblemRanking]:
        """Returns problems without an outcome, then those with a disturbed measurement."""
        outcomes = self.state.outcomes
        measured = [ranking for ranking in rankings if ranking.problem.key in outcomes]
        disturbed = [ranking for ranking in measured if outcomes[ranking.problem.key].is_disturbed]
        return [ranking for ranking in rankings if ranking.problem.key not in outcomes] + disturbed

    def measure(
        self, rankings: Sequence[ProblemRanking], progress: Progress | None
    ) -> dict[str, str]:
        """Measures problems and adds their outcomes to the state.

        Returns the problems left out, by key, with the reason.

        Raises:
            TuningError: If a contender leaves the GPU unusable.
        """
        if not rankings:
            return {}
        if progress is not None:
            progress(0, len(rankings))
        unmeasured: dict[str, str] = {}
        other_work = OtherWork(self.bench, self.state)
        now = 0.0
        try:
            for position, ranking in enumerate(rankings, start=1):
                last, now = now, self.elapsed_s()
                other_work.pass_time(now - last)
                if self.budget_s is not None and now >= self.budget_s:
                    unmeasured[ranking.problem.key] = OUT_OF_BUDGET
                    continue
                reason = self._measure_ranking(ranking, other_work.busy)
                if reason is not None:
                    unmeasured[ranking.problem.key] = reason
                if progress is not None:
                    progress(position, len(rankings))
        finally:
            other_work.end()
        return unmeasured

    def _measure_ranking(self, ranking: ProblemRanking, busy: str | None) -> str | None:
        """Measures a problem; returns the reason to leave it out, or None."""
        key = ranking.problem.key
        current = self.state.outcomes.get(key)
        further_ids = [] if current is None else [*current.kernels]  # so that passes end
        further_ids += self._unmeasured_neighbours(ranking.problem)
        runs = self.contenders.runs_of(ranking, further_ids if self.neighbours else ())
        for name in self.state.left_out(key):
            runs.pop(name, None)
        if not runs.keys() - {ATEN, TRITON}:
            return self._no_contender_reason(ranking)
        outcome = self.run(ranking.problem, runs)
        if isinstance(outcome, str):
            return outcome
        before = previous_outcome(ranking, self.bench.facts.name)
        contradiction: str | None = None
        confirmed_by: tuple[str, ...] = ()
        if before is not None:
            compared = compare(before, outcome)
            if compared.relation is Relation.CONTRADICTS:
                contradiction = compared.reason
            elif compared.relation is Relation.CONFIRMS:
                confirmed_by = confirming_gpus(before, outcome)
            else:
                _log.info("%s: not confirmed: %s", key, compared.reason)
            self._warn_of_repetition(before.conditions, outcome.conditions)
        doubts = (*outcome.doubts, *(doubt for doubt in (busy, contradiction) if doubt is not None))
        outcome = replace(outcome, doubts=doubts, confirmed_by=confirmed_by)
        self.state.add(key, outcome, self.bench.now_s())
        return None

    def run(
        self, problem: Problem, runs: Mapping[str, Run], *, also_back_to_back: bool = True
    ) -> TuningOutcome | str:
        """Measures contenders on a problem; returns the reason to leave it out if memory is short.

        Raises:
            UnusableGpuError: If a contender leaves the GPU unusable.
        """
        import torch

        key = problem.key
        try:
            return measure(
                problem,
                runs,
                self.bench,
                functools.partial(self.state.trying, key=key),
                functools.partial(self.running, key=key),
                Effort(also_back_to_back=also_back_to_back),
            )
        except BrokenDeviceError as error:
            name = contender_name(error.contender)
            reason = f"{key}: it leaves the GPU unusable: {error.reason}"
            self.state.add_broken(error.contender, reason)
            raise UnusableGpuError(
                f"{key}: {name} leaves the GPU unusable: {error.reason}; run the same command "
                "again, which skips this contender"
            ) from error
        except torch.OutOfMemoryError as error:
            _log.warning("%s is left out: %s", key, error)
            return f"{OUT_OF_MEMORY}{error}"

    def _warn_of_repetition(self, before: Conditions, now: Conditions) -> None:
        """Warns once that the bundle was measured on this very GPU before."""
        if now.gpu_sha256 is None or before.gpu_sha256 != now.gpu_sha256:
            return
        if not self.warned_gpus:
            _log.warning(
                "this GPU (UUID digest %s) measured these problems before, so this run cannot "
                "confirm them",
                gpu_name(now),
            )
        self.warned_gpus.add(gpu_name(now))

    def _no_contender_reason(self, ranking: ProblemRanking) -> str:
        broken = [id_ for id_, _ in ranking.kernels if id_ in self.state.broken]
        reasons = [f"{contender_name(id_)} is dropped" for id_ in broken]
        if len(broken) < len(ranking.kernels):
            others = "none of the others" if broken else "none"
            reasons.append(f"{others} can be launched with its operands")
        return f"none of its kernels can be measured: {'; '.join(reasons)}"
