"""Options and connections of commands that other machines can work for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ...pipeline.executor.scheduler_connection import INSECURE_OPTION, LOCAL, check_address

if TYPE_CHECKING:
    from ...pipeline.compiler import KernelWorkers
    from ...storage.build_cache import Cache
    from ...storage.remote.remote_cache import RemoteCache

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def executor_option(text: str) -> Option:
    """Returns the option ``--executor`` with a command's help text."""
    return click.option(
        "--executor", default=LOCAL, show_default=True, metavar="ADDRESS", help=text
    )


insecure_option = click.option(
    INSECURE_OPTION,
    is_flag=True,
    help="Allow tcp:// to another machine: whoever reaches that scheduler runs code on its "
    "workers and here.",
)


def checked_executor(address: str, *, allow_insecure: bool) -> str:
    """Returns an executor's address if it may be used.

    Raises:
        click.UsageError: If it may not.
    """
    if address == LOCAL:
        if allow_insecure:
            raise click.UsageError(f"{INSECURE_OPTION} needs --executor tcp://…")
        return address
    try:
        return check_address(address, allow_insecure=allow_insecure)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--executor") from None


@contextlib.contextmanager
def open_executor(
    address: str, remote: RemoteCache | None, *, allow_insecure: bool
) -> Iterator[Callable[[Cache], KernelWorkers] | None]:
    """Connects to an executor; yields what creates its workers, or None for this machine.

    Raises:
        ExecutorError: If the scheduler cannot be reached, or there is no remote cache.
    """
    if address == LOCAL:
        yield None
        return
    from ...pipeline.executor.dask_workers import DaskWorkers, require_remote
    from ...pipeline.executor.scheduler_connection import connect

    require_remote(remote)
    with connect(address, allow_insecure=allow_insecure) as client:
        yield functools.partial(DaskWorkers, client, remote)
