"""Runs a Python program under fake tensors and records its GEMMs, without GPU, memory or data.

`nvgemm-aot record --fake` starts it as ``python -m nvgemm_aot.workload.fake_run script.py …``,
``-m package …`` or ``-c code …``. Variables from `nvgemm_runtime.recording.recorder` name the file.
Tensors for ``cuda`` are created on ``cpu``, which makes no difference to a GEMM: torch without CUDA
has no streams for ``cuda`` tensors, and autograd would end the process.
"""

from __future__ import annotations

import contextlib
import functools
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from nvgemm_runtime.errors import RecordError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.matching.device import host_platform, torch_cuda
from nvgemm_runtime.recording.recorder import Recorder, recorded_target, recorder
from nvgemm_runtime.recording.text import Recording, target_entry

from .called_gemms import GemmCalls

_CUDA = re.compile(r"cuda(:[0-9]+)?")


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Makes every tensor in this thread a fake CPU tensor and disables torch.compile.

    For a dedicated process only: some replaced torch functions are not restored.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _let_parameters_swap(mode)
    _let_autocast_be_on_the_cpu()
    torch.cuda.synchronize = lambda device=None: None
    torch.compiler.set_stance("force_eager")
    with mode, _CudaIsCpu():
        yield


class _CudaIsCpu(TorchFunctionMode):  # type: ignore[misc]
    """Replaces ``cuda`` by ``cpu`` in arguments to torch functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if func in (torch.Tensor.to, torch._C._nn._parse_to):
            # A plain number is a device, too.
            args = ["cpu" if type(value) is int else value for value in args]
        if type(named.get("device")) is int or (
            named.get("device") is None and func in _device_constructors()
        ):
            named["device"] = "cpu"
        return func(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and _CUDA.fullmatch(value) else value


def _let_parameters_swap(mode: FakeTensorMode) -> None:
    """Lets modules change their dtype, which the mode's references to parameters would prevent."""
    swap = torch.utils.swap_tensors

    @functools.wraps(swap)
    def forget_and_swap(first: torch.Tensor, second: torch.Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, second)

    torch.utils.swap_tensors = forget_and_swap


def _let_autocast_be_on_the_cpu() -> None:
    autocast = torch.amp.autocast_mode.autocast
    start = autocast.__init__

    @functools.wraps(start)
    def start_on_cpu(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **named: Any
    ) -> None:
        if _CUDA.fullmatch(device_type):
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        start(self, device_type, dtype, *rest, **named)

    autocast.__init__ = start_on_cpu


WRITE_SECONDS = 1.0
"""Interval between writes in seconds; a new GEMM is written immediately."""

_TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM, as in shells."""

_NOT_STARTED = 2
"""Exit status if there is nothing to run, as in Python."""


class RecordedCalls(GemmCalls):
    """Counts GEMMs and periodically writes them to a recorder's file."""

    def __init__(self, recorder: Recorder, target: Target) -> None:
        super().__init__(target.arch)
        self._kept_by = recorder
        self._entry = target_entry(target)
        self._seen: set[Problem | str] = set()
        self._written = time.monotonic()
        self._writes = False
        self._is_to_end = False

    def write(self) -> None:
        """Adds the counts to the file and resets them.

        Raises:
            RecordError: If the file cannot be written.
            SystemExit: If `end` was called during the write.
        """
        self._writes = True
        if self.problems or self.undeclarable:
            recording = Recording(
                name="",
                targets={self._entry},
                problems=self.problems,
                undeclarable=self.undeclarable,
            )
            self._kept_by.merge(recording)
            self._seen.update(self.problems, self.undeclarable)
            self.problems.clear()
            self.undeclarable.clear()
        self._written = time.monotonic()
        self._writes = False
        if self._is_to_end:
            raise SystemExit(_TERMINATED)

    def end(self, *_: object) -> None:
        """Handles a signal: ends the program, after any write to the file."""
        self._is_to_end = True
        if not self._writes:
            raise SystemExit(_TERMINATED)

    def count(self, gemm: Problem | str) -> None:
        """Counts a GEMM and writes the counts if due."""
        super().count(gemm)
        if gemm not in self._seen or time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()


def main(arguments: list[str]) -> None:
    """Runs a program and records its GEMMs, however it ends.

    Raises:
        RecordError: If no file is named, or it cannot be written.
    """
    kept_by = recorder()
    if kept_by is None:
        raise RecordError("no recording file is named; run nvgemm-aot record --fake instead")
    kept_by.check()
    target = recorded_target(None, host_platform(), torch_cuda())
    calls = RecordedCalls(kept_by, target)
    signal.signal(signal.SIGTERM, calls.end)
    try:
        with fake_tensors(), calls:
            _run_program(arguments)
    except (DataDependentOutputException, DynamicOutputShapeException):
        sys.stderr.write(
            "nvgemm-aot: the program read tensor values, and fake tensors have none: omit that "
            "part, or record on a GPU without --fake\n"
        )
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        calls.write()


def _run_program(arguments: list[str]) -> None:
    """Runs a program as Python's command line does."""
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
        sys.stderr.write(f"nvgemm-aot: no such program: {first}\n")
        raise SystemExit(_NOT_STARTED)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
