"""Takes registers apart into floating-point values for arithmetic, and puts results together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .rounding import F16_NAN, F32_NAN, bf16_bits, from_bf16

PACKED = ("f16x2", "bf16x2")
"""Types of two values in 32 bits."""

WIDTHS = {
    "f16": "b16",
    "bf16": "b16",
    "f16x2": "b32",
    "bf16x2": "b32",
    "f32": "b32",
    "f32x2": "b64",
    "f64": "b64",
}
"""Registers that hold floating-point types."""


def unpacked(kind: str) -> Callable[[Any], Any]:
    """Returns the function from a type's lanes to float32, or float64 for ``f64``.

    Two values of a packed type lie beside each other, so there are 64 of them.
    """
    return _UNPACKED[kind]


def packed(kind: str) -> Callable[[Any], Any]:
    """Returns the function that rounds to a type to nearest even and makes lanes of registers."""
    return _PACKED[kind]


def _f32(value: Any) -> Any:
    bits = value.view(np.uint32)
    nan = value != value
    return np.where(nan, np.uint32(F32_NAN), bits) if 1 in nan.tobytes() else bits


def _f16(value: Any) -> Any:
    bits = value.astype(np.float16).view(np.uint16)
    nan = value != value
    return np.where(nan, np.uint16(F16_NAN), bits) if 1 in nan.tobytes() else bits


_UNPACKED: dict[str, Callable[[Any], Any]] = {
    "f16": lambda value: value.astype(np.float32),
    "bf16": from_bf16,
    "f16x2": lambda value: value.view(np.float16).astype(np.float32),
    "bf16x2": lambda value: from_bf16(value.view(np.uint16)),
    "f32": lambda value: value,
    "f32x2": lambda value: value.view(np.float32),
    "f64": lambda value: value,
}

_PACKED: dict[str, Callable[[Any], Any]] = {
    "f16": _f16,
    "bf16": bf16_bits,
    "f16x2": lambda value: _f16(value).view(np.uint32),
    "bf16x2": lambda value: bf16_bits(value).view(np.uint32),
    "f32": _f32,
    "f32x2": lambda value: _f32(value).view(np.uint64),
    "f64": lambda value: value.view(np.uint64),
}

_LEAST_NORMAL = {"f16": 2.0**-14, "f16x2": 2.0**-14, "f64": 2.0**-1022}
"""Least normal numbers of types whose exponents are not those of float32."""


def flushed(value: Any, kind: str) -> Any:
    """Makes subnormal values of a type zero, with their sign."""
    tiny = np.abs(value) < value.dtype.type(_LEAST_NORMAL.get(kind, 2.0**-126))
    if 1 not in tiny.tobytes():
        return value
    return np.where(tiny, np.copysign(value.dtype.type(0), value), value)


def saturated(value: Any, kind: str) -> Any:
    """Clamps values to 0 to 1; a NaN becomes 0."""
    positive = np.where(value > 0, value, value.dtype.type(0))
    return np.minimum(positive, value.dtype.type(1))


def relu(value: Any, kind: str) -> Any:
    """Makes negative values and -0 the positive 0; a NaN becomes the canonical one."""
    return np.where(value <= 0, value.dtype.type(0), value)
