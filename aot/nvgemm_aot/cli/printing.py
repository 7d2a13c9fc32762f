"""What all commands print with: tables, counts, sizes, results, and progress on stderr."""

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

if TYPE_CHECKING:
    from ..build.compiler import Progress


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Lay out rows in columns; columns whose cells are all numbers are right-aligned."""
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
    """Print a command's result: its document as JSON, or the text made of that."""
    click.echo(json.dumps(document, indent=2) if as_json else as_text(document))


def failed_text(status: int, interpreter: str | None) -> str:
    """Says that a user's command failed before it came to a GEMM, and in which Python."""
    text = f"the command exited with status {status} before compiling a GEMM"
    return text if interpreter is None else f"{text} ({interpreter})"


def keep_stdout() -> contextlib.AbstractContextManager[object]:
    """Send what other packages print to stderr: a command's result alone goes to stdout."""
    return contextlib.redirect_stdout(sys.stderr)


def count_text(count: int, noun: str) -> str:
    """A count with its noun: ``1 problem``, ``2 problems``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(size_bytes: int) -> str:
    """A size in B, kB or MB."""
    if size_bytes < 10_000:
        return f"{size_bytes} B"
    if size_bytes < 10_000_000:
        return f"{size_bytes / 1e3:.1f} kB"
    return f"{size_bytes / 1e6:.1f} MB"


def us_text(time_ns: int | None) -> float | str:
    """A time in microseconds, as a cell of a table."""
    return "-" if time_ns is None else time_ns / 1e3


def percent_text(percent: Fraction | float) -> str:
    """A percentage with one decimal, rounded down so that 100.0 % means all."""
    return f"{math.floor(percent * 10) / 10:.1f} %"


def file_document(path: Path) -> dict[str, Any]:
    """Describe a written file."""
    return {"path": str(path), "bytes": path.stat().st_size}


def file_text(document: dict[str, Any]) -> str:
    """Print a written file."""
    return f"{document['path']}: written, {size_text(document['bytes'])}"


_PLAIN_SECONDS = 5.0
"""Least interval of progress lines where there is no terminal."""


@contextlib.contextmanager
def report_progress(verb: str, of: str = "kernels") -> Iterator[Progress]:
    """Report progress on stderr, of ``Compiling`` say: a bar on a terminal, else plain lines."""
    with contextlib.ExitStack() as stack:
        yield _bar(verb, stack) if sys.stderr.isatty() else _lines(verb, of)


def _bar(verb: str, stack: contextlib.ExitStack) -> Progress:
    bar: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            shown = click.progressbar(length=total, label=verb, show_pos=True, file=sys.stderr)
            bar = stack.enter_context(shown)
        bar.update(done - bar.pos)

    return report


def _lines(verb: str, of: str) -> Progress:
    started = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == 0:
            click.echo(f"{verb} {total} {of}", err=True)
        elif done == total or now - last >= _PLAIN_SECONDS:
            last = now
            left = (now - started) / done * (total - done)
            click.echo(f"{verb} {done} of {total} done, about {left:.0f} s left", err=True)

    return report
