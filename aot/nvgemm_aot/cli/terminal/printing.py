"""Output helpers for all commands: tables, counts, sizes, results, and progress on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime.errors import count_text as count_text

if TYPE_CHECKING:
    from ...pipeline.compiler import Progress


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Lays out rows in columns; columns whose cells are all numbers are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def print_result(document: Any, as_text: Callable[[Any], str], *, as_json: bool) -> None:
    """Prints a command's result: its document as JSON, or the text made from it."""
    click.echo(json.dumps(document, indent=2) if as_json else as_text(document))


def failed_text(status: int, interpreter: str | None) -> str:
    """Describes a user's command that failed before its first GEMM, with its Python if known."""
    text = f"the command exited with status {status} before compiling a GEMM"
    return text if interpreter is None else f"{text} ({interpreter})"


def keep_stdout() -> contextlib.AbstractContextManager[object]:
    """Redirects other packages' output to stderr: stdout is for the command's result alone."""
    return contextlib.redirect_stdout(sys.stderr)


def size_text(size_bytes: int) -> str:
    """Formats a size in B, kB or MB."""
    if size_bytes < 10_000:
        return f"{size_bytes} B"
    if size_bytes < 10_000_000:
        return f"{size_bytes / 1e3:.1f} kB"
    return f"{size_bytes / 1e6:.1f} MB"


def us_text(time_ns: int | None) -> float | str:
    """Formats a time in microseconds, as a table cell."""
    return "-" if time_ns is None else time_ns / 1e3


def percent_text(percent: Fraction | float) -> str:
    """Formats a percentage with one decimal, rounded down so that 100.0 % means all."""
    return f"{math.floor(percent * 10) / 10:.1f} %"


def file_document(path: Path) -> dict[str, Any]:
    """Describes a written file."""
    return {"path": str(path), "bytes": path.stat().st_size}


def file_text(document: dict[str, Any]) -> str:
    """Renders a written file."""
    return f"{document['path']}: written, {size_text(document['bytes'])}"


_LEAST_DONE = 4
"""Items after the first that are needed to estimate a rate."""

_PLAIN_SECONDS = 5.0
"""Least interval between progress lines without a terminal, in seconds."""


@contextlib.contextmanager
def report_progress(verb: str, noun: str = "kernel") -> Iterator[Progress]:
    """Reports progress on stderr, led by ``verb``: a bar on a terminal, else plain lines."""
    with contextlib.ExitStack() as stack:
        yield _bar(verb, stack) if sys.stderr.isatty() else _lines(verb, noun)


def _bar(verb: str, stack: contextlib.ExitStack) -> Progress:
    bar: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            shown = click.progressbar(length=total, label=verb, show_pos=True, file=sys.stderr)
            bar = stack.enter_context(shown)
        bar.update(done - bar.pos)

    return report


def _lines(verb: str, noun: str) -> Progress:
    last = time.monotonic()
    remaining = RemainingTime()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        left_s = remaining.after(done, total, now)
        if done == 0:
            click.echo(f"{verb} {count_text(total, noun)}", err=True)
        elif done == total or now - last >= _PLAIN_SECONDS:
            last = now
            remaining_text = "" if left_s is None else f", about {left_s:.0f} s left"
            click.echo(f"{verb} {done} of {total} done{remaining_text}", err=True)

    return report


class RemainingTime:
    """Estimates the remaining time from the items done after the first.

    The first takes as long as processes take to start, which the others do not.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def after(self, done: int, total: int, now_s: float) -> float | None:
        """Returns the seconds left, or None while the rate is unknown and at the end."""
        if done == 0:
            return None
        if self._first is None:
            self._first = done, now_s
        first_done, first_s = self._first
        if done == total or done - first_done < _LEAST_DONE:
            return None
        return (now_s - first_s) / (done - first_done) * (total - done)
