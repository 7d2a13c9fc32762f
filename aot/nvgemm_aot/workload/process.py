"""Runs a user's command to its end, with the terminal's interrupts left to it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

_STANDARD_ERROR = 2

_KILLED = 128
"""What shells add to the number of the signal that ended a command."""


def run_to_end(
    command: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False
) -> int:
    """Run a command and wait for it, whatever is pressed meanwhile.

    Args:
        command: The program and its arguments.
        environment: All of its variables.
        quiet: Whether what it prints goes to standard error.

    Returns:
        Its exit status, as shells give it: 128 + N where signal N ended it.

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
    """Have Ctrl-C do nothing to this process from before the command is started to after its end.

    The terminal interrupts the command too, which ends or goes on as it likes: what it met is worth
    as much, and a server has no other end.
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
