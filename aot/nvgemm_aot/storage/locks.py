"""Locks between processes: an exclusive flock, which the death of its holder frees.

The file is removed when it is unlocked. Killed processes leave theirs behind, which are harmless;
`remove_unused` removes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from nvgemm_runtime.errors import StorageError

from .files import make_directories, open_new_file

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without locks. There, work is at worst done twice: files are replaced
whole."""


class FileLock:
    """A lock that is held."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Unlock the file and remove it."""
        # Removed while it is held: a process that waits for the removed file notices and retries.
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)


def acquire(path: Path, *, wait: bool = True) -> FileLock | None:
    """Lock a file, which is made together with its directory.

    Nothing else uses the file.

    Returns:
        The lock; None where another holds it and ``wait`` is false.

    Raises:
        StorageError: If the file cannot be made.
    """
    try:
        make_directories(path.parent)
        while True:
            descriptor = _open(path)
            try:
                if not _flock(descriptor, wait=wait):
                    os.close(descriptor)
                    return None
                if _is_at(descriptor, path):
                    return FileLock(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot lock: {error.strerror}; choose another place"
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; see `acquire`."""
    lock = acquire(path)
    assert lock is not None  # it was waited for
    try:
        yield
    finally:
        lock.release()


def remove_unused(directory: Path) -> None:
    """Remove the lock files that killed processes have left behind.

    Each is locked while it is removed: a process that wants it waits, and makes a new one.
    """
    for path in directory.glob("*"):
        with contextlib.suppress(StorageError):
            lock = acquire(path, wait=False)
            if lock is not None:
                lock.release()


def _open(path: Path) -> int:
    try:
        return open_new_file(path, os.O_RDWR)
    except PermissionError:  # another user's, which can be locked all the same
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _flock(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
