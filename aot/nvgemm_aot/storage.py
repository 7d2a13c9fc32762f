"""Writing files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from nvgemm_runtime.errors import StorageError

TEMPORARY_SUFFIX = ".partial"
"""Ending of the names under which files are written before they get their own."""


def write_atomic(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` whole or not at all, creating parent directories.

    The bytes go to a temporary file in the same directory, are flushed to disk, and replace
    ``path`` in one step.

    Raises:
        StorageError: If the directory cannot be written or the disk is full; ``path`` is as before.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot write {len(data)} bytes: {error.strerror}; "
            "free space there or choose another place"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
