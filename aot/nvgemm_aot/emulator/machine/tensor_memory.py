"""Tensor memory of a block: 128 lanes of 512 columns of 32 bits, allocated by columns."""

from __future__ import annotations

import numpy as np

LANES, COLUMNS = 128, 512
"""Size (PTX ISA, "Tensor Memory")."""

POISON = 0x7FC0_0000
"""What memory holds that nobody has written: a quiet NaN."""


class TensorMemory:
    """The memory, which nobody has written yet.

    Attributes:
        cells: 32-bit cells by lane and column.
        allocated: Columns of each allocation, by its first column.
    """

    def __init__(self) -> None:
        self._cells: np.ndarray | None = None
        self.allocated: dict[int, int] = {}

    @property
    def cells(self) -> np.ndarray:
        """The cells, made when first used, since Hopper's blocks have none."""
        if self._cells is None:
            self._cells = np.full((LANES, COLUMNS), POISON, np.uint32)
        return self._cells
