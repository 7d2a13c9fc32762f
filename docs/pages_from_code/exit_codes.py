"""Every exit code, from the classes of errors."""

from __future__ import annotations

import inspect

import click

from nvgemm_aot.cli.terminal.interrupts import INTERRUPTED
from nvgemm_runtime import errors
from nvgemm_runtime.errors import NvgemmError

from .tables import table

OTHERS = {
    0: ("", "Done."),
    1: ("", "An unexpected failure, with a traceback; please report it."),
    click.UsageError.exit_code: ("", "The command was used wrongly."),
    INTERRUPTED: ("", "Interrupted by Ctrl-C. What was compiled or measured is kept."),
}
"""Codes of no class of the project's."""


def section() -> str:
    """A table of the codes, sorted."""
    rows = [
        (str(code), f"`{name}`" if name else "", text)
        for code, (name, text) in sorted((OTHERS | raised()).items())
    ]
    return table(("code", "error", "meaning"), rows)


def raised() -> dict[int, tuple[str, str]]:
    """By exit code: the class that has it, and the first part of its docstring."""
    return {kind.exit_code: (kind.__name__, _meaning(kind)) for kind in kinds()}


def kinds() -> list[type[NvgemmError]]:
    """All classes of errors but their base, which nothing raises."""
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, NvgemmError) and kind is not NvgemmError
    ]


def _meaning(kind: type[NvgemmError]) -> str:
    text = inspect.cleandoc(kind.__doc__ or "").split("Attributes:")[0]
    return " ".join(text.replace("``", "`").split())
