"""The 32-bit descriptor of a multiplication (PTX ISA, "Instruction descriptor")."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

from ...emulation_errors import EmulationError
from .element_formats import BF16, F16, FLOAT8, INTEGER8, PACKED_E2M1, TF32, ElementFormat


class Kind(enum.Enum):
    """Kinds of multiplication, by their qualifiers."""

    F16 = "kind::f16"
    TF32 = "kind::tf32"
    F8F6F4 = "kind::f8f6f4"
    I8 = "kind::i8"
    MXF8F6F4 = "kind::mxf8f6f4"
    MXF4 = "kind::mxf4"
    MXF4NVF4 = "kind::mxf4nvf4"

    @property
    def is_scaled(self) -> bool:
        """True of kinds whose blocks of elements have scales."""
        return self in (Kind.MXF8F6F4, Kind.MXF4, Kind.MXF4NVF4)


class Accumulator(enum.Enum):
    """Types of results, by their codes."""

    F16 = 0
    F32 = 1
    S32 = 2


_FORMATS: dict[Kind, dict[int, ElementFormat]] = {
    Kind.F16: {0: F16, 1: BF16},
    Kind.TF32: {2: TF32},
    Kind.F8F6F4: FLOAT8,
    Kind.I8: INTEGER8,
    Kind.MXF8F6F4: FLOAT8,
    Kind.MXF4: {1: PACKED_E2M1},
    Kind.MXF4NVF4: {1: PACKED_E2M1},
}

_ACCUMULATORS = {
    Kind.F16: (Accumulator.F16, Accumulator.F32),
    Kind.TF32: (Accumulator.F32,),
    Kind.F8F6F4: (Accumulator.F16, Accumulator.F32),
    Kind.I8: (Accumulator.S32,),
}

_DEPTHS = {
    Kind.F16: 16,
    Kind.TF32: 8,
    Kind.F8F6F4: 32,
    Kind.I8: 32,
    Kind.MXF8F6F4: 32,
    Kind.MXF4: 64,
    Kind.MXF4NVF4: 64,
}


@dataclass(frozen=True, kw_only=True)
class InstructionDescriptor:
    """Shape and types of a multiplication.

    Attributes:
        m: Rows of the result, over all blocks of the group.
        n: Columns of the result.
        k: Depth.
        a: Format of A's elements.
        b: Format of B's elements.
        accumulator: Type of the result.
        negates_a: True if A is negated.
        negates_b: True if B is negated.
        a_is_transposed: True if A's contiguous dimension is m, not k.
        b_is_transposed: True if B's contiguous dimension is n, not k.
        saturates: True if integers stop at the ends of their range.
        a_scale: First byte of A's scales in a cell of tensor memory.
        b_scale: First byte of B's scales in a cell.
        scales_are_powers: True if scales are ue8m0, not ue4m3.
    """

    m: int
    n: int
    k: int
    a: ElementFormat
    b: ElementFormat
    accumulator: Accumulator
    negates_a: bool
    negates_b: bool
    a_is_transposed: bool
    b_is_transposed: bool
    saturates: bool = False
    a_scale: int = 0
    b_scale: int = 0
    scales_are_powers: bool = False


def _wrong(field: str, value: object, allowed: str) -> EmulationError:
    return EmulationError(f"the instruction descriptor's {field} is {value}, must be {allowed}")


@functools.lru_cache(maxsize=1024)
def decode_instruction_descriptor(word: int, kind: Kind, blocks: int) -> InstructionDescriptor:
    """Decodes a descriptor, for a group of 1 or 2 blocks, and checks it.

    Raises:
        EmulationError: If a field has a value that it must not have, or that is not supported.
    """
    if word & 4:
        raise _wrong("sparsity", 1, "0; sparse matrices are not supported")
    if word & 3:
        raise _wrong("sparsity selector", word & 3, "0 of dense matrices")
    formats = _FORMATS[kind]
    packed = kind in (Kind.MXF4, Kind.MXF4NVF4)
    codes = (word >> 7 & 7, word >> 10 & (3 if packed else 7))
    for name, code in zip("AB", codes):
        if code not in formats:
            raise _wrong(f"type of {name}", code, f"one of {[*formats]} of .{kind.value}")
    reserved = _SCALED_RESERVED if kind.is_scaled else _PLAIN_RESERVED
    if packed:
        reserved |= 1 << 12
        if word >> 31:
            raise _wrong("K", 96, "64; the longer K that only sm_103a has is not supported")
    if word & reserved:
        raise _wrong("reserved bits", f"{word & reserved:#x}", "0")
    found = InstructionDescriptor(
        m=(word >> 27 & 3) << 7 if kind.is_scaled else (word >> 24 & 31) << 4,
        n=(word >> 17 & 63) << 3,
        k=_DEPTHS[kind],
        a=formats[codes[0]],
        b=formats[codes[1]],
        accumulator=_accumulator(word, kind),
        negates_a=bool(word >> 13 & 1),
        negates_b=bool(word >> 14 & 1),
        a_is_transposed=bool(word >> 15 & 1),
        b_is_transposed=bool(word >> 16 & 1),
        saturates=not kind.is_scaled and bool(word >> 3 & 1),
        a_scale=word >> 29 & 3 if kind.is_scaled else 0,
        b_scale=word >> 4 & 3 if kind.is_scaled else 0,
        scales_are_powers=kind.is_scaled and bool(word >> 23 & 1),
    )
    _check(found, kind, blocks)
    return found


_PLAIN_RESERVED = 1 << 6 | 1 << 23 | 7 << 29
_SCALED_RESERVED = 1 << 3 | 1 << 6 | 7 << 24 | 1 << 31


def _accumulator(word: int, kind: Kind) -> Accumulator:
    if kind.is_scaled:
        return Accumulator.F32
    code = word >> 4 & 3
    if code not in [each.value for each in _ACCUMULATORS[kind]]:
        raise _wrong("type of D", code, f"one of {[each.value for each in _ACCUMULATORS[kind]]}")
    return Accumulator(code)


_WHOLE_BYTES = (Kind.F8F6F4, Kind.I8, Kind.MXF8F6F4)
"""Kinds whose elements take a byte each in shared memory."""


def _columns_step(found: InstructionDescriptor, kind: Kind, blocks: int) -> int:
    """Returns what N must be a multiple of (PTX ISA, "Matrix Shape", "Transpose and Negate")."""
    if found.b_is_transposed and kind in _WHOLE_BYTES:
        return 16 * blocks
    if kind is Kind.I8 and (blocks == 2 or found.n > 32):
        return 16 * blocks
    return 8 * blocks


def _check(found: InstructionDescriptor, kind: Kind, blocks: int) -> None:
    rows = (128, 256) if blocks == 2 else (128,) if kind.is_scaled else (64, 128)
    if found.m not in rows:
        raise _wrong("M", found.m, f"one of {rows} in .cta_group::{blocks}")
    step = _columns_step(found, kind, blocks)
    if found.n % step or not step <= found.n <= 256:
        raise _wrong(
            "N", found.n, f"a multiple of {step} up to 256 of .{kind.value} in .cta_group::{blocks}"
        )
    if Accumulator.F16 is found.accumulator and BF16 in (found.a, found.b):
        raise _wrong("type of D", found.accumulator.value, "1 (f32) for matrices of bf16")
    if kind is Kind.I8 and (found.negates_a or found.negates_b):
        raise _wrong("negation", 1, "0 of integers")
    if found.saturates and kind is not Kind.I8:
        raise _wrong("saturation", 1, f"0 of .{kind.value}")
    if kind in (Kind.MXF4, Kind.MXF4NVF4) and (found.a_is_transposed or found.b_is_transposed):
        raise _wrong("transposition", 1, f"0 of .{kind.value}")
    if kind is not Kind.MXF4NVF4 and kind.is_scaled and not found.scales_are_powers:
        raise _wrong("type of scales", 0, f"1 (ue8m0) of .{kind.value}")
