"""Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...machine.meanings import Computation
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers
from ..values import BITS, natural_dtype
from .computing import computed

WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
"""Types twice as wide."""

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")


def add_or_subtract(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``add`` and ``sub`` of integers."""
    qualifiers = Qualifiers(instruction)
    saturates = qualifiers.flag("sat")
    kind = qualifiers.one_of("s32") if saturates else qualifiers.one_of(*INTEGERS, *_PAIRS)
    qualifiers.end()
    adds = instruction.opcode == "add"
    if saturates:
        return computed(
            instruction, program, _saturating(np.add if adds else np.subtract), kind, kind, kind
        )
    function: Callable[..., Any] = np.add if adds else np.subtract
    if kind in _PAIRS:
        return computed(instruction, program, _halves(function), "b32", "b32", "b32")
    return computed(instruction, program, function, kind, kind, kind, signless=True)


_PAIRS = ("u16x2", "s16x2")


def _halves(function: Callable[..., Any], dtype: Any = np.uint16) -> Callable[..., Any]:
    """Returns a function of registers from one of their 16-bit halves."""

    def on_halves(*values: Any) -> Any:
        parts = (np.ascontiguousarray(value).view(dtype) for value in values)
        return function(*parts).view(np.uint32)

    return on_halves


def _saturating(function: Callable[..., Any]) -> Callable[..., Any]:
    def saturated(a: Any, b: Any) -> Any:
        exact = function(a.astype(np.int64), b.astype(np.int64))
        return np.clip(exact, -(1 << 31), (1 << 31) - 1).astype(np.int32)

    return saturated


def multiply(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``mul`` and ``mad`` of integers."""
    qualifiers = Qualifiers(instruction)
    part = qualifiers.one_of("lo", "hi", "wide")
    adds = instruction.opcode == "mad"
    saturates = adds and part == "hi" and qualifiers.flag("sat")
    if saturates:
        kind = qualifiers.one_of("s32")
    else:
        kind = qualifiers.one_of(*(WIDE if part == "wide" else INTEGERS))
    qualifiers.end()
    product = _PRODUCTS[part](kind)
    result = WIDE[kind] if part == "wide" else kind
    signless = part == "lo"
    if not adds:
        return computed(instruction, program, product, result, kind, kind, signless=signless)
    total = _saturating(np.add) if saturates else np.add
    kinds = (kind, kind, result)

    def function(a: Any, b: Any, c: Any) -> Any:
        return total(product(a, b), c)

    return computed(instruction, program, function, result, *kinds, signless=signless)


def _wide_product(kind: str) -> Callable[..., Any]:
    wide = natural_dtype(WIDE[kind])
    return lambda a, b: a.astype(wide) * b.astype(wide)


def _high_product(kind: str) -> Callable[..., Any]:
    if kind == "u64":
        return _high_64
    if kind == "s64":
        return _high_signed_64
    product, bits, narrow = _wide_product(kind), BITS[kind], natural_dtype(kind)
    return lambda a, b: (product(a, b) >> bits).astype(narrow)


def _high_64(a: Any, b: Any) -> Any:
    """Returns the high half of products of 64 bits, from products of 32-bit halves."""
    half, low = np.uint64(32), np.uint64(0xFFFF_FFFF)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (other >> half)


def _high_signed_64(a: Any, b: Any) -> Any:
    high = _high_64(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)


_PRODUCTS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "lo": lambda kind: np.multiply,
    "hi": _high_product,
    "wide": _wide_product,
}


def multiply_24(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``mul24`` and ``mad24``: products of the low 24 bits."""
    qualifiers = Qualifiers(instruction)
    part = qualifiers.one_of("lo", "hi")
    kind = qualifiers.one_of("u32", "s32")
    qualifiers.end()
    dtype = natural_dtype(kind)

    def product(a: Any, b: Any) -> Any:
        low = [(each << 8).astype(np.int64 if kind == "s32" else np.uint64) >> 8 for each in (a, b)]
        exact = low[0] * low[1]
        return (exact if part == "lo" else exact >> 16).astype(dtype)

    if instruction.opcode == "mul24":
        return computed(instruction, program, product, kind, kind, kind)
    return computed(instruction, program, lambda a, b, c: product(a, b) + c, kind, kind, kind, kind)


def divide(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``div`` and ``rem`` of integers, which round to zero.

    A division by zero gives all bits set, a remainder by zero the dividend: PTX leaves both open,
    and GPUs do this.
    """
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of(*INTEGERS)
    qualifiers.end()
    quotient = _signed_quotient if kind[0] == "s" else _quotient
    if instruction.opcode == "div":
        return computed(instruction, program, quotient, kind, kind, kind)

    def remainder(a: Any, b: Any) -> Any:
        return np.where(b == 0, a, a - quotient(a, b) * b)

    return computed(instruction, program, remainder, kind, kind, kind)


def _quotient(a: Any, b: Any) -> Any:
    return np.where(b == 0, ~a.dtype.type(0), a // np.where(b == 0, a.dtype.type(1), b))


def _signed_quotient(a: Any, b: Any) -> Any:
    unsigned = np.dtype(f"u{a.dtype.itemsize}").type
    # The magnitude of the least integer fits the unsigned type.
    magnitude = _quotient(np.abs(a).view(unsigned), np.abs(b).view(unsigned)).view(a.dtype.type)
    return np.where(b == 0, a.dtype.type(-1), np.where((a < 0) != (b < 0), -magnitude, magnitude))


def least_or_greatest(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``min`` and ``max`` of integers."""
    qualifiers = Qualifiers(instruction)
    relu = qualifiers.flag("relu")
    kind = qualifiers.one_of(*(("s32", "s16x2") if relu else (*INTEGERS, *_PAIRS)))
    qualifiers.end()
    chosen = np.minimum if instruction.opcode == "min" else np.maximum

    def function(a: Any, b: Any) -> Any:
        found = chosen(a, b)
        return np.maximum(found, found.dtype.type(0)) if relu else found

    if kind in _PAIRS:
        halves = _halves(function, np.int16 if kind == "s16x2" else np.uint16)
        return computed(instruction, program, halves, "b32", "b32", "b32")
    return computed(instruction, program, function if relu else chosen, kind, kind, kind)


def negate(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``neg`` of integers."""
    kind = _signed(instruction)
    return computed(instruction, program, np.negative, kind, kind)


def magnitude(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``abs`` of integers."""
    kind = _signed(instruction)
    return computed(instruction, program, np.abs, kind, kind)


def _signed(instruction: Instruction) -> str:
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of("s16", "s32", "s64")
    qualifiers.end()
    return kind
