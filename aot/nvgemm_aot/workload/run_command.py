"""Runs a user's command to its end and forwards signals to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

_STANDARD_ERROR = 2


class CannotStartError(OSError):
    """The user's command cannot be started."""


_SIGNAL_STATUS_BASE = 128
"""Offset in shells' exit status for a command that a signal ended."""

_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
"""Signals that a terminal sends to all foreground processes, which include the command."""

_PASSED_ON = (*_TERMINAL_SIGNALS, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_to_end(
    command: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False
) -> int:
    """Runs a command, waits for it, and returns its exit status.

    As in shells, the status is 128 + N if signal N ended the command. Signals that would end this
    process go to the command, which decides whether it ends; its GEMMs are reported either way.
    With ``quiet``, the command's output goes to standard error.

    Raises:
        CannotStartError: If the command cannot be started.
    """
    output = _STANDARD_ERROR if quiet else None
    with _SignalsForwarded() as signals:
        try:
            process = subprocess.Popen(command, env=environment, stdout=output)
        except OSError as error:
            raise CannotStartError(error.errno, error.strerror, command[0]) from error
        with process:
            signals.forward_to(process)
            status = process.wait()
    return status if status >= 0 else _SIGNAL_STATUS_BASE - status


class _SignalsForwarded:
    """Context manager that forwards this process's signals to a command.

    Signals that arrive before the command starts are forwarded later. Ignored signals stay ignored,
    as with nohup.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> _SignalsForwarded:
        if threading.current_thread() is threading.main_thread():
            for number in _PASSED_ON:
                self._handlers.enter_context(_installed_handler(number, self._receive))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def forward_to(self, process: subprocess.Popen[bytes]) -> None:
        """Forwards signals to this process from now on."""
        self._process = process
        while self._early:
            process.send_signal(self._early.pop(0))

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number in _TERMINAL_SIGNALS and _is_in_foreground():
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


@contextlib.contextmanager
def _installed_handler(number: int, handler: signal._HANDLER) -> Iterator[None]:
    before = signal.getsignal(number)
    if before in (None, signal.SIG_IGN):
        yield
        return
    # Not SIG_IGN, which the command would inherit.
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _is_in_foreground() -> bool:
    """Returns True if this process, and so the command, gets terminal input."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
