"""Cancelled clusters, whose work running clusters take over (PTX ISA, "clusterlaunchcontrol")."""

from __future__ import annotations

import numpy as np

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Block, Warp
from ...machine.lanes import LANES, Mask
from ...machine.launch import Extent
from ...machine.ordering import Operation
from ...machine.scheduler import Step
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Operand
from ..decoders import Qualifiers, decodes
from ..shared_addresses import active_lanes, locate_own, shared_address
from ..values import destination, read
from .late_effects import check_running, complete_at_barrier

_RESPONSE_BYTES = 16
_CANCELED = 1
_REFUSED = "no cluster to cancel"
"""Name in the memory of a block's first warp, set once the block has read such a response."""

_NO_BLOCK = 0x7FFF_FFFF
"""Place of a block where none was cancelled, which a kernel may read, but must not use."""


@decodes("clusterlaunchcontrol.try_cancel")
def _try_cancel(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("try_cancel")
    qualifiers.one_of("async")
    generic = not qualifiers.flag("shared::cta")
    qualifiers.one_of("mbarrier::complete_tx::bytes")
    multicast = qualifiers.flag("multicast::cluster::all")
    qualifiers.one_of("b128")
    qualifiers.end()
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    place = shared_address(instruction.operands[0], instruction, program, generic=generic)
    signal = shared_address(instruction.operands[1], instruction, program, generic=generic)

    def step(warp: Warp, mask: Mask) -> None:
        grid = warp.block.cluster.grid
        if _REFUSED in warp.block.warps[0].memory:
            raise EmulationError(
                "asks for a cluster after the block has read that there was none to cancel"
            )
        for lane in active_lanes(mask):
            block, offset = locate_own(warp, place(warp, lane))
            _, barrier = locate_own(warp, signal(warp, lane))
            if offset % _RESPONSE_BYTES:
                raise EmulationError(
                    f"asks for a cluster at offset {offset}, must be a multiple of "
                    f"{_RESPONSE_BYTES}"
                )
            response = _encode(grid.take_cluster())
            for peer in block.cluster.blocks if multicast else [block]:
                _respond(warp, instruction, peer, offset, barrier, response)

    return step


def _encode(first: Extent | None) -> bytes:
    """Encodes the first block of a cancelled cluster, or that there was none to cancel."""
    if first is None:
        return np.array([0, *[_NO_BLOCK] * 3], np.uint32).tobytes()
    return np.array([_CANCELED, *first], np.uint32).tobytes()


def _respond(
    warp: Warp,
    instruction: Instruction,
    block: Block,
    offset: int,
    barrier: int,
    response: bytes,
) -> None:
    ordering = warp.block.cluster.grid.ordering
    block.check_shared(offset, _RESPONSE_BYTES, "writes")

    def write(operation: Operation) -> int:
        check_running(block, "writes")
        ordering.operation_write(operation, block, np.array([offset]), _RESPONSE_BYTES)
        block.shared[offset : offset + _RESPONSE_BYTES] = np.frombuffer(response, np.uint8)
        return _RESPONSE_BYTES

    complete_at_barrier(warp, instruction, block, barrier, write)


@decodes("clusterlaunchcontrol.query_cancel.is_canceled")
def _is_canceled(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    for name in ("query_cancel", "is_canceled", "pred", "b128"):
        qualifiers.one_of(name)
    qualifiers.end()
    to, response = _query(instruction)
    value = read(response, "b128", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        canceled = value(warp)[:, 0] & np.uint64(_CANCELED) != 0
        if not canceled[mask].all():
            warp.block.warps[0].memory[_REFUSED] = True
        warp.put(to, canceled, mask)

    return step


@decodes(*(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}" for axis in "xyz"))
def _first_block(instruction: Instruction, program: Program) -> Step:
    """Decodes a query; that of a cluster that was not cancelled has no defined result."""
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("query_cancel")
    axis = "xyz".index(qualifiers.next()[-1])
    for name in ("b32", "b128"):
        qualifiers.one_of(name)
    qualifiers.end()
    to, response = _query(instruction)
    value = read(response, "b128", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        words = np.ascontiguousarray(value(warp)).view(np.uint32).reshape(LANES, 4)
        warp.put(to, words[:, 1 + axis].copy(), mask)

    return step


def _query(instruction: Instruction) -> tuple[int, Operand]:
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    to = destination(instruction.operands[0], instruction)
    if to is None:
        raise instruction.unknown("a result that is not kept")
    return to, instruction.operands[1]
