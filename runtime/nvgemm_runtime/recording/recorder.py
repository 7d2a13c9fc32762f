"""Keeps GEMMs that are met in the file that NVGEMM_AOT_RECORD names, over processes and runs.

Each GEMM is merged at once: the directory is locked, the file read, and replaced in one step. A
process can be killed at any time and leaves a whole file, in which all is that it had met.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import RecordError
from ..gemm.problem import Problem
from ..gemm.target import ARCHITECTURES, DEFAULT_ARCHITECTURE
from ..settings import RECORD_VARIABLE, TARGET_VARIABLE
from .text import TARGETS, Recording, manifest_name, parse

_NAME_ANOTHER = f"name another file, by {RECORD_VARIABLE} or --out"

_RECORDED_ON = {row.recorded_on: arch for arch, row in ARCHITECTURES.items() if row.recorded_on}
"""By compute capability: what to build for."""


def chosen_target(
    capability: tuple[int, int] | None, variables: Mapping[str, str] = os.environ
) -> str:
    """What to build for.

    Args:
        capability: Compute capability of the device that a GEMM was met on; None for a CPU.
        variables: Of the environment.

    Raises:
        RecordError: If the variable names nothing that can be built for.
    """
    chosen = variables.get(TARGET_VARIABLE)
    if not chosen:
        return _RECORDED_ON.get(capability or (0, 0), DEFAULT_ARCHITECTURE)
    if chosen not in TARGETS:
        raise RecordError(
            f"{TARGET_VARIABLE}={chosen}: nothing builds for it; allowed: {', '.join(TARGETS)}"
        )
    return chosen


class Recorder:
    """Merges GEMMs into a file.

    Args:
        path: The file; there is none yet, or it is a recording.

    Attributes:
        path: Absolute.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        # Always the same: what a killed process left is overwritten, by the next that has the lock.
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        self._known: tuple[bytes, Recording] | None = None

    def check(self) -> None:
        """Fail now if GEMMs could not be kept later.

        Raises:
            RecordError: If the directory cannot be written, or the file is no recording.
        """
        with self._alone():
            self._read()
            self._write_partial(b"")
            self._partial.unlink()

    def read(self) -> Recording:
        """What the file holds; nothing, under its name to be, where there is none.

        Raises:
            RecordError: If it cannot be read, or is no recording.
        """
        with self._alone():
            return self._read()

    def add(self, met: Problem | str, target: str) -> None:
        """Keep a GEMM that was met.

        Args:
            met: Its problem, or, where no manifest declares it, what it is and why in words.
            target: What to build for.

        Raises:
            RecordError: If it cannot be kept.
        """
        found = Recording(name="", targets={target})
        if isinstance(met, Problem):
            found.problems[met] = 1
        else:
            found.others[met] = 1
        self.merge(found)

    def merge(self, found: Recording) -> None:
        """Keep what another recording has.

        Raises:
            RecordError: If it cannot be kept; the file is as before.
        """
        with self._alone():
            recording = self._read()
            recording.merge(found)
            data = recording.render().encode()
            self._known = None
            self._write_partial(data)
            self._partial.replace(self.path)
            self._known = data, recording

    def _write_partial(self, data: bytes) -> None:
        self._partial.unlink(missing_ok=True)
        descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep threads and processes from each other, and name the file in errors."""
        try:
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX)
                yield
            finally:
                # A child that was forked meanwhile has the directory open, but not locked.
                fcntl.flock(directory, fcntl.LOCK_UN)
                os.close(directory)
        except OSError as error:
            raise RecordError(
                f"{self.path}: GEMMs cannot be recorded there: {error.strerror}; "
                f"{_NAME_ANOTHER}, in a directory that can be written"
            ) from error

    def _read(self) -> Recording:
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise RecordError(f"{self.path}: this is no file; {_NAME_ANOTHER}")
            data = self.path.read_bytes()
        except FileNotFoundError:
            data = b""
        if not data:
            return Recording(name=manifest_name(self.path.stem))
        if self._known is not None and data == self._known[0]:
            return self._known[1]
        try:
            return parse(data.decode())
        except ValueError as error:
            raise RecordError(
                f"{self.path}: this is no recording, or it was edited: {error}; "
                f"move it away, or {_NAME_ANOTHER}"
            ) from error


def recorder() -> Recorder | None:
    """The recorder of this process; None where the user did not ask for one."""
    path = os.environ.get(RECORD_VARIABLE)
    return _recorder(path) if path else None


@functools.cache
def _recorder(path: str) -> Recorder:
    return Recorder(Path(path))
