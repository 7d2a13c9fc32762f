"""Rounds exact sums and products to floating-point types, once.

A result is first rounded to odd in 53 bits: inexact results get an odd last bit. To round that
again to 24 bits or fewer, in any mode, gives what rounding the exact result gives (Boldo and
Melquiond, "Emulation of a FMA and correctly rounded sums").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

MODES = ("rn", "rz", "rm", "rp")
"""Rounding to nearest even, to zero, down, up."""

F32_NAN, F16_NAN = 0x7FFF_FFFF, 0x7FFF
"""Bits of a NaN that arithmetic returns; bf16 has those of f16 (PTX ISA, "add")."""


def odd_sum(a: Any, b: Any) -> Any:
    """Returns float64 sums, rounded to odd."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return _odd(total, error)


def _odd(value: Any, error: Any) -> Any:
    """Rounds to odd what a float64 value and its error are together."""
    inexact = np.isfinite(value) & (error != 0) & np.isfinite(error)
    bits = value.view(np.int64)
    beyond = np.signbit(error) != np.signbit(value)
    return np.where(inexact, (bits - beyond) | 1, bits).view(np.float64)


def rounded_to_f32(value: Any, mode: str) -> Any:
    """Rounds float64 values, exact or rounded to odd, to float32."""
    return _step(value, value.astype(np.float32), np.int32, mode)


def rounded_to_f16(value: Any, mode: str) -> Any:
    """Rounds float64 or float32 values to float16."""
    return _step(value, value.astype(np.float16), np.int16, mode)


def _step(exact: Any, nearest: Any, integers: Any, mode: str) -> Any:
    """Moves the nearest values by one where a mode wants the neighbour on the other side."""
    if mode == "rn":
        return nearest
    bits = nearest.view(integers)
    if mode == "rz":
        bits = bits - (np.abs(nearest) > np.abs(exact))
    elif mode == "rm":
        bits = np.where(nearest > exact, np.where(np.signbit(nearest), bits + 1, bits - 1), bits)
    else:
        bits = np.where(nearest < exact, np.where(np.signbit(nearest), bits - 1, bits + 1), bits)
    return bits.astype(integers).view(nearest.dtype)


def bf16_bits(value: Any, mode: str = "rn") -> Any:
    """Rounds float32 values to bf16, returned as bits; a NaN becomes the canonical one."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    if mode == "rn":
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    else:
        rounded = bits >> 16
        if mode != "rz":
            outward = np.signbit(value) == (mode == "rm")
            rounded = rounded + (outward & (bits & np.uint32(0xFFFF) != 0))
    nan = value != value
    if 1 in nan.tobytes():
        rounded = np.where(nan, np.uint32(F16_NAN), rounded)
    return rounded.astype(np.uint16)


def from_bf16(bits: Any) -> Any:
    """Returns bf16 values, given as uint16, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def odd_f32(value: Any) -> Any:
    """Rounds float64 values, exact or rounded to odd, to odd float32."""
    cut = rounded_to_f32(value, "rz")
    inexact = (cut != value) & np.isfinite(value)
    return np.where(inexact, cut.view(np.uint32) | 1, cut.view(np.uint32)).view(np.float32)


_TO_WHOLE: dict[str, Callable[[Fraction], int]] = {
    "rn": round,
    "rz": math.trunc,
    "rm": math.floor,
    "rp": math.ceil,
}


def rounded_fraction(value: Fraction, mode: str, precision: int, least: int, most: int) -> Fraction:
    """Rounds a fraction to a binary floating-point number.

    Args:
        value: The exact value.
        mode: One of `MODES`.
        precision: Bits of a significand, with the implicit one.
        least: Exponent of the least positive number: it is ``2**least``.
        most: Exponent of the first power of two that is too large; such results are clamped in
            modes that round to zero from there, or are ``2**most`` otherwise, which is infinity.
    """
    if value == 0:
        return value
    magnitude = abs(value)
    two = Fraction(2)
    exponent: int = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if two**exponent > magnitude:
        exponent -= 1
    unit = Fraction(two ** max(exponent - precision + 1, least))
    scaled = value / unit
    whole = _TO_WHOLE[mode](scaled)
    found = whole * unit
    largest = Fraction(two**most)
    if abs(found) >= largest:
        sign = 1 if found > 0 else -1
        to_zero = mode == "rz" or (mode == "rm" and sign > 0) or (mode == "rp" and sign < 0)
        found = sign * (largest - largest / 2**precision if to_zero else largest)
    return found


def by_fractions(
    function: Callable[..., Fraction | None], mode: str, dtype: Any, *values: Any
) -> Any:
    """Computes lane by lane with fractions, where no quicker method is exact.

    Lanes are NaN where an operand is not finite, or the function returns 0 or None: ordinary
    arithmetic knows those. Used for results of float64, and for rare rounding modes.
    """
    precision, least, most = (53, -1074, 1024) if dtype is np.float64 else (24, -149, 128)
    out = np.full(len(values[0]), np.nan, dtype)
    for lane, numbers in enumerate(zip(*(value.tolist() for value in values))):
        if all(map(math.isfinite, numbers)):
            exact = function(*map(Fraction, numbers))
            if exact:
                found = rounded_fraction(exact, mode, precision, least, most)
                if abs(found) >= Fraction(2) ** most:
                    out[lane] = math.inf if found > 0 else -math.inf
                else:
                    out[lane] = math.copysign(float(found), 1 if exact > 0 else -1)
    return out
