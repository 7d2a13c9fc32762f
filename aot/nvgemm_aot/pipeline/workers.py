"""Pool of worker processes. Each has one item at a time, so a death is blamed on its item."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_DEATHS = 2
"""Worker deaths after which a task is given up. A single death may be for lack of memory."""

MAX_RESTARTS = 2
"""Failed starts in a row that the pool tolerates, in addition to one per process."""

START_SECONDS = 300.0
"""Longest time for a worker to get ready, in seconds."""

TASKS_PER_WORKER = 200
"""Tasks after which a worker is replaced: one grew from 0.55 to 0.92 GB in 200 tasks."""

BOOTSTRAP = (
    "import sys; connection, stderr, *sys.path = sys.argv[1:]; "
    "from nvgemm_aot.pipeline.workers import serve; serve(int(connection), int(stderr))"
)
"""Code of a worker process; its arguments are two descriptors and its parent's module path."""

_CLOSED_DESCRIPTORS_HINT = (
    "as after a provider, or a library that it uses, closed all descriptors (os.closerange); a "
    "provider must close none but its own"
)

_CLOSED_PIPE = 76
"""Exit status of a worker whose pipe to the parent was closed in it; EX_PROTOCOL in sysexits.h."""

_STDERR_TAIL_BYTES = 1000

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Default environment of a worker. Processes share the cores already: threads of numpy's BLAS
library made small multiplications of matrices 20 times slower."""

_RAISED = (Exception, KeyboardInterrupt)
"""Exceptions that a worker sends as its answer. It ignores Ctrl-C, but a compiler may raise
KeyboardInterrupt."""

_LONGEST_WAIT_SECONDS = 3600.0
"""Longest wait in one system call, which does not take an infinite time."""


class WorkerDied(Exception):
    """Several processes died on a task; the text says how."""


class TimeLimitExceeded(WorkerDied):
    """The process was killed because its task exceeded the time limit."""


class WorkersKilled(Exception):
    """Another thread killed the processes while they had work."""


class WorkersCannotStart(Exception):
    """Several processes in a row ended before they were ready; the text describes the last end."""


class _Worker(Generic[Item, Result]):
    """One process with its pipe."""

    def __init__(self, work: Callable[[Item], Result], prepare: Callable[[], object]) -> None:
        self.connection, child_end = Pipe()
        self._errors = os.memfd_create("nvgemm-aot-worker")
        self._close_errors = weakref.finalize(self, os.close, self._errors)
        stderr = _duplicate_of_stderr()
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, *_args_from_interpreter_flags(), "-c", BOOTSTRAP),
                    *(str(child_end.fileno()), str(stderr), *map(str, sys.path)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=_ONE_THREAD | os.environ,
                pass_fds=(child_end.fileno(), stderr),
            )
        finally:
            os.close(stderr)
            child_end.close()
        with contextlib.suppress(OSError):  # if the process has died, waiting for it shows that
            self.connection.send((work, prepare))
        self._pipe = os.fstat(self.connection.fileno())
        self.ready = False
        self.item: Item | None = None
        self.deadline = math.inf
        self.tasks = 0

    def give(self, item: Item) -> None:
        self.item = item
        self.tasks += 1
        with contextlib.suppress(OSError):  # if the process has died, waiting for it shows that
            self.connection.send(item)

    def has_pipe(self) -> bool:
        """Returns True if the pipe is open; a library can close all descriptors of this process."""
        return _is_open(self.connection.fileno(), self._pipe)

    def stop(self) -> str:
        """Kills the process; returns how it ended, with its error output if it was never ready."""
        # Killing loses nothing: a worker stores each result, and nobody needs the rest.
        self.process.kill()
        status = self.process.wait()
        tail = b""
        with contextlib.suppress(OSError):  # if this process's descriptors were closed
            start = max(0, os.fstat(self._errors).st_size - _STDERR_TAIL_BYTES)
            tail = os.pread(self._errors, _STDERR_TAIL_BYTES, start)
        for close in (self.connection.close, self._close_errors):
            with contextlib.suppress(OSError):
                close()
        ending = _status_text(status)
        output = tail.decode(errors="replace").strip() or "it printed no error"
        return ending if self.ready or status == _CLOSED_PIPE else f"{ending}: {output}"


class Workers(Generic[Item, Result]):
    """Pool of processes, started at once so that they get ready while work is prepared.

    Use it as a context manager: leaving it stops every process within moments. Processes end if
    their parent is killed.

    Args:
        count: Number of processes, at least 1.
        work: Function that processes an item; importable by name.
        prepare: Function that a process calls first, e.g. for slow imports; importable by name.
        limit_seconds: Time limit per item, not counting time under `clock_stopped`.
    """

    def __init__(
        self,
        count: int,
        work: Callable[[Item], Result],
        prepare: Callable[[], object],
        limit_seconds: float = math.inf,
    ) -> None:
        self._count = count
        self._work = work
        self._prepare = prepare
        self._limit_seconds = limit_seconds
        self._idle: list[_Worker[Item, Result]] = []
        self._busy: dict[Connection[Any, Any], _Worker[Item, Result]] = {}
        self._all: set[_Worker[Item, Result]] = set()
        self._failed_starts = 0
        self._killed = False
        self._fill()

    def __enter__(self) -> Workers[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        workers, self._all = self._all, set()
        self._idle, self._busy = [], {}
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.stop()

    def kill(self) -> None:
        """Stops every process for good, from any thread. A thread in `run` gets WorkersKilled."""
        self._killed = True
        workers = list(self._all)
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()

    def run(self, items: Sequence[Item]) -> Iterator[tuple[Item, Result | WorkerDied]]:
        """Processes all items and yields each with its result, in no fixed order.

        Raises:
            WorkersKilled: If `kill` was called.
            WorkersCannotStart: If processes and their replacements end before they are ready.
            Exception: Any exception from ``work``.
            KeyboardInterrupt: If ``work`` or ``prepare`` raised it.
        """
        waiting = list(reversed(items))
        deaths: Counter[int] = Counter()
        while waiting or self._busy:
            self._fill()
            while waiting and self._idle:
                self._give(self._idle.pop(), waiting.pop())
            for worker in self._wait_for_answers():
                item = worker.item
                assert item is not None  # every busy worker has an item
                try:
                    outcome = worker.connection.recv()
                except (EOFError, OSError):
                    ending = self._drop(worker)
                    if not worker.ready:
                        waiting.append(item)
                        self._count_failed_start(ending)
                        continue
                    deaths[id(item)] += 1
                    if deaths[id(item)] < MAX_DEATHS:
                        waiting.append(item)
                    else:
                        yield item, WorkerDied(ending)
                    continue
                if isinstance(outcome, Ready):
                    self._failed_starts = 0
                    worker.ready = True
                    worker.deadline = time.monotonic() + self._limit_seconds
                    continue
                if isinstance(outcome, Waiting):
                    worker.deadline = math.inf
                    continue
                if worker.tasks >= TASKS_PER_WORKER:
                    self._drop(worker)
                else:
                    del self._busy[worker.connection]
                    self._idle.append(worker)
                if isinstance(outcome, _RAISED):
                    raise outcome
                yield item, outcome
            for worker in self._overdue():
                item = worker.item
                assert item is not None
                self._drop(worker)
                if worker.ready:
                    yield item, TimeLimitExceeded(f"not done within {self._limit_seconds:g} s")
                else:
                    waiting.append(item)
                    self._count_failed_start(f"not ready within {START_SECONDS:g} s")

    def _fill(self) -> None:
        """Starts the processes that the pool lacks."""
        while len(self._all) < self._count:
            if self._killed:
                raise WorkersKilled
            fresh = _Worker(self._work, self._prepare)
            self._all.add(fresh)
            self._idle.append(fresh)

    def _give(self, worker: _Worker[Item, Result], item: Item) -> None:
        seconds = self._limit_seconds if worker.ready else START_SECONDS
        worker.deadline = time.monotonic() + seconds
        worker.give(item)
        self._busy[worker.connection] = worker

    def _wait_for_answers(self) -> list[_Worker[Item, Result]]:
        """Waits until workers have answered or died, or until a worker is overdue."""
        if not all(worker.has_pipe() for worker in self._busy.values()):
            raise WorkersCannotStart(
                f"the build's own process lost their pipes, {_CLOSED_DESCRIPTORS_HINT}"
            )
        rest = min(worker.deadline for worker in self._busy.values()) - time.monotonic()
        ready = wait(list(self._busy), min(max(0.0, rest), _LONGEST_WAIT_SECONDS))
        return [worker for connection, worker in self._busy.items() if connection in ready]

    def _overdue(self) -> list[_Worker[Item, Result]]:
        """Returns the workers past their deadline that have still not answered."""
        now = time.monotonic()
        overdue = [worker for worker in self._busy.values() if worker.deadline <= now]
        return [worker for worker in overdue if not worker.connection.poll()]

    def _drop(self, worker: _Worker[Item, Result]) -> str:
        """Stops a worker for good; returns how it ended."""
        if self._killed:
            raise WorkersKilled
        del self._busy[worker.connection]
        self._all.remove(worker)
        return worker.stop()

    def _count_failed_start(self, ending: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= self._count + MAX_RESTARTS:
            count, self._failed_starts = self._failed_starts, 0
            raise WorkersCannotStart(
                f"{count} in a row ended before they were ready, the last {ending}"
            )


def _duplicate_of_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:  # stderr is closed
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _status_text(status: int) -> str:
    if status == _CLOSED_PIPE:
        return f"without its pipe to the build, {_CLOSED_DESCRIPTORS_HINT}"
    if status >= 0:
        return f"with exit status {status}"
    hint = ", as when memory is short" if status == -signal.SIGKILL else ""
    with contextlib.suppress(ValueError):  # some real-time signals have no name
        return f"by {signal.Signals(-status).name}{hint}"
    return f"by signal {-status}"


class Ready:
    """Worker message: ready, or done waiting. Restarts the time limit."""


class Waiting:
    """A worker's message that it waits for another process. Stops the time limit."""


_to_parent: Connection[Any, Any] | None = None
"""The pipe to the parent, in a worker process."""


@contextlib.contextmanager
def clock_stopped() -> Iterator[None]:
    """Restarts the current item's time limit after the block; does nothing outside a worker."""
    if _to_parent is not None:
        _to_parent.send(Waiting())
    yield
    if _to_parent is not None:
        _to_parent.send(Ready())


def serve(connection: int, stderr: int) -> None:
    """Runs a worker process: gets ready, then answers items with results until the pipe closes.

    The parent first sends ``(work, prepare)`` through the pipe with descriptor ``connection``. Once
    the process is ready, its error output goes to ``stderr``. Earlier output goes to a file that
    the parent reads to explain a process that does not get ready.
    """
    # Torch warns of this at its import; nothing here uses NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    # Ctrl-C reaches the whole process group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, args=(connection,), daemon=True).start()
    global _to_parent
    pipe: Connection[Any, Any] = Connection(connection)
    _to_parent = pipe
    pipe_status = os.fstat(connection)
    try:
        work, prepare = pipe.recv()
        prepared: BaseException | None = None
        gc.disable()  # importing a compiler makes a million objects, of which none is garbage
        try:
            prepare()
        except _RAISED as error:
            prepared = error
        gc.freeze()
        gc.enable()
        _require_open(connection, pipe_status)
        _show_errors(stderr)
        pipe.send(Ready())
        while True:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a library may have changed it
            answer = _work_on(work, pipe.recv(), prepared)
            _require_open(connection, pipe_status)
            pipe.send(answer)
    except (EOFError, OSError):
        return


def _require_open(descriptor: int, status: os.stat_result) -> None:
    """Ends this process if a descriptor was closed, and perhaps reopened as another file.

    The parent would receive nothing and wait for the time limit.
    """
    if not _is_open(descriptor, status):
        os._exit(_CLOSED_PIPE)


def _is_open(descriptor: int, status: os.stat_result) -> bool:
    """Returns True if a descriptor is open and still refers to the same file."""
    try:
        return os.path.samestat(os.fstat(descriptor), status)
    except OSError:
        return False


def _work_on(work: Callable[[Any], Any], item: object, prepared: BaseException | None) -> object:
    try:
        if prepared is not None:
            raise prepared
        return work(item)
    except _RAISED as error:
        return error


def _die_with_parent(connection: int) -> None:
    """Kills this process as soon as its parent has ended."""
    poll = select.poll()
    poll.register(connection, 0)  # for a hang-up alone
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _show_errors(stderr: int) -> None:
    """Redirects all output to the parent's stderr, beginning with the text written so far.

    Includes standard output: the parent's standard output carries only the command's result.
    """
    written = os.pread(2, os.fstat(2).st_size, 0)
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)
    os.close(stderr)
    while written:
        written = written[os.write(2, written) :]
