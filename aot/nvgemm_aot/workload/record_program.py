"""Runs a program and records its GEMMs into a manifest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.errors import RecordError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import TargetName
from nvgemm_runtime.recording.recorder import Recorder, named_target
from nvgemm_runtime.settings import (
    MODE_VARIABLE,
    RECORD_VARIABLE,
    TARGET_VARIABLE,
    Mode,
    default_mode,
)

from .interpreter import Interpreter, find_interpreter, is_python
from .run_command import run_to_end

_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Python options that take the next argument."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Result of recording a program.

    Attributes:
        status: The program's exit status, as in shells; if that is 0 and ``file_error`` is set,
            `RecordError`'s.
        problems: Number of calls for each GEMM that a manifest can declare.
        undeclarable: Number of calls for each other GEMM.
        new: Number of problems that the file did not have.
        file_error: Reason why the file is no longer a recording, or None.
        interpreter: The program's Python, if it has one and called no GEMM.
    """

    status: int
    path: Path
    problems: Counter[Problem]
    undeclarable: Counter[str]
    new: int
    file_error: str | None = None
    interpreter: Interpreter | None = None


def record_program(
    command: Sequence[str], path: Path, *, target: TargetName | None = None, fake: bool = False
) -> Recorded:
    """Runs a program and merges its GEMMs into a manifest.

    Args:
        command: The program and its arguments.
        path: Manifest: an earlier recording, or a new file.
        target: Target to build for; None for the GPU.
        fake: Run a Python program under fake tensors and record the GEMMs that it calls instead of
            those that torch.compile compiles.

    Raises:
        RecordError: If recording is impossible; the command is then not started.
        SettingError: If NVGEMM_AOT names no mode.
        CannotStartError: If the command cannot be started.
    """
    recorder = Recorder(path)
    environment = {**os.environ, RECORD_VARIABLE: str(recorder.path)}
    if target is not None:
        environment[TARGET_VARIABLE] = target.text
    if default_mode() is Mode.OFF:
        raise RecordError(f"{MODE_VARIABLE}=off: recording needs it unset")
    named_target(environment)
    recorder.check()
    if fake:
        command = _with_fake_tensors(command)
        environment["CUDA_VISIBLE_DEVICES"] = ""
    before = recorder.read()
    status = run_to_end(command, environment)
    try:
        after = recorder.read()
    except RecordError as error:
        return Recorded(
            status=status or RecordError.exit_code,
            path=recorder.path,
            problems=Counter(),
            undeclarable=Counter(),
            new=0,
            file_error=str(error),
        )
    problems, undeclarable = (
        after.problems - before.problems,
        after.undeclarable - before.undeclarable,
    )
    return Recorded(
        status=status,
        path=recorder.path,
        problems=problems,
        undeclarable=undeclarable,
        new=len(after.problems.keys() - before.problems.keys()),
        interpreter=None if problems or undeclarable else find_interpreter(command),
    )


def _with_fake_tensors(command: Sequence[str]) -> list[str]:
    """Builds the command that runs a Python program under fake tensors.

    Raises:
        RecordError: If it is no Python program.
    """
    python, *arguments = command
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        if arguments[index] in ("-m", "-c"):
            break
        index += 2 if arguments[index] in _OPTIONS_WITH_VALUE else 1
    program = arguments[index:]
    is_whole = len(program) > (program[:1] in (["-m"], ["-c"]))
    if not is_python(python) or not is_whole:
        raise RecordError(
            f"--fake runs only Python programs: the command is {' '.join(command)!r}, must be "
            "python script.py …, python -m package … or python -c code …"
        )
    return [python, *arguments[:index], "-m", "nvgemm_aot.workload.fake_run", *program]
