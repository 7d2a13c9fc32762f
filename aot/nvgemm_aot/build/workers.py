"""Worker processes for compiling: one task each at a time, and a death names its task."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]
from types import TracebackType
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_DEATHS = 2
"""A task whose worker died this often is given up: once may be the memory that others took."""

MAX_RESTARTS = 2
"""So many workers are started in place of those that ended before they were ready, in a row."""

START_SECONDS = 300.0
"""A worker that is not ready after so long is taken for one that never will be."""

TASKS_PER_WORKER = 200
"""After so many tasks a worker starts anew: one was seen to grow from 0.55 to 0.92 GB in 200."""

BOOTSTRAP = (
    "import sys; connection, stderr, *sys.path = sys.argv[1:]; "
    "from nvgemm_aot.build.workers import serve; serve(int(connection), int(stderr))"
)
"""Code of the process; its arguments are two descriptors and the module path of its maker."""

_STDERR_TAIL_BYTES = 1000

_LOOK_AGAIN_SECONDS = 3600.0
"""No system call takes endless times."""


class WorkerDied(Exception):
    """The process that had a task died on it, more than once; the text says how."""


class TimeLimitExceeded(WorkerDied):
    """The process that had a task was killed, for it took longer than a task may."""


class WorkersKilled(Exception):
    """The processes were killed from another thread while they had work."""


class WorkersCannotStart(Exception):
    """One process after the other ended before it was ready; the text says how."""


class _Worker(Generic[Item, Result]):
    """One process and the pipe to it."""

    def __init__(self, work: Callable[[Item], Result], prepare: Callable[[], object]) -> None:
        self.connection, theirs = Pipe()
        self._errors = os.memfd_create("nvgemm-aot-worker")
        self._close_errors = weakref.finalize(self, os.close, self._errors)
        stderr = _duplicate_of_stderr()
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, *_args_from_interpreter_flags(), "-c", BOOTSTRAP),
                    *(str(theirs.fileno()), str(stderr), *map(str, sys.path)),
                ],
                stdin=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(theirs.fileno(), stderr),
            )
        finally:
            os.close(stderr)
            theirs.close()
        with contextlib.suppress(OSError):  # a process that has died shows when it is waited for
            self.connection.send((work, prepare))
        self.ready = False
        self.item: Item | None = None
        self.deadline = math.inf
        self.tasks = 0

    def give(self, item: Item) -> None:
        self.item = item
        self.tasks += 1
        with contextlib.suppress(OSError):  # as above
            self.connection.send(item)

    def stop(self) -> str:
        """End the process; returns how it ended, with its errors if it was never ready."""
        # Killed, not asked: what a worker has finished is stored, and the rest is wanted no more.
        self.process.kill()
        status = self.process.wait()
        size_bytes = os.fstat(self._errors).st_size
        start = max(0, size_bytes - _STDERR_TAIL_BYTES)
        tail = os.pread(self._errors, _STDERR_TAIL_BYTES, start).decode(errors="replace").strip()
        self.connection.close()
        self._close_errors()
        how = _status_text(status)
        return how if self.ready else f"{how}: {tail or 'it printed no error'}"


class Workers(Generic[Item, Result]):
    """A pool of processes that starts at once, so that they get ready while work is prepared.

    Use it as a context manager: leaving it, by whatever way, stops every process within moments.
    Processes end by themselves when the one that made them is killed.

    Args:
        count: Processes, at least 1.
        work: What to do with an item; importable by name.
        prepare: What a process does first, such as slow imports; importable by name.
        limit_seconds: How long an item may take, but for what `clock_stopped` leaves out.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        everyone, self._all = self._all, set()
        self._idle, self._busy = [], {}
        for worker in everyone:
            worker.process.kill()
        for worker in everyone:
            worker.stop()

    def kill(self) -> None:
        """Stop every process for good, from any thread; one that is in `run` gets WorkersKilled."""
        self._killed = True
        everyone = list(self._all)
        for worker in everyone:
            worker.process.kill()
        for worker in everyone:
            worker.process.wait()

    def run(self, items: Sequence[Item]) -> Iterator[tuple[Item, Result | WorkerDied]]:
        """Work on all items and yield each when it is done, in no fixed order.

        Raises:
            WorkersKilled: If `kill` was called.
            WorkersCannotStart: If processes end before they are ready, and so do those that are
                started in their place.
            Exception: What ``work`` raised.
        """
        waiting = list(reversed(items))
        deaths: Counter[int] = Counter()
        while waiting or self._busy:
            self._fill()
            while waiting and self._idle:
                self._give(self._idle.pop(), waiting.pop())
            for worker in self._answering():
                item = worker.item
                assert item is not None  # every busy worker was given one
                try:
                    outcome = worker.connection.recv()
                except (EOFError, OSError):
                    how = self._drop(worker)
                    if not worker.ready:
                        waiting.append(item)
                        self._count_failed_start(how)
                        continue
                    deaths[id(item)] += 1
                    if deaths[id(item)] < MAX_DEATHS:
                        waiting.append(item)
                    else:
                        yield item, WorkerDied(how)
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
                if isinstance(outcome, Exception):
                    raise outcome
                yield item, outcome
            for worker in self._late():
                item = worker.item
                assert item is not None
                self._drop(worker)
                if worker.ready:
                    yield item, TimeLimitExceeded(f"not done within {self._limit_seconds:g} s")
                else:
                    waiting.append(item)
                    self._count_failed_start(f"not ready within {START_SECONDS:g} s")

    def _fill(self) -> None:
        """Start what the pool lacks."""
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

    def _answering(self) -> list[_Worker[Item, Result]]:
        """Wait for workers that have something to say, or have died, until one is too late."""
        rest = min(worker.deadline for worker in self._busy.values()) - time.monotonic()
        ready = wait(list(self._busy), min(max(0.0, rest), _LOOK_AGAIN_SECONDS))
        return [worker for connection, worker in self._busy.items() if connection in ready]

    def _late(self) -> list[_Worker[Item, Result]]:
        """Workers past their time that have not answered in the meantime either."""
        now = time.monotonic()
        late = [worker for worker in self._busy.values() if worker.deadline <= now]
        return [worker for worker in late if not worker.connection.poll()]

    def _drop(self, worker: _Worker[Item, Result]) -> str:
        """Stop a worker for good; returns how it ended."""
        if self._killed:
            raise WorkersKilled
        del self._busy[worker.connection]
        self._all.remove(worker)
        return worker.stop()

    def _count_failed_start(self, how: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= self._count + MAX_RESTARTS:
            count, self._failed_starts = self._failed_starts, 0
            raise WorkersCannotStart(
                f"{count} in a row ended before they were ready, the last {how}"
            )


def _duplicate_of_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:  # it is closed
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _status_text(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    hint = ", as when memory is short" if status == -signal.SIGKILL else ""
    with contextlib.suppress(ValueError):  # of real-time signals some have no name
        return f"by {signal.Signals(-status).name}{hint}"
    return f"by signal {-status}"


class Ready:
    """A message: preparations are over, or what was waited for is there. Time counts from now."""


class Waiting:
    """A message: the process waits for another one, which is to count as nobody's time."""


_to_maker: Connection[Any, Any] | None = None
"""The pipe to the maker, in a worker process."""


@contextlib.contextmanager
def clock_stopped() -> Iterator[None]:
    """Have the time limit of the item at hand begin after the block; nothing elsewhere."""
    if _to_maker is not None:
        _to_maker.send(Waiting())
    yield
    if _to_maker is not None:
        _to_maker.send(Ready())


def serve(connection: int, stderr: int) -> None:
    """Receive what to do, get ready, and answer items with results until the other end is gone.

    Args:
        connection: Descriptor of a pipe to the maker, by which first ``(work, prepare)`` come.
        stderr: Descriptor to write errors to once it is ready. What is written before goes where
            the maker can read it: the reason why a process does not get ready.
    """
    # Ctrl-C goes to the whole process group; the maker alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_maker, args=(connection,), daemon=True).start()
    global _to_maker
    pipe: Connection[Any, Any] = Connection(connection)
    _to_maker = pipe
    try:
        work, prepare = pipe.recv()
        prepared: Exception | None = None
        try:
            prepare()
        except Exception as error:
            prepared = error
        _show_errors(stderr)
        pipe.send(Ready())
        while True:
            pipe.send(_outcome(work, pipe.recv(), prepared))
    except (EOFError, OSError):
        return


def _outcome(work: Callable[[Any], Any], item: object, prepared: Exception | None) -> object:
    try:
        if prepared is not None:
            raise prepared
        return work(item)
    except Exception as error:
        return error


def _die_with_maker(connection: int) -> None:
    """End this process when the one that made it has ended, whatever it is busy with."""
    poll = select.poll()
    poll.register(connection, 0)  # for a hang-up alone
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _show_errors(stderr: int) -> None:
    """Write errors where the maker's go from now on, with what was written so far."""
    said = os.pread(2, os.fstat(2).st_size, 0)
    os.dup2(stderr, 2)
    os.close(stderr)
    while said:
        said = said[os.write(2, said) :]
