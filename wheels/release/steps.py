"""Steps of a release: other programs, whose failure ends it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]

# 1980, the earliest time that the zip format can say.
_ENVIRONMENT = {"SOURCE_DATE_EPOCH": "315532800"}


def stop(message: str) -> NoReturn:
    """End the release with an error."""
    sys.exit(f"wheels/release: {message}")


def run(*command: str | Path, **environment: str) -> None:
    """Run a program with our output, and further environment variables."""
    words = [str(word) for word in command]
    together = {**os.environ, **_ENVIRONMENT, **environment}
    if subprocess.run(words, env=together, check=False).returncode != 0:
        stop(f"this failed: {shlex.join(words)}")


def read(*command: str | Path, **environment: str) -> str:
    """What a program prints on standard output, with further environment variables."""
    words = [str(word) for word in command]
    together = {**os.environ, **_ENVIRONMENT, **environment}
    done = subprocess.run(words, env=together, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        stop(f"this failed: {shlex.join(words)}")
    return done.stdout


def run_module(name: str, *arguments: str | Path, **environment: str) -> None:
    """Run a module of this Python's environment."""
    run(sys.executable, "-m", name, *arguments, **environment)


def read_module(name: str, *arguments: str | Path) -> str:
    """What a module of this Python's environment prints on standard output."""
    return read(sys.executable, "-m", name, *arguments)
