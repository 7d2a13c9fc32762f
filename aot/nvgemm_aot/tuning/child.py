"""Measuring process: runs a task and reports to `watchdog`, which may kill it.

Messages go through a pipe; each is a tuple that begins with a `Message`.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import gc
import importlib
import logging
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Generic, Protocol, TypeVar

from .measuring.gpu import Bench
from .session import Progress, Running
from .tune_bundles import TuningOptions

BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    f"from {__name__} import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
"""Process code. Arguments: pipe descriptor, parent process id, module path."""

_PR_SET_PDEATHSIG = 1
"""Linux prctl option: signal sent to a process when its parent ends."""


class Message(enum.Enum):
    """Message kinds and the values that follow."""

    RUNS = "runs"
    """A contender starts: contender name, problem key."""
    RETURNED = "returned"
    """The contender has returned."""
    PROGRESS = "progress"
    """Progress: problems done, problems in total."""
    AGAIN = "again"
    """Second measurements' progress, as for ``PROGRESS``."""
    LOG = "log"
    """Log record: logger, level, text."""
    DONE = "done"
    """The task's result."""
    FAILED = "failed"
    """Exception that ended the task, and its traceback as text."""


@dataclass(frozen=True, kw_only=True)
class Reports:
    """Calls by which a task reports to the watching process.

    Attributes:
        progress: Progress.
        again: Second measurements' progress.
        running: Context entered with a contender and a problem key during each contender's run.
    """

    progress: Progress
    again: Progress
    running: Running


R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class ChildTask(Protocol[R_co]):
    """Task for a measuring process, to which it is pickled."""

    @property
    def bench(self) -> str:
        """Function that creates the bench, as ``module:function``."""

    @property
    def log_level(self) -> int:
        """Lowest level to report."""

    def perform(self, bench: Bench, reports: Reports) -> R_co:
        """Performs the task in the measuring process."""


@dataclass(frozen=True, kw_only=True)
class MeasuringTask(Generic[R]):
    """`tune_bundles.tune` or `part_measuring.measure_part` as a task.

    Attributes:
        measure: The function with its first arguments, up to the bench.
        options: Problems and kernels to measure, and the budget.
        bench: As for `ChildTask`.
        log_level: As for `ChildTask`.
    """

    measure: Callable[..., R]
    options: TuningOptions
    bench: str
    log_level: int

    def perform(self, bench: Bench, reports: Reports) -> R:
        """Measures."""
        return self.measure(
            bench,
            self.options,
            progress=reports.progress,
            again=reports.again,
            running=reports.running,
        )


def main(descriptor: int, parent: int) -> None:
    """Runs the task received from the pipe and reports."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Torch warns of this at its import; nothing here uses NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    gc.disable()  # importing torch makes a million objects, of which none is garbage
    connection = Connection(descriptor)
    work: ChildTask[object] = connection.recv()
    send = functools.partial(_send, connection)
    reporter = _Reporter(send)
    logging.basicConfig(level=work.log_level, handlers=[reporter], force=True)
    try:
        reports = Reports(
            progress=functools.partial(send, Message.PROGRESS),
            again=functools.partial(send, Message.AGAIN),
            running=reporter.running,
        )
        bench = _load_function(work.bench)()
        gc.freeze()
        gc.enable()
        result = work.perform(bench, reports)
    except BaseException as error:
        send(Message.FAILED, _sendable(error), traceback.format_exc())
    else:
        send(Message.DONE, result)


def _send(connection: Connection, kind: Message, *values: object) -> None:
    """Sends a message; ends this process if nobody reads.

    An exception here would be blamed on the running contender.
    """
    try:
        connection.send((kind, *values))
    except OSError:
        os._exit(1)


def _load_function(name: str) -> Callable[[], Bench]:
    module, _, function = name.partition(":")
    factory: Callable[[], Bench] = getattr(importlib.import_module(module), function)
    return factory


def _sendable(error: BaseException) -> BaseException:
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Reporter(logging.Handler):
    """Reports the running contender and log records."""

    def __init__(self, send: Callable[..., None]) -> None:
        super().__init__()
        self._send = send

    @contextlib.contextmanager
    def running(self, contender: str, key: str) -> Iterator[None]:
        self._send(Message.RUNS, contender, key)
        try:
            yield
        finally:
            self._send(Message.RETURNED)

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Message.LOG, record.name, record.levelno, record.getMessage())
