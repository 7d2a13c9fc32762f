"""Floating-point arithmetic (PTX ISA, "Floating Point Instructions", "Half Precision ...")."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from ...machine.meanings import Computation
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers
from ..values import natural_dtype
from .computing import computed
from .float_forms import (
    PACKED,
    WIDTHS,
    flushed,
    packed,
    relu,
    saturated,
    unpacked,
)
from .rounding import (
    MODES,
    by_fractions,
    odd_f32,
    odd_sum,
    rounded_to_f16,
    rounded_to_f32,
)

_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_SINGLE = ("f32", "f32x2")


def add_multiply(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``add``, ``sub``, ``mul`` and ``fma`` of floating-point types."""
    qualifiers = Qualifiers(instruction)
    fused = instruction.opcode in ("fma", "mad")
    mode = qualifiers.one_of(*MODES) if fused else qualifiers.option(*MODES) or "rn"
    flushes = qualifiers.flag("ftz")
    clamps = qualifiers.flag("sat")
    positive = fused and not clamps and qualifiers.flag("relu")
    kind = qualifiers.one_of("f32", "f32x2", "f64", *_HALVES)
    narrow = qualifiers.option("f16", "bf16") if kind == "f32" and not flushes else None
    qualifiers.end()
    if (
        (kind in _HALVES and mode != "rn")
        or (kind == "f64" and (flushes or clamps))
        or (kind.startswith("bf16") and (flushes or clamps))
        or (kind == "f32x2" and clamps)
        or (positive and kind not in _HALVES)
        or (narrow and instruction.opcode == "mul")
    ):
        raise instruction.unknown(f"combination .{'.'.join(instruction.qualifiers)}")
    exact = _OPERATIONS[instruction.opcode]
    after = [
        *([flushed] if flushes else []),
        *([saturated] if clamps else []),
        *([relu] if positive else []),
    ]
    function = exact(kind, mode)
    plain = not after and not flushes
    inputs = 3 if fused else 2
    kinds = [kind] * inputs
    if narrow:
        # One factor or addend is narrow; the sum is of f32.
        kinds = [narrow] * (inputs - 1) + ["f32"]
    widen = [unpacked(each) for each in kinds]
    pack = packed(kind)

    half = natural_dtype(kind)

    def directly(*values: Any) -> Any:
        return pack(function(*values))

    def on_registers(*values: Any) -> Any:
        wide = [each(value) for each, value in zip(widen, values)]
        if plain:
            return pack(function(*wide))
        if flushes:
            wide = [flushed(value, kind) for value in wide]
        found = function(*wide)
        if kind in _HALVES:
            found = widen[0](pack(found).view(half))
        for apply in after:
            found = apply(found, kind)
        return pack(found)

    by = directly if plain and {*kinds} <= {"f32", "f64"} else on_registers
    return computed(instruction, program, by, WIDTHS[kind], *kinds, raw=True)


def _add(kind: str, mode: str) -> Callable[..., Any]:
    if mode == "rn":
        return np.add
    if kind == "f64":
        return lambda a, b: _patched(
            by_fractions(lambda x, y: x + y, mode, np.float64, a, b),
            _down_zero(a + b, a, b, mode),
        )
    return lambda a, b: _down_zero(
        rounded_to_f32(odd_sum(a.astype(np.float64), b.astype(np.float64)), mode), a, b, mode
    )


def _down_zero(found: Any, a: Any, b: Any, mode: str) -> Any:
    """Makes zero sums of unlike signs negative where rounding is down."""
    if mode != "rm":
        return found
    zero = (found == 0) & (np.signbit(a) | np.signbit(b))
    return np.where(zero, -found.dtype.type(0), found)


def _patched(found: Any, ordinary: Any) -> Any:
    """Takes what fractions could not give from ordinary arithmetic."""
    return np.where(np.isnan(found), ordinary, found)


def _subtract(kind: str, mode: str) -> Callable[..., Any]:
    if mode == "rn":
        return np.subtract
    add = _add(kind, mode)
    return lambda a, b: add(a, -b)


def _multiply(kind: str, mode: str) -> Callable[..., Any]:
    if mode == "rn":
        return np.multiply
    if kind == "f64":
        return lambda a, b: _patched(
            by_fractions(lambda x, y: x * y, mode, np.float64, a, b), a * b
        )
    return lambda a, b: rounded_to_f32(a.astype(np.float64) * b.astype(np.float64), mode)


def _fused(kind: str, mode: str) -> Callable[..., Any]:
    if kind == "f64":
        return lambda a, b, c: _fused_f64(a, b, c, mode)

    def exact(a: Any, b: Any, c: Any) -> Any:
        product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = odd_sum(product, addend)
        if kind in ("f16", "f16x2"):
            return rounded_to_f16(total, mode).astype(np.float32)
        if kind in ("bf16", "bf16x2"):
            # Packing rounds an odd float32 to bf16 once.
            return odd_f32(total)
        return _down_zero(rounded_to_f32(total, mode), product, addend, mode)

    return exact


def _fused_f64(a: Any, b: Any, c: Any, mode: str) -> Any:
    def exact(x: Fraction, y: Fraction, z: Fraction) -> Fraction:
        return x * y + z

    ordinary = _down_zero(a * b + c, a * b, c, mode)
    return _patched(by_fractions(exact, mode, np.float64, a, b, c), ordinary)


_OPERATIONS: dict[str, Callable[[str, str], Callable[..., Any]]] = {
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "fma": _fused,
    "mad": _fused,
}


def least_or_greatest_float(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``min`` and ``max`` of floating-point types."""
    qualifiers = Qualifiers(instruction)
    flushes = qualifiers.flag("ftz")
    keeps_nan = qualifiers.flag("NaN")
    crossed = qualifiers.flag("xorsign")
    absolute = (
        qualifiers.one_of("abs") == "abs"
        if crossed
        else len(instruction.operands) == 4 and qualifiers.flag("abs")
    )
    kind = qualifiers.one_of("f32", *([] if absolute and not crossed else ["f64", *_HALVES]))
    qualifiers.end()
    count = len(instruction.operands) - 1
    if (
        (kind == "f64" and (flushes or keeps_nan or crossed))
        or (kind.startswith("bf16") and flushes)
        or count not in ((2, 3) if kind == "f32" and not crossed else (2,))
    ):
        raise instruction.unknown(f"combination .{'.'.join(instruction.qualifiers)}")
    least = instruction.opcode == "min"
    widen, pack = unpacked(kind), packed(kind)

    def chosen(a: Any, b: Any) -> Any:
        # Zeros are ordered by their signs, which numpy does not promise.
        below = np.where(a == b, np.signbit(a), a < b)
        found = np.where(below == least, a, b)
        if keeps_nan:
            return np.where(np.isnan(a) | np.isnan(b), np.nan, found).astype(a.dtype)
        return np.where(np.isnan(a), b, np.where(np.isnan(b), a, found))

    def on_registers(*values: Any) -> Any:
        wide = [widen(value) for value in values]
        if flushes:
            wide = [flushed(value, kind) for value in wide]
        sign = np.signbit(wide[0]) ^ np.signbit(wide[1])
        if absolute:
            wide = [np.abs(value) for value in wide]
        found = chosen(wide[0], wide[1])
        if count == 3:
            found = chosen(found, wide[2])
        if crossed:
            found = np.where(sign & ~np.isnan(found), -found, found)
        return pack(found)

    return computed(instruction, program, on_registers, WIDTHS[kind], *[kind] * count, raw=True)


def change_sign(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``neg`` and ``abs`` of floating-point types: they change sign bits only."""
    qualifiers = Qualifiers(instruction)
    flushes = qualifiers.flag("ftz")
    kind = qualifiers.one_of("f32", "f64", *_HALVES)
    qualifiers.end()
    if flushes and (kind == "f64" or kind.startswith("bf16")):
        raise instruction.unknown(f"combination .{'.'.join(instruction.qualifiers)}")
    width = WIDTHS[kind]
    bits = {"b16": 1 << 15, "b32": 1 << 31, "b64": 1 << 63}[width]
    if kind in PACKED:
        bits = 0x8000_8000
    widen, pack = unpacked(kind), packed(kind)
    negates = instruction.opcode == "neg"

    def on_registers(value: Any) -> Any:
        if flushes:
            value = pack(flushed(widen(value), kind))
        raw = value.view({"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}[width])
        sign = raw.dtype.type(bits)
        return raw ^ sign if negates else raw & ~sign

    return computed(instruction, program, on_registers, width, kind, raw=True)
