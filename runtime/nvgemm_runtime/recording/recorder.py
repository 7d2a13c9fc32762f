"""Records GEMMs in NVGEMM_AOT_RECORD's file, over several processes and runs.

Each GEMM is merged immediately, under a lock, and the file is replaced atomically. A process that
is killed at any time leaves a complete file with every GEMM it compiled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import RecordError
from ..gemm.problem import Problem
from ..gemm.target import ARCHITECTURES, DEFAULT_ARCHITECTURE, Target, TargetName
from ..settings import RECORD_VARIABLE, TARGET_VARIABLE, printable, printable_path
from . import file_locks
from .text import Recording, manifest_name, parse

_NAME_ANOTHER = f"name another file, by {RECORD_VARIABLE} or --out"

_RECORDED_ON = {row.recorded_on: arch for arch, row in ARCHITECTURES.items() if row.recorded_on}
"""Architecture to build for, by compute capability."""


def named_target(variables: Mapping[str, str] = os.environ) -> TargetName | None:
    """Returns the target that the environment variable names, or None if it is not set.

    Raises:
        RecordError: If no provider builds for its value.
    """
    name = variables.get(TARGET_VARIABLE)
    if not name:
        return None
    try:
        return TargetName.parse(name)
    except ValueError as error:
        raise RecordError(
            f"{TARGET_VARIABLE}={printable(name)}: no provider builds for this target; "
            f"{printable(str(error), 400)}"
        ) from None


def recorded_target(
    capability: tuple[int, int] | None,
    platform: str,
    cuda: str | None,
    variables: Mapping[str, str] = os.environ,
) -> Target:
    """Returns the target to record for. The environment variable overrides the process's own.

    Args:
        capability: Compute capability of the GEMM's device; None for a CPU.
        platform: Platform of this process.
        cuda: CUDA major version of its torch; None for a torch without CUDA.
        variables: Environment variables.

    Raises:
        RecordError: If no provider builds for the variable's value.
    """
    default = TargetName(arch=_RECORDED_ON.get(capability or (0, 0), DEFAULT_ARCHITECTURE))
    return (named_target(variables) or default).resolve(platform=platform, cuda=cuda)


class Recorder:
    """Merges GEMMs into a file."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        # A fixed name, so that the next process overwrites a killed one's file.
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        self._lock_path = self.path.with_name(f".{self.path.name}.lock")
        self._known: tuple[bytes, Recording] | None = None

    def check(self) -> None:
        """Raises an error now if GEMMs could not be recorded later.

        Raises:
            RecordError: If the directory is not writable, or the file is not a recording.
        """
        with self._locked():
            self._read()
            self._write_partial(b"")
            self._partial.unlink()

    def read(self) -> Recording:
        """Returns the file's recording, or an empty one if there is no file.

        Raises:
            RecordError: If the file cannot be read, or is not a recording.
        """
        with self._locked():
            return self._read()

    def add(self, gemm: Problem | str, target: str) -> None:
        """Records a GEMM and the ``targets`` entry (`target_entry`) for which it was compiled.

        Raises:
            RecordError: If it cannot be recorded.
        """
        recording = Recording(name="", targets={target})
        if isinstance(gemm, Problem):
            recording.problems[gemm] = 1
        else:
            recording.undeclarable[gemm] = 1
        self.merge(recording)

    def merge(self, other: Recording) -> None:
        """Adds the GEMMs of another recording.

        Raises:
            RecordError: If the file cannot be replaced. It is then unchanged.
        """
        with self._locked():
            recording = self._read()
            recording.merge(other)
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
        """Holds the lock next to the file, and names the file in errors."""
        try:
            lock = file_locks.acquire(self._lock_path)
            assert lock is not None  # `acquire` waits
            try:
                yield
            finally:
                lock.release()
        except OSError as error:
            raise RecordError(
                f"{printable_path(self.path)}: cannot record GEMMs there: {error.strerror}; "
                f"{_NAME_ANOTHER}, in a writable directory"
            ) from error

    def _read(self) -> Recording:
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise RecordError(
                    f"{printable_path(self.path)}: not a regular file; {_NAME_ANOTHER}"
                )
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
                f"{printable_path(self.path)}: not a recording, or an edited one: {error}; "
                f"move it away, or {_NAME_ANOTHER}"
            ) from error


def recorder() -> Recorder | None:
    """Returns this process's recorder, or None if recording is off."""
    path = os.environ.get(RECORD_VARIABLE)
    return _recorder(path) if path else None


@functools.cache
def _recorder(path: str) -> Recorder:
    return Recorder(Path(path))
