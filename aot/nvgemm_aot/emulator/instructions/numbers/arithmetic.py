"""Arithmetic opcodes that integers and floating-point types share."""

from __future__ import annotations

from collections.abc import Callable

from ...machine.meanings import Computation
from ...ptx.program import Instruction, Program
from ..decoders import decodes
from . import carries, elementary, floats, integers

_Decoder = Callable[[Instruction, Program], Computation]

_OF_INTEGERS: dict[str, _Decoder] = {
    "add": integers.add_or_subtract,
    "sub": integers.add_or_subtract,
    "mul": integers.multiply,
    "mad": integers.multiply,
    "mul24": integers.multiply_24,
    "mad24": integers.multiply_24,
    "div": integers.divide,
    "rem": integers.divide,
    "min": integers.least_or_greatest,
    "max": integers.least_or_greatest,
    "neg": integers.negate,
    "abs": integers.magnitude,
}

_OF_FLOATS: dict[str, _Decoder] = {
    "add": floats.add_multiply,
    "sub": floats.add_multiply,
    "mul": floats.add_multiply,
    "mad": floats.add_multiply,
    "fma": floats.add_multiply,
    "min": floats.least_or_greatest_float,
    "max": floats.least_or_greatest_float,
    "neg": floats.change_sign,
    "abs": floats.change_sign,
    "div": elementary.divide_floats,
}


@decodes(*{**_OF_INTEGERS, **_OF_FLOATS})
def _arithmetic(instruction: Instruction, program: Program) -> Computation:
    if "cc" in instruction.qualifiers:
        return carries.with_carry(instruction, program)
    kind = instruction.qualifiers[-1] if instruction.qualifiers else ""
    floating = "f" in kind
    decoder = (_OF_FLOATS if floating else _OF_INTEGERS).get(instruction.opcode)
    if decoder is None:
        raise instruction.unknown(f"qualifier .{kind}")
    return decoder(instruction, program)
