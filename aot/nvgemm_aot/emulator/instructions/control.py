"""Branches and the end of threads (PTX ISA, "Control Flow Instructions")."""

from __future__ import annotations

from ..machine.meanings import Branch
from ..ptx.program import Instruction, Program
from ..ptx.ptx_operands import Label
from .decoders import Qualifiers, decodes


@decodes("bra")
def _branch(instruction: Instruction, program: Program) -> Branch:
    qualifiers = Qualifiers(instruction)
    qualifiers.flag("uni")
    qualifiers.end()
    (label,) = instruction.operands
    if not isinstance(label, Label):
        raise instruction.unknown(f"operand {label}")
    return Branch(label.target)


@decodes("ret", "exit")
def _end(instruction: Instruction, program: Program) -> Branch:
    Qualifiers(instruction).end()
    return Branch(None)
