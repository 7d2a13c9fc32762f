"""Taking hold of what a tuning is to write, before anything is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.errors import BundleFormatError, StorageError, TuningError

from ..locks import acquire
from ..storage import require_writable, sweep_partials_of
from .state import state_path


@contextlib.contextmanager
def reserved(output: Path) -> Iterator[None]:
    """Hold an output: nobody else tunes into it meanwhile.

    Raises:
        StorageError: If it cannot be written.
        TuningError: If another process holds it, or it has measurements whose state is gone.
    """
    if output.is_dir():
        raise StorageError(f"{output}: cannot write: it is a directory; name a file in it")
    require_writable(output.parent)
    lock = acquire(output.with_name(f".{output.name}.lock"), wait=False)
    if lock is None:
        raise TuningError(
            f"{output}: another process is tuning into it; wait for its end, or name another output"
        )
    try:
        sweep_partials_of(output)
        _refuse_foreign_measurements(output)
        yield
    finally:
        lock.release()


def _refuse_foreign_measurements(output: Path) -> None:
    state = state_path(output)
    if output.exists() and not state.exists() and _holds_measurements(output):
        raise TuningError(
            f"{output} holds measurements, and the state they came with, {state}, is not there: "
            "they would be lost; name another output, or remove this one"
        )


def _holds_measurements(path: Path) -> bool:
    try:
        with Bundle(path) as bundle:
            return any(ranking.measured is not None for ranking in bundle.header.rankings)
    except BundleFormatError:
        return False
