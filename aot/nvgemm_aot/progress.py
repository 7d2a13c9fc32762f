"""Progress of a build on stderr: a bar where there is a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .compiler import Progress

_PLAIN_SECONDS = 5.0
"""Where there is no terminal, progress is one line at most this often."""


@contextlib.contextmanager
def report_progress() -> Iterator[Progress]:
    """Report compiled kernels on stderr: a bar with the time left, or plain lines."""
    if sys.stderr.isatty():
        with contextlib.ExitStack() as stack:
            bar: Any = None

            def advance(done: int, total: int, name: str) -> None:
                nonlocal bar
                if bar is None:
                    bar = stack.enter_context(
                        click.progressbar(
                            length=total, label="Compiling", show_pos=True, file=sys.stderr
                        )
                    )
                bar.update(1)

            yield advance
        return
    started = last = time.monotonic()

    def report(done: int, total: int, name: str) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= _PLAIN_SECONDS:
            last = now
            left = (now - started) / done * (total - done)
            click.echo(f"compiled {done} of {total} kernels, about {left:.0f} s left", err=True)

    yield report
