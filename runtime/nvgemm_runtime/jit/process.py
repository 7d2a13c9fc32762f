"""Starts the JIT server and exchanges messages with it over two pipes."""

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
"""Server module, run by name and never imported here."""

_PIPE_BYTES = 1 << 20
"""Pipe size for thousands of requests, so that sending never waits. The default is 64 KiB."""

_STDERR_TAIL_BYTES = 2000

_END_SECONDS = 2.0

_NOT_INHERITED = (
    *("TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE"),
    *("NVGEMM_AOT_RECORD", "NVGEMM_AOT_EXPLAIN"),
)
"""Variables that would make the server write into this process's files."""


class JitProcess:
    """Running server.

    Args:
        arguments: Further server arguments.
        answered: Called with each answer, in a separate thread.
        ended: Called once in that thread, at the end, with a description of the crash or None.

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
        with contextlib.suppress(OSError):  # the user's pipes may have reached their limit
            fcntl.fcntl(self._requests, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, "--parent", str(os.getpid()), *arguments],
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=self._errors,
                cwd="/",  # files in the user's directory must not be imported as modules
                env=_environment(),
                start_new_session=True,  # Ctrl-C goes to this process, which ends the server
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
        """Process id."""
        return self._process.pid

    def send(self, request: dict[str, Any]) -> None:
        """Sends a request. If the server has died, `ended` is called soon."""
        with self._sending, contextlib.suppress(OSError):
            os.write(self._requests, json.dumps(request).encode() + b"\n")

    def end(self) -> None:
        """Ends the server, and kills it after `_END_SECONDS`."""
        self._close_requests()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def abandon(self) -> None:
        """Closes the pipes in a forked child. The server belongs to the parent."""
        for descriptor in (self._requests, self._answers, self._errors):
            with contextlib.suppress(OSError):  # already closed if the server was ending
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
        crash = f"the builder ended ({_status_text(status)}): {tail or 'it printed no error'}"
        self._ended(self, crash if status or not count else None)

    def _read_answers(self) -> int:
        """Passes on all answers until the pipe closes, and returns their number."""
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
    """Returns this process's environment with its import path, adapted for the server."""
    variables = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    paths = (os.path.abspath(path) for path in map(str, sys.path) if os.pathsep not in path)  # noqa: PTH100
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",  # compiling needs no GPU, and a context would take memory
        "NVGEMM_AOT": "off",  # the server uses torch only to describe operands
    }
