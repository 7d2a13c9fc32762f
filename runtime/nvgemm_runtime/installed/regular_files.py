"""Reads files that a user names, without ever waiting for a writer."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import StorageError
from ..settings import printable_path


def open_without_waiting(path: Path) -> BinaryIO:
    """Opens a file, also one that is no regular file; reads from a pipe do not wait either.

    Raises:
        OSError: If it cannot be opened, or is a directory.
    """
    return open(path, "rb", opener=_open_descriptor)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Returns a regular file's first bytes.

    Args:
        path: File path.
        most_bytes: Most bytes to read; a caller with a limit asks for one more.

    Raises:
        OSError: If it cannot be read.
        StorageError: If it is a directory, a pipe, a socket or a device.
    """
    try:
        with open_without_waiting(path) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read(most_bytes)
    except IsADirectoryError:
        pass
    raise StorageError(f"{printable_path(path)}: not a regular file")


def _open_descriptor(path: str, flags: int) -> int:
    # Non-blocking, because opening a named pipe would wait for a writer.
    return os.open(path, flags | os.O_NONBLOCK)
