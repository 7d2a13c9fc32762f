"""Errors that stop an emulated kernel."""

from __future__ import annotations

from nvgemm_runtime.errors import NvgemmError


class EmulationError(NvgemmError):
    """An emulated kernel did something that it must not do, or that the emulator does not know."""

    exit_code = 3


class UnsupportedPtxError(EmulationError):
    """The PTX has a version, target, instruction or qualifier that the emulator does not know."""


class MemoryAccessError(EmulationError):
    """A kernel reads or writes outside the memory that it was given."""


class DeadlockError(EmulationError):
    """No warp can go on; the message says what each one waits for."""
