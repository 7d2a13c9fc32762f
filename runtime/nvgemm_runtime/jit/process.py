"""Starts and talks to the JIT server: two pipes, and a thread that reads its answers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

SERVER = "nvgemm_aot.jit.server"
"""The module of the server; run by its name and never imported here."""

_PIPE_BYTES = 1 << 20
"""Room for thousands of requests, so that sending one never waits: the default is 64 KiB."""

_STDERR_TAIL_BYTES = 2000

_END_SECONDS = 2.0

_NOT_INHERITED = (
    *("TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE"),
    *("NVGEMM_AOT_RECORD", "NVGEMM_AOT_EXPLAIN"),
)
"""Variables that would have the server write into the files of this process."""


class JitProcess:
    """A running server.

    Args:
        arguments: Further arguments of the server.
        answered: Called with each answer, in a thread of its own.
        ended: Called there once, at the end, with what went wrong, or None.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        answered: Callable[[JitProcess, dict[str, Any]], None],
        ended: Callable[[JitProcess, str | None], None],
    ) -> None:
        self._answered = answered
        self._ended = ended
        self._sending = threading.Lock()
        theirs_in, self._requests = os.pipe()
        self._answers, theirs_out = os.pipe()
        self._errors = os.memfd_create("nvgemm-aot-jit")
        with contextlib.suppress(OSError):  # where pipes of this user take too much already
            fcntl.fcntl(self._requests, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, "--parent", str(os.getpid()), *arguments],
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=self._errors,
                cwd="/",  # files in the user's directory must not be imported as modules
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for this process, which decides what ends
            )
        except OSError:
            for descriptor in (self._requests, self._answers, self._errors):
                os.close(descriptor)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        threading.Thread(target=self._read, name="nvgemm-aot-jit", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, request: dict[str, Any]) -> None:
        """Send a request. Where the server has died, `ended` is called soon."""
        with self._sending, contextlib.suppress(OSError):
            os.write(self._requests, json.dumps(request).encode() + b"\n")

    def end(self) -> None:
        """End the server, and wait a moment for that."""
        self._close_requests()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def abandon(self) -> None:
        """Close the pipes in a forked child: the server is the parent's."""
        for descriptor in (self._requests, self._answers, self._errors):
            with contextlib.suppress(OSError):  # the server was ending
                os.close(descriptor)
        self._process.returncode = 0  # or Popen would wait for it

    def _close_requests(self) -> None:
        with self._sending:
            descriptor, self._requests = self._requests, -1
            if descriptor >= 0:
                os.close(descriptor)

    def _read(self) -> None:
        try:
            count = self._read_answers()
        except Exception as error:  # no further answer can be read
            self._process.kill()
            count, tail = 0, f"{type(error).__name__}: {error}"
        else:
            tail = self._stderr_tail()
        status = self._process.wait()
        self._close_requests()
        os.close(self._answers)
        os.close(self._errors)
        crash = f"the builder side ended ({_status_text(status)}): {tail or 'it printed no error'}"
        self._ended(self, crash if status or not count else None)

    def _read_answers(self) -> int:
        """Pass on every answer until there are no more; returns how many there were."""
        rest = b""
        count = 0
        while data := os.read(self._answers, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._answered(self, json.loads(line))
                count += 1
        return count

    def _stderr_tail(self) -> str:
        size_bytes = os.fstat(self._errors).st_size
        start = max(0, size_bytes - _STDERR_TAIL_BYTES)
        return os.pread(self._errors, _STDERR_TAIL_BYTES, start).decode(errors="replace").strip()


def _status_text(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def _environment() -> dict[str, str]:
    """This process's environment, so that the server can import what this process can."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    places = (os.path.abspath(place) for place in map(str, sys.path) if os.pathsep not in place)  # noqa: PTH100
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(places),
        "CUDA_VISIBLE_DEVICES": "",  # compiling needs no GPU; a context on it would take memory
        "NVGEMM_AOT": "off",  # the server uses torch to describe operands, and not to compile
    }
