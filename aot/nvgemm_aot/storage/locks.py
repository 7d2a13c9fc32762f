"""Locks between processes, in directories made for them; see `nvgemm_runtime.recording.file_locks`.

Killed processes leave lock files behind; `remove_unused` removes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.recording import file_locks
from nvgemm_runtime.recording.file_locks import FileLock

from .files import make_directories

__all__ = ["FileLock", "acquire", "locked", "remove_unused"]


def acquire(path: Path, *, wait: bool = True) -> FileLock | None:
    """Locks a file, which is made together with its directory.

    Nothing else may use the file.

    Returns:
        The lock, or None if another process holds it and ``wait`` is False.

    Raises:
        StorageError: If the file cannot be made.
    """
    try:
        make_directories(path.parent)
        return file_locks.acquire(path, wait=wait)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot lock: {error.strerror}; choose another directory"
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a file's lock; see `acquire`."""
    lock = acquire(path)
    assert lock is not None  # `acquire` waits for it
    try:
        yield
    finally:
        lock.release()


def remove_unused(directory: Path) -> None:
    """Removes the lock files that killed processes have left behind.

    Holds each lock during removal: a process that wants it waits, and makes a new file.
    """
    for path in directory.glob("*"):
        with contextlib.suppress(StorageError):
            lock = acquire(path, wait=False)
            if lock is not None:
                lock.release()
