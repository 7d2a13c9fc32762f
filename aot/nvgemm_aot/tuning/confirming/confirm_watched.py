"""Confirms kernels in a separate process, which is killed if a kernel does not return."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.installed.registry import INSTALLATION

from ...rankings.agreement import ATEN
from ..child import Message, Reports
from ..measuring.gpu import Bench
from ..session import Progress
from ..watchdog import HANG_S, WatchedProcess
from .confirm_kernels import BrokenByError, Confirmed, confirm

_log = logging.getLogger(__name__)

CONFIRM_BENCH = "nvgemm_aot.tuning.confirming.confirm_kernels:confirm_bench"
"""Function that creates the bench for torch's current CUDA device."""

MOST_ENDS = 3
"""Most processes that a kernel ends: more suggest a broken GPU or driver."""


@dataclass(frozen=True, kw_only=True)
class ConfirmTask:
    """Confirmation as a task; see `confirm_kernels.confirm`."""

    budget_s: float | None
    without: frozenset[str]
    bench: str
    log_level: int

    def perform(self, bench: Bench, reports: Reports) -> Confirmed:
        """Confirms the kernels of this process's installed bundles."""
        found = INSTALLATION.shipped_bundles()
        return confirm(
            [file.bundle for file in found if file.bundle is not None],
            bench,
            budget_s=self.budget_s,
            without=self.without,
            progress=reports.progress,
            running=reports.running,
        )


def confirm_watched(
    *,
    budget_s: float | None = None,
    hang_s: float = HANG_S,
    bench: str = CONFIRM_BENCH,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Confirmed:
    """Confirms like `confirm_kernels.confirm`, and survives kernels that hang or end their process.

    After such an end, another process measures everything anew without the kernel.

    Args:
        budget_s: Seconds that measuring may take; None for no limit.
        hang_s: Seconds after which a contender that has not returned counts as hanging.
        bench: Function that creates the bench in the measuring process, as ``module:function``.
        progress: Called before the first measurement and after each.
        clock: Returns seconds, for the budget.

    Raises:
        TuningError: As `confirm_kernels.confirm`; also if ATen hangs, if `MOST_ENDS` processes hang
            or die, or if one is silent for too long.
        NvgemmError: As `confirm_kernels.confirm`.
    """
    begin = clock()
    dropped: dict[str, str] = {}
    handlers: dict[Message, Progress] = {Message.PROGRESS: progress or (lambda done, total: None)}
    while True:
        task = ConfirmTask(
            budget_s=None if budget_s is None else max(0.0, budget_s - (clock() - begin)),
            without=frozenset(dropped),
            bench=bench,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        contender, reason = "", ""
        with contextlib.closing(WatchedProcess(task)) as process:
            try:
                end = process.watch(hang_s, handlers)
            except BrokenByError as error:
                contender, reason = error.contender, str(error)
            else:
                if isinstance(end, Confirmed):
                    return replace(
                        end, rejected={**dropped, **end.rejected}, elapsed_s=clock() - begin
                    )
                contender, reason = end.contender, end.text
        if contender in ("", ATEN) or len(dropped) + 1 == MOST_ENDS:
            raise TuningError(f"{reason}; this suggests a broken GPU or driver; nothing is written")
        if budget_s is not None and clock() - begin >= budget_s:
            raise TuningError(f"{reason}; the budget is spent, so nothing is written or changed")
        _log.warning("%s; measuring again without it", reason)
        dropped[contender] = reason
