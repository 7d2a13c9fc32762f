"""What runs in a worker process: it gets ready, and works on items until its maker is gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

BOOTSTRAP = (
    "import sys; connection, stderr, *sys.path = sys.argv[1:]; "
    "from nvgemm_aot.build.worker_process import serve; serve(int(connection), int(stderr))"
)
"""Code of the process; its arguments are two descriptors and the module path of its maker."""


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
