"""Sums with a carry bit (PTX ISA, "Extended-Precision Integer Arithmetic Instructions")."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...machine.hierarchy import Warp
from ...machine.lanes import LANES
from ...machine.meanings import Computation, Source
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers, decodes
from ..values import destination, source, storage_dtype

_CARRY = "carry"
"""Name in a warp's memory; carries are set in all lanes, which differs from hardware only if
lanes that did not run an instruction use its carry."""


def with_carry(instruction: Instruction, program: Program) -> Computation:
    """Decodes ``add.cc``, ``sub.cc``, ``addc`` and ``subc``."""
    qualifiers = Qualifiers(instruction)
    keeps = qualifiers.flag("cc")
    kind = qualifiers.one_of("u32", "s32", "b32", "u64", "s64", "b64")
    qualifiers.end()
    takes = instruction.opcode.endswith("c")
    subtracts = instruction.opcode.startswith("sub")
    if instruction.opcode not in ("add", "sub", "addc", "subc") or len(instruction.operands) != 3:
        raise instruction.unknown("qualifier .cc")
    unsigned = kind.replace("s", "u").replace("b", "u")
    result, first, second = instruction.operands
    dtype = storage_dtype(unsigned)

    def function(a: Any, b: Any, memory: dict[str, Any]) -> Any:
        one = memory.get(_CARRY, np.zeros(LANES, bool)) if takes else np.zeros(LANES, bool)
        if subtracts:
            partial = a - b
            found = partial - one.astype(dtype)
            carry = (a < b) | (partial < one)
        else:
            partial = a + b
            found = partial + one.astype(dtype)
            carry = (partial < a) | (found < partial)
        if keeps:
            memory[_CARRY] = carry
        return found

    def memory(warp: Warp) -> dict[str, Any]:
        return warp.memory

    return Computation(
        function=function,
        sources=(
            source(first, unsigned, instruction, program),
            source(second, unsigned, instruction, program),
            Source(value=memory),
        ),
        results=(destination(result, instruction, kind),),
    )


@decodes("addc", "subc")
def _with_carry(instruction: Instruction, program: Program) -> Computation:
    return with_carry(instruction, program)
