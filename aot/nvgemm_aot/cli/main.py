"""Group of commands; maps errors to exit codes."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
import warnings
from typing import Any

import click

from nvgemm_runtime import __version__
from nvgemm_runtime.errors import NvgemmError, StorageError, ToolchainError, install_command

from .build.command import build
from .bundles.command import inspect, list_, verify, wheel
from .bundles.merge_and_split import merge, split
from .cache import cache
from .coverage.command import coverage
from .doctor.command import doctor
from .emulate.command import emulate
from .manifest import manifest, schema
from .programs.explain import explain
from .programs.record import record
from .rankings.command import rankings
from .rankings.confirm import confirm
from .rankings.tune import tune
from .signing.command import keygen, sign
from .terminal import interrupts, output

_log = logging.getLogger(__name__)


class _Group(click.Group):
    """Runs a command and turns errors into a message and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs the command line. An error of the operating system also ends it with one line."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            where = output.failed_stream(error) or error.filename or "the operating system"
            _log.debug("traceback", exc_info=True)
            output.report(f"{where}: {error.strerror or error}; {_next_step(error)}")
            output.drop_unwritten()
            sys.exit(StorageError.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            _require_directory()
            with interrupts.raised():
                return super().invoke(ctx)
        except NvgemmError as error:
            output.report(str(error))
            ctx.exit(error.exit_code)
        except ModuleNotFoundError as error:
            module = (error.name or "").partition(".")[0]
            if module in ("", "nvgemm_aot", "nvgemm_runtime"):
                raise
            if module == "numpy":  # only `emulate` needs it
                reason, command = "", install_command("build")
            else:
                reason, command = ", as after pip install --no-deps", install_command()
            output.report(f"the Python module {module} is not installed{reason}; run: {command}")
            ctx.exit(ToolchainError.exit_code)
        except Exception as error:
            if not _is_entry_point_error(error):
                raise
            from ..providers.discovery import unreadable_entry_points

            output.report(str(unreadable_entry_points(error)))
            ctx.exit(ToolchainError.exit_code)
        except KeyboardInterrupt:
            click.echo("nvgemm-aot: interrupted; compiled kernels are in the cache", err=True)
            ctx.exit(interrupts.INTERRUPTED)


def _require_directory() -> None:
    """Refuses to run in a deleted directory, because even torch fails there.

    Raises:
        StorageError: If the current directory was deleted or cannot be read.
    """
    try:
        os.getcwd()  # noqa: PTH109
    except OSError as error:
        raise StorageError(
            f"the current directory: {error.strerror}; it was deleted or cannot be read; change to "
            "another one"
        ) from error


def _next_step(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space there"
    return "for the traceback, run with -vv"


def _is_entry_point_error(error: Exception) -> bool:
    """Returns True if an error was raised while reading entry points, as pydantic and torch do."""
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
    build, cache, confirm, coverage, doctor, emulate, explain, inspect, keygen, list_, manifest,
    merge, rankings, record, schema, sign, split, tune, verify, wheel,
):  # fmt: skip
    main.add_command(_command)
