"""Formats of the elements and scales that tensor cores multiply (PTX ISA, "Data types").

Values are decoded to float64, which holds every one exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...machine.global_memory import Bytes

Values: TypeAlias = npt.NDArray[np.float64]


@functools.cache
def small_float(exponent_bits: int, mantissa_bits: int, bias: int, last: str) -> Values:
    """Returns the values of a format of at most 8 bits with a sign, by their bits.

    Args:
        exponent_bits: Bits of the exponent.
        mantissa_bits: Bits of the mantissa.
        bias: Exponent's bias.
        last: Meaning of the largest exponent: ``ieee``, ``nan`` if only its last mantissa is NaN,
            or ``finite``.
    """
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (codes & (1 << mantissa_bits) - 1).astype(np.float64)
    fraction = mantissa / (1 << mantissa_bits)
    values = np.where(
        exponent == 0,
        np.ldexp(fraction, 1 - bias),
        np.ldexp(1 + fraction, exponent - bias),
    )
    highest = exponent == (1 << exponent_bits) - 1
    if last == "ieee":
        values[highest] = np.where(mantissa[highest] == 0, np.inf, np.nan)
    elif last == "nan":
        values[highest & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    sign = codes >> (exponent_bits + mantissa_bits)
    values = np.where(sign == 1, -values, values)
    values.flags.writeable = False
    return values


E4M3 = small_float(4, 3, 7, "nan")
E5M2 = small_float(5, 2, 15, "ieee")
E2M3 = small_float(2, 3, 1, "finite")
E3M2 = small_float(3, 2, 3, "finite")
E2M1 = small_float(2, 1, 1, "finite")

UE8M0 = np.ldexp(1.0, np.arange(256) - 127)
UE8M0[255] = np.nan


def _f16(chunks: Bytes) -> Values:
    return chunks.view(np.float16).astype(np.float64)


def _bf16(chunks: Bytes) -> Values:
    wide = chunks.view(np.uint16).astype(np.uint32) << np.uint32(16)
    values: Values = wide.view(np.float32).astype(np.float64)
    return values


def _tf32(chunks: Bytes) -> Values:
    cut = chunks.view(np.uint32) & np.uint32(0xFFFF_E000)
    values: Values = cut.view(np.float32).astype(np.float64)
    return values


def _six_bits(table: Values) -> Callable[[Bytes], Values]:
    def decode(chunks: Bytes) -> Values:
        parts = chunks.reshape(*chunks.shape[:-1], -1, 16)[..., :12].astype(np.uint32)
        triples = parts.reshape(*parts.shape[:-1], 4, 3)
        words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        codes = np.stack([words >> 6 * place & 63 for place in range(4)], -1)
        return table[codes.reshape(*chunks.shape[:-1], -1)]

    return decode


def _nibbles(data: Bytes) -> Values:
    codes = np.stack([data & 15, data >> 4], -1)
    return E2M1[codes.reshape(*data.shape[:-1], -1)]


def _padded_nibbles(chunks: Bytes) -> Values:
    parts = chunks.reshape(*chunks.shape[:-1], -1, 16)[..., :8]
    return _nibbles(np.ascontiguousarray(parts).reshape(*chunks.shape[:-1], -1))


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A format of matrix elements.

    Attributes:
        name: Name in PTX.
        decode: Turns rows of 16-byte chunks into values.
        chunk_elements: Elements in 16 bytes of shared memory.
        is_padded: True if shared memory pads elements to 8 bits, 16 at a time.
    """

    name: str
    decode: Callable[[Bytes], Values]
    chunk_elements: int
    is_padded: bool = False


F16 = ElementFormat(name="f16", decode=_f16, chunk_elements=8)
BF16 = ElementFormat(name="bf16", decode=_bf16, chunk_elements=8)
TF32 = ElementFormat(name="tf32", decode=_tf32, chunk_elements=4)
FLOAT8 = {
    0: ElementFormat(name="e4m3", decode=lambda data: E4M3[data], chunk_elements=16),
    1: ElementFormat(name="e5m2", decode=lambda data: E5M2[data], chunk_elements=16),
    3: ElementFormat(name="e2m3", decode=_six_bits(E2M3), chunk_elements=16, is_padded=True),
    4: ElementFormat(name="e3m2", decode=_six_bits(E3M2), chunk_elements=16, is_padded=True),
    5: ElementFormat(name="e2m1", decode=_padded_nibbles, chunk_elements=16, is_padded=True),
}
"""Formats of ``.kind::f8f6f4`` and ``.kind::mxf8f6f4``, by their codes."""

PACKED_E2M1 = ElementFormat(name="e2m1", decode=_nibbles, chunk_elements=32)
INTEGER8 = {
    0: ElementFormat(name="u8", decode=lambda data: data.astype(np.float64), chunk_elements=16),
    1: ElementFormat(
        name="s8", decode=lambda data: data.view(np.int8).astype(np.float64), chunk_elements=16
    ),
}
