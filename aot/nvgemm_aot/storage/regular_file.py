"""Reads files that a user names, and refuses what only looks like one: that might never end."""

from __future__ import annotations

import os
import select
import stat
from pathlib import Path
from typing import BinaryIO

from nvgemm_runtime.errors import StorageError

LONGEST_SILENCE_S = 60.0
"""How long a pipe's writer may write nothing."""

_PIPE = "a pipe"
_KINDS = {
    stat.S_IFIFO: _PIPE,
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class IrregularFileError(StorageError):
    """What is named is there, and nothing can be read of it without waiting for ever."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, in any order.

    Raises:
        IrregularFileError: If it is a pipe, a socket or a device.
        OSError: If it cannot be opened, or is a directory.
    """
    kind, file = _open(path)
    if kind is not None:
        file.close()
        raise _irregular(path, kind)
    return file


def read_start(path: Path, most_bytes: int) -> bytes:
    """Read a file, or a pipe that somebody writes to, such as the shell's ``<(...)``.

    Args:
        path: What to read.
        most_bytes: How much of it is read.

    Raises:
        IrregularFileError: If it is a pipe that nobody writes to, or whose writer is silent for
            `LONGEST_SILENCE_S`; a socket; or a device.
        OSError: If it cannot be read, or is a directory.
    """
    kind, file = _open(path)
    with file:
        if kind is None:
            return file.read(most_bytes)
        if kind != _PIPE:
            raise _irregular(path, kind)
        return _read_pipe(path, file.fileno(), most_bytes)


def _read_pipe(path: Path, descriptor: int, most_bytes: int) -> bytes:
    """What comes out of a non-blocking pipe until its end."""
    parts: list[bytes] = []
    left = most_bytes
    arrived = select.poll()
    arrived.register(descriptor, select.POLLIN)
    while left:
        try:
            part = os.read(descriptor, left)
        except BlockingIOError:
            if not arrived.poll(LONGEST_SILENCE_S * 1e3):
                silence = f"{_PIPE} whose writer wrote nothing for {LONGEST_SILENCE_S:g} s"
                raise _irregular(path, silence) from None
            continue
        if not part:
            break
        parts.append(part)
        left -= len(part)
    if not parts:
        raise _irregular(path, f"{_PIPE} that nobody writes to")
    return b"".join(parts)


def _open(path: Path) -> tuple[str | None, BinaryIO]:
    """Open whatever there is without waiting, and say what it is; None for a file.

    Raises:
        IrregularFileError: If it is a socket.
    """
    kind = _kind(path.stat().st_mode)
    if kind not in (None, _PIPE):
        raise _irregular(path, kind)  # to open a device can do something
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    file = os.fdopen(descriptor, "rb")  # refuses a directory
    return _kind(os.fstat(descriptor).st_mode), file


def _kind(mode: int) -> str | None:
    return _KINDS.get(stat.S_IFMT(mode))


def _irregular(path: Path, kind: str | None) -> IrregularFileError:
    return IrregularFileError(
        f"{path}: this is {kind}; allowed: a regular file; write the content to one, and name that"
    )
