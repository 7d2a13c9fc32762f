"""Requests kernels that no bundle has from a builder process.

Imports neither the builder nor the compiler. The first request starts the process, the JIT server.
It ends with this process, even after a crash, or after a while without requests. It writes kernels
into a user bundle, where `Installation.refresh_user_bundles` finds them.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import install_command
from ..gemm.problem import Problem
from ..gemm.target import CPU, PLATFORMS
from ..installed.jit_cache import default_directory
from ..matching.device import DeviceFacts
from ..reporting.counters import COUNTERS
from ..settings import JIT_CANDIDATES_VARIABLE, JIT_PROVIDER_VARIABLE, jit_candidates
from .builder import is_installed, missing_module
from .process import JitProcess

MAX_CRASHES = 2
"""Number of crashes after which the server is not started again. A single crash may come from a
lack of memory."""

_DEVICE_FACTS = (
    *("kind", "name", "capability", "multiprocessors", "shared_memory_bytes"),
    *("platform", "cuda"),
)
"""Device facts in a request."""

_CROSS_MODULE = "ziglang"
"""Module in the extra `cross`: the linker for Arm kernels, on Arm machines too."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class JitResult:
    """Result of a request.

    Attributes:
        problem: Requested problem.
        bundle: User bundle with kernels for it, or None.
        compiled: Number of kernels compiled for this request; 0 if other processes compiled them.
        seconds: Server time, including waits for other processes.
        reason: Reason why there is no kernel, or None.
        failures: Reasons why candidates did not compile. Other candidates may have compiled.
    """

    problem: Problem
    bundle: Path | None = None
    compiled: int = 0
    seconds: float = 0.0
    reason: str | None = None
    failures: tuple[str, ...] = ()


class Pending:
    """Request in progress."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._asked_at = time.monotonic()
        self._result: JitResult | None = None
        self._done = threading.Event()

    def done(self) -> bool:
        """Returns True if `result` would not wait."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> JitResult:
        """Waits for the result. Never raises: a failure is a result with its reason.

        Args:
            timeout: Longest wait in seconds, counted from the request. The server continues, and
                the result can be requested again.
        """
        wait_s = None if timeout is None else max(0.0, self._asked_at + timeout - time.monotonic())
        self._done.wait(wait_s)
        return self._result or JitResult(
            problem=self.problem, reason=f"not compiled within {timeout} s"
        )

    def settle(self, result: JitResult) -> None:
        """Sets the result once. Later results are ignored."""
        if self._result is None:
            self._result = result
            self._done.set()

    def fail(self, reason: str) -> Pending:
        """Settles the request without a kernel."""
        self.settle(JitResult(problem=self.problem, reason=reason))
        return self


def why_not_compiling(facts: DeviceFacts) -> str | None:
    """Returns the reason why this process cannot compile for a device, or None. Imports nothing."""
    if not jit_candidates():
        return f"{JIT_CANDIDATES_VARIABLE} is 0"
    has_provider = bool(os.environ.get(JIT_PROVIDER_VARIABLE))
    if facts.kind == CPU and not has_provider:
        return "nothing compiles kernels for the CPU"
    if has_provider:
        missing = None if is_installed("nvgemm_aot") else "nvgemm_aot"
    else:
        missing = missing_module()
    needs_linker = facts.kind != CPU and _is_cross(facts.platform)
    if missing is None and needs_linker and not is_installed(_CROSS_MODULE):
        missing = _CROSS_MODULE
    return None if missing is None else _missing(missing, facts.platform)


def _missing(module: str, platform: str) -> str:
    extras = "build,cross" if _is_cross(platform) else "build"
    return f"the builder is not installed: no {module}; run: {install_command(extras)}"


def _is_cross(platform: str) -> bool:
    """Returns True if the linker from the extra ``cross`` links a platform's kernels."""
    return platform in PLATFORMS[1:]


class JitClient:
    """Requests from this process. Safe to use in several threads and after a fork."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)
        self._process: JitProcess | None = None
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._asked: dict[tuple[Problem, DeviceFacts], Pending] = {}
        self._open: dict[int, tuple[dict[str, Any], Pending]] = {}
        self._crashes = 0
        self._closed: str | None = None

    def request(self, problem: Problem, facts: DeviceFacts) -> Pending:
        """Requests kernels for a problem, at most once per process.

        Never raises, and never waits for the builder.
        """
        pending = Pending(problem)
        try:
            reason = why_not_compiling(facts)
            if reason is not None:
                return pending.fail(reason)
            with self._lock:
                earlier = self._asked.setdefault((problem, facts), pending)
                if earlier is pending:
                    self._ask(pending, facts)
                return earlier
        except Exception as error:  # Inductor compiles without these kernels.
            _log.debug("%s: cannot request kernels", problem.key, exc_info=True)
            return pending.fail(f"{type(error).__name__}: {error}")

    def find_request(self, problem: Problem, facts: DeviceFacts) -> Pending | None:
        """Returns the request for a problem, or None."""
        return self._asked.get((problem, facts))

    def close(self) -> None:
        """Ends the server, or kills it after a short wait. Its compiled kernels remain."""
        with self._lock:
            process, self._process = self._process, None
            self._give_up("this process is ending")
        if process is not None:
            process.end()

    def forget(self) -> None:
        """Drops the parent's requests in a forked child, which starts its own server."""
        process, self._process = self._process, None
        open_requests = self._open
        self._reset()
        for _, pending in open_requests.values():
            pending.fail("requested by the parent process before a fork")
        if process is not None:
            process.abandon()

    def _ask(self, pending: Pending, facts: DeviceFacts) -> None:
        if self._closed is not None:
            pending.fail(self._closed)
            return
        number = next(self._numbers)
        request = {
            "id": number,
            "problem": pending.problem.key,
            "candidates": jit_candidates(),
            "cache": str(default_directory().absolute()),
            "device": {name: getattr(facts, name) for name in _DEVICE_FACTS},
        }
        self._open[number] = request, pending
        if self._process is None:
            self._start([request])
        else:
            self._process.send(request)

    def _start(self, requests: Sequence[dict[str, Any]]) -> None:
        try:
            self._process = JitProcess(self._arguments, self._answered, self._ended)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self._give_up(f"the builder cannot be started: {error}")
            return
        for request in requests:
            self._process.send(request)

    def _answered(self, process: JitProcess, answer: dict[str, Any]) -> None:
        for warning in answer["warnings"]:
            _log.warning("%s", warning)
        for note in answer["notes"]:
            _log.info("%s", note)
        with self._lock:
            _, pending = self._open.pop(answer["id"], (None, None))
        if pending is None:
            return
        COUNTERS.compiled(answer["compiled"])
        bundle = answer["bundle"]
        pending.settle(
            JitResult(
                problem=pending.problem,
                bundle=None if bundle is None else Path(bundle),
                compiled=answer["compiled"],
                seconds=answer["seconds"],
                reason=answer["reason"],
                failures=tuple(answer["failures"]),
            )
        )

    def _ended(self, process: JitProcess, crash: str | None) -> None:
        with self._lock:
            if process is not self._process:
                return  # closed on purpose
            self._process = None
            if crash is not None:
                self._crashes += 1
                _log.debug("%s", crash)
            if self._crashes >= MAX_CRASHES:
                self._give_up(str(crash))
            elif self._open:
                self._start([request for request, _ in self._open.values()])

    def _give_up(self, reason: str) -> None:
        self._closed = reason
        for _, pending in self._open.values():
            pending.fail(reason)
        self._open = {}


CLIENT = JitClient()
"""Client of this process."""


request, find_request = CLIENT.request, CLIENT.find_request

atexit.register(CLIENT.close)
os.register_at_fork(after_in_child=CLIENT.forget)
