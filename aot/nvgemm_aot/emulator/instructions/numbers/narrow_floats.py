"""Floating-point formats of at most 8 bits, encoded and decoded by tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np


class Special(Enum):
    """Codes of a format that are not finite numbers."""

    NONE = "none"
    TOP_CODE_NAN = "the last code is NaN"
    INFINITY_AND_NAN = "the last exponent is infinity and NaN, as in IEEE 754"


@dataclass(frozen=True, kw_only=True)
class NarrowFormat:
    """A format with a sign bit (PTX ISA, "Alternate Floating-Point Data Formats").

    Attributes:
        exponent: Bits of the exponent.
        mantissa: Bits of the mantissa.
        special: Codes that are not finite.
    """

    exponent: int
    mantissa: int
    special: Special

    @property
    def bits(self) -> int:
        """Width with the sign."""
        return 1 + self.exponent + self.mantissa

    @cached_property
    def finite(self) -> Any:
        """Finite values that are not negative, by their codes, as float64."""
        codes = np.arange(1 << (self.exponent + self.mantissa))
        exponents, fractions = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        bias = (1 << (self.exponent - 1)) - 1
        normal = np.where(exponents > 0, 1.0, 0.0)
        values = np.ldexp(
            normal + fractions / (1 << self.mantissa), np.maximum(exponents, 1) - bias
        )
        if self.special is Special.TOP_CODE_NAN:
            return values[:-1]
        if self.special is Special.INFINITY_AND_NAN:
            return values[: -(1 << self.mantissa)]
        return values

    @cached_property
    def decoded(self) -> Any:
        """Values of all codes, as float32."""
        half = np.full(1 << (self.bits - 1), np.nan, np.float32)
        half[: len(self.finite)] = self.finite
        if self.special is Special.INFINITY_AND_NAN:
            half[len(self.finite)] = np.inf
        return np.concatenate([half, -half])

    def encoded(self, values: Any, *, relu: bool = False) -> Any:
        """Rounds to nearest even, as uint32 codes; too large values become the largest finite."""
        magnitudes = np.abs(values)
        middles = (self.finite[1:] + self.finite[:-1]) / 2
        codes = np.searchsorted(middles, magnitudes)
        tie = (codes < len(middles)) & (middles[np.minimum(codes, len(middles) - 1)] == magnitudes)
        codes = codes + (tie & (codes & 1 == 1))
        sign = np.signbit(values)
        codes = np.where(relu & sign, 0, codes + (sign & ~np.bool_(relu)) * (1 << (self.bits - 1)))
        # Without a NaN, the largest number stands for it.
        nan = len(self.finite) - 1 if self.special is Special.NONE else (1 << (self.bits - 1)) - 1
        return np.where(np.isnan(values), nan, codes).astype(np.uint32)


FORMATS = {
    "e4m3": NarrowFormat(exponent=4, mantissa=3, special=Special.TOP_CODE_NAN),
    "e5m2": NarrowFormat(exponent=5, mantissa=2, special=Special.INFINITY_AND_NAN),
    "e2m1": NarrowFormat(exponent=2, mantissa=1, special=Special.NONE),
    "e2m3": NarrowFormat(exponent=2, mantissa=3, special=Special.NONE),
    "e3m2": NarrowFormat(exponent=3, mantissa=2, special=Special.NONE),
}


def encoded_scale(values: Any, mode: str) -> Any:
    """Rounds magnitudes to powers of two, as codes of ``ue8m0``; a NaN is code 255.

    Args:
        values: float32 or float64 values.
        mode: ``rz`` or ``rp``, which round down and up.
    """
    with np.errstate(all="ignore"):
        fractions, exponents = np.frexp(np.abs(values.astype(np.float64)))
    exponents = exponents - 1 + ((mode == "rp") & (fractions > 0.5))
    codes = np.where(fractions == 0, 0, np.clip(exponents + 127, 0, 254))
    codes = np.where(np.isinf(values), 254, codes)
    return np.where(np.isnan(values), 255, codes).astype(np.uint32)


def decoded_scale(codes: Any) -> Any:
    """Returns powers of two, as float64."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))
