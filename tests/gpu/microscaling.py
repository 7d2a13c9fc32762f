"""MXFP8, MXFP4 and NVFP4 by their specifications: codes, blocks, and the order of scales.

Written from the OCP Microscaling Formats (MX) specification v1.0 (element types: section 5.3;
scales: 5.4; conversion: 6.3), the OCP 8-bit Floating Point specification v1.0 (table 1), torch's
``Float4_e2m1fn_x2.h`` (which nibble is first), and cuBLAS' documentation, "1D Block Scaling Factors
Layout". It shares nothing with nvgemm_runtime, and decodes by tables rather than by torch's casts.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

FP4_MAX = 6.0
FP8_E4M3_MAX = 448.0


@dataclass(frozen=True, kw_only=True)
class Minifloat:
    """A small floating-point type with a sign.

    Attributes:
        exponent_bits, mantissa_bits: Sizes of its fields, below the sign.
        bias: What is subtracted from an exponent.
        not_numbers: Values of the codes that break the rule, by code without the sign.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    not_numbers: dict[int, float]

    def value(self, code: int) -> float:
        """Value of a code; zero and subnormal numbers have the exponent field 0."""
        magnitude_bits = self.exponent_bits + self.mantissa_bits
        magnitude = code & ((1 << magnitude_bits) - 1)
        sign = -1.0 if code >> magnitude_bits else 1.0
        if magnitude in self.not_numbers:
            return sign * self.not_numbers[magnitude]
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * math.ldexp(fraction, 1 - self.bias)
        return sign * math.ldexp(1 + fraction, exponent - self.bias)


FP4_E2M1 = Minifloat(exponent_bits=2, mantissa_bits=1, bias=1, not_numbers={})
FP8_E4M3 = Minifloat(exponent_bits=4, mantissa_bits=3, bias=7, not_numbers={0x7F: math.nan})
FP8_E5M2 = Minifloat(
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    not_numbers={0x7C: math.inf, 0x7D: math.nan, 0x7E: math.nan, 0x7F: math.nan},
)


def e8m0_value(code: int) -> float:
    """Value of a scale of MX: a power of two, or NaN; there is neither sign nor zero."""
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


@functools.cache
def _table(dtype: torch.dtype) -> list[list[float]]:
    """By byte of a type: the values that it holds."""
    if dtype is torch.float4_e2m1fn_x2:
        return [[FP4_E2M1.value(byte & 15), FP4_E2M1.value(byte >> 4)] for byte in range(256)]
    value = {
        torch.float8_e4m3fn: FP8_E4M3.value,
        torch.float8_e5m2: FP8_E5M2.value,
        torch.float8_e8m0fnu: e8m0_value,
    }[dtype]
    return [[value(byte)] for byte in range(256)]


def decode(tensor: torch.Tensor) -> torch.Tensor:
    """Values in fp64 of a tensor of fp4, fp8 or e8m0; of fp4, the last dimension is twice as long.

    Of the two values in a byte of fp4, the first is in the low half.
    """
    table = torch.tensor(_table(tensor.dtype), dtype=torch.float64, device=tensor.device)
    return table[tensor.contiguous().view(torch.uint8).long()].flatten(-2)


def encode_fp4(values: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of fp4, ties to even codes, two a byte; those beyond 6 become 6.

    Args:
        values: Numbers, with an even last dimension.
    """
    magnitudes = [FP4_E2M1.value(code) for code in range(8)]
    between = torch.tensor(
        [(low + high) / 2 for low, high in itertools.pairwise(magnitudes)],
        dtype=torch.float64,
        device=values.device,
    )
    distance = values.double().abs().contiguous()
    below = torch.bucketize(distance, between)  # a tie falls to the lower code
    above = torch.bucketize(distance, between, right=True)  # or to the upper
    codes = torch.where(below % 2 == 0, below, above) | values.signbit().long() << 3
    return pack_fp4(codes)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 as fp4, two a byte."""
    bytes_ = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return bytes_.contiguous().view(torch.float4_e2m1fn_x2)


def encode_e8m0(values: torch.Tensor) -> torch.Tensor:
    """The largest powers of two that are not above positive numbers, as scales of MX."""
    _, exponent = torch.frexp(values.double())  # values = fraction * 2**exponent, 0.5 <= fraction
    return (exponent - 1 + 127).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)


def quantise(
    values: torch.Tensor, dtype: torch.dtype, scale_dtype: torch.dtype, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers as elements and a scale for each block of a row.

    A power of two is chosen as section 6.3 of the MX specification says: that of the largest
    number, over that of the largest element. Other scales make the largest number the largest
    element, as NVFP4 does.

    Args:
        values: Numbers [rows, k], with k a multiple of ``block``.
        dtype: Type of the elements.
        scale_dtype: Type of the scales.
        block: How many values share a scale.

    Returns:
        Elements [rows, k] (of fp4: [rows, k / 2]) and scales [rows, k / block], not swizzled.
    """
    largest_element = {
        torch.float4_e2m1fn_x2: FP4_MAX,
        torch.float8_e4m3fn: FP8_E4M3_MAX,
        torch.float8_e5m2: 57344.0,
    }[dtype]
    blocks = values.double().unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1)
    if scale_dtype is torch.float8_e8m0fnu:
        power = 2.0 ** math.floor(math.log2(largest_element))
        scales = encode_e8m0(largest.clamp(min=2.0**-100) / power)
    else:
        scales = (largest / largest_element).clamp(2.0**-6, FP8_E4M3_MAX).float().to(scale_dtype)
    elements = (blocks / decode(scales).unsqueeze(-1)).flatten(-2)
    elements = elements.clamp(-largest_element, largest_element)
    encoded = (
        encode_fp4(elements) if dtype is torch.float4_e2m1fn_x2 else elements.float().to(dtype)
    )
    return encoded, scales


def dequantise(elements: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Numbers in fp64 from elements [rows, k] and scales [rows, k / block, rounded up]."""
    values = decode(elements)
    expanded = decode(scales).repeat_interleave(block, -1)
    return values * expanded[..., : values.shape[-1]]


def _offsets(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Where the scale of a row and a block of k lies: [rows, columns], counted in scales.

    Blocks of 128 rows by 4 scales lie one behind the other, those of the same rows first. In one,
    the scale (i, j) stands at ``i % 32 * 16 + i // 32 * 4 + j``.
    """
    i = torch.arange(rows, device=device).unsqueeze(1)
    j = torch.arange(columns, device=device)
    blocks_in_a_row = -(-columns // 4)
    block = i // 128 * blocks_in_a_row + j // 4
    return block * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4


def swizzle(scales: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Scales [rows, columns] in the order that tensor cores take, with ``padding`` as the rest.

    Returns:
        A flat tensor: rows padded to a multiple of 128, columns to one of 4.
    """
    rows, columns = scales.shape
    count = -(-rows // 128) * 128 * (-(-columns // 4) * 4)
    flat = torch.full((count,), padding, dtype=torch.uint8, device=scales.device)
    flat[_offsets(rows, columns, scales.device)] = scales.contiguous().view(torch.uint8)
    return flat.view(scales.dtype)


def unswizzle(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales [rows, columns] of a swizzled tensor, without its padding."""
    bytes_ = flat.contiguous().view(torch.uint8).flatten()
    return bytes_[_offsets(rows, columns, flat.device)].view(flat.dtype)
