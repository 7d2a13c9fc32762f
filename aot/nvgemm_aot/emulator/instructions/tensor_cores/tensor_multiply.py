"""Multiplications of matrices (PTX ISA, "tcgen05.mma").

A result is the sum of its products and of what it adds to, rounded once. Tensor cores may round
differently where that sum is not exact.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...machine.hierarchy import Block, Warp
from ...machine.lanes import Mask
from ...machine.meanings import Value
from ...machine.scheduler import Step
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Address, Immediate, Operand, Register, Vector
from ..decoders import Qualifiers, decodes
from ..shared_addresses import active_lanes
from ..values import address, read
from .instruction_descriptor import Kind, decode_instruction_descriptor
from .matrix_descriptor import decode_matrix_descriptor
from .multiplication import Multiplication, Scales
from .tensor_allocation import CTA_GROUPS
from .work_queue import blocks_of_group, issue

_SCALE_BLOCKS: dict[Kind, dict[str | None, int]] = {
    Kind.MXF8F6F4: {None: 32, "scale_vec::1X": 32, "block32": 32},
    Kind.MXF4: {None: 32, "scale_vec::2X": 32, "block32": 32},
    Kind.MXF4NVF4: {"scale_vec::2X": 32, "block32": 32, "scale_vec::4X": 16, "block16": 16},
}
"""Elements along k that share a scale (PTX ISA, "Block scaling")."""

_COLLECTORS = tuple(f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard"))

_LARGEST_SHIFT = 15


@dataclass(frozen=True, kw_only=True)
class _Operands:
    """Readers of a multiplication's operands."""

    d: Value
    a: Value
    b: Value
    descriptor: Value
    accumulates: Value
    disabled: list[Value]
    scales: tuple[Value, Value] | None


@decodes("tcgen05.mma")
def _multiply(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("mma")
    paired = qualifiers.one_of(*CTA_GROUPS) == "cta_group::2"
    kind = Kind(qualifiers.one_of(*(each.value for each in Kind)))
    scale_block = 0
    if kind.is_scaled:
        qualifiers.one_of("block_scale")
        sizes = _SCALE_BLOCKS[kind]
        named = tuple(name for name in sizes if name is not None)
        name = qualifiers.option(*named) if None in sizes else qualifiers.one_of(*named)
        scale_block = sizes[name]
    qualifiers.option(*_COLLECTORS)
    qualifiers.end()
    operands, a_in_tensor, shift = _read_operands(instruction, program, kind, paired=paired)

    def step(warp: Warp, mask: Mask) -> None:
        blocks = blocks_of_group(warp, paired=paired)
        for lane in active_lanes(mask):
            word = int(operands.descriptor(warp)[lane])
            shape = decode_instruction_descriptor(word, kind, len(blocks))
            a, b = int(operands.a(warp)[lane]), int(operands.b(warp)[lane])
            scales = None
            if operands.scales is not None:
                first, second = (int(each(warp)[lane]) for each in operands.scales)
                scales = Scales(a=first, b=second, block=scale_block)
            multiplication = Multiplication(
                shape=shape,
                d=int(operands.d(warp)[lane]),
                a=a if a_in_tensor else decode_matrix_descriptor(a),
                b=decode_matrix_descriptor(b),
                scales=scales,
                accumulates=bool(operands.accumulates(warp)[lane]),
                shift=shift,
                disabled=tuple(int(each(warp)[lane]) for each in operands.disabled),
            )
            multiplication.check(blocks)
            issue(warp, instruction, blocks, functools.partial(_run, multiplication, blocks))

    return step


def _run(multiplication: Multiplication, blocks: list[Block], operation: object) -> None:
    multiplication.run(blocks, operation)


def _read_operands(
    instruction: Instruction, program: Program, kind: Kind, *, paired: bool
) -> tuple[_Operands, bool, int]:
    """Reads operands; returns also whether A lies in tensor memory, and the scale of D."""
    left = list(instruction.operands)
    shift = 0
    if len(left) < 5:
        raise instruction.unknown(f"a number of {len(left)} operands")
    if not kind.is_scaled and isinstance(left[-1], Immediate):
        last = left.pop()
        assert isinstance(last, Immediate)
        shift = last.value
        if not 0 <= shift <= _LARGEST_SHIFT or kind not in (Kind.F16, Kind.TF32):
            raise instruction.unknown(f"scale of D {shift}")
    d, a, b, descriptor, *rest = left
    scales = None
    if kind.is_scaled:
        if len(rest) != 3:
            raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
        scales = (
            address(rest.pop(0), "u32", instruction, program),
            address(rest.pop(0), "u32", instruction, program),
        )
    disabled: list[Value] = []
    if len(rest) == 2 and isinstance(rest[0], Vector):
        lanes = rest.pop(0)
        assert isinstance(lanes, Vector)
        if len(lanes.elements) != (8 if paired else 4):
            raise instruction.unknown(f"a number of {len(lanes.elements)} lane masks")
        disabled = [read(each, "b32", instruction, program) for each in lanes.elements]
    if len(rest) != 1 or not isinstance(rest[0], Register):
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    a_in_tensor = isinstance(a, Address)
    return (
        _Operands(
            d=address(d, "u32", instruction, program),
            a=_matrix(a, instruction, program),
            b=read(b, "u64", instruction, program),
            descriptor=read(descriptor, "u32", instruction, program),
            accumulates=read(rest[0], "pred", instruction, program),
            disabled=disabled,
            scales=scales,
        ),
        a_in_tensor,
        shift,
    )


def _matrix(operand: Operand, instruction: Instruction, program: Program) -> Value:
    if isinstance(operand, Address):
        return address(operand, "u32", instruction, program)
    return read(operand, "u64", instruction, program)
