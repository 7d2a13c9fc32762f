"""Block scales: values, layout, and block-scaled products.

Tables decode values and scales, so results do not depend on a GPU's casts.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Problem, Signature
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.gemm.types import SWIZZLE_COLUMNS, SWIZZLE_ROWS

if TYPE_CHECKING:
    import torch

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by 3-bit code; the fourth bit is the sign (OCP Microscaling Formats specification
v1.0, 5.3.3)."""

_LEAST_EXPONENT = -5
"""Least exponent for the middle of random scales: half that value is e4m3's least normal number,
2**-6."""

_TILE_LINES = 32
"""Lines in a tile. Line i holds the columns of rows i, i + 32, i + 64 and i + 96."""

PORTION = 2**26
"""A and B values decoded at a time: half a gigabyte in fp64."""


def has_blocks(signature: Signature) -> bool:
    """Returns True if a signature has block scales."""
    return signature.scales is not None and signature.scales.block is not None


def _unit_code_and_octave(dtype: DType) -> tuple[int, int]:
    """Returns a scale dtype's code for 1 and its codes per octave."""
    fraction_bits, bias = dtype.row.fraction_bits, dtype.row.exponent_bias
    assert fraction_bits is not None
    assert bias is not None
    return bias << fraction_bits, 1 << fraction_bits


def random_scales(
    problem: Problem, role: Role, device: str, generator: torch.Generator, *, terms: int
) -> torch.Tensor:
    """Returns random scales for A or B as kernels read them: swizzled, zero-padded, flat.

    Scales span two octaves. Their middle falls with ``terms``, the number of products in a sum, so
    sums deviate by at most about 30 for up to 2**22 terms and fit into fp8. Padding is code 0, not
    NaN: kernels may multiply it by the zeros that they hold past k. A kernel that uses padding as a
    scale computes a wrong result.
    """
    import torch

    scales = problem.signature.scales
    assert scales is not None
    assert scales.block is not None
    rows = problem.m if role is Role.SCALE_A else problem.n
    unit_code, octave = _unit_code_and_octave(scales.dtype)
    exponent = max(_LEAST_EXPONENT, -round(math.log2(terms) / 4))  # for A and B each
    middle = unit_code + octave * exponent
    codes = torch.randint(
        middle - octave, middle + octave + 1, (rows, -(-problem.k // scales.block)),
        generator=generator, device=device, dtype=torch.uint8,
    )  # fmt: skip
    return swizzled(codes).view(torch_dtype(scales.dtype))


def scales_of_powers(exponents: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Returns power-of-two scales as kernels read them, for exponents [rows, blocks] in -6..8."""
    import torch

    unit_code, octave = _unit_code_and_octave(dtype)
    codes = unit_code + octave * exponents
    return swizzled(codes.to(torch.uint8)).view(torch_dtype(dtype))


def fp4_of(values: torch.Tensor) -> torch.Tensor:
    """Packs values into fp4, two per byte, the first in the low half.

    Shape [..., k] with even k; values 0, 1, 2, 3, 4, 6 and their negatives.
    """
    import torch

    codes = values.new_tensor([0, 2, 4, 5, 6, 0, 7])[values.abs().long()] + 8 * (values < 0)
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).view(torch_dtype(DType.FP4_E2M1))


def block_scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    signature: Signature,
    *,
    of_magnitudes: bool = False,
) -> torch.Tensor:
    """Returns ``sum over k of (a * scale of a) * (b * scale of b)`` in fp64, by portions.

    Args:
        a: Operand [m, k]; for fp4 [m, k / 2].
        b: Operand [k, n]; for fp4 [k / 2, n].
        scale_a: Swizzled A scales.
        scale_b: Swizzled B scales.
        signature: Signature with block scales.
        of_magnitudes: True to drop the signs of A and B.
    """
    import torch

    scales, dtype = signature.scales, signature.a
    assert scales is not None
    assert scales.block is not None
    m, n, k = a.shape[0], b.shape[1], a.shape[1] * dtype.packed
    blocks = -(-k // scales.block)
    factors_a = _decode(unswizzled(scale_a, m, blocks), scales.dtype)
    factors_b = _decode(unswizzled(scale_b, n, blocks), scales.dtype)
    result = torch.zeros((m, n), dtype=torch.float64, device=a.device)
    block_count = max(1, PORTION // ((m + n) * scales.block))
    width = scales.block // dtype.packed
    for first in range(0, blocks, block_count):
        last = first + block_count
        scale_columns, elements = slice(first, last), slice(first * width, last * width)
        part_a = _decode_scaled(a[:, elements], factors_a[:, scale_columns], dtype, scales.block)
        part_b = _decode_scaled(b.mT[:, elements], factors_b[:, scale_columns], dtype, scales.block)
        if of_magnitudes:
            part_a, part_b = part_a.abs_(), part_b.abs_()
        result.addmm_(part_a, part_b.mT)
    return result


def swizzled(codes: torch.Tensor) -> torch.Tensor:
    """Reorders bytes [rows, columns] into the 32 x 4 x 4 swizzle, padded with zeros.

    Tiles are 128 rows by 4 columns in 32 lines with 16 bytes each, stored row block by row block
    (cuBLAS documentation, "1D Block Scaling Factors Layout").
    """
    rows, columns = codes.shape
    tiles = -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_COLUMNS)
    padded = codes.new_zeros((tiles[0] * SWIZZLE_ROWS, tiles[1] * SWIZZLE_COLUMNS))
    padded[:rows, :columns] = codes
    lines = padded.view(tiles[0], -1, _TILE_LINES, tiles[1], SWIZZLE_COLUMNS)
    return lines.permute(0, 3, 2, 1, 4).flatten()


def unswizzled(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverts `swizzled`: returns bytes [rows, columns] for a tensor with any one-byte dtype."""
    import torch

    tiles = -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_COLUMNS)
    lines = flat.view(torch.uint8).view(*tiles, _TILE_LINES, -1, SWIZZLE_COLUMNS)
    whole = lines.permute(0, 3, 2, 1, 4).reshape(tiles[0] * SWIZZLE_ROWS, -1)
    return whole[:rows, :columns]


def _decode_scaled(
    elements: torch.Tensor, factors: torch.Tensor, dtype: DType, block: int
) -> torch.Tensor:
    values = _decode(elements, dtype)
    return values * factors.repeat_interleave(block, -1)[:, : values.shape[1]]


def _decode(elements: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Decodes to fp64; the last dimension doubles for fp4."""
    import torch

    table = _decode_table(dtype).to(elements.device)
    return table[elements.view(torch.uint8).int()].flatten(-2)


@functools.cache
def _decode_table(dtype: DType) -> torch.Tensor:
    """Values by byte, fp64 on the CPU; for fp4 two per byte, the low half first."""
    import torch

    if dtype is DType.FP4_E2M1:
        values = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.float64)
        return torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)
    bytes_ = torch.arange(256, dtype=torch.uint8)
    return bytes_.view(torch_dtype(dtype)).double().unsqueeze(-1)
