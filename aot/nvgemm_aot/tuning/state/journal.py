"""File of JSON lines that a tuning appends to, and the lock of its output."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from nvgemm_runtime.errors import StorageError, TuningError

from ...storage.files import require_writable, sweep_partials_of
from ...storage.locks import acquire


def state_path(output: Path) -> Path:
    """Returns a tuning's state file path, next to its output."""
    return output.with_name(f"{output.name}.tuning.jsonl")


@contextlib.contextmanager
def reserved(output: Path) -> Iterator[None]:
    """Locks an output, so that no other process tunes into it.

    Raises:
        StorageError, TuningError: If it cannot be written, or another process holds it.
    """
    if output.is_dir():
        raise StorageError(f"{output}: cannot write: it is a directory; name a file in it")
    require_writable(output.parent)
    lock = acquire(output.with_name(f".{output.name}.lock"), wait=False)
    if lock is None:
        raise TuningError(
            f"{output}: another process is tuning into it; wait until it ends, or name another "
            "output"
        )
    try:
        sweep_partials_of(output)
        yield
    finally:
        lock.release()


Line = Mapping[str, Any]

_BEGIN = b'{"version": '
"""Prefix for every first line, in any version."""


class Journal:
    """File of JSON objects, one per line, to which one process at a time appends.

    The first appended line creates the file and writes ``first`` before it.

    Attributes:
        lines: Lines found at opening, with the first among them. Text after the last line feed was
            unfinished when its writer was killed, and is left out.

    Raises:
        StorageError: If the file cannot be read, or is damaged.
    """

    def __init__(self, path: Path, first: Line) -> None:
        self.path = path
        self._first = first
        self._file: IO[bytes] | None = None
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise StorageError(f"{path}: cannot read: {error.strerror}") from error
        self._end = data.rfind(b"\n") + 1
        self._size_bytes = len(data)
        self.lines = [self._parsed(line) for line in data[: self._end].split(b"\n")[:-1]]
        if not self._end and not _BEGIN.startswith(data[: len(_BEGIN)]):
            self.fail(f"its first line does not end: {data[:40]!r}")

    @property
    def facts(self) -> list[Line]:
        """Lines after the first."""
        return self.lines[1:]

    def _parsed(self, line: bytes) -> Line:
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError) as error:
            self.fail(f"{type(error).__name__} in {line[:40]!r}")
        if not isinstance(parsed, dict):
            self.fail(f"{line[:40]!r} is not a JSON object")
        return parsed

    def fail(self, what: str) -> NoReturn:
        """Raises the StorageError for a damaged file."""
        raise StorageError(
            f"{self.path}: the tuning state is damaged ({what}); remove it and the output next to "
            "it to start over"
        )

    def append(self, line: Line, *, sync: bool = True) -> None:
        """Appends a line; with ``sync``, the line also outlives a machine crash.

        Raises:
            StorageError: If the file cannot be written, or another process writes it too.
        """
        data = (b"" if self._end else encode_line(self._first)) + encode_line(line)
        with self._writing(f"{len(data)} bytes"):
            if self._file is None:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._file = os.fdopen(descriptor, "r+b", buffering=0)
            self._cut(self._end)  # drops an unfinished line
            self._file.seek(self._end)
            self._size_bytes += self._file.write(data)
            if self._size_bytes < self._end + len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(self._file.fileno())
        self._end += len(data)

    @contextlib.contextmanager
    def meanwhile(self, line: Line) -> Iterator[None]:
        """Keeps a line at the end during the block; it remains only if the process is killed.

        If the block fails, its error stays the cause for an error that `append` raises.
        """
        end = self._end or len(encode_line(self._first))
        self.append(line, sync=False)
        try:
            yield
        finally:
            with self._writing("the removal of a line"):
                self._cut(end)
            self._end = end

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot write {what}: {error.strerror}; earlier measurements "
                "are saved, and the same command continues"
            ) from error

    def _cut(self, end: int) -> None:
        """Truncates the file, unless another process has written it too.

        Locks should prevent that, but some file systems have none.
        """
        assert self._file is not None
        actual_bytes = os.fstat(self._file.fileno()).st_size
        if actual_bytes != self._size_bytes:
            self._file.close()
            self._file = None
            raise StorageError(
                f"{self.path}: has {actual_bytes} bytes, but {self._size_bytes} when this process "
                "last used it: another process tunes into the same output; wait until it ends, or "
                "name another output"
            )
        self._file.truncate(end)
        self._size_bytes = end

    def close(self) -> None:
        """Closes the file; removes it if it has no facts."""
        if self._file is not None:
            self._file.close()
            if self._end <= len(encode_line(self._first)):
                self.path.unlink(missing_ok=True)


def encode_line(line: Line) -> bytes:
    """Returns a line's bytes, with its line feed."""
    return json.dumps(line).encode() + b"\n"
