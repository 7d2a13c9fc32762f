"""Conversions to and from formats of at most 8 bits, two values at a time (PTX ISA, "cvt")."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...machine.meanings import Computation
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Operand, Register
from ..decoders import Qualifiers
from ..values import BITS, source
from .float_forms import packed, unpacked
from .narrow_floats import FORMATS, decoded_scale, encoded_scale

_SCALE = "ue8m0x2"
NARROW = {*(f"{name}x2" for name in FORMATS), _SCALE}
"""Types of two narrow values."""

_PAIRS = ("f16x2", "bf16x2")


def narrow_conversion(instruction: Instruction, program: Program) -> Computation:
    """Decodes conversions of which one type is narrow.

    Raises:
        UnsupportedPtxError: If there is no such conversion.
    """
    if instruction.qualifiers[-2] in NARROW:
        return _to_narrow(instruction, program)
    return _from_narrow(instruction, program)


def _to_narrow(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    scale = instruction.qualifiers[-2] == _SCALE
    mode = qualifiers.one_of(*(("rz", "rp") if scale else ("rn",)))
    finite = qualifiers.flag("satfinite")
    if not finite and not scale:
        raise instruction.unknown("an end before .satfinite")
    positive = not scale and qualifiers.flag("relu")
    kind = qualifiers.one_of(*NARROW)
    of = qualifiers.one_of("f32", *(("bf16x2",) if scale else _PAIRS))
    qualifiers.end()
    count = 2 if of == "f32" else 1
    if len(instruction.operands) != 1 + count:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    register, stored = _narrow_register(instruction.operands[0], kind, instruction)
    widen = unpacked(of)
    half = 4 if kind == "e2m1x2" else 8

    def encoded(values: Any) -> Any:
        if scale:
            codes = encoded_scale(values, mode)
            return codes if finite else np.where(np.isinf(values), np.uint32(255), codes)
        return FORMATS[kind[:-2]].encoded(values, relu=positive)

    def converted(*values: Any) -> Any:
        if count == 2:
            high, low = encoded(values[0]), encoded(values[1])
        else:
            codes = encoded(widen(values[0])).reshape(-1, 2)
            low, high = codes[:, 0], codes[:, 1]
        return (high << np.uint32(half) | low).astype(stored)

    return Computation(
        function=converted,
        sources=tuple(source(each, of, instruction, program) for each in instruction.operands[1:]),
        results=(register,),
    )


def _narrow_register(operand: Operand, kind: str, instruction: Instruction) -> tuple[int, Any]:
    """Returns the register of two narrow values: of 8 bits for e2m1x2, or of 16 bits."""
    bits = 8 if kind == "e2m1x2" else 16
    if not isinstance(operand, Register) or BITS[operand.type] not in (bits, 16):
        raise instruction.unknown(f"operand {operand} as .{kind}")
    return operand.number, np.uint16


def _from_narrow(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("rn")
    kind = instruction.qualifiers[-1]
    positive = kind != _SCALE and qualifiers.flag("relu")
    to = qualifiers.one_of(*(("bf16x2",) if kind == _SCALE else _PAIRS))
    qualifiers.one_of(*NARROW)
    qualifiers.end()
    result, operand = instruction.operands
    if not isinstance(result, Register) or BITS[result.type] != 32:
        raise instruction.unknown(f"result {result}")
    _narrow_register(operand, kind, instruction)
    half = 4 if kind == "e2m1x2" else 8
    width = 8 if kind == _SCALE else FORMATS[kind[:-2]].bits
    pack = packed(to)

    def converted(codes: Any) -> Any:
        both = np.stack([codes, codes >> np.uint16(half)], 1) & np.uint16((1 << width) - 1)
        if kind == _SCALE:
            values = decoded_scale(both).astype(np.float32)
        else:
            values = FORMATS[kind[:-2]].decoded[both]
        if positive:
            values = np.where(values < 0, np.float32(0), values)
        return pack(np.ascontiguousarray(values).reshape(-1))

    return Computation(
        function=converted,
        sources=(source(operand, "b8" if half == 4 else "b16", instruction, program),),
        results=(result.number,),
    )
