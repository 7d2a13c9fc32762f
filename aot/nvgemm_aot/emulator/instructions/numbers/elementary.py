"""Divisions, roots and elementary functions (PTX ISA, "rcp", "sqrt", "ex2", ...).

Approximations are computed in float64 and rounded. Hardware's last bits differ within the error
bounds that the PTX ISA gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from ...machine.meanings import Computation
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers, decodes
from .computing import computed
from .float_forms import WIDTHS, flushed, packed, unpacked
from .rounding import MODES, by_fractions


def _elementwise(
    instruction: Instruction,
    program: Program,
    kind: str,
    function: Callable[..., Any],
    *,
    flushes: bool,
    inputs: int = 1,
) -> Computation:
    widen, pack = unpacked(kind), packed(kind)

    def on_registers(*values: Any) -> Any:
        wide = [widen(value) for value in values]
        if flushes:
            wide = [flushed(value, kind) for value in wide]
        found = function(*wide)
        return pack(flushed(found, kind) if flushes else found)

    return computed(instruction, program, on_registers, WIDTHS[kind], *[kind] * inputs, raw=True)


def divide_floats(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``div`` of floating-point types."""
    qualifiers = Qualifiers(instruction)
    mode = qualifiers.one_of("approx", "full", *MODES)
    flushes = qualifiers.flag("ftz")
    rounded = mode in MODES
    kind = qualifiers.one_of("f32", *([] if flushes or not rounded else ["f64"]))
    qualifiers.end()
    function = _quotient(mode if rounded else "rn", kind)
    return _elementwise(instruction, program, kind, function, flushes=flushes, inputs=2)


def _quotient(mode: str, kind: str) -> Callable[..., Any]:
    if mode == "rn":
        return np.divide
    dtype = np.float32 if kind == "f32" else np.float64

    def divided(a: Any, b: Any) -> Any:
        found = by_fractions(lambda x, y: x / y if y else None, mode, dtype, a, b)
        return np.where(np.isnan(found), a / b, found)

    return divided


@decodes("rcp")
def _reciprocal(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    mode = qualifiers.one_of("approx", *MODES)
    flushes = qualifiers.flag("ftz")
    # Of f64, there is an approximation with .ftz only, and rounding without.
    wide = (mode == "approx") == flushes
    kind = qualifiers.one_of("f32", *(["f64"] if wide else []))
    qualifiers.end()
    divide = _quotient("rn" if mode == "approx" else mode, kind)
    return _elementwise(
        instruction, program, kind, lambda a: divide(np.ones_like(a), a), flushes=flushes
    )


@decodes("sqrt")
def _square_root(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    mode = qualifiers.one_of("approx", *MODES)
    flushes = qualifiers.flag("ftz")
    kind = qualifiers.one_of("f32", *([] if flushes or mode == "approx" else ["f64"]))
    qualifiers.end()
    function: Callable[..., Any] = np.sqrt
    if mode in ("rz", "rm", "rp"):
        dtype = np.float32 if kind == "f32" else np.float64
        directed = mode

        def function(a: Any) -> Any:
            found = by_fractions(lambda x: _root(x) if x > 0 else None, directed, dtype, a)
            return np.where(np.isfinite(a) & (a > 0), found, np.sqrt(a))

    return _elementwise(instruction, program, kind, function, flushes=flushes)


def _root(value: Fraction) -> Fraction:
    """Returns a square root, or a number on the same side of all floating-point numbers."""
    scale = 1 << 2300
    whole = value.numerator * scale * scale // value.denominator
    root = math.isqrt(whole)
    exact = root * root == whole and value.numerator * scale * scale % value.denominator == 0
    return Fraction(2 * root + (0 if exact else 1), 2 * scale)


@decodes("rsqrt")
def _reciprocal_root(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("approx")
    flushes = qualifiers.flag("ftz")
    kind = qualifiers.one_of("f32", "f64")
    qualifiers.end()

    def function(a: Any) -> Any:
        return (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype)

    return _elementwise(instruction, program, kind, function, flushes=flushes)


_APPROXIMATE: dict[str, Callable[..., Any]] = {
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
}


@decodes(*_APPROXIMATE)
def _approximate(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("approx")
    opcode = instruction.opcode
    flushes = opcode != "tanh" and qualifiers.flag("ftz")
    kinds = ["f32"]
    if opcode == "tanh":
        kinds += ["f16", "f16x2", "bf16", "bf16x2"]
    elif opcode == "ex2":
        kinds += ["bf16", "bf16x2"] if flushes else ["f16", "f16x2"]
    kind = qualifiers.one_of(*kinds)
    qualifiers.end()
    exact = _APPROXIMATE[opcode]

    def function(a: Any) -> Any:
        return exact(a.astype(np.float64)).astype(np.float32)

    return _elementwise(instruction, program, kind, function, flushes=flushes)


@decodes("copysign")
def _copy_sign(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``copysign``: the second operand with the first one's sign."""
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of("f32", "f64")
    qualifiers.end()
    return computed(instruction, program, lambda a, b: np.copysign(b, a), kind, kind, kind)
