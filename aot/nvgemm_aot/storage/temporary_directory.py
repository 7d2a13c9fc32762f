"""Directories that live as long as their process, in memory if possible.

A killed process cannot remove its directory: the next process that makes one does. A lock marks a
directory in use, also between containers that share the file system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from nvgemm_runtime.errors import StorageError

from .locks import acquire

_PREFIX = "nvgemm-aot-jit-"

_SHARED_MEMORY = Path("/dev/shm")

_LOCK = "in-use"

_YOUNG_SECONDS = 60
"""Age in seconds before which a directory may not have its lock yet."""


def make(parent: Path | None = None, *, in_memory: bool = True) -> Path:
    """Makes a directory that only this user can read.

    Its parent is ``parent``, by default shared memory if ``in_memory``, else the system's directory
    for temporary files.

    Raises:
        StorageError: If it cannot be made.
    """
    if parent is None:
        usable = in_memory and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
        parent = _SHARED_MEMORY if usable else Path(tempfile.gettempdir())
    _sweep(parent)
    try:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise StorageError(f"{parent}: no temporary directory: {error.strerror}") from error
    try:
        acquire(directory / _LOCK)  # held for as long as this process lives
    except StorageError:
        remove(directory)
        raise
    return directory


def remove(directory: Path) -> None:
    """Removes such a directory with everything in it."""
    shutil.rmtree(directory, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, StorageError):
            status = directory.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _YOUNG_SECONDS:
                continue
            lock = acquire(directory / _LOCK, wait=False)
            if lock is not None:
                remove(directory)
                lock.release()
