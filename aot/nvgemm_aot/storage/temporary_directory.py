"""Directories that live as long as their process: in memory where that can be had.

A killed process cannot remove its own; the next one to make such a directory does. A lock tells
whether a directory is anyone's, whatever containers share the place.
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
"""A directory so young may yet be without its lock."""


def make(parent: Path | None = None, *, in_memory: bool = True) -> Path:
    """Make a directory that only this user can read.

    Args:
        parent: Where to make it; by default where the system has temporary files.
        in_memory: Whether it shall take memory rather than disk, where it can.

    Raises:
        StorageError: If there is no place for it.
    """
    if parent is None:
        usable = in_memory and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
        parent = _SHARED_MEMORY if usable else Path(tempfile.gettempdir())
    _sweep(parent)
    try:
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise StorageError(f"{parent}: no temporary directory: {error.strerror}") from error
    acquire(made / _LOCK)  # held for as long as this process lives
    return made


def remove(directory: Path) -> None:
    """Remove one with all that is in it."""
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
