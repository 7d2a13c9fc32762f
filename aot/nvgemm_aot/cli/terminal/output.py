"""Handles standard output and standard error that cannot be written, as on a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

import click


def failed_stream(error: OSError) -> str | None:
    """Returns the standard stream that could not be written, or None for any other error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("click.utils", "echo"):
            return _stream_name(frame.f_locals.get("file"))
    return None


def _stream_name(stream: Any) -> str | None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return _NAMES.get(stream.fileno())
    return None


_NAMES = {1: "standard output", 2: "standard error"}
"""Names by file descriptor."""


def report(message: str) -> None:
    """Prints an error, if standard error can be written."""
    with contextlib.suppress(OSError):
        click.echo(f"nvgemm-aot: error: {message}", err=True)


def drop_unwritten() -> None:
    """Drops unwritten output, because the interpreter would try again at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            null_device = os.open(os.devnull, os.O_WRONLY)
            with contextlib.suppress(OSError):
                os.dup2(null_device, stream.fileno())
            os.close(null_device)
