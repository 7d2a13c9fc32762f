"""Progress of a build on stderr: a bar where there is a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..build.compiler import Progress

_PLAIN_SECONDS = 5.0
"""Where there is no terminal, progress is one line at most this often."""


@contextlib.contextmanager
def report_progress(verb: str, of: str = "kernels") -> Iterator[Progress]:
    """Report how many kernels, or other things, are done, with the time left.

    Args:
        verb: What is done with them, e.g. ``Compiling``.
        of: What they are.
    """
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
