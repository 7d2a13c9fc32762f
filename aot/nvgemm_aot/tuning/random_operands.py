"""Random operands of problems to time, and block scales: their values, layout and products.

Values and scales are decoded by tables, so that results do not depend on a GPU's casts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, extra_roles, role_dtype, role_shape, roles
from nvgemm_runtime.gemm.types import SWIZZLE_COLUMNS, SWIZZLE_ROWS

if TYPE_CHECKING:
    import torch

Operands = tuple[Any, ...]
"""A, B, the output, and then the further operands, in the order of `roles.extra_roles`."""

MOST_SETS = 512
"""Most sets of operands: a sample has no more launches."""

_FP8_RESULT = 16.0
"""Standard deviation of fp8 results, whose largest value is 448 (e4m3)."""
_INT8_RESULT = 20.0
"""Standard deviation of int8 results: six deviations fit into 127."""
_UINT8_RESULT = 40.0
"""Mean of uint8 results if values were zeros and ones; twos make it 90, and 255 is ten deviations
further."""


def make_sets(problem: Problem, device: str, *, seed: int, total_bytes: int) -> list[Operands]:
    """Make several sets of operands of one problem, which together take some space.

    Args:
        problem: The problem.
        device: As torch names it.
        seed: Seed of the random data.
        total_bytes: Bytes that all sets should take together; at least two sets are made.

    Returns:
        At most `MOST_SETS` sets, each in buffers of its own. Groups share the rows evenly.
    """
    import torch

    signature = problem.signature
    one = 0
    for role in roles(signature):
        dtype = role_dtype(signature, role)
        one += dtype.bytes_of(math.prod(role_shape(problem, role)) * dtype.packed)
    count = min(MOST_SETS, max(2, -(-total_bytes // one)))
    generator = torch.Generator(device=device).manual_seed(seed)
    return [make_operands(problem, device, generator) for _ in range(count)]


def make_operands(problem: Problem, device: str, generator: torch.Generator) -> Operands:
    """One set of operands; see `make_sets`."""
    import torch

    signature = problem.signature
    a = _matrix(problem, Role.A, device, generator, row_major=signature.layout.a_row_major)
    b = _matrix(problem, Role.B, device, generator, row_major=signature.layout.b_row_major)
    out = torch.empty(
        role_shape(problem, Role.OUT), dtype=torch_dtype(signature.out), device=device
    )
    return a, b, out, *random_extras(problem, device, generator, terms=problem.k)


def poison(out: torch.Tensor) -> None:
    """Fill every byte with 0xFF, which is NaN or -1, so that elements not written show."""
    import torch

    out.view(torch.uint8).fill_(0xFF)


def make_extras(
    problem: Problem,
    device: str,
    addend: Callable[[tuple[int, ...]], torch.Tensor],
    scales: Callable[[Role], torch.Tensor],
) -> list[torch.Tensor]:
    """Make the operands besides A, B and the output.

    Args:
        problem: The problem.
        device: The device's name in torch.
        addend: Makes the values of an addend of a shape.
        scales: Makes the scales of A or B.
    """
    made = []
    for role in extra_roles(problem.signature):
        if role is Role.OFFSETS:
            made.append(group_ends(problem, device))
        elif role is Role.ADDEND:
            dtype = torch_dtype(role_dtype(problem.signature, role))
            made.append(addend(role_shape(problem, role)).to(dtype))
        else:
            made.append(scales(role))
    return made


def random_extras(
    problem: Problem, device: str, generator: torch.Generator, *, terms: int
) -> list[torch.Tensor]:
    """An addend of normal distribution, and scales around 1 or, of blocks, `random_scales`."""
    import torch

    def scales(role: Role) -> torch.Tensor:
        if _has_blocks(problem):
            return random_scales(problem, role, device, generator, terms=terms)
        return torch.rand(role_shape(problem, role), generator=generator, device=device) + 0.5

    return make_extras(
        problem,
        device,
        lambda shape: torch.randn(shape, generator=generator, device=device),
        scales,
    )


def group_ends(problem: Problem, device: str) -> torch.Tensor:
    """The end row of each group, all of even size."""
    import torch

    ends = [problem.m * group // problem.groups for group in range(1, problem.groups + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _has_blocks(problem: Problem) -> bool:
    scales = problem.signature.scales
    return scales is not None and scales.block is not None


def _matrix(
    problem: Problem, role: Role, device: str, generator: torch.Generator, *, row_major: bool
) -> torch.Tensor:
    *lead, rows, columns = role_shape(problem, role)
    shape = (*lead, rows, columns) if row_major else (*lead, columns, rows)
    values = _values(problem, role_dtype(problem.signature, role), shape, device, generator)
    return values if row_major else values.mT


def _values(
    problem: Problem,
    dtype: DType,
    shape: tuple[int, ...],
    device: str,
    generator: torch.Generator,
) -> torch.Tensor:
    """Random values whose sums of ``k`` scaled products fit into the output's type."""
    import torch

    out = problem.signature.out
    if dtype is DType.FP4_E2M1:  # every code, in both halves of a byte
        bytes_ = torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
        return bytes_.view(torch_dtype(dtype))
    if dtype.is_integer:
        if out is DType.INT32:
            info = torch.iinfo(torch_dtype(dtype))
            return torch.randint(
                info.min, info.max + 1, shape, generator=generator, device=device,
                dtype=torch_dtype(dtype),
            )  # fmt: skip
        least = 0 if dtype is DType.UINT8 else -8
        if out not in (DType.INT8, DType.UINT8):
            return torch.randint(
                least, 9, shape, generator=generator, device=device, dtype=torch_dtype(dtype)
            )
        result = _INT8_RESULT if dtype is DType.INT8 else _UINT8_RESULT**0.5
        density = min(1.0, result / problem.k**0.5)
        kept = torch.rand(shape, generator=generator, device=device) < density
        if dtype is DType.UINT8:  # 1 or 2, for zeros and ones of few products would be all ones
            kept = kept * torch.randint(1, 3, shape, generator=generator, device=device)
            return kept.to(torch_dtype(dtype))
        signs = torch.randint(0, 2, shape, generator=generator, device=device) * 2 - 1
        return (kept * signs).to(torch_dtype(dtype))
    scale = 1.0
    if out.is_fp8 and not _has_blocks(problem):
        scale = min(1.0, (_FP8_RESULT / problem.k**0.5) ** 0.5)
    values = torch.randn(shape, generator=generator, device=device) * scale
    return values.to(torch_dtype(dtype))


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By code without its sign, the fourth bit (OCP Microscaling Formats specification v1.0, 5.3.3)."""

_LEAST_EXPONENT = -5
"""Of the middle of scales: half of it is the least normal number of e4m3, 2**-6."""

_TILE_LINES = 32
"""In a tile, line i holds the columns of rows i, i + 32, i + 64 and i + 96."""

PORTION = 2**26
"""Values of A and B decoded at a time: half a gigabyte in fp64."""


def _one_and_octave(dtype: DType) -> tuple[int, int]:
    """The code of 1 in a type of scales, and the number of codes in an octave."""
    fraction_bits, bias = dtype.row.fraction_bits, dtype.row.exponent_bias
    assert fraction_bits is not None
    assert bias is not None
    return bias << fraction_bits, 1 << fraction_bits


def random_scales(
    problem: Problem, role: Role, device: str, generator: torch.Generator, *, terms: int
) -> torch.Tensor:
    """Scales of A or B as kernels take them: swizzled, padded with zeros, in one dimension.

    They are random numbers of two octaves. The middle falls with the number of products, so that
    the deviation of their sums is at most some 30, up to 2**22 of them, and they fit into fp8. The
    padding is code 0 and no NaN: kernels may multiply it by the zeros that they have for values
    behind k. Whoever takes it for a scale is found out by that.

    Args:
        problem: A problem with scales of blocks.
        role: `Role.SCALE_A` or `Role.SCALE_B`.
        device: As torch names it.
        generator: Of the random data, on that device.
        terms: How many products are summed.
    """
    import torch

    scales = problem.signature.scales
    assert scales is not None
    assert scales.block is not None
    rows = problem.m if role is Role.SCALE_A else problem.n
    one, octave = _one_and_octave(scales.dtype)
    exponent = max(_LEAST_EXPONENT, -round(math.log2(terms) / 4))  # of A, and again of B
    middle = one + octave * exponent
    codes = torch.randint(
        middle - octave, middle + octave + 1, (rows, -(-problem.k // scales.block)),
        generator=generator, device=device, dtype=torch.uint8,
    )  # fmt: skip
    return swizzled(codes).view(torch_dtype(scales.dtype))


def scales_of_powers(exponents: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Powers of two as scales, as kernels take them.

    Args:
        exponents: Of shape [rows, blocks], each from -6 to 8.
        dtype: Of the scales.
    """
    import torch

    one, octave = _one_and_octave(dtype)
    codes = one + octave * exponents
    return swizzled(codes.to(torch.uint8)).view(torch_dtype(dtype))


def fp4_of(values: torch.Tensor) -> torch.Tensor:
    """Values that fp4 has, as a tensor of it: two in a byte, the first in the low half.

    Args:
        values: Of shape [..., k], k even; 0, 1, 2, 3, 4, 6 and their negatives.
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
    """``sum over k of (a * scale of a) * (b * scale of b)`` in fp64, some of k at a time.

    Args:
        a: Operand of shape [m, k], of fp4 [m, k / 2].
        b: Operand of shape [k, n], of fp4 [k / 2, n].
        scale_a: Scales of A, swizzled.
        scale_b: Scales of B, likewise.
        signature: What is computed, with scales of blocks.
        of_magnitudes: Whether A and B count without their signs.
    """
    import torch

    scales, dtype = signature.scales, signature.a
    assert scales is not None
    assert scales.block is not None
    m, n, k = a.shape[0], b.shape[1], a.shape[1] * dtype.packed
    blocks = -(-k // scales.block)
    factors_a = _decoded(unswizzled(scale_a, m, blocks), scales.dtype)
    factors_b = _decoded(unswizzled(scale_b, n, blocks), scales.dtype)
    result = torch.zeros((m, n), dtype=torch.float64, device=a.device)
    at_once = max(1, PORTION // ((m + n) * scales.block))
    width = scales.block // dtype.packed
    for first in range(0, blocks, at_once):
        last = first + at_once
        some, elements = slice(first, last), slice(first * width, last * width)
        part_a = _scaled(a[:, elements], factors_a[:, some], dtype, scales.block)
        part_b = _scaled(b.mT[:, elements], factors_b[:, some], dtype, scales.block)
        if of_magnitudes:
            part_a, part_b = part_a.abs_(), part_b.abs_()
        result.addmm_(part_a, part_b.mT)
    return result


def swizzled(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, columns] in the order of the 32 x 4 x 4 swizzle, padded with zeros.

    Tiles of 128 rows by 4 columns lie one behind the other, those of the same rows first, each in
    32 lines of 16 bytes (CUDA documentation of cuBLAS, "1D Block Scaling Factors Layout").
    """
    rows, columns = codes.shape
    tiles = -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_COLUMNS)
    padded = codes.new_zeros((tiles[0] * SWIZZLE_ROWS, tiles[1] * SWIZZLE_COLUMNS))
    padded[:rows, :columns] = codes
    lines = padded.view(tiles[0], -1, _TILE_LINES, tiles[1], SWIZZLE_COLUMNS)
    return lines.permute(0, 3, 2, 1, 4).flatten()


def unswizzled(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What `swizzled` was given: bytes [rows, columns] of a tensor of any type of one byte."""
    import torch

    tiles = -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_COLUMNS)
    lines = flat.view(torch.uint8).view(*tiles, _TILE_LINES, -1, SWIZZLE_COLUMNS)
    whole = lines.permute(0, 3, 2, 1, 4).reshape(tiles[0] * SWIZZLE_ROWS, -1)
    return whole[:rows, :columns]


def _scaled(
    elements: torch.Tensor, factors: torch.Tensor, dtype: DType, block: int
) -> torch.Tensor:
    values = _decoded(elements, dtype)
    return values * factors.repeat_interleave(block, -1)[:, : values.shape[1]]


def _decoded(elements: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Values in fp64; of fp4, the last dimension is twice as long."""
    import torch

    table = _table(dtype).to(elements.device)
    return table[elements.view(torch.uint8).int()].flatten(-2)


@functools.cache
def _table(dtype: DType) -> torch.Tensor:
    """By byte: the values in it, as fp64 on the CPU. Of two of fp4, the first is the low half."""
    import torch

    if dtype is DType.FP4_E2M1:
        values = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.float64)
        return torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)
    bytes_ = torch.arange(256, dtype=torch.uint8)
    return bytes_.view(torch_dtype(dtype)).double().unsqueeze(-1)
