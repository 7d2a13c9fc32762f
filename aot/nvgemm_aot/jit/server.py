"""Compiles for a user's process, in a process of its own that imports the compiler.

It reads requests from standard input and writes answers to standard output, each a line of JSON.
`nvgemm_runtime.jit.client` starts it and is the other end. It ends with the user's process, or
after some idle time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvgemm_runtime.errors import NvgemmError, StorageError, ToolchainError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.settings import (
    JIT_JOBS_VARIABLE,
    JIT_PROVIDER_VARIABLE,
    printable,
    whole_number,
)

from ..pipeline.compiler_limits import default_jobs
from ..providers import PROVIDERS, SEPARATOR, Provider, load_provider
from ..storage import temporary_directory
from ..storage.build_cache import Cache
from ..storage.files import finish_writing
from ..storage.remote.remote_cache import RemoteCache, open_remote
from ..targets.local import Device
from .jit_compiler import Compiled, JitCompiler

_log = logging.getLogger(__name__)

IDLE_SECONDS = 60
"""Idle time after which the server ends, because it and its compilers hold gigabytes."""

_MOST_REQUESTS = 256
"""Most concurrent requests; most of them wait for compilers or for other servers."""

_ATTEMPTS = 2
"""Number of attempts with a cache directory: the user may be clearing it during the first."""

_POLL_SECONDS = 0.5


class Server:
    """Answers requests for kernels, on the descriptor ``answers``."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._writing = threading.Lock()
        self._setup = threading.Lock()
        self._compilers: dict[Path, JitCompiler] = {}
        self._remote: RemoteCache | None = None
        self._has_opened_remote = False
        self._temporary: Path | None = None
        self._warnings: list[str] = []
        self._logged: set[str] = set()
        self._notes: list[str] = []
        self._threads = ThreadPoolExecutor(max_workers=_MOST_REQUESTS)
        self._working = 0
        self._last_work = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds without work; 0 while this process alone holds kernels."""
        if self._working or self._temporary is not None:
            return 0.0
        return time.monotonic() - self._last_work

    def take(self, request: dict[str, Any]) -> None:
        """Starts work on a request; the answer is written when it is done."""
        with self._writing:
            self._working += 1
        self._threads.submit(self._work, request)

    def warn(self, text: str) -> None:
        """Sends a warning with the next answer, each text once."""
        if text not in self._logged:
            self._logged.add(text)
            self._warnings.append(text)

    def close(self) -> None:
        """Stops compiling, and removes the temporary cache directory, if any."""
        with self._setup:
            for compiler in self._compilers.values():
                compiler.close()
            if (
                self._temporary is not None
            ):  # first: the parent waits for little, sending takes long
                temporary_directory.remove(self._temporary)
            if self._remote is not None:
                self._remote.__exit__(None, None, None)

    def _work(self, request: dict[str, Any]) -> None:
        began = time.monotonic()
        try:
            outcome = self._compile(request)
        except NvgemmError as error:
            outcome = Compiled(reason=str(error))
        except Exception as error:
            _log.exception("%s", request.get("problem"))
            outcome = Compiled(reason=f"{type(error).__name__}: {error}")
        with self._writing:
            warnings, self._warnings = self._warnings, []
            notes, self._notes = self._notes, []
            answer = {
                "id": request["id"],
                "bundle": None if outcome.bundle is None else str(outcome.bundle),
                "compiled": outcome.compiled,
                "reason": outcome.reason,
                "failures": [f"{f.task.candidate.operator}: {f.reason}" for f in outcome.failures],
                "seconds": time.monotonic() - began,
                "warnings": warnings,
                "notes": notes,
            }
            _write_all(self._answers, json.dumps(answer).encode() + b"\n")
            self._working -= 1
            self._last_work = time.monotonic()

    def _compile(self, request: dict[str, Any]) -> Compiled:
        problem = Problem.parse(request["problem"])
        device = Device.from_json(request["device"])
        candidates = int(request["candidates"])
        for _ in range(_ATTEMPTS if self._temporary is None else 0):
            try:
                compiler = self._compiler(Path(request["cache"]))
                return compiler.compile(problem, candidates, device)
            except StorageError as error:
                refusal = error
        directory = self._temporary or self._give_up(refusal)
        return self._compiler(directory).compile(problem, candidates, device)

    def _compiler(self, directory: Path) -> JitCompiler:
        with self._setup:
            if directory not in self._compilers:
                self._compilers[directory] = JitCompiler(
                    Cache(directory), _provider(), _jobs(), self._notes.append, self._open_remote()
                )
            return self._compilers[directory]

    def _open_remote(self) -> RemoteCache | None:
        """Opens the remote cache, once; warns if its settings are wrong, and goes on without."""
        if not self._has_opened_remote:
            self._has_opened_remote = True
            try:
                self._remote = open_remote()
            except NvgemmError as error:
                self.warn(f"run-time compiling goes on without the remote cache: {error}")
        return self._remote

    def _give_up(self, error: StorageError) -> Path:
        """Switches to a temporary cache directory for this process alone; warns once."""
        with self._setup:
            if self._temporary is None:
                self._temporary = temporary_directory.make()
                self._warnings.append(f"newly compiled kernels serve this process only: {error}")
            return self._temporary


def _provider() -> Provider:
    """Creates the providers that the variable names, by default all installed ones.

    A program's environment may hold another package that pins quack. Unlike a build, the server
    therefore works without a provider that cannot be used.

    Raises:
        ToolchainError: If a named provider does not exist, or by default no provider can be used.
    """
    setting = os.environ.get(JIT_PROVIDER_VARIABLE)
    if setting:
        return load_provider(setting)
    errors: dict[str, ToolchainError] = {}
    for name in PROVIDERS:
        try:
            load_provider(name).toolchain()
        except ToolchainError as error:
            errors[name] = error
    usable = SEPARATOR.join(name for name in PROVIDERS if name not in errors)
    if not usable:
        raise next(iter(errors.values()))
    for name, cause in errors.items():
        _log.warning(
            "run-time compiling skips provider %s: %s; to silence this, set %s=%s",
            *(name, cause, JIT_PROVIDER_VARIABLE, usable),
        )
    return load_provider(usable)


def _jobs() -> int:
    setting = os.environ.get(JIT_JOBS_VARIABLE, "")
    if jobs := whole_number(setting):
        return jobs
    if setting:
        _log.warning(
            "%s=%s: must be a number, 1 or more; taken as %d",
            *(JIT_JOBS_VARIABLE, printable(setting), default_jobs()),
        )
    return default_jobs()


class _ToUser(logging.Handler):
    """Passes each warning in this process once to the user's process."""

    def __init__(self, server: Server) -> None:
        super().__init__(logging.WARNING)
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:  # an answer carries errors with a traceback
            self._server.warn(record.getMessage())


def _write_all(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the client is gone, and this process will end
        while data:
            data = data[os.write(descriptor, data) :]


def serve(requests: int, answers: int, parent: int, idle_seconds: float) -> None:
    """Answers requests until the parent has ended or the idle time is over.

    Both descriptors are pipes. Ends when the pipe for requests closes, or when ``parent`` is no
    longer the parent: other processes may hold the pipe open.
    """
    server = Server(answers)
    logging.getLogger("nvgemm_aot").addHandler(_ToUser(server))
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    rest = b""
    try:
        while os.getppid() == parent:
            if not poll.poll(_POLL_SECONDS * 1000):
                if server.idle_seconds >= idle_seconds:
                    return
                continue
            data = os.read(requests, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                server.take(json.loads(line))
    finally:
        server.close()


def main() -> None:
    """Runs the server on standard input and output."""
    parser = argparse.ArgumentParser(prog="nvgemm_aot.jit.server", description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The runtime loads no file that others could write.
    os.umask(os.umask(0o077) | 0o022)
    # Compilers must neither print among the answers nor read requests.
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as null_device:  # noqa: PTH123
        os.dup2(null_device.fileno(), 0)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    serve(requests, answers, options.parent, options.idle_seconds)
    # Threads that wait for locks or compilers must not keep this process alive.
    finish_writing()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
