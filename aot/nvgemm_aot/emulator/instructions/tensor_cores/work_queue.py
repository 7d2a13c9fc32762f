"""The order in which tensor cores work, and what commits wait for."""

from __future__ import annotations

from collections.abc import Callable

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Block, Warp
from ...machine.ordering import Operation
from ...ptx.program import Instruction
from ..asynchronous.late_effects import check_running, later

_KEY = "tensor core clock"


def blocks_of_group(warp: Warp, *, paired: bool) -> list[Block]:
    """Returns the blocks whose tensor cores work together, in the order of their ranks.

    Raises:
        EmulationError: If the block has no peer.
    """
    block = warp.block
    if not paired:
        return [block]
    peers = block.cluster.blocks
    if len(peers) % 2:
        raise EmulationError(f".cta_group::2 needs a cluster of pairs, it has {len(peers)} blocks")
    return peers[block.rank & ~1 :][:2]


def issue(
    warp: Warp,
    instruction: Instruction,
    blocks: list[Block],
    action: Callable[[Operation], None],
) -> None:
    """Gives work to the tensor cores, which they do after what the block gave them before."""
    grid = warp.block.cluster.grid
    operation = grid.ordering.begin(warp)

    def run() -> None:
        for block in blocks:
            check_running(block, "uses")
        action(operation)
        clock = grid.ordering.finish(operation)
        warp.memory[_KEY] = grid.ordering.merge(warp.memory.get(_KEY), clock)

    later(warp, instruction, ("tensor cores", id(warp.block)), run)


def commit(warp: Warp, instruction: Instruction, barriers: list[tuple[Block, int]]) -> None:
    """Arrives at memory barriers once all work that a warp gave before is done."""
    grid = warp.block.cluster.grid
    for block, offset in barriers:
        grid.ordering.use_barrier(warp, block, offset, asynchronous=True)

    def run() -> None:
        clock = warp.memory.get(_KEY)
        for block, offset in barriers:
            check_running(block, "signals a memory barrier in")
            grid.progress += block.barrier_at(offset).arrive(grid.ordering, clock)

    later(warp, instruction, ("tensor cores", id(warp.block)), run)
