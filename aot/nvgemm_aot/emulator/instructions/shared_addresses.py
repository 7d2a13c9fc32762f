"""Addresses of shared memory in operands, and the blocks that they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ..emulation_errors import MemoryAccessError
from ..machine.accesses import check_running
from ..machine.addresses import SHARED_WINDOW
from ..machine.hierarchy import Block, Warp
from ..machine.lanes import FULL, Mask
from ..machine.meanings import Value
from ..ptx.program import Instruction, Program
from ..ptx.ptx_operands import Address, Operand, Register
from .values import address


class AddressOf:
    """Reader of the address in the shared window that a lane of a warp has."""

    def __init__(self, lanes: Value, *, generic: bool) -> None:
        self.lanes = lanes
        self._window = SHARED_WINDOW if generic else 0

    def __call__(self, warp: Warp, lane: int) -> int:
        """Returns a lane's address.

        Raises:
            MemoryAccessError: If it is not of shared memory.
        """
        value = int(self.lanes(warp)[lane])
        if value >> 32 != self._window >> 32:
            kind = "generic " if self._window else ""
            raise MemoryAccessError(f"{kind}address {value:#x} is not of shared memory")
        return value - self._window


def shared_address(
    operand: Operand, instruction: Instruction, program: Program, *, generic: bool = False
) -> AddressOf:
    """Returns the reader of an address of shared memory.

    Args:
        operand: The address, in a register of 32 or 64 bits.
        instruction: The instruction that has it.
        program: The program that has that.
        generic: True if the instruction names no state space, so that the address is generic.

    Raises:
        UnsupportedPtxError: If the operand is no address.
    """
    wide = isinstance(operand, Address) and (
        generic or (isinstance(operand.base, Register) and operand.base.type.endswith("64"))
    )
    lanes = address(operand, "u64" if wide else "u32", instruction, program)
    return AddressOf(lanes, generic=generic)


Locator: TypeAlias = Callable[[Warp, int], tuple[Block, int]]
"""Returns the block that an address names, and the byte offset there."""


def locate(warp: Warp, place: int) -> tuple[Block, int]:
    """Returns the block that an address names, and the byte offset in its shared memory.

    Raises:
        MemoryAccessError: If the cluster has no such block.
        EmulationError: If that block has ended.
    """
    block, offset = warp.block.locate(place)
    check_running(warp, block)
    return block, offset


def locate_own(warp: Warp, place: int) -> tuple[Block, int]:
    """Returns the warp's own block, and the byte offset that an address names there.

    Raises:
        MemoryAccessError: If the address is another block's, which ``.shared::cta`` excludes.
    """
    block, offset = warp.block.locate(place)
    if block is not warp.block:
        raise MemoryAccessError(
            f"shared address {place:#x} is of block {block.index}, must be of the warp's own block "
            f"{warp.block.index}; other blocks' addresses need .shared::cluster"
        )
    return block, offset


def agree(lanes: Any, mask: Mask) -> bool:
    """Returns whether active lanes have one value."""
    chosen = lanes if mask is FULL else lanes[mask]
    agreed: bool = chosen.tobytes() == chosen[:1].tobytes() * len(chosen)
    return agreed


def active_lanes(mask: Mask) -> list[int]:
    """Returns the numbers of a mask's lanes."""
    found: list[int] = mask.nonzero()[0].tolist()
    return found
