"""A kernel launch, and the schedule by which it is emulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Extent: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel launch.

    Attributes:
        grid: Blocks along x, y, z; multiples of ``cluster``.
        block: Threads along x, y, z.
        cluster: Blocks of a cluster along x, y, z.
        shared_bytes: Dynamic shared memory of a block.
        parameters: Bytes of the parameter space.
        is_dependent: True if it may begin before earlier launches end.
    """

    grid: Extent
    block: Extent
    cluster: Extent = (1, 1, 1)
    shared_bytes: int = 0
    parameters: bytes = b""
    is_dependent: bool = False


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Choices that a GPU makes by itself, drawn from a seed, so that they can be replayed.

    Attributes:
        seed: Seed for the order of warps, and for when late effects happen.
        resident: Clusters that run at the same time.
        delay: Rounds by which an asynchronous effect is late, at most. With 0, it happens at once,
            and warps run in their order.
        quantum: Instructions that a warp runs before the next one's turn.
        limit: Warp instructions after which a kernel counts as one that never ends.
        unwritten: Byte that shared and tensor memory have throughout until they are written. 0xFF
            makes a NaN of each floating-point type.
    """

    seed: int = 0
    resident: int = 2
    delay: int = 0
    quantum: int = 200
    limit: int = 200_000_000
    unwritten: int = 0xFF
