"""Scale recipes: what the scale factors of A and B are, and where in memory each one lies.

The product is ``sum over k of (a * scale of a) * (b * scale of b)``. Block scales are those of the
OCP Microscaling Formats specification (MX: one power of two for 32 values along k) and of NVFP4
(one fp8 number for 16); the tensor cores take them in one fixed order, the 32 x 4 x 4 swizzle.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from .element_types import DType


class ScaleRecipe(str, enum.Enum):
    """Element type of the scales, and which values share one."""

    E8M0_1X32 = "e8m0_1x32"
    """MXFP8 and MXFP4."""
    E4M3_1X16 = "e4m3_1x16"
    """NVFP4."""
    E8M0_1X16 = "e8m0_1x16"
    """NVFP4 with powers of two."""
    FP32_TENSOR = "fp32_tensor"
    """One scale for all of A, one for all of B."""
    FP32_ROW = "fp32_row"
    """One scale for each row of A and each column of B."""

    @property
    def dtype(self) -> DType:
        """Element type of the scales."""
        return _FACTS[self].dtype

    @property
    def block(self) -> int | None:
        """How many values along k share a scale; None where all along k do."""
        return _FACTS[self].block

    @property
    def is_swizzled(self) -> bool:
        """Whether scales lie in the 32 x 4 x 4 swizzle: those of blocks do."""
        return self.block is not None


class _Facts(NamedTuple):
    dtype: DType
    block: int | None


_FACTS = {
    ScaleRecipe.E8M0_1X32: _Facts(DType.FP8_E8M0, 32),
    ScaleRecipe.E4M3_1X16: _Facts(DType.FP8_E4M3, 16),
    ScaleRecipe.E8M0_1X16: _Facts(DType.FP8_E8M0, 16),
    ScaleRecipe.FP32_TENSOR: _Facts(DType.FP32, None),
    ScaleRecipe.FP32_ROW: _Facts(DType.FP32, None),
}

SWIZZLE_ROWS = 128
SWIZZLE_COLUMNS = 4
"""Scales come in blocks of so many rows (of A, or columns of B) by so many along k, padded to whole
ones (CUDA documentation of cuBLAS, "1D Block Scaling Factors Layout")."""

SWIZZLED_ALIGNMENT_BYTES = 32
"""Alignment of swizzled scales that block-scaled kernels assume: ``assumed_align`` of the scale
pointers in cutlass.operators 0.3.0."""


def swizzled_elements(recipe: ScaleRecipe, rows: int, k: int) -> int:
    """How many scales a swizzled scale tensor holds, padding included.

    Args:
        recipe: A recipe with blocks.
        rows: m for A, n for B.
        k: Values of a row.
    """
    assert recipe.block is not None
    columns = -(-k // recipe.block)
    return _round_up(rows, SWIZZLE_ROWS) * _round_up(columns, SWIZZLE_COLUMNS)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
