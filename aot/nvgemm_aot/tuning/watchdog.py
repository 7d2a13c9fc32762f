"""Tunes in a separate process, which is killed if a kernel does not return.

A hanging kernel makes the GPU unusable for its process, which often cannot even exit. So the
measuring process reports the running contender. If the contender does not return in time, the
watchdog kills the process, records in the state that the contender hangs, and starts another
process without it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Generic, TypeVar

from nvgemm_runtime.errors import NvgemmError, TuningError

from ..rankings.agreement import TRITON, contender_name
from .child import BOOTSTRAP, ChildTask, MeasuringTask, Message
from .part_measuring import Measured
from .session import Progress, UnusableGpuError
from .state.journal import reserved, state_path
from .state.tuning_state import add_death, add_hang
from .tune_bundles import Tuned, TuningOptions, tune

_log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T", Tuned, Measured)

GPU_BENCH = "nvgemm_aot.tuning.measuring.gpu:gpu_bench"
"""Function that creates the bench for torch's current CUDA device."""

HANG_S = 60.0
"""Seconds after which a contender that has not returned counts as hanging. Its longest step is the
first run: a kernel is loaded, and its results for two operand sets are compared. For the largest
problem in nvgemm-aot's own manifests, that takes about a second."""

TRITON_FACTOR = 30
"""Factor on that time for Triton: Inductor compiles and times its choices in the first run."""

MOST_FURTHER = 2
"""Most processes for second measurements: the first repeats, the second handles the disturbed
ones."""

MOST_ENDS = 8
"""Most processes that hang or die in a tuning: more suggest a broken GPU or driver."""

IDLE_FACTOR = 10
"""Factor on the hang time for silence while no contender runs: the process loads torch, makes
operands, waits for other work on the GPU, or writes the bundle."""

STOP_S = 0.2
"""Longest time between looks at a request to stop."""

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

GRACE_S = 20.0
"""Seconds in which an interrupted process saves its results."""

KILL_S = 120.0
"""Seconds in which a killed process ends: the driver takes its kernels off the GPU first."""


def tune_watched(
    paths: Sequence[Path],
    output: Path,
    options: TuningOptions,
    *,
    bench: str = GPU_BENCH,
    hang_s: float = HANG_S,
    progress: Progress | None = None,
    again: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    gpu: str | None = None,
) -> Tuned:
    """Tunes like `tune_bundles.tune`, and survives kernels that hang or end their process.

    Each process measures a second time the problems that the previous one measured first.

    Args:
        paths: Bundles to tune.
        output: Bundle to write.
        options: Problems and kernels to measure, and the budget.
        bench: Function that creates the bench in the measuring process, as ``module:function``.
        hang_s: Seconds after which a contender that has not returned counts as hanging.
        progress: Called before the first problem and after each finished problem.
        again: Called likewise for second measurements.
        clock: Returns seconds, for the budget.
        gpu: Value of CUDA_VISIBLE_DEVICES for the measuring process; None for this process's.

    Raises:
        TuningError: As `tune_bundles.tune`; also if `MOST_ENDS` processes hang or die, or one is
            silent for too long while no contender runs.
        NvgemmError: As `tune_bundles.tune`.
    """
    return measure_watched(
        functools.partial(tune, paths, output),
        output,
        options,
        bench=bench,
        hang_s=hang_s,
        progress=progress,
        again=again,
        clock=clock,
        gpu=gpu,
    )


def measure_watched(
    measure: Callable[..., T],
    output: Path,
    options: TuningOptions,
    *,
    bench: str = GPU_BENCH,
    hang_s: float = HANG_S,
    progress: Progress | None = None,
    again: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    gpu: str | None = None,
    stop: threading.Event | None = None,
) -> T:
    """Measures as `tune_watched` does, until nothing is left to repeat.

    ``measure`` is `tune_bundles.tune` or `part_measuring.measure_part` with its arguments before
    the bench, and ``output`` has the state that it keeps. Once ``stop`` is set, it interrupts the
    measuring process. Other arguments are as for `tune_watched`.

    Raises:
        NvgemmError: As `tune_watched`.
        KeyboardInterrupt: If ``stop`` is set.
    """
    begin = clock()
    merged_progress = {
        Message.PROGRESS: _MergedProgress(report=progress),
        Message.AGAIN: _MergedProgress(report=again),
    }
    ends: list[str] = []
    further = measured_now = 0
    while len(ends) < MOST_ENDS:
        remaining_options = options
        if options.budget_s is not None:
            remaining_options = replace(
                options, budget_s=max(0.0, options.budget_s - (clock() - begin))
            )
        task = MeasuringTask(
            measure=measure,
            options=remaining_options,
            bench=bench,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        with contextlib.closing(WatchedProcess(task, gpu=gpu)) as process:
            end = process.watch(hang_s, merged_progress, stop)
        if not isinstance(end, ProcessEnd):
            is_over = remaining_options.budget_s is not None and clock() - begin >= (
                options.budget_s or 0
            )
            measured_now += end.measured_now
            if not end.unrepeated or further == MOST_FURTHER or is_over:
                return replace(end, measured_now=measured_now)
            further += 1
            continue
        if end.record is not None:
            with reserved(output):
                end.record(state_path(output), end.contender, end.key, end.reason)
        _log.warning("%s; continuing in a new process", end.text)
        ends.append(end.text)
    raise TuningError(
        f"{len(ends)} measuring processes hung or died, which suggests a broken GPU or driver; "
        f"measurements are saved in {state_path(output)}, and the same command continues; the "
        f"last: {ends[-1]}"
    )


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """Process end without a result; ``contender`` and ``key`` are its last run.

    ``record`` notes it in the state; None if the contender is not to blame, or noted already.
    """

    contender: str
    key: str
    reason: str
    record: Callable[[Path, str, str, str], None] | None

    @property
    def text(self) -> str:
        """Contender, problem and reason for messages."""
        if not self.contender:
            return self.reason
        return f"{self.key}: {contender_name(self.contender)}: {self.reason}"


@dataclass(kw_only=True)
class _MergedProgress:
    """Progress over several processes, each with fewer problems left."""

    report: Progress | None
    total: int | None = None
    done: int = field(default=-1)

    def __call__(self, done: int, total: int) -> None:
        if self.total is None:
            self.total = total
        done = min(self.total, max(0, self.total - total) + done)
        if self.report is not None and done > self.done:
            self.done = done
            self.report(done, self.total)


class WatchedProcess(Generic[R]):
    """Measuring process and the pipe to it."""

    def __init__(self, work: ChildTask[R], *, gpu: str | None = None) -> None:
        self._connection, child_end = Pipe()
        environment = os.environ if gpu is None else {**os.environ, VISIBLE_GPUS: gpu}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", BOOTSTRAP, str(child_end.fileno()), str(os.getpid())),
                *sys.path,
            ],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[child_end.fileno()],
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
        )
        child_end.close()
        self._running: tuple[str, str] | None = None
        self._last = ("", "")
        with contextlib.suppress(BrokenPipeError):  # `watch` reports its end
            self._connection.send(work)

    def watch(
        self,
        hang_s: float,
        progress: Mapping[Message, Progress],
        stop: threading.Event | None = None,
    ) -> R | ProcessEnd:
        """Passes on the process's reports until it ends or hangs; ``stop`` interrupts it.

        Raises:
            BaseException: Exception that ended the process.
        """
        try:
            while True:
                limit_s = self._limit_s(hang_s)
                if not self._has_message(limit_s, stop):
                    return self._kill_hanging(limit_s)
                try:
                    message: tuple[Any, ...] = self._connection.recv()
                except (EOFError, ConnectionResetError):
                    return self._report_death()
                result = self._handle(message, progress)
                if result is not None:
                    return result
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def _has_message(self, limit_s: float, stop: threading.Event | None) -> bool:
        """Waits for a message; raises KeyboardInterrupt if ``stop`` is set meanwhile."""
        if stop is None:
            return self._connection.poll(limit_s)
        end = time.monotonic() + limit_s
        while not stop.is_set():
            left_s = end - time.monotonic()
            if self._connection.poll(max(0.0, min(left_s, STOP_S))):
                return True
            if left_s <= 0:
                return False
        raise KeyboardInterrupt

    def _limit_s(self, hang_s: float) -> float:
        if self._running is None:
            return hang_s * IDLE_FACTOR
        return hang_s * (TRITON_FACTOR if self._running[0] == TRITON else 1)

    def _kill_hanging(self, limit_s: float) -> ProcessEnd:
        """Kills the process and returns the contender that hangs.

        Raises:
            TuningError: If no contender runs.
        """
        self._kill()
        if self._running is None:
            raise TuningError(
                f"the measuring process was silent for {limit_s:g} s while no kernel ran: the GPU "
                "or its driver does not respond. If nvidia-smi does not respond either, reset the "
                "GPU or restart the machine. Then run the same command again. On a slow machine, "
                "pass a longer --hang-after (silence is allowed for "
                f"{IDLE_FACTOR} times as long)"
            )
        contender, key = self._last
        return ProcessEnd(
            contender=contender,
            key=key,
            reason=f"it hangs: it has not returned for {limit_s:g} s",
            record=add_hang,
        )

    def _handle(
        self, message: tuple[Any, ...], progress: Mapping[Message, Progress]
    ) -> R | ProcessEnd | None:
        kind, *values = message
        if kind is Message.RUNS:
            self._running = self._last = (values[0], values[1])
        elif kind is Message.RETURNED:
            self._running = None
        elif kind in progress:
            progress[kind](*values)
        elif kind is Message.LOG:
            name, level, text = values
            logging.getLogger(name).log(level, "%s", text)
        elif kind is Message.FAILED:
            return self._report_failure(*values)
        else:
            result: R = values[0]
            return result
        return None

    def _report_failure(self, error: BaseException, trace: str) -> ProcessEnd:
        if isinstance(error, UnusableGpuError):
            # The process itself recorded it, and its end frees the GPU.
            return ProcessEnd(contender="", key="", reason=str(error), record=None)
        if isinstance(error, NvgemmError):
            raise error
        raise error from RuntimeError(f"in the measuring process:\n{trace}")

    def _report_death(self) -> ProcessEnd:
        status = self._process.wait()
        how = f"status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):  # some real-time signals have no name
                how = signal.Signals(-status).name
        contender, key = self._last
        meanwhile = "while it ran" if self._running else "after it had run"
        return ProcessEnd(
            contender=contender,
            key=key,
            reason=f"the measuring process died by {how} {meanwhile}"
            if contender
            else f"the measuring process died by {how} before anything ran",
            record=add_death if self._running else None,
        )

    def _interrupt(self) -> None:
        """Lets the process end by itself for a while; a second interruption ends it at once."""
        with contextlib.suppress(KeyboardInterrupt):
            self._process.terminate()
            limit = time.monotonic() + GRACE_S
            while time.monotonic() < limit:
                try:
                    if self._connection.poll(max(0.0, limit - time.monotonic())):
                        self._connection.recv()  # drains the pipe, which would block the process
                except (EOFError, OSError):
                    return

    def _kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            raise TuningError(
                f"process {self._process.pid}, in which a kernel hangs, does not end {KILL_S:g} s "
                "after it was killed: the driver may wait for the GPU; reset the GPU, or restart "
                "the machine, and run the same command again"
            ) from None

    def close(self) -> None:
        """Ends the process if it runs, and closes the pipe."""
        self._connection.close()
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S if self._running is None else 0.1)
        if self._process.poll() is None:
            self._kill()
