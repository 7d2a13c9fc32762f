"""Integer arithmetic and logic (PTX ISA, "Integer Arithmetic Instructions")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..machine.hierarchy import Warp
from ..machine.lanes import Mask
from ..machine.scheduler import Step
from ..ptx.program import Instruction, Program
from .registry import Qualifiers, decodes
from .values import destination, read

_BITWISE: dict[str, Callable[..., Any]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@decodes(*_BITWISE)
def _bitwise(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of("pred", "b16", "b32", "b64")
    qualifiers.end()
    result, first, second = instruction.operands
    to = destination(result, instruction)
    assert to is not None
    a = read(first, kind, instruction, program)
    b = read(second, kind, instruction, program)
    function = _BITWISE[instruction.opcode]

    def step(warp: Warp, mask: Mask) -> None:
        warp.put(to, function(a(warp), b(warp)), mask)

    return step
