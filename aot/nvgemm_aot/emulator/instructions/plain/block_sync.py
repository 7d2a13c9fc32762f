"""Barriers of warps, blocks and clusters (PTX ISA, "bar, barrier", "barrier.cluster")."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Warp
from ...machine.lanes import FULL, LANES, Mask
from ...machine.meanings import PARK, RETRY, Step, Value, going_on
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers, decodes
from ..values import read


@decodes("bar", "barrier")
def _barrier(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    if instruction.opcode == "bar" and qualifiers.flag("warp"):
        return _warp_barrier(qualifiers, instruction, program)
    if instruction.opcode == "barrier" and qualifiers.flag("cluster"):
        return _cluster_barrier(qualifiers, instruction)
    qualifiers.flag("cta")
    action = qualifiers.one_of("sync", "arrive")
    if instruction.opcode == "barrier":
        qualifiers.flag("aligned")
    qualifiers.end()
    waits = action == "sync"
    operands = instruction.operands
    if len(operands) not in ((1, 2) if waits else (2,)):
        raise instruction.unknown(f"a number of {len(operands)} operands")
    number = read(operands[0], "u32", instruction, program)
    threads = read(operands[1], "u32", instruction, program) if len(operands) == 2 else None

    def step(warp: Warp, mask: Mask) -> str | None:
        _check_whole(warp, mask)
        block = warp.block
        grid = block.cluster.grid
        count = None if threads is None else _uniform(threads, warp, mask)
        grid.progress += 1
        which = _uniform(number, warp, mask)
        opened = block.named.arrive(grid.ordering, warp, which, count, waits=waits)
        return PARK if waits and not opened else None

    if waits:
        return step

    def arrive(warp: Warp, mask: Mask) -> None:
        step(warp, mask)

    return going_on(arrive)


def _check_whole(warp: Warp, mask: Mask) -> None:
    """Checks that all lanes which have not ended are here.

    Raises:
        EmulationError: If some are elsewhere.
    """
    if mask is FULL:
        return
    alive = warp.stack[0][1]
    if (mask != alive).any():
        raise EmulationError(
            f"lanes {_list(mask)} reach a barrier without lanes {_list(alive & ~mask)} of their "
            "warp"
        )


def _list(mask: Mask) -> str:
    return ", ".join(map(str, np.flatnonzero(mask)))


def _uniform(value: Value, warp: Warp, mask: Mask) -> int:
    """Returns a value that all lanes must have.

    Raises:
        EmulationError: If they have several.
    """
    lanes = value(warp) if mask is FULL else value(warp)[mask]
    first = int(lanes[0])
    if np.count_nonzero(lanes != lanes[0]):
        raise EmulationError(f"lanes give a barrier unequal operands: {lanes.tolist()}")
    return first


def _warp_barrier(qualifiers: Qualifiers, instruction: Instruction, program: Program) -> Step:
    qualifiers.one_of("sync")
    qualifiers.end()
    (operand,) = instruction.operands
    members = read(operand, "b32", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        check_members(warp, mask, members(warp))

    return going_on(step)


_ALL = 0xFFFF_FFFF
_BITS = np.arange(LANES, dtype=np.uint32)


def check_members(warp: Warp, mask: Mask, members: Any) -> None:
    """Checks that the lanes which a member mask names are here, and no others.

    Raises:
        EmulationError: If a named lane has not ended and is elsewhere, or a lane here is not named.
    """
    if mask is FULL and members[0] == _ALL:
        return
    named_lanes = (np.uint32(int(members[mask][0])) >> _BITS & 1).astype(bool)
    if (mask & ~named_lanes).any():
        raise EmulationError(
            f"lanes {_list(mask & ~named_lanes)} run an instruction whose member mask "
            f"{int(members[mask][0]):#x} does not name them"
        )
    missing = named_lanes & ~mask & warp.stack[0][1]
    if missing.any():
        raise EmulationError(
            f"member mask {int(members[mask][0]):#x} names lanes {_list(missing)}, which are "
            "elsewhere"
        )


def _cluster_barrier(qualifiers: Qualifiers, instruction: Instruction) -> Step:
    arrives = qualifiers.one_of("arrive", "wait") == "arrive"
    order = qualifiers.option(*(("release", "relaxed") if arrives else ("acquire",)))
    qualifiers.flag("aligned")
    qualifiers.end()
    if instruction.operands:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    relaxed = order == "relaxed"

    def arrive(warp: Warp, mask: Mask) -> None:
        _check_whole(warp, mask)
        cluster = warp.block.cluster
        ordering = cluster.grid.ordering
        clock = ordering.release_relaxed(warp) if relaxed else ordering.release(warp)
        cluster.arrive(warp, clock)

    def wait(warp: Warp, mask: Mask) -> str | None:
        _check_whole(warp, mask)
        if not warp.block.cluster.passed(warp):
            warp.waiting = "barrier.cluster"
            return RETRY
        warp.waiting = None
        return None

    return going_on(arrive) if arrives else wait
