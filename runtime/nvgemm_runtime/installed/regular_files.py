"""Reads files that a user names, without ever waiting for a writer."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import StorageError
from ..settings import printable_path


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Returns a regular file's first bytes.

    Args:
        path: File path.
        most_bytes: Most bytes to read; a caller with a limit asks for one more.

    Raises:
        OSError: If it cannot be read.
        StorageError: If it is a directory, a pipe, a socket or a device.
    """
    # Non-blocking, because opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StorageError(f"{printable_path(path)}: not a regular file")
        parts = []
        while most_bytes and (part := os.read(descriptor, most_bytes)):
            parts.append(part)
            most_bytes -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
