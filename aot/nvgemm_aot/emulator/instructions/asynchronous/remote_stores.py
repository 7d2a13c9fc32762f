"""Stores and reductions that complete at a memory barrier (PTX ISA, "st.async", "red.async")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...emulation_errors import EmulationError
from ...machine.global_memory import Bytes
from ...machine.hierarchy import Block, Warp
from ...machine.lanes import Mask
from ...machine.ordering import Operation
from ...machine.scheduler import Step
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Operand, Register, Vector
from ..decoders import Qualifiers, decodes
from ..shared_addresses import active_lanes, locate, shared_address
from ..values import BITS, read
from .late_effects import check_running, complete_at_barrier
from .reductions import reduce

_STORED = (*(f"{kind}{bits}" for kind in "bus" for bits in (32, 64)), "f32", "f64")

_REDUCED: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64", "s64"),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32",),
    "or": ("b32",),
    "xor": ("b32",),
}


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """Data on its way to a block's shared memory, and the barrier that it completes at."""

    data: Bytes
    block: Block
    offset: int
    barrier_offset: int
    operation: str | None
    type: str


@decodes("st.async")
def _store(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("async")
    qualifiers.flag("weak")
    generic = not qualifiers.flag("shared::cluster")
    qualifiers.one_of("mbarrier::complete_tx::bytes")
    vector = qualifiers.option("v2", "v4")
    kind = qualifiers.one_of(*_STORED)
    qualifiers.end()
    count = int(vector[1:]) if vector else 1
    if count * BITS[kind] > 128:
        raise instruction.unknown(f"vector .{vector}.{kind}")
    return _sends(instruction, program, kind, count, None, generic=generic)


@decodes("red.async")
def _reduce(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    for name in ("async", "relaxed", "cluster"):
        qualifiers.one_of(name)
    generic = not qualifiers.flag("shared::cluster")
    qualifiers.one_of("mbarrier::complete_tx::bytes")
    operation = qualifiers.one_of(*_REDUCED)
    kind = qualifiers.one_of(*_REDUCED[operation])
    qualifiers.end()
    return _sends(instruction, program, kind, 1, operation, generic=generic)


def _sends(
    instruction: Instruction,
    program: Program,
    kind: str,
    count: int,
    operation: str | None,
    *,
    generic: bool,
) -> Step:
    if len(instruction.operands) != 3:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    target, given, barrier = instruction.operands
    place = shared_address(target, instruction, program, generic=generic)
    signal = shared_address(barrier, instruction, program, generic=generic)
    elements = _elements(given, kind, count, instruction)
    values = [read(each, kind, instruction, program) for each in elements]
    size = count * BITS[kind] // 8

    def step(warp: Warp, mask: Mask) -> None:
        data = np.ascontiguousarray(np.stack([value(warp) for value in values], 1)).view(np.uint8)
        for lane in active_lanes(mask):
            block, offset = locate(warp, place(warp, lane))
            waiter, barrier_offset = locate(warp, signal(warp, lane))
            if block is not waiter:
                raise EmulationError("stores in one block and signals a barrier in another")
            block.check_shared(offset, size, "stores at")
            if offset % size:
                raise EmulationError(f"stores at offset {offset}, must be a multiple of {size}")
            sent = _Sent(
                data=data[lane],
                block=block,
                offset=offset,
                barrier_offset=barrier_offset,
                operation=operation,
                type=kind,
            )
            _send(warp, instruction, sent)

    return step


def _elements(
    operand: Operand, kind: str, count: int, instruction: Instruction
) -> Sequence[Operand]:
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != count:
        raise instruction.unknown(f"a vector of {len(elements)}")
    for each in elements:
        if isinstance(each, Register) and BITS[each.type] != BITS[kind]:
            raise instruction.unknown(f"register {each.name} of type .{each.type}")
    return elements


def _send(warp: Warp, instruction: Instruction, sent: _Sent) -> None:
    ordering, block, offset = warp.block.cluster.grid.ordering, sent.block, sent.offset
    size = len(sent.data)

    def put(operation: Operation) -> int:
        check_running(block, "writes")
        data = sent.data
        if sent.operation is not None:
            old = block.shared[offset : offset + size]
            data = reduce(sent.operation, sent.type, old, data)
        ordering.operation_write(operation, block, np.array([offset], np.int64), size)
        block.shared[offset : offset + size] = data
        return size

    complete_at_barrier(warp, instruction, block, sent.barrier_offset, put)
