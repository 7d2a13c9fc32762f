"""Ctrl-C: ends the process at once during imports, and raises KeyboardInterrupt in a command."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it: 128 + SIGINT."""


def leave_at_once() -> None:
    """Makes Ctrl-C end this process without a traceback while no command has begun.

    Ignored interrupts, as in background jobs of some shells, stay ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt during the block instead of ending the process."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    # Not by an exception: imports may replace it by another, or print and drop it.
    with contextlib.suppress(OSError):
        os.write(2, b"nvgemm-aot: interrupted\n")
    os._exit(INTERRUPTED)
