"""Effects that happen after the instruction that asked for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Block, Warp
from ...machine.ordering import Operation
from ...ptx.program import Instruction


def later(
    warp: Warp, instruction: Instruction, queue: Hashable, action: Callable[[], None]
) -> None:
    """Does something later; its errors name the instruction that asked for it."""
    grid = warp.block.cluster.grid
    if not grid.schedule.delay:
        grid.later(queue, action)
        return

    def run() -> None:
        try:
            action()
        except EmulationError as error:
            raise type(error)(
                f"{warp} at line {instruction.line} ({instruction.text}): {error}"
            ) from error

    grid.later(queue, run)


def complete_at_barrier(
    warp: Warp,
    instruction: Instruction,
    waiter: Block,
    barrier: int,
    act: Callable[[Operation], int],
) -> None:
    """Starts an operation that completes bytes at a memory barrier once it has acted.

    Args:
        warp: The warp that starts it.
        instruction: The instruction that asks for it, for messages.
        waiter: Block that holds the barrier.
        barrier: Offset of the barrier in the block's shared memory.
        act: Reads and writes memory, later. Returns the bytes that the barrier counts.
    """
    grid = warp.block.cluster.grid
    operation = grid.ordering.begin(warp)
    grid.ordering.use_barrier(warp, waiter, barrier, asynchronous=True)

    def arrive() -> None:
        size = act(operation)
        clock = grid.ordering.finish(operation)
        grid.progress += waiter.barrier_at(barrier).complete(grid.ordering, clock, size)

    later(warp, instruction, object(), arrive)


def check_running(block: Block, what: str) -> None:
    """Checks that a block whose shared memory is used has not ended.

    Raises:
        EmulationError: If it has.
    """
    if block.ended:
        raise EmulationError(
            f"{what} shared memory of block {block.index} after the block has ended; it must "
            "wait for its copies"
        )
