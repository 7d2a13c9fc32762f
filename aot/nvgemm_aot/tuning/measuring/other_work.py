"""Looks for other work on the GPU while problems are measured."""

from __future__ import annotations

from ..outcome import UNSEEN_WORK
from ..state.tuning_state import TuningState
from .gpu import Bench
from .problem_times import look_for_others, wait_until_idle

LOOK_EVERY_S = 60.0
"""Interval between looks for other work on the GPU; looking takes a fortieth of it. If a run is
killed, everything measured since the last look counts as uncertain."""


class OtherWork:
    """Looks for other work on the GPU before the first problem and every `LOOK_EVERY_S`.

    ``busy`` is the doubt that the last look raises, or None.
    """

    def __init__(self, bench: Bench, state: TuningState) -> None:
        self._bench = bench
        self._state = state
        self._passed_s = 0.0
        self.busy = wait_until_idle(bench)

    def pass_time(self, seconds: float) -> None:
        """Adds elapsed seconds and looks again if that is due."""
        self._passed_s += seconds
        if self._passed_s >= LOOK_EVERY_S and not self._state.is_confirmed:
            self._look()
            if self.busy not in (None, UNSEEN_WORK):
                self.busy = wait_until_idle(self._bench)

    def end(self) -> None:
        """Checks for other work once more as the run ends."""
        if not self._state.is_confirmed:
            self._look()

    def _look(self) -> None:
        before, self.busy = self.busy, look_for_others(self._bench)
        is_new = before is None and self.busy is not None
        self._state.confirm(f"{self.busy} afterwards" if is_new else None)
        self._passed_s = 0.0
