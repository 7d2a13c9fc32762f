"""What Ctrl-C does to the command: it ends at once, or, while a command is at work, is handled."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it: 128 + SIGINT."""


def leave_at_once() -> None:
    """Have Ctrl-C end this process without a traceback, for nothing has been begun yet.

    Where interrupts are ignored, as in background jobs of some shells, they stay so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt in the block where it would end the process at once."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    # Not by an exception: imports turn some into others, or print and drop them.
    with contextlib.suppress(OSError):
        os.write(2, b"nvgemm-aot: interrupted\n")
    os._exit(INTERRUPTED)
