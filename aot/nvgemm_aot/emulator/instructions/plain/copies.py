"""Asynchronous copies without a bulk engine (PTX ISA, "cp.async")."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...machine.accesses import Space, load, store
from ...machine.hierarchy import Warp
from ...machine.lanes import Mask
from ...machine.meanings import Step, going_on, lanes_of
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Immediate
from ..decoders import Qualifiers, decodes
from ..values import BITS, address, read, source


@decodes("cp.async")
def _copy_async(instruction: Instruction, program: Program) -> Step:
    """Decodes ``cp.async.ca`` and ``cp.async.cg``.

    The copy is done when its group is waited for, at the latest; here at once, since only the
    thread itself may read what it copied, and only behind a wait.
    """
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("async")
    cache = qualifiers.one_of("ca", "cg")
    qualifiers.one_of("shared", "shared::cta")
    qualifiers.one_of("global")
    has_policy = qualifiers.flag("L2::cache_hint")
    qualifiers.option("L2::64B", "L2::128B", "L2::256B")
    qualifiers.end()
    operands = list(instruction.operands)
    if has_policy:
        operands.pop()
    if len(operands) not in (3, 4) or not isinstance(operands[2], Immediate):
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    size = operands[2].value
    if size not in ((4, 8, 16) if cache == "ca" else (16,)):
        raise instruction.unknown(f"size {size}")
    to = address(operands[0], "u32", instruction, program)
    frm = address(operands[1], "u64", instruction, program)
    sizes = ignored = None
    if len(operands) == 4:
        kind = getattr(operands[3], "type", "u32")
        if kind == "pred":
            ignored = lanes_of(source(operands[3], "pred", instruction, program))
        else:
            sizes = read(operands[3], "u32", instruction, program)
            assert BITS[kind] == 32

    def step(warp: Warp, mask: Mask) -> None:
        places, origins = to(warp)[mask], frm(warp)[mask]
        data = np.zeros((len(places), size), np.uint8)
        counts: Any = np.full(len(places), size)
        if sizes is not None:
            counts = np.minimum(sizes(warp)[mask], size)
        elif ignored is not None:
            counts = np.where(ignored(warp)[mask], 0, size)
        for count in set(counts.tolist()) - {0}:
            (lanes,) = np.nonzero(counts == count)
            if count & (count - 1):
                for byte in range(count):
                    data[lanes, byte] = load(
                        warp, Space.GLOBAL, origins[lanes] + np.uint64(byte), 1, 1
                    )[:, 0]
            else:
                data[lanes, :count] = load(warp, Space.GLOBAL, origins[lanes], 1, count)
        store(warp, Space.SHARED, places, data)

    return going_on(step)


@decodes("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")
def _copy_group(instruction: Instruction, program: Program) -> Step:
    """Decodes ``cp.async.commit_group``, ``wait_group`` and ``wait_all``."""
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("async")
    action = qualifiers.one_of("commit_group", "wait_group", "wait_all")
    qualifiers.end()
    if len(instruction.operands) != (1 if action == "wait_group" else 0):
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    return _done


@going_on
def _done(warp: Warp, mask: Mask) -> None:
    pass
