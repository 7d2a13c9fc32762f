"""Tensor memory of a block: 128 lanes of 512 columns of 32 bits, allocated by columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..emulation_errors import EmulationError, MemoryAccessError

LANES, COLUMNS = 128, 512
"""Size (PTX ISA, "Tensor Memory")."""

SMALLEST_ALLOCATION = 32
"""Columns are allocated in powers of two from this (PTX ISA, "Tensor Memory Allocation")."""


class TensorMemory:
    """The memory, which nobody has written yet.

    Args:
        unwritten: Byte that it has throughout.

    Attributes:
        cells: 32-bit cells by lane and column.
        allocated: Columns of each allocation, by its first column.
        requests: Columns of all allocations that were asked for, in order.
        is_relinquished: Set once the block has given up its right to allocate.
    """

    def __init__(self, unwritten: int) -> None:
        self._unwritten = np.uint32(unwritten * 0x0101_0101)
        self._cells: npt.NDArray[np.uint32] | None = None
        self.allocated: dict[int, int] = {}
        self.requests: list[int] = []
        self.is_relinquished = False

    @property
    def cells(self) -> npt.NDArray[np.uint32]:
        """The cells, made when first used, since Hopper's blocks have none."""
        if self._cells is None:
            self._cells = np.full((LANES, COLUMNS), self._unwritten, np.uint32)
        return self._cells

    def request(self, columns: int) -> int:
        """Asks for an allocation; returns its number.

        Raises:
            EmulationError: If the number of columns is not allowed, or the right was given up.
        """
        self._check_count(columns)
        if self.is_relinquished:
            raise EmulationError("allocates tensor memory after giving up the right to")
        if self.requests and columns > self.requests[-1]:
            raise EmulationError(
                f"allocates {columns} columns of tensor memory after {self.requests[-1]}; "
                "allocations of a block must not grow"
            )
        self.requests.append(columns)
        return len(self.requests) - 1

    def allocate(self, columns: int) -> int | None:
        """Returns the first column of a requested allocation, or None while there is no room."""
        first = 0
        for begin in [*sorted(self.allocated), COLUMNS]:
            if begin - first >= columns:
                break
            if begin == COLUMNS:
                return None
            first = begin + self.allocated[begin]
        self.allocated[first] = columns
        self.cells[:, first : first + columns] = self._unwritten
        return first

    def free(self, first: int, columns: int) -> None:
        """Frees an allocation.

        Raises:
            EmulationError: If there is none like that.
        """
        self._check_count(columns)
        if self.allocated.get(first) != columns:
            raise EmulationError(
                f"frees {columns} columns of tensor memory at {first}; allocated are "
                f"{self.describe()}"
            )
        del self.allocated[first]

    def check(self, lanes: range, columns: range, verb: str) -> None:
        """Checks that cells exist and are allocated.

        Raises:
            MemoryAccessError: If they are not.
        """
        inside = lanes.start >= 0 and lanes.stop <= LANES
        for first, count in self.allocated.items():
            if inside and first <= columns.start and columns.stop <= first + count:
                return
        raise MemoryAccessError(
            f"{verb} lanes {lanes.start} to {lanes.stop - 1} and columns {columns.start} to "
            f"{columns.stop - 1} of tensor memory; allocated are {self.describe()}"
        )

    def _check_count(self, columns: int) -> None:
        if not SMALLEST_ALLOCATION <= columns <= COLUMNS or columns & (columns - 1):
            raise EmulationError(
                f"the number of columns is {columns}, must be a power of 2 from "
                f"{SMALLEST_ALLOCATION} to {COLUMNS}"
            )

    def describe(self) -> str:
        """Lists the allocated columns."""
        return (
            ", ".join(
                f"columns {first} to {first + count - 1}"
                for first, count in sorted(self.allocated.items())
            )
            or "none"
        )
