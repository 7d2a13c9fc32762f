"""The group of commands: maps errors to exit codes."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from typing import Any

import click

from nvgemm_runtime import __version__
from nvgemm_runtime.errors import NvgemmError, ToolchainError
from nvgemm_runtime.installing import install_command

from . import interrupts
from .build import build
from .bundles import inspect, list_, verify, wheel
from .cache import cache
from .coverage import coverage
from .doctor import doctor
from .explain import explain
from .manifest import manifest, schema
from .rankings import rankings
from .record import record
from .tune import tune


class _Group(click.Group):
    """Runs a command and turns the project's errors into a message and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interrupts.raised():
                return super().invoke(ctx)
        except NvgemmError as error:
            click.echo(f"nvgemm-aot: error: {error}", err=True)
            ctx.exit(error.exit_code)
        except ModuleNotFoundError as error:
            module = (error.name or "").partition(".")[0]
            if module in ("", "nvgemm_aot", "nvgemm_runtime"):
                raise
            click.echo(
                f"nvgemm-aot: error: the Python module {module} is not installed, as after "
                f"pip install --no-deps; run: {install_command()}",
                err=True,
            )
            ctx.exit(ToolchainError.exit_code)
        except Exception as error:
            if not _read_entry_points(error):
                raise
            from ..providers.discovery import unreadable_entry_points

            click.echo(f"nvgemm-aot: error: {unreadable_entry_points(error)}", err=True)
            ctx.exit(ToolchainError.exit_code)
        except KeyboardInterrupt:
            click.echo("nvgemm-aot: interrupted; what was compiled is kept", err=True)
            ctx.exit(interrupts.INTERRUPTED)


def _read_entry_points(error: Exception) -> bool:
    """Whether an error was raised while entry points were read, as pydantic and torch do."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = {(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames}
    return ("importlib.metadata", "entry_points") in names


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nvgemm-aot")
@click.option("-v", "--verbose", count=True, help="Log more; twice for debug messages.")
def main(verbose: int) -> None:
    """Compile GEMM kernels ahead of time, check them, and pack them into wheels."""
    # Torch warns of this at its import; nothing here uses NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    levels = {0: logging.WARNING, 1: logging.INFO}
    logging.basicConfig(
        level=levels.get(verbose, logging.DEBUG), format="%(name)s: %(message)s", stream=sys.stderr
    )


for _command in (
    build, cache, coverage, doctor, explain, inspect, list_, manifest, rankings, record, schema,
    tune, verify, wheel,
):  # fmt: skip
    main.add_command(_command)
