"""Runs a Python program under fake tensors and records the GEMMs that it calls.

``python -m nvgemm_aot.workload.fake_run script.py …``, ``-m package …`` or ``-c code …``; the
variables of `nvgemm_runtime.recording.recorder` say where to. `nvgemm-aot record --fake` starts it.
"""

from __future__ import annotations

import runpy
import signal
import sys
import time
from pathlib import Path

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from nvgemm_runtime.errors import RecordError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.recording.recorder import Recorder, chosen_target, recorder
from nvgemm_runtime.recording.text import Recording

from .dispatch import GemmCalls
from .fake_cuda import fake_tensors

WRITE_SECONDS = 1.0
"""Counts are written this often, while GEMMs are called; one that is new is written at once."""

_TERMINATED = 128 + signal.SIGTERM
"""Exit status of a terminated command, as shells give it."""

_NOT_STARTED = 2
"""Exit status where there is nothing to run, as Python gives it."""


class KeptCalls(GemmCalls):
    """Counts GEMMs, and keeps them in a file meanwhile.

    Args:
        kept_by: What they are kept by.
        target: What to build for.
    """

    def __init__(self, kept_by: Recorder, target: str) -> None:
        super().__init__(target)
        self._kept_by = kept_by
        self._target = target
        self._seen: set[Problem | str] = set()
        self._written = time.monotonic()
        self._writes = False
        self._is_to_end = False

    def write(self) -> None:
        """Move what was counted to the file.

        Raises:
            RecordError: If it cannot be written.
            SystemExit: If `end` was called meanwhile.
        """
        self._writes = True
        if self.problems or self.others:
            found = Recording(
                name="", targets={self._target}, problems=self.problems, others=self.others
            )
            self._kept_by.merge(found)
            self._seen.update(self.problems, self.others)
            self.problems.clear()
            self.others.clear()
        self._written = time.monotonic()
        self._writes = False
        if self._is_to_end:
            raise SystemExit(_TERMINATED)

    def end(self, *_: object) -> None:
        """End the program, but no write to the file: a handler of signals."""
        self._is_to_end = True
        if not self._writes:
            raise SystemExit(_TERMINATED)

    def count(self, met: Problem | str) -> None:
        """Count a GEMM, and write what was counted if it is time."""
        super().count(met)
        if met not in self._seen or time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()


def main(arguments: list[str]) -> None:
    """Run a program, and keep what it calls however it ends.

    Raises:
        RecordError: If no file is named, or it cannot be written.
    """
    kept_by = recorder()
    if kept_by is None:
        raise RecordError("no file to record to is named; run nvgemm-aot record --fake instead")
    kept_by.check()
    calls = KeptCalls(kept_by, chosen_target(None))
    signal.signal(signal.SIGTERM, calls.end)
    try:
        with fake_tensors(), calls:
            _run(arguments)
    except (DataDependentOutputException, DynamicOutputShapeException):
        sys.stderr.write(
            "nvgemm-aot: the program looked at numbers, and fake tensors have none: leave that "
            "part out, or record where a GPU is, without --fake\n"
        )
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        calls.write()


def _run(arguments: list[str]) -> None:
    """Run a program as Python's command line does."""
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif not Path(first).exists():
        sys.stderr.write(f"nvgemm-aot: there is no program {first}\n")
        raise SystemExit(_NOT_STARTED)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
