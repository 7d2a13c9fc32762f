"""Runs a user's command to its end and leaves the terminal's interrupts to it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

_STANDARD_ERROR = 2

_KILLED = 128
"""Shells report the signal that ended a command as its number plus this."""


def run_to_end(
    command: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False
) -> int:
    """Run a command and wait for it, even if Ctrl-C is pressed; returns its exit status.

    That is as shells give it: 128 + N where signal N ended it. With ``quiet``, the command's output
    goes to standard error.

    Raises:
        OSError: If it cannot be started.
    """
    output = _STANDARD_ERROR if quiet else None
    with (
        _leaving_interrupts_to_it(),
        subprocess.Popen(command, env=environment, stdout=output) as process,
    ):
        status = process.wait()
    return status if status >= 0 else _KILLED - status


@contextlib.contextmanager
def _leaving_interrupts_to_it() -> Iterator[None]:
    """Ignore Ctrl-C in this process while the command runs.

    The terminal interrupts the command too, and that decides whether it ends; its GEMMs are
    reported either way. Interrupting a server is the usual way to end it.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    # Not SIG_IGN, which the command would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
