"""Bulk copies of contiguous bytes (PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...emulation_errors import EmulationError
from ...machine.addresses import PARAMETER_WINDOW
from ...machine.hierarchy import Block, Warp
from ...machine.lanes import Mask
from ...machine.ordering import Offsets, Operation
from ...machine.scheduler import Step
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers, decodes
from ..shared_addresses import Locator, active_lanes, locate, locate_own, shared_address
from ..values import address, read
from .bulk_groups import add_to_group
from .late_effects import check_running, complete_at_barrier, later
from .reductions import reduce

ALIGNMENT = 16
"""Alignment of both addresses and of the size, in bytes."""

_REDUCED: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32"),
    "inc": ("u32",),
    "and": ("b32",),
}
_REDUCED |= {
    "max": _REDUCED["min"],
    "dec": _REDUCED["inc"],
    "or": _REDUCED["and"],
    "xor": _REDUCED["and"],
}
"""Types of reductions in shared memory."""

_REDUCED_IN_GLOBAL: dict[str, tuple[str, ...]] = {
    "add": ("f32", "f64", "f16", "bf16"),
    "min": ("u64", "s64", "f16", "bf16"),
    "max": ("u64", "s64", "f16", "bf16"),
    "and": ("b64",),
    "or": ("b64",),
    "xor": ("b64",),
}
"""Further types in global memory."""


@dataclass(frozen=True, kw_only=True)
class _Reduction:
    operation: str
    type: str


@decodes("cp.async.bulk")
def _copy(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    for name in ("async", "bulk"):
        qualifiers.one_of(name)
    if qualifiers.flag("global"):
        return _store(qualifiers, instruction, program, reduces=False)
    space = qualifiers.one_of("shared::cluster", "shared::cta")
    if space == "shared::cluster" and qualifiers.flag("shared::cta"):
        return _send(qualifiers, instruction, program, reduces=False)
    qualifiers.one_of("global")
    located = locate_own if space == "shared::cta" else locate
    return _load(qualifiers, instruction, program, located)


@decodes("cp.reduce.async.bulk")
def _reduce(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    for name in ("reduce", "async", "bulk"):
        qualifiers.one_of(name)
    if qualifiers.flag("global"):
        return _store(qualifiers, instruction, program, reduces=True)
    qualifiers.one_of("shared::cluster")
    qualifiers.one_of("shared::cta")
    return _send(qualifiers, instruction, program, reduces=True)


@decodes("cp.async.bulk.prefetch")
def _prefetch(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    for name in ("async", "bulk", "prefetch", "L2", "global"):
        qualifiers.one_of(name)
    hinted = qualifiers.flag("L2::cache_hint")
    qualifiers.end()
    if len(instruction.operands) != 2 + hinted:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    source = address(instruction.operands[0], "u64", instruction, program)
    size = read(instruction.operands[1], "u32", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            first, count = int(source(warp)[lane]), int(size(warp)[lane])
            _check_alignment(first, count)
            if count:
                warp.block.cluster.grid.memory.find(first, first + count - 1)

    return step


def _reduction(
    qualifiers: Qualifiers, *, reduces: bool, in_global: bool = False
) -> _Reduction | None:
    if not reduces:
        return None
    operation = qualifiers.one_of(*_REDUCED)
    halves = ("f16", "bf16")
    if operation == "add" and in_global and qualifiers.flag("noftz"):
        return _Reduction(operation=operation, type=qualifiers.one_of(*halves))
    further = _REDUCED_IN_GLOBAL.get(operation, ()) if in_global else ()
    kinds = [kind for kind in further if operation != "add" or kind not in halves]
    return _Reduction(operation=operation, type=qualifiers.one_of(*_REDUCED[operation], *kinds))


def _check_alignment(*values: int) -> None:
    for value in values:
        if value % ALIGNMENT:
            raise EmulationError(
                f"a bulk copy's address or size is {value:#x}, must be a multiple of {ALIGNMENT}"
            )


def _span(offset: int) -> Offsets:
    return np.array([offset], np.int64)


def _load(
    qualifiers: Qualifiers, instruction: Instruction, program: Program, located: Locator
) -> Step:
    qualifiers.one_of("mbarrier::complete_tx::bytes")
    multicast = qualifiers.flag("multicast::cluster")
    hinted = qualifiers.flag("L2::cache_hint")
    qualifiers.end()
    if len(instruction.operands) != 4 + multicast + hinted:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    target, source, number, barrier, *rest = instruction.operands
    place = shared_address(target, instruction, program)
    origin = address(source, "u64", instruction, program)
    size = read(number, "u32", instruction, program)
    signal = shared_address(barrier, instruction, program)
    ranks = read(rest[0], "u16", instruction, program) if multicast else None

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            block, offset = located(warp, place(warp, lane))
            waiter, waiter_offset = located(warp, signal(warp, lane))
            first, count = int(origin(warp)[lane]), int(size(warp)[lane])
            _check_alignment(offset, first, count)
            if block is not waiter:
                raise EmulationError("copies to one block and signals a barrier in another")
            peers = warp.block.cluster.blocks
            chosen = 1 << block.rank if ranks is None else int(ranks(warp)[lane])
            if chosen == 0 or chosen >> len(peers):
                raise EmulationError(
                    f"multicasts to blocks {chosen:#b} of a cluster of {len(peers)}"
                )
            for peer in peers:
                if chosen >> peer.rank & 1:
                    _begin_load(warp, instruction, first, count, peer, offset, waiter_offset)

    return step


def _begin_load(
    warp: Warp,
    instruction: Instruction,
    first: int,
    size: int,
    block: Block,
    offset: int,
    waiter_offset: int,
) -> None:
    grid = warp.block.cluster.grid
    block.check_shared(offset, size, "copies to")
    if not 0 <= first - PARAMETER_WINDOW < len(grid.launch.parameters):
        grid.ordering.use_global(warp)

    def copy(operation: Operation) -> int:
        check_running(block, "writes")
        if size:
            parameters = first - PARAMETER_WINDOW
            if 0 <= parameters <= len(grid.launch.parameters) - size:
                data = np.frombuffer(grid.launch.parameters, np.uint8, size, parameters)
            else:
                region = grid.memory.find(first, first + size - 1)
                data = region.data[first - region.address :][:size]
            grid.ordering.operation_write(operation, block, _span(offset), size)
            block.shared[offset : offset + size] = data
        return size

    complete_at_barrier(warp, instruction, block, waiter_offset, copy)


def _send(
    qualifiers: Qualifiers, instruction: Instruction, program: Program, *, reduces: bool
) -> Step:
    """Decodes a copy from a block's shared memory to that of a block in its cluster."""
    qualifiers.one_of("mbarrier::complete_tx::bytes")
    reduction = _reduction(qualifiers, reduces=reduces)
    qualifiers.end()
    if len(instruction.operands) != 4:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    target, source, number, barrier = instruction.operands
    place = shared_address(target, instruction, program)
    origin = shared_address(source, instruction, program)
    size = read(number, "u32", instruction, program)
    signal = shared_address(barrier, instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            block, offset = locate(warp, place(warp, lane))
            own, first = locate(warp, origin(warp, lane))
            waiter, waiter_offset = locate(warp, signal(warp, lane))
            count = int(size(warp)[lane])
            _check_alignment(offset, first, count)
            if block is not waiter or own is not warp.block:
                raise EmulationError(
                    "copies from another block, or signals a barrier elsewhere than it copies to"
                )
            own.check_shared(first, count, "copies from")
            block.check_shared(offset, count, "copies to")
            _begin_send(warp, instruction, first, count, block, offset, waiter_offset, reduction)

    return step


def _begin_send(
    warp: Warp,
    instruction: Instruction,
    first: int,
    size: int,
    block: Block,
    offset: int,
    waiter_offset: int,
    reduction: _Reduction | None,
) -> None:
    grid, own = warp.block.cluster.grid, warp.block

    def copy(operation: Operation) -> int:
        check_running(own, "reads")
        check_running(block, "writes")
        grid.ordering.operation_read(operation, own, _span(first), size)
        data = own.shared[first : first + size].copy()
        if reduction is not None:
            old = block.shared[offset : offset + size]
            data = reduce(reduction.operation, reduction.type, old, data)
        grid.ordering.operation_write(operation, block, _span(offset), size)
        block.shared[offset : offset + size] = data
        return size

    complete_at_barrier(warp, instruction, block, waiter_offset, copy)


def _store(
    qualifiers: Qualifiers, instruction: Instruction, program: Program, *, reduces: bool
) -> Step:
    qualifiers.one_of("shared::cta")
    qualifiers.one_of("bulk_group")
    hinted = qualifiers.flag("L2::cache_hint")
    reduction = _reduction(qualifiers, reduces=reduces, in_global=True)
    qualifiers.end()
    if len(instruction.operands) != 3 + hinted:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    target, source, number = instruction.operands[:3]
    place = address(target, "u64", instruction, program)
    origin = shared_address(source, instruction, program)
    size = read(number, "u32", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            own, offset = locate(warp, origin(warp, lane))
            first, count = int(place(warp)[lane]), int(size(warp)[lane])
            _check_alignment(offset, first, count)
            if own is not warp.block:
                raise EmulationError("stores from another block's shared memory")
            own.check_shared(offset, count, "copies from")
            _begin_store(warp, lane, instruction, first, count, offset, reduction)

    return step


def _begin_store(
    warp: Warp,
    lane: int,
    instruction: Instruction,
    first: int,
    size: int,
    offset: int,
    reduction: _Reduction | None,
) -> None:
    grid, block = warp.block.cluster.grid, warp.block
    grid.ordering.use_global(warp)
    operation = grid.ordering.begin(warp)
    copy = add_to_group(warp, [lane])
    queue = object()

    def fetch() -> None:
        check_running(block, "reads")
        grid.ordering.operation_read(operation, block, _span(offset), size)
        data = block.shared[offset : offset + size].copy()
        copy.clock = grid.ordering.finish(operation)
        copy.has_read = True
        grid.progress += 1

        def put() -> None:
            if size:
                region = grid.memory.find(first, first + size - 1, writes=True)
                start = first - region.address
                old = region.data[start : start + size]
                old[...] = (
                    data
                    if reduction is None
                    else reduce(reduction.operation, reduction.type, old.copy(), data)
                )
            copy.is_done = True
            grid.progress += 1

        later(warp, instruction, queue, put)

    later(warp, instruction, queue, fetch)
