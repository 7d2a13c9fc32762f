"""A file of JSON lines that grows by one at a time, and outlives the death of its writer."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from nvgemm_runtime.errors import StorageError

Line = Mapping[str, Any]

_BEGIN = b'{"version": '
"""Of every first line, whatever it says of the version."""


class Journal:
    """Lines of JSON objects. One process at a time writes it.

    Args:
        path: The file. It is made with the first line that is appended.
        first: Its first line, which is written before any other.

    Attributes:
        lines: Those that were there, the first one among them. What stands behind the last line
            feed was not finished when its writer was killed, and is left out.

    Raises:
        StorageError: If the file cannot be read, or is damaged.
    """

    def __init__(self, path: Path, first: Line) -> None:
        self._path = path
        self._first = first
        self._file: IO[bytes] | None = None
        whole, unfinished = self._read()
        self.lines = [self._parsed(line) for line in whole.split(b"\n")[:-1]]
        self._end = len(whole)
        self._size_bytes = len(whole) + len(unfinished)
        if not whole and not _BEGIN.startswith(unfinished[: len(_BEGIN)]):
            self.fail(f"its first line does not end: {unfinished[:40]!r}")

    def _read(self) -> tuple[bytes, bytes]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return b"", b""
        except OSError as error:
            raise StorageError(f"{self._path}: cannot read: {error.strerror}") from error
        end = data.rfind(b"\n") + 1
        return data[:end], data[end:]

    def _parsed(self, line: bytes) -> Line:
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError) as error:
            self.fail(f"{type(error).__name__} in {line[:40]!r}")
        if not isinstance(parsed, dict):
            self.fail(f"{line[:40]!r} is no object")
        return parsed

    def fail(self, what: str) -> NoReturn:
        """Say that the file is damaged.

        Raises:
            StorageError: Always.
        """
        raise StorageError(
            f"{self._path}: the state of a tuning is damaged ({what}); remove it, and the output "
            "beside it, to measure from the beginning"
        )

    def append(self, line: Line, *, sync: bool = True) -> None:
        """Add a line.

        Args:
            line: It.
            sync: Whether it must outlive the machine too, and not only this process.

        Raises:
            StorageError: If the file cannot be written, or another process writes it too.
        """
        data = (b"" if self._end else _encoded(self._first)) + _encoded(line)
        with self._writing(f"{len(data)} bytes"):
            if self._file is None:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._file = os.fdopen(descriptor, "r+b", buffering=0)
            self._cut(self._end)  # of a line that was not finished
            self._file.seek(self._end)
            self._size_bytes += self._file.write(data)
            if self._size_bytes < self._end + len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(self._file.fileno())
        self._end += len(data)

    @contextlib.contextmanager
    def meanwhile(self, line: Line) -> Iterator[None]:
        """Have a line at the end that is gone afterwards, unless the process is killed.

        Raises:
            StorageError: As of `append`. Where what is done meanwhile fails, its error stays the
                cause of this one.
        """
        end = self._end
        self.append(line, sync=False)
        try:
            yield
        finally:
            with self._writing("that a line is gone"):
                self._cut(end)
            self._end = end

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._path}: cannot write {what}: {error.strerror}; what was measured before "
                "stays, and the same command goes on from there"
            ) from error

    def _cut(self, end: int) -> None:
        """Drop what stands behind a position, if all of that is ours.

        Locks keep other processes away. Some file systems have none.
        """
        assert self._file is not None
        found = os.fstat(self._file.fileno()).st_size
        if found != self._size_bytes:
            self._file.close()
            self._file = None
            raise StorageError(
                f"{self._path}: has {found} bytes, and {self._size_bytes} when this process wrote "
                "or read it: another one tunes into the same output; wait for its end, or name "
                "another output"
            )
        self._file.truncate(end)
        self._size_bytes = end

    def close(self) -> None:
        """Close the file, and remove it if it holds nothing."""
        if self._file is not None:
            self._file.close()
            if self._end == 0:
                self._path.unlink(missing_ok=True)


def _encoded(line: Line) -> bytes:
    return json.dumps(line).encode() + b"\n"
