"""Conversions between types (PTX ISA, "cvt")."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from ...machine.meanings import Computation
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Register, Sink
from ..decoders import Qualifiers, decodes
from ..values import BITS, destination, natural_dtype, source, storage_dtype
from .float_forms import flushed, packed, relu, saturated, unpacked
from .narrow_conversions import NARROW, narrow_conversion
from .rounding import (
    MODES,
    bf16_bits,
    odd_f32,
    rounded_fraction,
    rounded_to_f16,
    rounded_to_f32,
)

_INTEGERS = tuple(f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "us")
_FLOATS = ("f16", "bf16", "f32", "f64")
_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@decodes("cvt")
def _convert(instruction: Instruction, program: Program) -> Computation:
    kinds = instruction.qualifiers[-2:]
    if len(kinds) < 2:
        raise instruction.unknown("an end of its qualifiers")
    if any(kind in NARROW for kind in kinds):
        return narrow_conversion(instruction, program)
    if kinds[0] in ("f16x2", "bf16x2"):
        return _two_values(instruction, program)
    if kinds[0] == "tf32":
        return _to_tf32(instruction, program)
    qualifiers = Qualifiers(instruction)
    mode = qualifiers.option(*MODES, *_WHOLE)
    positive = qualifiers.flag("relu")
    finite = qualifiers.flag("satfinite")
    flushes = qualifiers.flag("ftz")
    clamps = qualifiers.flag("sat")
    to = qualifiers.one_of(*_INTEGERS, *_FLOATS)
    of = qualifiers.one_of(*_INTEGERS, *_FLOATS)
    qualifiers.end()
    function = _conversion(instruction, to, of, mode, flushes=flushes, clamps=clamps)
    if positive or finite:
        if (to not in ("f16", "bf16")) or of != "f32" or mode not in ("rn", "rz"):
            raise instruction.unknown(f"qualifier .{'relu' if positive else 'satfinite'}")
        function = _limited(to, mode, positive=positive, finite=finite)
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    _, operand = instruction.operands
    register, stored = _wide_result(instruction, to)
    widened = _widened(to, stored)
    return Computation(
        function=function if widened is None else lambda value: widened(function(value)),
        sources=(source(operand, of, instruction, program, wider=True),),
        results=(register,),
    )


def _wide_result(instruction: Instruction, kind: str) -> tuple[int | None, Any]:
    """Returns the register that takes a result, and its type, which may be wider than the result.

    Raises:
        UnsupportedPtxError: If the register is narrower.
    """
    result = instruction.operands[0]
    if isinstance(result, Sink):
        return None, storage_dtype(kind)
    if (
        not isinstance(result, Register)
        or result.type in ("pred", "b128")
        or BITS[result.type] < BITS[kind]
    ):
        raise instruction.unknown(f"result {result}")
    return result.number, storage_dtype(result.type)


def _widened(kind: str, stored: Any) -> Callable[[Any], Any] | None:
    """Returns the function that extends results to a wider register, by the sign if signed."""
    if BITS[kind] == 8 and stored is np.uint16:
        return None
    if storage_dtype(kind) is stored:
        return None
    signed = np.dtype(f"i{np.dtype(stored).itemsize}").type
    if kind[0] == "s":
        return lambda value: (
            value.view(natural_dtype(kind) if kind != "s8" else np.int16)
            .astype(signed)
            .view(stored)
        )
    return lambda value: value.astype(stored)


def _conversion(
    instruction: Instruction, to: str, of: str, mode: str | None, *, flushes: bool, clamps: bool
) -> Callable[[Any], Any]:
    """Returns the function from lanes of one type to bits of another."""
    f32 = "f32" in (to, of)
    if flushes and not f32:
        raise instruction.unknown("qualifier .ftz")
    if of in _INTEGERS and to in _INTEGERS:
        if mode or flushes:
            raise instruction.unknown(f"qualifier .{mode or 'ftz'}")
        return _between_integers(to, of, clamps)
    if to in _INTEGERS:
        if mode not in _WHOLE:
            raise instruction.unknown(f"rounding .{mode}")
        return _to_integer(to, of, _WHOLE[mode], flushes)
    if of in _INTEGERS:
        if mode not in MODES:
            raise instruction.unknown(f"rounding .{mode}")
        return _from_integer(to, of, mode, clamps)
    widens = to == of or _PRECISION[to] > _PRECISION[of]
    if (widens and mode in MODES) or (not widens and mode not in MODES):
        raise instruction.unknown(f"rounding .{mode}")
    if mode in _WHOLE and to != of:
        raise instruction.unknown(f"rounding .{mode}")
    return _between_floats(to, of, mode, flushes=flushes, clamps=clamps)


_PRECISION = {"bf16": 1, "f16": 1, "f32": 2, "f64": 3}


def _between_integers(to: str, of: str, clamps: bool) -> Callable[[Any], Any]:
    stored, bits = storage_dtype(to), BITS[to]

    def converted(value: Any) -> Any:
        if of == "s8":
            value = value.astype(np.uint8).view(np.int8)
        elif of == "u8":
            value = value.astype(np.uint8)
        if clamps:
            least, most = _range(to)
            held = np.iinfo(value.dtype)
            value = np.clip(value, max(least, int(held.min)), min(most, int(held.max)))
        if bits == 8:
            narrow = value.astype(np.uint8)
            if to == "s8":
                return narrow.view(np.int8).astype(np.int16).view(np.uint16)
            return narrow.astype(np.uint16)
        return value.astype(stored)

    if of not in ("s8", "u8") and bits != 8 and not clamps:
        if natural_dtype(of) is stored:
            return lambda value: value
        return lambda value: value.astype(stored)
    return converted


def _range(kind: str) -> tuple[int, int]:
    bits = BITS[kind]
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def _to_integer(to: str, of: str, whole: Callable[..., Any], flushes: bool) -> Callable[[Any], Any]:
    """Returns the function that rounds floats to whole numbers, clamped to the type."""
    widen, stored = unpacked(of), storage_dtype(to)
    least, most = _range(to)
    # A NaN becomes zero, or the sign bit where a type of 64 bits takes part.
    nan = 1 << (BITS[to] - 1) if "64" in (of + to) else 0
    wide = np.dtype("i8" if to[0] == "s" else "u8").type

    def converted(value: Any) -> Any:
        found = widen(value)
        if flushes:
            found = flushed(found, of)
        found = whole(found.astype(np.float64))
        # The float nearest to the greatest integer may be above it.
        high, low = found >= float(most), found <= float(least)
        inside = np.where(high | low | np.isnan(found), 0.0, found).astype(wide)
        inside = np.where(high, wide(most), np.where(low, wide(least), inside))
        bits = inside.view(np.uint64)
        bits = np.where(np.isnan(found), np.uint64(nan), bits)
        return bits.astype(stored)

    return converted


def _from_integer(to: str, of: str, mode: str, clamps: bool) -> Callable[[Any], Any]:
    pack = packed(to)

    def converted(value: Any) -> Any:
        if BITS[of] == 8:
            value = value.astype(np.uint8).view(np.int8 if of == "s8" else np.uint8)
        if to == "f64":
            found = _to_f64(value, mode)
        elif to == "f32" and mode == "rn":
            found = value.astype(np.float32)
        else:
            found = _odd_f64(value) if BITS[of] == 64 else value.astype(np.float64)
            found = rounded_to_f32(found, mode) if to == "f32" else found
        if clamps:
            found = saturated(found, to)
        return _narrowed(to, found, mode) if to in ("f16", "bf16") else pack(found)

    return converted


def _to_f64(value: Any, mode: str) -> Any:
    if mode == "rn" or value.itemsize < 8:
        return value.astype(np.float64)
    exact = (rounded_fraction(Fraction(each), mode, 53, -1074, 1024) for each in value.tolist())
    return np.array([float(each) for each in exact])


def _odd_f64(value: Any) -> Any:
    """Returns 64-bit integers as float64; inexact ones so that their last bits count as a rest."""
    negative = value < 0
    magnitude = np.where(negative, -value, value).astype(np.uint64)
    rest = magnitude & np.uint64(0x7FF) != 0
    large = ((magnitude >> np.uint64(11)) | rest.astype(np.uint64)).astype(np.float64) * 2048
    exact = np.where(magnitude < 1 << 53, magnitude.astype(np.float64), large)
    return np.where(negative, -exact, exact)


def _narrowed(to: str, value: Any, mode: str) -> Any:
    """Rounds float64 values to bits of f16 or bf16."""
    if to == "f16":
        return packed("f16")(rounded_to_f16(value, mode))
    return bf16_bits(odd_f32(value), mode)


def _between_floats(
    to: str, of: str, mode: str | None, *, flushes: bool, clamps: bool
) -> Callable[[Any], Any]:
    widen, pack = unpacked(of), packed(to)
    rounded = mode or "rn"

    def converted(value: Any) -> Any:
        found = widen(value)
        if flushes and of == "f32":
            found = flushed(found, of)
        if mode in _WHOLE:
            found = _WHOLE[mode](found)
        if to == "f64":
            found = found.astype(np.float64)
        elif to == "f32":
            found = rounded_to_f32(found, rounded) if of == "f64" else found
        if flushes and to == "f32":
            found = flushed(found, to)
        if clamps:
            found = saturated(found, to)
        if to in ("f16", "bf16"):
            return _narrowed(to, found.astype(np.float64), rounded)
        return pack(found)

    if mode == "rn" and not clamps and not flushes and of == "f32" and to in ("f16", "bf16"):
        return pack
    return converted


_LARGEST = {"f16": 65504.0, "bf16": float.fromhex("0x1.fep127")}


def _limited(to: str, mode: str, *, positive: bool, finite: bool) -> Callable[[Any], Any]:
    """Returns the conversion of float32 to 16 bits with .relu and .satfinite."""
    largest = np.float32(_LARGEST[to])

    def converted(value: Any) -> Any:
        if positive:
            value = relu(value, to)
        if finite:
            value = np.where(np.isnan(value), value, np.clip(value, -largest, largest))
        if mode == "rn":
            return packed(to)(value)
        return _narrowed(to, value.astype(np.float64), mode)

    return converted


def _two_values(instruction: Instruction, program: Program) -> Computation:
    """Decodes conversions of two float32 to two values in 32 bits; the first is the high one."""
    qualifiers = Qualifiers(instruction)
    mode = qualifiers.one_of("rn", "rz")
    positive = qualifiers.flag("relu")
    finite = qualifiers.flag("satfinite")
    kind = qualifiers.one_of("f16x2", "bf16x2")
    qualifiers.one_of("f32")
    qualifiers.end()
    if len(instruction.operands) != 3:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    narrow = _limited(kind[:-2], mode, positive=positive, finite=finite)
    if mode == "rn" and not positive and not finite:
        narrow = packed(kind[:-2])
    result, high, low = instruction.operands

    def both(high: Any, low: Any) -> Any:
        pairs = np.empty((len(high), 2), np.float32)
        pairs[:, 0], pairs[:, 1] = low, high
        return narrow(pairs).view(np.uint32)[:, 0]

    return Computation(
        function=both,
        sources=(
            source(high, "f32", instruction, program),
            source(low, "f32", instruction, program),
        ),
        results=(destination(result, instruction, "b32"),),
    )


def _to_tf32(instruction: Instruction, program: Program) -> Computation:
    """Decodes conversions to tf32: float32 with 10 bits of mantissa, the others zero."""
    qualifiers = Qualifiers(instruction)
    mode = qualifiers.one_of("rna", "rn", "rz")
    finite = qualifiers.flag("satfinite")
    positive = mode != "rna" and qualifiers.flag("relu")
    finite = finite or qualifiers.flag("satfinite")
    qualifiers.one_of("tf32")
    qualifiers.one_of("f32")
    qualifiers.end()
    result, operand = instruction.operands

    def converted(value: Any) -> Any:
        if positive:
            value = relu(value, "f32")
        bits = value.view(np.uint32)
        if mode == "rna":
            rounded = bits + np.uint32(0x1000)
        elif mode == "rn":
            rounded = bits + (((bits >> 13) & 1) + np.uint32(0xFFF))
        else:
            rounded = bits
        rounded = rounded & np.uint32(0xFFFF_E000)
        if finite:
            over = rounded & np.uint32(0x7FFF_FFFF) >= np.uint32(0x7F80_0000)
            rounded = np.where(
                over, (bits & np.uint32(0x8000_0000)) | np.uint32(0x7F7F_E000), rounded
            )
        elif 1 in np.isinf(value).tobytes():
            rounded = np.where(np.isinf(value), bits, rounded)
        return np.where(np.isnan(value), np.uint32(0x7FFF_FFFF), rounded)

    return Computation(
        function=converted,
        sources=(source(operand, "f32", instruction, program),),
        results=(destination(result, instruction, "b32"),),
    )
