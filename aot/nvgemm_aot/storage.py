"""Writing files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import contextlib
import errno
import glob
import math
import os
import secrets
import threading
import time
from pathlib import Path

from nvgemm_runtime.errors import StorageError

_PARTIAL_SUFFIX = ".partial"
"""Ending of the names under which files are written before they get their own."""

_STALE_SECONDS = 24 * 3600
"""Partial files older than this are nobody's: their writer was killed."""


_writing = threading.Lock()


def finish_writing() -> None:
    """Let a file that another thread writes be finished, and none be begun any more.

    For a process that is about to end though threads of it are at work.
    """
    _writing.acquire()


def write_atomic(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` whole or not at all, creating parent directories.

    The bytes go to a temporary file in the same directory, are flushed to disk, and replace
    ``path`` in one step.

    Raises:
        StorageError: If the directory cannot be written or the disk is full; ``path`` is as before.
    """
    with _writing:
        _write_atomic(path, data)


def _write_atomic(path: Path, data: bytes) -> None:
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}{_PARTIAL_SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        hint = "free space there" if error.errno == errno.ENOSPC else "choose another place"
        raise StorageError(
            f"{path}: cannot write {len(data)} bytes: {error.strerror}; {hint}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def require_writable(directory: Path) -> None:
    """Fail now if a file could not be written later; sweep what killed writers left behind.

    Raises:
        StorageError: If the directory cannot be made or written.
    """
    probe = directory / "probe"
    write_atomic(probe, b"")
    probe.unlink(missing_ok=True)
    sweep_partials(directory)


def remove_file(path: Path) -> bool:
    """Remove a file, if it is there; whether it was.

    Raises:
        StorageError: If it is there and cannot be removed.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot remove {path}: {error.strerror}; remove it by hand") from None
    return True


def sweep_partials(directory: Path) -> None:
    """Remove the partial files that killed writers left in a directory."""
    _sweep(directory, "*", written_before=time.time() - _STALE_SECONDS)


def sweep_partials_of(path: Path) -> None:
    """Remove those of one file, however young: the caller sees to it that nobody writes it now."""
    _sweep(path.parent, glob.escape(path.name) + ".*", written_before=math.inf)


def _sweep(directory: Path, names: str, *, written_before: float) -> None:
    for partial in directory.glob(f".{names}{_PARTIAL_SUFFIX}"):
        with contextlib.suppress(OSError):
            if partial.stat().st_mtime < written_before:
                partial.unlink()
