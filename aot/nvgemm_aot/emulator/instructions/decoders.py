"""Decoders of instructions by opcode, and a strict reader of qualifiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ..machine.meanings import Meaning
from ..ptx.program import Instruction, Program

Decoder: TypeAlias = Callable[[Instruction, Program], Meaning]

_DECODERS: dict[str, Decoder] = {}


def decodes(*opcodes: str) -> Callable[[Decoder], Decoder]:
    """Registers a function as the decoder of some opcodes.

    An opcode may include the first qualifiers, such as ``cp.async.bulk``; the longest match wins.
    """

    def register(decoder: Decoder) -> Decoder:
        for opcode in opcodes:
            assert opcode not in _DECODERS, opcode
            _DECODERS[opcode] = decoder
        return decoder

    return register


def decode(instruction: Instruction, program: Program) -> Meaning:
    """Returns what an instruction does.

    Raises:
        UnsupportedPtxError: If its opcode or a qualifier is not known.
    """
    names = (instruction.opcode, *instruction.qualifiers)
    for count in range(len(names), 0, -1):
        if (decoder := _DECODERS.get(".".join(names[:count]))) is not None:
            return decoder(instruction, program)
    raise instruction.unknown(f"opcode {instruction.opcode}")


class Qualifiers:
    """Reads an instruction's qualifiers in order, so that none is passed over."""

    def __init__(self, instruction: Instruction) -> None:
        self._instruction = instruction
        self._left = list(instruction.qualifiers)

    def flag(self, name: str) -> bool:
        """Reads the next qualifier if it is this one; returns whether it was."""
        if self._left[:1] == [name]:
            self._left.pop(0)
            return True
        return False

    def option(self, *names: str) -> str | None:
        """Reads the next qualifier if it is one of these; returns it, or None."""
        return self._left.pop(0) if self._left and self._left[0] in names else None

    def one_of(self, *names: str) -> str:
        """Reads the next qualifier, which must be one of these.

        Raises:
            UnsupportedPtxError: If it is not.
        """
        if (found := self.option(*names)) is None:
            raise self._instruction.unknown(
                f"qualifier .{self._left[0]}" if self._left else f"an end before .{names[0]}"
            )
        return found

    def next(self) -> str:
        """Reads the next qualifier.

        Raises:
            UnsupportedPtxError: If there is none.
        """
        if not self._left:
            raise self._instruction.unknown("an end of its qualifiers")
        return self._left.pop(0)

    def end(self) -> None:
        """Checks that all were read.

        Raises:
            UnsupportedPtxError: If one is left.
        """
        if self._left:
            raise self._instruction.unknown(f"qualifier .{self._left[0]}")
