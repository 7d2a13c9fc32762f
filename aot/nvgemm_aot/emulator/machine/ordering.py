"""Watches in which order accesses to memory are bound to happen.

Instructions call these hooks at every access and at every synchronisation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Warp = Any
"""A `hierarchy.Warp`, whose module imports this one."""

Block = Any
"""A `hierarchy.Block`."""

Clock = Any
"""Says what happened before; made by `Ordering.release` and `Ordering.finish`."""

Operation = Any
"""An asynchronous operation: a bulk copy, or work of the tensor core."""

Region = Any
"""A `global_memory.Region`."""

Offsets = npt.NDArray[np.int64]
"""Byte offsets into a block's shared memory, or into a region."""


class Ordering:
    """Checks nothing: every order is right."""

    def read(self, warp: Warp, block: Block, offsets: Offsets, size: int) -> None:
        """A warp reads ``size`` bytes of shared memory at each offset."""

    def write(self, warp: Warp, block: Block, offsets: Offsets, size: int) -> None:
        """A warp writes ``size`` bytes of shared memory at each offset."""

    def global_read(self, warp: Warp, region: Region, offsets: Offsets, size: int) -> None:
        """A warp reads ``size`` bytes of the workspace at each offset."""

    def global_write(self, warp: Warp, region: Region, offsets: Offsets, size: int) -> None:
        """A warp writes ``size`` bytes of the workspace at each offset."""

    def use_global(self, warp: Warp) -> None:
        """A warp accesses global memory, or issues an operation that does."""

    def depend(self, warp: Warp) -> None:
        """A warp has waited for the launches on which its own depends."""

    def fence_async(self, warp: Warp) -> None:
        """A warp makes its accesses visible to asynchronous operations."""

    def fence_initialised_barriers(self, warp: Warp) -> None:
        """A warp makes memory barriers that it initialised visible to its cluster."""

    def release(self, warp: Warp) -> Clock:
        """Returns what happened before this point of a warp, for who waits for it."""

    def release_relaxed(self, warp: Warp) -> Clock:
        """Returns what fences of a warp published, for who waits for a relaxed arrival."""

    def acquire(self, warp: Warp, clock: Clock) -> None:
        """A warp learns of a release: what happened before that comes before its next accesses."""

    def acquire_relaxed(self, warp: Warp, clock: Clock) -> None:
        """A warp observes a release, which orders what follows its next fence."""

    def fence(self, warp: Warp) -> None:
        """A warp runs a fence that releases and acquires."""

    def merge(self, first: Clock, second: Clock) -> Clock:
        """Returns the clock behind both."""

    def use_barrier(
        self, warp: Warp, block: Block, offset: int, *, asynchronous: bool = False
    ) -> None:
        """A warp, or an operation that it issues, uses a memory barrier at a byte offset."""

    def begin(self, warp: Warp) -> Operation:
        """A warp issues an asynchronous operation."""

    def operation_read(
        self, operation: Operation, block: Block, offsets: Offsets, size: int
    ) -> None:
        """An operation reads ``size`` bytes of shared memory at each offset."""

    def operation_write(
        self, operation: Operation, block: Block, offsets: Offsets, size: int
    ) -> None:
        """An operation writes ``size`` bytes of shared memory at each offset."""

    def finish(self, operation: Operation) -> Clock:
        """Returns what has happened once the operation is complete."""

    def tensor_free(self, warp: Warp, block: Block, columns: slice) -> None:
        """A warp frees columns of tensor memory."""

    def tensor_read(self, by: Operation, block: Block, lanes: slice, columns: slice) -> None:
        """An operation reads tensor memory."""

    def tensor_write(self, by: Operation, block: Block, lanes: slice, columns: slice) -> None:
        """An operation writes tensor memory."""

    def leave(self, warp: Warp) -> None:
        """A warp has ended."""
