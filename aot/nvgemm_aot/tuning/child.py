"""The process that measures: runs a tuning and reports to `watchdog`, which may kill it.

Messages go through a pipe, each a tuple that begins with a `Message`.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
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
from pathlib import Path

from .gpu import Bench
from .tune import TuningOptions, tune

BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    f"from {__name__} import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
"""Code of the process; its arguments are a descriptor, its parent's id and module path."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""


class Message(enum.Enum):
    """What a message says, and what follows."""

    RUNS = "runs"
    """A contender begins to run: its name, and the problem's key."""
    RETURNED = "returned"
    """It has returned."""
    PROGRESS = "progress"
    """Problems that are done, and how many there are."""
    AGAIN = "again"
    """As ``PROGRESS``, of problems that are measured a second time."""
    LOG = "log"
    """A record: logger, level and text."""
    DONE = "done"
    """The tuning's result."""
    FAILED = "failed"
    """The exception that ended it, and its traceback as text."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a measuring process does.

    Attributes:
        bench: Where the function is that makes the bench, ``module:function``.
        log_level: Of messages to report.
    """

    paths: tuple[Path, ...]
    output: Path
    options: TuningOptions
    bench: str
    log_level: int


def main(descriptor: int, parent: int) -> None:
    """Do the work that the pipe gives, and report."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Torch warns of this at its import; nothing here uses NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    connection = Connection(descriptor)
    work: Work = connection.recv()
    send = functools.partial(_send, connection)
    reporter = _Reporter(send)
    logging.basicConfig(level=work.log_level, handlers=[reporter], force=True)
    try:
        result = tune(
            work.paths,
            work.output,
            _load(work.bench)(),
            work.options,
            progress=functools.partial(send, Message.PROGRESS),
            again=functools.partial(send, Message.AGAIN),
            running=reporter.running,
        )
    except BaseException as error:
        send(Message.FAILED, _sendable(error), traceback.format_exc())
    else:
        send(Message.DONE, result)


def _send(connection: Connection, kind: Message, *values: object) -> None:
    """Send a message; end this process if nobody is there to read it.

    An exception would be blamed on the contender that runs.
    """
    try:
        connection.send((kind, *values))
    except OSError:
        os._exit(1)


def _load(name: str) -> Callable[[], Bench]:
    module, _, function = name.partition(":")
    made: Callable[[], Bench] = getattr(importlib.import_module(module), function)
    return made


def _sendable(error: BaseException) -> BaseException:
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Reporter(logging.Handler):
    """Reports which contender runs, and what is logged."""

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
