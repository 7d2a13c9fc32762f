"""One session of a tuning: the problems that its state does not hold are measured, one by one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nvgemm_runtime.errors import TuningError

from ..bundle.content import ProblemRanking
from .contenders import ATEN, TRITON, Contenders
from .measuring import Bench, BrokenDeviceError, look_for_others, measure, wait_until_idle
from .outcome import UNSEEN_WORK, Outcome, contender_name, disagreement
from .state import TuningState
from .tuned_bundle import previous_outcome

_log = logging.getLogger(__name__)

OUT_OF_BUDGET = "the budget was used up; the same command goes on"
OUT_OF_MEMORY = "it does not fit into the GPU's memory, the same command tries again: "

LOOK_EVERY_S = 60.0
"""After so long other work is looked for again, which takes a fortieth of it. Where a run is
killed, what was measured since the last look is uncertain."""

Progress = Callable[[int, int], None]
"""Called before the first problem and after each: how many are done of those that were left."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What one run of a tuning has.

    Attributes:
        contenders: What is timed.
        bench: Where, and by what.
        state: What is measured, and where that is kept.
        budget_s: After so many seconds no further problem is begun; None for no limit.
        clock: Seconds.
        begin: Its time when the run began.
    """

    contenders: Contenders
    bench: Bench
    state: TuningState
    budget_s: float | None
    clock: Callable[[], float]
    begin: float

    def left(self, rankings: Sequence[ProblemRanking]) -> list[ProblemRanking]:
        """Those that the state does not hold, and behind them those that something disturbed."""
        outcomes = self.state.outcomes
        new = [one for one in rankings if one.problem.key not in outcomes]
        known = [one for one in rankings if one.problem.key in outcomes]
        return new + [one for one in known if outcomes[one.problem.key].is_disturbed]

    def measure(
        self, rankings: Sequence[ProblemRanking], progress: Progress | None
    ) -> dict[str, str]:
        """Measure problems, and keep what was measured in the state.

        Returns:
            By key, why problems are left out.

        Raises:
            TuningError: If a contender leaves the GPU unusable.
        """
        if not rankings:
            return {}
        if progress is not None:
            progress(0, len(rankings))
        unmeasured: dict[str, str] = {}
        looks = _Looks(self.bench, self.state)
        now = self.begin
        try:
            for place, ranking in enumerate(rankings, start=1):
                last, now = now, self.clock()
                looks.pass_time(now - last)
                if self.budget_s is not None and now - self.begin >= self.budget_s:
                    unmeasured[ranking.problem.key] = OUT_OF_BUDGET
                    continue
                reason = self._measure_one(ranking, looks.busy)
                if reason is not None:
                    unmeasured[ranking.problem.key] = reason
                if progress is not None:
                    progress(place, len(rankings))
        finally:
            looks.end()
        return unmeasured

    def _measure_one(self, ranking: ProblemRanking, busy: str | None) -> str | None:
        """Measure a problem; why it is left out, or None."""
        import torch

        key = ranking.problem.key
        without = self.state.left_out(key)
        runs = {
            name: run for name, run in self.contenders.of(ranking).items() if name not in without
        }
        if not runs.keys() - {ATEN, TRITON}:
            return self._why_none(ranking)
        trying = functools.partial(self.state.trying, key=key)
        try:
            outcome = measure(ranking.problem, runs, self.bench, trying)
        except BrokenDeviceError as error:
            name = contender_name(error.contender)
            reason = f"{key}: it leaves the GPU unusable: {error.reason}"
            self.state.add_broken(error.contender, reason)
            raise TuningError(
                f"{key}: {name} leaves the GPU unusable: {error.reason}; run the same command "
                "again: it goes on without that"
            ) from error
        except torch.OutOfMemoryError as error:
            _log.warning("%s is left out: %s", key, error)
            return f"{OUT_OF_MEMORY}{error}"
        before = previous_outcome(ranking, self.bench.facts.name)
        differs = None if before is None else disagreement(before, outcome)
        self.state.add(key, _with_doubts(outcome, busy, differs))
        return None

    def _why_none(self, ranking: ProblemRanking) -> str:
        broken = [id_ for id_, _ in ranking.kernels if id_ in self.state.broken]
        reasons = [f"{contender_name(id_)} is thrown out" for id_ in broken]
        if len(broken) < len(ranking.kernels):
            others = "none of the others" if broken else "none"
            reasons.append(f"{others} can be launched with its operands")
        return f"none of its kernels can be measured: {'; '.join(reasons)}"


class _Looks:
    """Looks for other work, before problems are measured and after some time again.

    Attributes:
        busy: What to say of the work that there was at the last look.
    """

    def __init__(self, bench: Bench, state: TuningState) -> None:
        self._bench = bench
        self._state = state
        self._passed_s = 0.0
        self.busy = wait_until_idle(bench)

    def pass_time(self, seconds: float) -> None:
        self._passed_s += seconds
        if self._passed_s >= LOOK_EVERY_S and not self._state.is_confirmed:
            self._look()
            if self.busy not in (None, UNSEEN_WORK):
                self.busy = wait_until_idle(self._bench)

    def end(self) -> None:
        if not self._state.is_confirmed:
            self._look()

    def _look(self) -> None:
        before, self.busy = self.busy, look_for_others(self._bench)
        is_new = before is None and self.busy is not None
        self._state.confirm(f"{self.busy} afterwards" if is_new else None)
        self._passed_s = 0.0


def _with_doubts(outcome: Outcome, *doubts: str | None) -> Outcome:
    added = tuple(doubt for doubt in doubts if doubt is not None)
    return replace(outcome, doubts=(*outcome.doubts, *added)) if added else outcome
