"""Records GEMMs in the file that NVGEMM_AOT_RECORD names, over processes and runs.

Each GEMM is merged at once, under a lock: the file is read, and replaced in one step. A
process can be killed at any time and leaves a whole file, with every GEMM that it met.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from .. import file_locks
from ..errors import RecordError
from ..gemm.problem import Problem
from ..gemm.target import ARCHITECTURES, DEFAULT_ARCHITECTURE, Target, TargetName
from ..settings import RECORD_VARIABLE, TARGET_VARIABLE, shown, shown_path
from .text import Recording, manifest_name, parse

_NAME_ANOTHER = f"name another file, by {RECORD_VARIABLE} or --out"

_RECORDED_ON = {row.recorded_on: arch for arch, row in ARCHITECTURES.items() if row.recorded_on}
"""By compute capability: what to build for."""


def named_target(variables: Mapping[str, str] = os.environ) -> TargetName | None:
    """What the variable names to record for; None where it is not set.

    Raises:
        RecordError: If it names what nothing builds for.
    """
    named = variables.get(TARGET_VARIABLE)
    if not named:
        return None
    try:
        return TargetName.parse(named)
    except ValueError as error:
        raise RecordError(
            f"{TARGET_VARIABLE}={shown(named)}: nothing builds for it; {shown(str(error), 400)}"
        ) from None


def recorded_target(
    capability: tuple[int, int] | None,
    platform: str,
    cuda: str | None,
    variables: Mapping[str, str] = os.environ,
) -> Target:
    """The target to record for; what the variable names comes before what the process is.

    Args:
        capability: Compute capability of the device that a GEMM runs on; None for a CPU.
        platform: Platform of this process.
        cuda: CUDA major version of its torch; None for a torch without CUDA.
        variables: Environment variables.

    Raises:
        RecordError: If the variable names what nothing builds for.
    """
    met = TargetName(arch=_RECORDED_ON.get(capability or (0, 0), DEFAULT_ARCHITECTURE))
    return (named_target(variables) or met).resolve(platform=platform, cuda=cuda)


class Recorder:
    """Merges GEMMs into a file."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        # Always the same name: the next process overwrites what a killed one left.
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        self._lock_path = self.path.with_name(f".{self.path.name}.lock")
        self._known: tuple[bytes, Recording] | None = None

    def check(self) -> None:
        """Raise now if GEMMs could not be recorded later.

        Raises:
            RecordError: If the directory cannot be written, or the file is no recording.
        """
        with self._locked():
            self._read()
            self._write_partial(b"")
            self._partial.unlink()

    def read(self) -> Recording:
        """The file's recording; an empty one where there is no file.

        Raises:
            RecordError: If it cannot be read, or is no recording.
        """
        with self._locked():
            return self._read()

    def add(self, met: Problem | str, target: str) -> None:
        """Record a GEMM, and the entry of ``targets`` (`target_entry`) for which it was met.

        Raises:
            RecordError: If it cannot be recorded.
        """
        found = Recording(name="", targets={target})
        if isinstance(met, Problem):
            found.problems[met] = 1
        else:
            found.others[met] = 1
        self.merge(found)

    def merge(self, found: Recording) -> None:
        """Add the GEMMs of another recording.

        Raises:
            RecordError: If the file cannot be replaced; it is as before.
        """
        with self._locked():
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
    def _locked(self) -> Iterator[None]:
        """Hold the lock beside the file, and name the file in errors."""
        try:
            lock = file_locks.acquire(self._lock_path)
            assert lock is not None  # it was waited for
            try:
                yield
            finally:
                lock.release()
        except OSError as error:
            raise RecordError(
                f"{shown_path(self.path)}: GEMMs cannot be recorded there: {error.strerror}; "
                f"{_NAME_ANOTHER}, in a directory that can be written"
            ) from error

    def _read(self) -> Recording:
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise RecordError(f"{shown_path(self.path)}: this is no file; {_NAME_ANOTHER}")
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
                f"{shown_path(self.path)}: this is no recording, or it was edited: {error}; "
                f"move it away, or {_NAME_ANOTHER}"
            ) from error


def recorder() -> Recorder | None:
    """The recorder of this process; None where the user did not ask for one."""
    path = os.environ.get(RECORD_VARIABLE)
    return _recorder(path) if path else None


@functools.cache
def _recorder(path: str) -> Recorder:
    return Recorder(Path(path))
