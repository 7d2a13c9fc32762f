"""User's programs that have kernels compiled while they run, in processes of their own.

Kernels are those of `fake_provider`, for a GPU that is not there: nothing here launches them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_provider import FakeProvider
from nvgemm_runtime.gemm.problem import Problem

_PROGRAM = """
import json, sys
sys.path.extend(json.loads(sys.argv[1]))
from nvgemm_runtime.jit.client import CLIENT, request
from nvgemm_runtime.gemm.problem import Problem
from synthetic_facts import H200
pending = [request(Problem.parse(key), H200) for key in json.loads(sys.argv[2])]
process = CLIENT._process
print(json.dumps(None if process is None else process.pid), flush=True)
outcomes = [one.result(600) for one in pending]
print(json.dumps({
    "bundles": [str(outcome.bundle) if outcome.bundle else None for outcome in outcomes],
    "compiled": [outcome.compiled for outcome in outcomes],
    "reasons": [outcome.reason for outcome in outcomes],
    "failures": [outcome.failures for outcome in outcomes],
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
}), flush=True)
"""


def problem(m: int = 16, n: int = 512, k: int = 256) -> Problem:
    """A problem of one signature."""
    return Problem.parse(f"mm/tn/bf16xbf16/fp32/bf16/m{m}n{n}k{k}")


class Program:
    """A running program that asks for problems."""

    def __init__(self, environment: dict[str, str], problems: tuple[Problem, ...]) -> None:
        places = [str(Path(__file__).parent)]
        keys = [problem.key for problem in problems]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(places), json.dumps(keys)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.server: int | None = json.loads(self.process.stdout.readline() or "null")

    def answer(self) -> dict[str, Any]:
        """What came of it, with what it said on standard error."""
        out, said = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, said
        return {**json.loads(out), "said": said}

    def kill(self) -> None:
        """As by kill -9."""
        self.process.kill()
        self.process.communicate()


class JitMachine:
    """A machine with a cache directory of its own, on which programs run."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = directory / "cache"
        self.log = directory / "log"
        self._monkeypatch = monkeypatch
        self._mark = f"JIT_MARK={directory}"
        self.set(
            NVGEMM_AOT_CACHE=str(self.cache),
            NVGEMM_AOT_JIT_PROVIDER=FakeProvider.name,
            NVGEMM_AOT_JIT_JOBS="2",
            FAKE_LOG=str(self.log),
            JIT_MARK=str(directory),
        )

    def set(self, **variables: str) -> None:
        """Set environment variables of the programs, and of this process."""
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def start(self, *problems: Problem) -> Program:
        """Start a program that asks for problems."""
        return Program(dict(os.environ), problems)

    def run(self, *problems: Problem) -> dict[str, Any]:
        """Run one; see `Program.answer`."""
        return self.start(*problems).answer()

    def compiled(self) -> list[str]:
        """The operators that were compiled, each as often as it was, sorted."""
        return sorted(self.log.read_text().split()) if self.log.exists() else []

    def bundles(self) -> list[Path]:
        """The user bundles."""
        return sorted((self.cache / "jit").glob("*.nvgemm"))

    def partial_files(self) -> list[Path]:
        """What a writer that was killed has left."""
        return [path for path in self.cache.rglob("*") if path.name.endswith(".partial")]

    def others(self) -> list[int]:
        """Processes of this machine other than this one: servers, compilers, programs."""
        return [pid for pid in _processes() if self._is_ours(pid) and pid != os.getpid()]

    def compilers_of(self, server: int) -> list[int]:
        """Compiler processes of a server."""
        return [
            pid for pid in _processes() if _parent(pid) == server and _is(pid, b"pipeline.workers")
        ]

    @contextlib.contextmanager
    def ending_quietly(self) -> Iterator[None]:
        """Whatever a test starts must not outlive it, nor be left for it to end."""
        yield
        wait_until(lambda: not self.others(), "processes outlive what they were started for")

    def _is_ours(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return self._mark.encode() in environment.split(b"\0")


def wait_until(condition: Callable[[], object], otherwise: str, seconds: float = 300) -> None:
    """Wait for what must come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def kill(pid: int) -> None:
    """As by kill -9."""
    os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _is(pid: int, word: bytes) -> bool:
    """Whether the command of a process has such a word."""
    try:
        return word in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
