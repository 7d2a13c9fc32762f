"""Parsed programs."""

from __future__ import annotations

from dataclasses import dataclass

from ..emulation_errors import UnsupportedPtxError
from .ptx_operands import Operand, Register


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: Name up to the first dot, such as ``tcgen05``.
        qualifiers: Names behind it, in order, such as ``("mma", "cta_group::1", "kind::f16")``.
        predicate: Register that decides whether it runs, and ``negated``, in which sense.
        line: Line of the PTX text, from 1.
        text: The statement, without its predicate.
    """

    opcode: str
    qualifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Register | None
    negated: bool
    line: int
    text: str

    def unknown(self, what: str) -> UnsupportedPtxError:
        """Returns the error for a part of this instruction that the emulator does not know."""
        return UnsupportedPtxError(
            f"line {self.line}: {self.text}: {what} is not known to the emulator"
        )


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A kernel parameter, at an offset in the parameter space, both in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """One kernel.

    Attributes:
        entry: Its name.
        version: PTX version, such as ``(9, 4)``.
        target: Architecture, such as ``sm_100f``.
        parameter_bytes: Size of the parameter space.
        shared_symbols: Variables in shared memory, each at its offset in bytes. Dynamic shared
            memory begins behind the static variables.
        static_shared_bytes: Bytes of the static variables.
        required_block: Threads a block must have along x, y, z, or None.
        registers: Types of all registers, by index.
        reconvergence: For each instruction, the one at which warps that it splits come together:
            its immediate post-dominator. ``len(instructions)`` is the kernel's end.
    """

    entry: str
    version: tuple[int, int]
    target: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    shared_symbols: dict[str, int]
    static_shared_bytes: int
    required_block: tuple[int, int, int] | None
    registers: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    reconvergence: tuple[int, ...]

    def parameter(self, name: str) -> Parameter | None:
        """Returns the parameter of a name, or None."""
        return next((each for each in self.parameters if each.name == name), None)
