"""Allocation of tensor memory (PTX ISA, "tcgen05.alloc")."""

from __future__ import annotations

import numpy as np

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Block, Warp
from ...machine.lanes import Mask
from ...machine.scheduler import RETRY, Step
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers, decodes
from ..shared_addresses import locate, shared_address
from ..values import read
from .work_queue import blocks_of_group

CTA_GROUPS = ("cta_group::1", "cta_group::2")


def whole_warp(mask: Mask) -> None:
    """Checks that all lanes run an instruction that is ``.sync.aligned``.

    Raises:
        EmulationError: If some do not.
    """
    if not mask.all():
        raise EmulationError(f"{int(mask.sum())} lanes run an instruction that needs a whole warp")


def check_group(instruction: Instruction, program: Program, group: str) -> None:
    """Checks that the kernel's instructions for tensor cores all have the same ``.cta_group``.

    Raises:
        UnsupportedPtxError: If one has another.
    """
    for other in program.instructions:
        if other.opcode == "tcgen05" and {*CTA_GROUPS} - {group} & {*other.qualifiers}:
            raise other.unknown(f"a group other than .{group} of line {instruction.line}")


@decodes("tcgen05.alloc")
def _alloc(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("alloc")
    group = qualifiers.one_of(*CTA_GROUPS)
    check_group(instruction, program, group)
    qualifiers.one_of("sync")
    qualifiers.one_of("aligned")
    space = qualifiers.option("shared::cta")
    qualifiers.one_of("b32")
    qualifiers.end()
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    place = shared_address(instruction.operands[0], instruction, program, generic=space is None)
    count = read(instruction.operands[1], "u32", instruction, program)

    def step(warp: Warp, mask: Mask) -> str | None:
        whole_warp(mask)
        columns = int(count(warp)[0])
        blocks = blocks_of_group(warp, paired=group == "cta_group::2")
        if _REQUEST not in warp.memory:
            warp.memory[_REQUEST] = warp.block.tensor.request(columns)
            warp.block.cluster.grid.progress += 1
        if not _all_ask(warp, blocks, columns):
            return RETRY
        first = warp.block.tensor.allocate(columns)
        if first is None:
            warp.waiting = f"{columns} columns of tensor memory to be freed"
            return RETRY
        warp.waiting = None
        del warp.memory[_REQUEST]
        block, offset = locate(warp, place(warp, 0))
        block.check_shared(offset, 4, "writes")
        block.shared[offset : offset + 4] = np.frombuffer(first.to_bytes(4, "little"), np.uint8)
        grid = warp.block.cluster.grid
        grid.ordering.write(warp, block, np.array([offset]), 4)
        grid.progress += 1
        return None

    return step


_REQUEST = "tensor memory request"
"""Name in a warp's memory of its request's number, until it is fulfilled."""


def _all_ask(warp: Warp, blocks: list[Block], columns: int) -> bool:
    """Tells if all blocks of a group have made the request that a warp waits for.

    Raises:
        EmulationError: If one asked for another number of columns, or has ended.
    """
    number = warp.memory[_REQUEST]
    for block in blocks:
        requests = block.tensor.requests
        if number >= len(requests):
            if block.ended:
                raise EmulationError(
                    f"allocates tensor memory with block {block.index}, which has ended; both "
                    "blocks of a pair must allocate"
                )
            warp.waiting = f"block {block.index} to allocate tensor memory, too"
            return False
        if requests[number] != columns:
            raise EmulationError(
                f"allocates {columns} columns of tensor memory, and block {block.index} of its "
                f"pair allocates {requests[number]}"
            )
    return True


@decodes("tcgen05.dealloc")
def _dealloc(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("dealloc")
    qualifiers.one_of(*CTA_GROUPS)
    qualifiers.one_of("sync")
    qualifiers.one_of("aligned")
    qualifiers.one_of("b32")
    qualifiers.end()
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    place = read(instruction.operands[0], "u32", instruction, program)
    count = read(instruction.operands[1], "u32", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        whole_warp(mask)
        first, columns = int(place(warp)[0]), int(count(warp)[0])
        warp.block.tensor.free(first, columns)
        grid = warp.block.cluster.grid
        grid.ordering.tensor_free(warp, warp.block, slice(first, first + columns))
        grid.progress += 1

    return step


@decodes("tcgen05.relinquish_alloc_permit")
def _relinquish(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("relinquish_alloc_permit")
    qualifiers.one_of(*CTA_GROUPS)
    qualifiers.one_of("sync")
    qualifiers.one_of("aligned")
    qualifiers.end()
    if instruction.operands:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")

    def step(warp: Warp, mask: Mask) -> None:
        whole_warp(mask)
        warp.block.tensor.is_relinquished = True

    return step
