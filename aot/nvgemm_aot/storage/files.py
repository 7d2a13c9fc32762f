"""Writes files so that neither a reader nor a crash ever sees half a file.

New files and directories have no write permission for others, whatever the umask: code is loaded
from them, and nothing is loaded that others could have changed.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import math
import os
import secrets
import select
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.installed.regular_files import open_without_waiting

_PARTIAL_SUFFIX = ".partial"
"""Suffix for files while they are written."""

_STALE_SECONDS = 24 * 3600
"""Age at which a partial file is the leftover of a killed writer."""


_DIRECTORY_MODE = 0o755
_FILE_MODE = 0o644
"""Permissions for new directories and files; the umask can restrict them further."""

_writing = threading.Lock()


def finish_writing() -> None:
    """Waits until no thread is writing a file, and stops others from starting.

    For a process that is about to end while its threads work.
    """
    _writing.acquire()


def make_directories(path: Path) -> None:
    """Makes a directory and its parents, writable only by this user.

    Leaves existing directories unchanged. If a directory cannot be made or used, removes the ones
    made so far.

    Raises:
        OSError: If a directory cannot be made.
    """
    missing = [path]
    while not missing[-1].parent.is_dir() and missing[-1] != missing[-1].parent:
        missing.append(missing[-1].parent)
    if len(missing) > 1 and missing[-1].exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(missing[-1]))
    created: list[Path] = []
    try:
        for directory in reversed(missing):
            if _make_directory(directory):
                created.append(directory)
    except OSError:
        for directory in reversed(created):
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise


def _make_directory(path: Path) -> bool:
    """Makes a directory unless it exists; returns True if it was made."""
    try:
        path.mkdir(_DIRECTORY_MODE)
    except OSError:
        if path.is_dir():
            return False
        raise
    if stat.S_IMODE(path.stat().st_mode) & stat.S_IRWXU != stat.S_IRWXU:
        path.rmdir()
        reason = "the umask denies this user access to new directories"
        raise OSError(errno.EACCES, reason, str(path))
    return True


def open_new_file(path: Path, flags: int) -> int:
    """Opens a file, and makes it if missing so that only this user can write it.

    Raises:
        OSError: If the file cannot be opened.
    """
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)


def write_atomic(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Writes ``data`` to ``path`` whole or not at all, creating parent directories.

    The bytes go to a temporary file in the same directory, are flushed to disk, and replace
    ``path`` in one step. Unless ``is_durable``, they are not flushed: after a crash of the machine
    the file may be damaged, which its reader must notice.

    Raises:
        StorageError: If the directory cannot be written or the disk is full; ``path`` is unchanged.
    """
    try:
        with _writing:
            _write_bytes(path, data, is_durable=is_durable)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot write {len(data)} bytes: {error.strerror}; {space_hint(error)}"
        ) from error


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Writes files that belong together; if one cannot be written, new ones are removed again.

    Each file is written as by `write_atomic`. A file that existed before stays: the former one or
    the new one.

    Raises:
        StorageError: If a file cannot be written.
    """
    made: list[Path] = []
    try:
        for path, data in contents.items():
            if not path.exists():
                made.append(path)
            write_atomic(path, data)
    except BaseException:  # also an interruption
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink()
        raise


def _write_bytes(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}{_PARTIAL_SUFFIX}"
    try:
        make_directories(path.parent)
        descriptor = open_new_file(temporary, os.O_WRONLY | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def space_hint(error: OSError) -> str:
    """Returns the next step after a failed write."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "free space there" if is_full else "choose another directory"


def require_writable(directory: Path) -> None:
    """Fails early if a directory is not writable; sweeps leftovers from killed writers.

    Raises:
        StorageError: If the directory cannot be made or written.
    """
    probe = directory / "probe"
    try:
        with _writing:
            _write_bytes(probe, b"")
    except OSError as error:
        raise StorageError(
            f"{directory}: cannot be written: {error.strerror}; {space_hint(error)}"
        ) from error
    probe.unlink(missing_ok=True)
    sweep_partials(directory)


def remove_file(path: Path) -> bool:
    """Removes a file if it exists; returns True if it did.

    Raises:
        StorageError: If the file exists and cannot be removed.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot remove {path}: {error.strerror}; remove it by hand") from None
    return True


def sweep_partials(directory: Path) -> None:
    """Removes the partial files that killed writers left in a directory."""
    _sweep(directory, "*", written_before=time.time() - _STALE_SECONDS)


def sweep_partials_of(path: Path) -> None:
    """Removes one file's partial files at any age; the caller ensures that nobody writes it."""
    _sweep(path.parent, glob.escape(path.name) + ".*", written_before=math.inf)


def _sweep(directory: Path, names: str, *, written_before: float) -> None:
    for partial in directory.glob(f".{names}{_PARTIAL_SUFFIX}"):
        with contextlib.suppress(OSError):
            if partial.stat().st_mtime < written_before:
                partial.unlink()


LONGEST_SILENCE_S = 60.0
"""Longest time without output from a pipe's writer, in seconds."""

_PIPE = "a pipe"
_KINDS = {
    stat.S_IFIFO: _PIPE,
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class IrregularFileError(StorageError):
    """The path exists, but reading it could block forever."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, in any order.

    Raises:
        IrregularFileError: If it is a pipe, a socket or a device.
        OSError: If it cannot be opened, or is a directory.
    """
    kind, file = _open_named(path)
    if kind is not None:
        file.close()
        raise _irregular_error(path, kind)
    return file


def read_start(path: Path, most_bytes: int) -> bytes:
    """Reads a file, or a pipe with a writer, such as the shell's ``<(...)``.

    Raises:
        IrregularFileError: If it is a socket, a device, a pipe without a writer, or a pipe whose
            writer is silent for `LONGEST_SILENCE_S`.
        OSError: If it cannot be read, or is a directory.
    """
    kind, file = _open_named(path)
    with file:
        if kind is None:
            return file.read(most_bytes)
        if kind != _PIPE:
            raise _irregular_error(path, kind)
        return _read_pipe(path, file.fileno(), most_bytes)


def _read_pipe(path: Path, descriptor: int, most_bytes: int) -> bytes:
    """Reads a non-blocking pipe until its end."""
    parts: list[bytes] = []
    remaining = most_bytes
    arrived = select.poll()
    arrived.register(descriptor, select.POLLIN)
    while remaining:
        try:
            part = os.read(descriptor, remaining)
        except BlockingIOError:
            if not arrived.poll(LONGEST_SILENCE_S * 1e3):
                silence = f"{_PIPE} whose writer wrote nothing for {LONGEST_SILENCE_S:g} s"
                raise _irregular_error(path, silence) from None
            continue
        if not part:
            break
        parts.append(part)
        remaining -= len(part)
    if not parts:
        raise _irregular_error(path, f"{_PIPE} without a writer")
    return b"".join(parts)


def _open_named(path: Path) -> tuple[str | None, BinaryIO]:
    """Opens a path without waiting, and names its kind if it is no regular file."""
    kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None and kind != _PIPE:
        raise _irregular_error(path, kind)  # opening a device can have effects
    file = open_without_waiting(path)
    return _KINDS.get(stat.S_IFMT(os.fstat(file.fileno()).st_mode)), file


def _irregular_error(path: Path, kind: str) -> IrregularFileError:
    return IrregularFileError(
        f"{path}: this is {kind}, must be a regular file; write its content to a file and name that"
    )
