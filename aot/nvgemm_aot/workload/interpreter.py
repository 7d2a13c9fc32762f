"""Finds a command's Python and checks it for torch and nvgemm-aot."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHON = re.compile(r"python[0-9.]*")

_MODULES = {"torch": "torch", "nvgemm_runtime": "nvgemm-aot"}
"""Package names in messages, by module."""

_PROBE = f"""
import importlib.util, json, platform, sys
missing = [name for name in {list(_MODULES)!r} if importlib.util.find_spec(name) is None]
print(json.dumps([sys.executable, platform.python_version(), missing]))
"""

_PROBE_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """Python interpreter.

    Attributes:
        path: Executable.
        version: Version, such as ``3.11.9``.
        missing: Packages that are not installed there: torch, nvgemm-aot or both.
    """

    path: str
    version: str
    missing: tuple[str, ...]

    def __str__(self) -> str:
        lacks = f", without {' and '.join(self.missing)}" if self.missing else ""
        return f"interpreter: {self.path}, Python {self.version}{lacks}"


def is_python(program: str) -> bool:
    """Returns True if a program's name is that of a Python interpreter."""
    return _PYTHON.fullmatch(Path(program).name) is not None


def find_interpreter(command: Sequence[str]) -> Interpreter | None:
    """Queries a command's Python; None if the command runs neither Python nor a Python script."""
    python = command[0] if is_python(command[0]) else _python_of_script(command[0])
    if python is None:
        return None
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
        path, version, missing = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return Interpreter(
        path=path, version=version, missing=tuple(_MODULES[module] for module in missing)
    )


def _python_of_script(program: str) -> str | None:
    """Returns the Python in a script's first line, which pip writes for ``torchrun``."""
    script = shutil.which(program)
    try:
        with Path(script or program).open("rb") as file:
            first = file.readline(1000).decode(errors="replace").strip()
    except OSError:
        return None
    python = first.removeprefix("#!").strip()
    return python if first.startswith("#!") and is_python(python) else None
