"""Instructions that change nothing a kernel computes: prefetches, hints, register counts."""

from __future__ import annotations

import numpy as np

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Warp
from ...machine.lanes import LANES, Mask
from ...machine.meanings import YIELD, Computation, Step, going_on
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Immediate
from ..decoders import Qualifiers, decodes
from ..numbers.computing import computed
from ..values import address, read


@decodes("prefetch", "prefetchu")
def _prefetch(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    if instruction.opcode == "prefetchu":
        qualifiers.one_of("L1")
    elif qualifiers.option("const", "param"):
        qualifiers.one_of("tensormap")
    elif not qualifiers.flag("tensormap"):
        qualifiers.option("global", "local")
        qualifiers.one_of("L1", "L2", "L2::evict_last", "L2::evict_normal")
    qualifiers.end()
    (operand,) = instruction.operands
    address(operand, "u64", instruction, program)
    return _nothing


@decodes("applypriority", "discard")
def _priority(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.flag("global")
    qualifiers.one_of("L2::evict_normal" if instruction.opcode == "applypriority" else "L2")
    qualifiers.end()
    operand, size = instruction.operands
    address(operand, "u64", instruction, program)
    if size != Immediate(128):
        raise instruction.unknown(f"size {size}")
    return _nothing


@decodes("createpolicy")
def _policy(instruction: Instruction, program: Program) -> Computation:
    """Decodes cache policies, which are 0 here: nothing reads them."""
    qualifiers = Qualifiers(instruction)
    if qualifiers.one_of("fractional", "range", "cvt") != "cvt":
        if instruction.qualifiers[0] == "range":
            qualifiers.flag("global")
        qualifiers.one_of("L2::evict_last", "L2::evict_normal", "L2::evict_first", _UNCHANGED)
        qualifiers.option("L2::evict_first", _UNCHANGED)
    else:
        qualifiers.one_of("L2")
    kind = qualifiers.one_of("b64")
    qualifiers.end()
    zero = np.zeros(LANES, np.uint64)
    return computed(instruction, program, lambda: zero, kind, operands=instruction.operands[:1])


_UNCHANGED = "L2::evict_unchanged"


@decodes("setmaxnreg")
def _registers(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("inc", "dec")
    for name in ("sync", "aligned", "u32"):
        qualifiers.one_of(name)
    qualifiers.end()
    (count,) = instruction.operands
    if not isinstance(count, Immediate) or count.value % 8 or not 24 <= count.value <= 256:
        raise instruction.unknown(f"count {count}, which must be a multiple of 8 in 24..256,")
    return _nothing


@decodes("griddepcontrol")
def _dependent_launch(instruction: Instruction, program: Program) -> Step:
    """Decodes waits for, and permissions of, other launches, which never run at the same time."""
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of("launch_dependents", "wait")
    qualifiers.end()
    return _depend if kind == "wait" else _nothing


@decodes("nanosleep")
def _sleep(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of("u32")
    qualifiers.end()
    (duration,) = instruction.operands
    read(duration, kind, instruction, program)
    return lambda warp, mask: YIELD


@decodes("trap", "brkpt")
def _trap(instruction: Instruction, program: Program) -> Step:
    Qualifiers(instruction).end()
    opcode = instruction.opcode

    def step(warp: Warp, mask: Mask) -> None:
        raise EmulationError(f"runs {opcode}")

    return going_on(step)


@going_on
def _depend(warp: Warp, mask: Mask) -> None:
    warp.block.cluster.grid.ordering.depend(warp)


@going_on
def _nothing(warp: Warp, mask: Mask) -> None:
    pass
