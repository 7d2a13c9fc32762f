"""Writing files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path

from nvgemm_runtime.errors import StorageError

_PARTIAL_SUFFIX = ".partial"
"""Ending of the names under which files are written before they get their own."""

_STALE_SECONDS = 24 * 3600
"""Partial files older than this are nobody's: their writer was killed."""


def write_atomic(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` whole or not at all, creating parent directories.

    The bytes go to a temporary file in the same directory, are flushed to disk, and replace
    ``path`` in one step.

    Raises:
        StorageError: If the directory cannot be written or the disk is full; ``path`` is as before.
    """
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


def sweep_partials(directory: Path) -> None:
    """Remove the partial files that killed writers left in a directory."""
    oldest = time.time() - _STALE_SECONDS
    for partial in directory.glob(f".*{_PARTIAL_SUFFIX}"):
        with contextlib.suppress(OSError):
            if partial.stat().st_mtime < oldest:
                partial.unlink()
