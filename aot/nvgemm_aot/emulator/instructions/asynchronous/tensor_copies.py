"""Bulk copies of boxes of tensors (PTX ISA, "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor").

Loads and stores take effect late. A store reads shared memory at one time and writes the tensor at
a later one, so that ``wait_group.read`` is what allows its source to be overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...emulation_errors import EmulationError
from ...machine.global_memory import Bytes
from ...machine.hierarchy import Block, Warp
from ...machine.lanes import Mask
from ...machine.meanings import Value
from ...machine.ordering import Operation
from ...machine.scheduler import Step
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Address, Operand, Vector
from ..decoders import Qualifiers, decodes
from ..shared_addresses import active_lanes, agree, locate, locate_own, shared_address
from ..values import read
from .bulk_groups import add_to_group
from .late_effects import check_running, complete_at_barrier, later
from .reductions import OPERATIONS, reduce
from .tensor_boxes import Box, chunks_of, load_tensor_map, read_chunks, write_chunks

GATHERED_ROWS = 4
"""Rows of a box of ``.tile::gather4`` and ``.tile::scatter4``, each at a coordinate of its own."""

_DIMENSIONS = {f"{rank}d": rank for rank in range(1, 6)}


@decodes("cp.async.bulk.tensor")
def _copy(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    for name in ("async", "bulk", "tensor"):
        qualifiers.one_of(name)
    rank = _DIMENSIONS[qualifiers.one_of(*_DIMENSIONS)]
    if qualifiers.flag("global"):
        return _store(qualifiers, instruction, program, rank, None)
    return _load(qualifiers, instruction, program, rank)


@decodes("cp.reduce.async.bulk.tensor")
def _reduce(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    for name in ("reduce", "async", "bulk", "tensor"):
        qualifiers.one_of(name)
    rank = _DIMENSIONS[qualifiers.one_of(*_DIMENSIONS)]
    qualifiers.one_of("global")
    return _store(qualifiers, instruction, program, rank, OPERATIONS)


@decodes("cp.async.bulk.prefetch.tensor")
def _prefetch(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    for name in ("async", "bulk", "prefetch", "tensor"):
        qualifiers.one_of(name)
    rank = _DIMENSIONS[qualifiers.one_of(*_DIMENSIONS)]
    qualifiers.one_of("L2")
    qualifiers.one_of("global")
    rows = _rows(qualifiers, rank, "tile::gather4")
    hinted = qualifiers.flag("L2::cache_hint")
    qualifiers.end()
    if len(instruction.operands) != 1 + hinted:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    boxes = _boxes(instruction.operands[0], instruction, program, rank, rows)

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            for box in boxes(warp, lane):
                box.read(warp.block.cluster.grid.memory)

    return step


def _rows(qualifiers: Qualifiers, rank: int, separate: str) -> int:
    """Reads the load mode; returns the rows that have coordinates of their own, or 0."""
    mode = qualifiers.option("tile", *([separate] if rank == 2 else []))
    return GATHERED_ROWS if mode == separate else 0


@dataclass(frozen=True, kw_only=True)
class _Boxes:
    """Reader of the boxes that an instruction copies, one after the other in shared memory.

    Attributes:
        rank: Dimensions of the tensor.
        rows: Rows that have coordinates of their own, or 0.
        where: Address of the tensor map, to which ``offset`` is added.
        coordinates: Coordinates of the first element, or the first column and all rows.
    """

    rank: int
    rows: int
    where: Value
    offset: int
    coordinates: Sequence[Value]

    def agree(self, warp: Warp, mask: Mask) -> bool:
        """Tells if active lanes copy the same boxes."""
        return all(agree(value(warp), mask) for value in (self.where, *self.coordinates))

    def __call__(self, warp: Warp, lane: int) -> list[Box]:
        """Returns the boxes of a lane."""
        grid = warp.block.cluster.grid
        tensor = load_tensor_map(grid, int(self.where(warp)[lane]) + self.offset)
        if tensor.rank != self.rank:
            raise EmulationError(
                f"the tensor map has {tensor.rank} dimensions, must have {self.rank}"
            )
        first, *others = (_signed(int(each(warp)[lane])) for each in self.coordinates)
        if not self.rows:
            return [Box(tensor, (first, *others))]
        if tensor.box[1] != 1:
            raise EmulationError(f"the tensor map's box has {tensor.box[1]} rows, must have 1")
        return [Box(tensor, (first, row)) for row in others]


def _boxes(
    operand: Operand, instruction: Instruction, program: Program, rank: int, rows: int
) -> _Boxes:
    """Returns the reader of ``[tensor map, {coordinates}]``."""
    if not isinstance(operand, Address) or not isinstance(operand.coordinates, Vector):
        raise instruction.unknown(f"operand {operand}")
    number = 1 + rows if rows else rank
    elements = operand.coordinates.elements
    if len(elements) != number:
        raise instruction.unknown(f"a number of {len(elements)} coordinates")
    return _Boxes(
        rank=rank,
        rows=rows,
        where=read(operand.base, "u64", instruction, program),
        offset=operand.offset,
        coordinates=[read(each, "s32", instruction, program) for each in elements],
    )


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _load(qualifiers: Qualifiers, instruction: Instruction, program: Program, rank: int) -> Step:
    space = qualifiers.one_of("shared::cluster", "shared::cta")
    located = locate_own if space == "shared::cta" else locate
    qualifiers.one_of("global")
    rows = _rows(qualifiers, rank, "tile::gather4")
    qualifiers.one_of("mbarrier::complete_tx::bytes")
    multicast = space == "shared::cluster" and qualifiers.flag("multicast::cluster")
    group = qualifiers.option("cta_group::1", "cta_group::2")
    hinted = qualifiers.flag("L2::cache_hint")
    # NVVM writes the group behind the hint, the manual before it.
    group = group or qualifiers.option("cta_group::1", "cta_group::2")
    qualifiers.end()
    if len(instruction.operands) != 3 + multicast + hinted:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    target, source, barrier, *rest = instruction.operands
    place = shared_address(target, instruction, program)
    boxes = _boxes(source, instruction, program, rank, rows)
    signal = shared_address(barrier, instruction, program)
    ranks: Value | None = read(rest[0], "u16", instruction, program) if multicast else None
    paired = group == "cta_group::2"

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            block, offset = located(warp, place(warp, lane))
            waiter, waiter_offset = locate(warp, signal(warp, lane))
            _check_barrier(block, waiter, paired=paired or multicast)
            warp.block.cluster.grid.ordering.use_global(warp)
            tiles = boxes(warp, lane)
            peers = warp.block.cluster.blocks
            if ranks is None:
                targets = [(block, waiter)]
            else:
                chosen = int(ranks(warp)[lane])
                if chosen == 0 or chosen >> len(peers):
                    raise EmulationError(
                        f"multicasts to blocks {chosen:#b} of a cluster of {len(peers)}"
                    )
                targets = [
                    (peer, peers[peer.rank & ~1 | waiter.rank & 1] if paired else peer)
                    for peer in peers
                    if chosen >> peer.rank & 1
                ]
            for to, notified in targets:
                _begin_load(warp, instruction, tiles, to, offset, notified, waiter_offset)

    return step


def _check_barrier(block: Block, waiter: Block, *, paired: bool) -> None:
    same = block.rank >> 1 == waiter.rank >> 1 if paired else block is waiter
    if not same:
        raise EmulationError(
            f"copies to block {block.index} and signals a memory barrier in block {waiter.index}, "
            "must be the same one, or with .cta_group::2 one of its pair"
        )


def _begin_load(
    warp: Warp,
    instruction: Instruction,
    tiles: Sequence[Box],
    block: Block,
    offset: int,
    waiter: Block,
    waiter_offset: int,
) -> None:
    grid = warp.block.cluster.grid
    size = sum(tile.shared_bytes for tile in tiles)
    chunks = chunks_of(block, offset, size, tiles[0].tensor.swizzle)

    def copy(operation: Operation) -> int:
        check_running(block, "writes")
        parts = [tile.read(grid.memory) for tile in tiles]
        grid.ordering.operation_write(operation, block, chunks, 16)
        begin = 0
        for part in parts:
            end = begin + len(part) // 16
            write_chunks(block, chunks[begin:end], part)
            begin = end
        return sum(tile.counted_bytes for tile in tiles)

    complete_at_barrier(warp, instruction, waiter, waiter_offset, copy)


def _store(
    qualifiers: Qualifiers,
    instruction: Instruction,
    program: Program,
    rank: int,
    operations: Sequence[str] | None,
) -> Step:
    qualifiers.one_of("shared::cta")
    operation = None if operations is None else qualifiers.one_of(*operations)
    rows = _rows(qualifiers, rank, "tile::scatter4")
    qualifiers.one_of("bulk_group")
    hinted = qualifiers.flag("L2::cache_hint")
    qualifiers.end()
    if len(instruction.operands) != 2 + hinted:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    target, source = instruction.operands[:2]
    boxes = _boxes(target, instruction, program, rank, rows)
    place = shared_address(source, instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        lanes = active_lanes(mask)
        same = operation is None and agree(place.lanes(warp), mask) and boxes.agree(warp, mask)
        # Lanes that store the same bytes to the same place do so at once.
        for threads in [lanes] if same else [[lane] for lane in lanes]:
            block, offset = locate(warp, place(warp, threads[0]))
            if block is not warp.block:
                raise EmulationError("stores from another block's shared memory")
            tiles = boxes(warp, threads[0])
            _begin_store(warp, threads, instruction, tiles, offset, operation)

    return step


def _begin_store(
    warp: Warp,
    lanes: Sequence[int],
    instruction: Instruction,
    tiles: Sequence[Box],
    offset: int,
    reduction: str | None,
) -> None:
    grid, block = warp.block.cluster.grid, warp.block
    tensor = tiles[0].tensor
    for tile in tiles:
        tile.check_store()
    size = sum(tile.shared_bytes for tile in tiles)
    chunks = chunks_of(block, offset, size, tensor.swizzle)
    grid.ordering.use_global(warp)
    operation = grid.ordering.begin(warp)
    copy = add_to_group(warp, lanes)
    queue = object()

    def fetch() -> None:
        check_running(block, "reads")
        grid.ordering.operation_read(operation, block, chunks, 16)
        data = read_chunks(block, chunks)
        copy.clock = grid.ordering.finish(operation)
        copy.has_read = True
        grid.progress += 1
        later(warp, instruction, queue, lambda: put(data))

    def put(data: Bytes) -> None:
        begin = 0
        for tile in tiles:
            part = data[begin : begin + tile.shared_bytes]
            if reduction is not None:
                old = tile.read(grid.memory)
                part = reduce(reduction, tensor.type.name, old, part)
            tile.write(grid.memory, part, reduces=reduction is not None)
            begin += tile.shared_bytes
        copy.is_done = True
        grid.progress += 1

    later(warp, instruction, queue, fetch)
