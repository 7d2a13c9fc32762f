"""Taking hold of what a tuning is to write, before anything is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, StorageError, TuningError

from ..storage.files import require_writable, sweep_partials_of
from ..storage.locks import acquire
from .state import state_path


@contextlib.contextmanager
def reserved(output: Path) -> Iterator[None]:
    """Hold an output: nobody else tunes into it meanwhile.

    Raises:
        StorageError: If it cannot be written.
        TuningError: If another process holds it.
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
        yield
    finally:
        lock.release()


def refuse_foreign_measurements(output: Path, written: Collection[str]) -> None:
    """See that no measurements are written over but those of the same tuning.

    Args:
        output: Where it is to write.
        written: Build keys of the bundles that it has written.

    Raises:
        TuningError: If the bundle there is another one, and holds measurements.
    """
    if not output.exists():
        return
    try:
        with Bundle(output) as bundle:
            header = bundle.header
    except BundleFormatError:
        return
    is_measured = any(ranking.measured is not None for ranking in header.rankings)
    if is_measured and header.build_key not in written:
        raise TuningError(
            f"{output} holds measurements that {state_path(output)} knows nothing of: they would "
            "be lost; name another output, or remove this one"
        )
