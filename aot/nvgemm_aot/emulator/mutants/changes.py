"""Programs with one instruction changed or removed."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..ptx.program import Instruction, Program
from ..ptx.ptx_operands import (
    Address,
    Immediate,
    Label,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from ..ptx.reconvergence import immediate_post_dominators


class Kind(enum.Enum):
    """Kinds of changes."""

    REMOVED = "removed"
    OPCODE = "opcode"
    QUALIFIER = "qualifier"
    EXCHANGED = "operands exchanged"
    CONSTANT = "constant"
    PREDICATE = "predicate"
    REGISTER = "register"
    TARGET = "branch target"


_OPCODES = (
    ("add", "sub"),
    ("and", "or", "xor"),
    ("min", "max"),
    ("shl", "shr"),
    ("not", "mov"),
    ("neg", "mov"),
)
"""Opcodes of which one takes another's place."""

_QUALIFIERS = (
    ("eq", "ne"),
    ("lt", "le", "gt", "ge"),
    ("lo", "hi"),
    ("s32", "u32"),
    ("s64", "u64"),
    ("rn", "rz"),
    ("f16", "bf16"),
    ("bf16x2", "f16x2"),
    ("read",),
    ("cta_group::1", "cta_group::2"),
    ("release", "relaxed"),
    ("acquire", "relaxed"),
    ("x1", "x2", "x4", "x8", "x16", "x32"),
    ("add", "min", "max"),
    ("and", "or", "xor"),
    ("up", "down", "bfly", "idx"),
    ("expect_tx",),
    ("multicast::cluster",),
)
"""Qualifiers of which one takes another's place; a lone one is left out."""

_SIGNEDNESS = {"s32", "u32", "s64", "u64"}

_COMMUTATIVE = ("add", "and", "or", "xor", "mul", "min", "max", "addc")

_REACH = 25
"""Instructions around one, from which another register is taken."""


def removed(program: Program, place: int) -> Program:
    """Returns a program without an instruction. A wait for a memory barrier always succeeds."""
    old = program.instructions[place]
    if old.opcode == "mbarrier" and old.qualifiers[0] in ("try_wait", "test_wait"):
        zero = Immediate(0)
        new = replace(
            old, opcode="setp", qualifiers=("eq", "u32"), operands=(old.operands[0], zero, zero)
        )
    else:
        new = replace(
            old,
            opcode="griddepcontrol",
            qualifiers=("launch_dependents",),
            operands=(),
            predicate=None,
            negated=False,
        )
    return _with(program, place, new)


def changed(program: Program, place: int, kind: Kind, seed: int) -> Program | None:
    """Returns a program with an instruction changed at random, or None if it cannot be so."""
    if kind is Kind.REMOVED:
        return removed(program, place)
    choices = random.Random(f"{place} {kind.value} {seed}")
    instruction = program.instructions[place]
    found = [each for each in _CHANGES[kind](instruction, program, place) if each != instruction]
    return _with(program, place, choices.choice(found)) if found else None


def _with(program: Program, place: int, instruction: Instruction) -> Program:
    instructions = (
        *program.instructions[:place],
        instruction,
        *program.instructions[place + 1 :],
    )
    together = program.reconvergence
    if program.instructions[place].opcode in ("bra", "ret", "exit"):
        together = immediate_post_dominators(instructions)
    return replace(program, instructions=instructions, reconvergence=together)


def _opcodes(instruction: Instruction, program: Program, place: int) -> Iterator[Instruction]:
    for family in _OPCODES:
        if instruction.opcode in family:
            for other in family:
                yield replace(instruction, opcode=other)


def _qualifiers(instruction: Instruction, program: Program, place: int) -> Iterator[Instruction]:
    for number, name in enumerate(instruction.qualifiers):
        before, after = instruction.qualifiers[:number], instruction.qualifiers[number + 1 :]
        if name in _SIGNEDNESS and _ignores_signedness(instruction):
            continue
        for family in _QUALIFIERS:
            if name in family:
                if len(family) == 1:
                    yield replace(instruction, qualifiers=before + after)
                for other in family:
                    yield replace(instruction, qualifiers=(*before, other, *after))


def _ignores_signedness(instruction: Instruction) -> bool:
    """Tells if an integer's sign does not change the result (PTX ISA, "Integer Arithmetic")."""
    if instruction.opcode in ("mul", "mad", "setp", "set"):
        return not {"lo", "eq", "ne"}.isdisjoint(instruction.qualifiers)
    return instruction.opcode in ("add", "sub") and "sat" not in instruction.qualifiers


def _exchanged(instruction: Instruction, program: Program, place: int) -> Iterator[Instruction]:
    operands = instruction.operands
    begin = 1
    if instruction.opcode in _COMMUTATIVE or {"eq", "ne"}.intersection(instruction.qualifiers):
        begin = 2  # exchanging the first two factors changes nothing
    for first in range(begin, len(operands)):
        for second in range(first + 1, len(operands)):
            new = list(operands)
            new[first], new[second] = new[second], new[first]
            yield replace(instruction, operands=tuple(new))


def _constants(instruction: Instruction, program: Program, place: int) -> Iterator[Instruction]:
    def others(operand: Operand) -> Iterator[Operand]:
        if isinstance(operand, Immediate):
            for value in _near(operand.value):
                yield replace_value(operand, value)
        elif isinstance(operand, Address):
            for value in _near(operand.offset):
                yield operand._replace(offset=value)

    yield from _operands(instruction, others, first=0)


def replace_value(constant: Immediate, value: int) -> Immediate:
    """Returns a constant with another value, of the same width."""
    return (
        constant._replace(value=value & ((1 << constant.float_bits) - 1))
        if (constant.float_bits)
        else constant._replace(value=value)
    )


def _near(value: int) -> list[int]:
    """Returns constants that a slip makes from one."""
    return [value + 1, value - 1, value * 2, value // 2, value + 16, value ^ 64]


def _predicates(instruction: Instruction, program: Program, place: int) -> Iterator[Instruction]:
    if instruction.predicate is not None:
        yield replace(instruction, negated=not instruction.negated)
        yield replace(instruction, predicate=None, negated=False)


def _registers(instruction: Instruction, program: Program, place: int) -> Iterator[Instruction]:
    near = program.instructions[max(0, place - _REACH) : place + _REACH]
    known = {register for each in near for register in registers_of(each.operands)}

    def others(operand: Operand) -> Iterator[Operand]:
        if isinstance(operand, Register):
            yield from sorted(each for each in known if each.type == operand.type)
        elif isinstance(operand, Address) and isinstance(operand.base, Register):
            for each in sorted(each for each in known if each.type == operand.base.type):
                yield operand._replace(base=each)
        elif isinstance(operand, Vector):
            for number, element in enumerate(operand.elements):
                for other in others(element):
                    elements = list(operand.elements)
                    elements[number] = other
                    yield Vector(tuple(elements))

    yield from _operands(instruction, others, first=0)


def _targets(instruction: Instruction, program: Program, place: int) -> Iterator[Instruction]:
    labels = sorted(
        {
            operand
            for each in program.instructions
            for operand in each.operands
            if isinstance(operand, Label)
        }
    )

    def others(operand: Operand) -> Iterator[Operand]:
        if isinstance(operand, Label):
            yield from labels

    yield from _operands(instruction, others, first=0)


def _operands(
    instruction: Instruction, others: Callable[[Operand], Iterator[Operand]], *, first: int
) -> Iterator[Instruction]:
    for number, operand in enumerate(instruction.operands):
        if number >= first:
            for other in others(operand):
                new = (*instruction.operands[:number], other, *instruction.operands[number + 1 :])
                yield replace(instruction, operands=new)


def registers_of(operands: Sequence[Operand]) -> Iterator[Register]:
    """Yields the registers in operands."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand
        elif isinstance(operand, Vector):
            yield from registers_of(operand.elements)
        elif isinstance(operand, Pair):
            yield from registers_of((operand.first, operand.second))
        elif isinstance(operand, Negated):
            yield operand.register
        elif isinstance(operand, Address):
            yield from registers_of((operand.base,))
            if operand.coordinates is not None:
                yield from registers_of((operand.coordinates,))
        else:
            assert isinstance(operand, (Immediate, Special, Symbol, Label, Sink))


_CHANGES: dict[Kind, Callable[[Instruction, Program, int], Iterator[Instruction]]] = {
    Kind.OPCODE: _opcodes,
    Kind.QUALIFIER: _qualifiers,
    Kind.EXCHANGED: _exchanged,
    Kind.CONSTANT: _constants,
    Kind.PREDICATE: _predicates,
    Kind.REGISTER: _registers,
    Kind.TARGET: _targets,
}
