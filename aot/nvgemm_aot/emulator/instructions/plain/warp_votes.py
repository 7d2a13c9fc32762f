"""Exchanges among the lanes of a warp (PTX ISA, "shfl.sync", "vote.sync", "redux.sync", ...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...machine.hierarchy import Warp
from ...machine.lanes import FULL, LANE, LANES, Mask
from ...machine.meanings import Step, going_on, lanes_of
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Immediate, Pair
from ..decoders import Qualifiers, decodes
from ..values import destination, natural_dtype, read, source, storage_dtype
from .block_sync import check_members

_LANES64 = LANE.astype(np.int64)
_FIRST, _IS_FIRST = np.zeros(LANES, np.uint32), LANE == 0
_WEIGHTS = np.uint32(1) << LANE


@decodes("shfl")
def _shuffle(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("sync")
    mode = qualifiers.one_of("up", "down", "bfly", "idx")
    qualifiers.one_of("b32")
    qualifiers.end()
    if len(instruction.operands) != 5:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    result, value, by, clamp, members = instruction.operands
    holds = None
    if isinstance(result, Pair):
        holds = destination(result.second, instruction, "pred")
        result = result.first
    to = destination(result, instruction, "b32")
    values = read(value, "b32", instruction, program)
    who = read(members, "b32", instruction, program)
    amounts = read(by, "b32", instruction, program)
    clamps = read(clamp, "b32", instruction, program)
    fixed = None
    if isinstance(by, Immediate) and isinstance(clamp, Immediate):
        fixed = _partners(mode, np.full(LANES, by.value), np.full(LANES, clamp.value))

    def step(warp: Warp, mask: Mask) -> None:
        check_members(warp, mask, who(warp))
        partners, valid = fixed or _partners(
            mode, amounts(warp).astype(np.int64), clamps(warp).astype(np.int64)
        )
        if to is not None:
            found = values(warp).take(partners)
            if mask is not FULL:
                found = np.where(mask[partners], found, _POISON)
            warp.put(to, found, mask)
        if holds is not None:
            warp.put(holds, valid, mask)

    return going_on(step)


_POISON = np.uint32(0x7FC0_0000)
"""Value from a lane that is not there, which is undefined (PTX ISA, "shfl.sync"): a quiet NaN."""


def _partners(mode: str, by: Any, clamp: Any) -> tuple[Any, Any]:
    """Returns the lane that each one reads, and whether it lies in range (PTX ISA, "shfl.sync")."""
    by, segment, limit = by & 31, clamp >> 8 & 31, clamp & 31
    least, most = _LANES64 & segment, (_LANES64 & segment) | (limit & ~segment & 31)
    if mode == "up":
        lanes = _LANES64 - by
        valid = lanes >= most
    else:
        lanes = {
            "down": _LANES64 + by,
            "bfly": _LANES64 ^ by,
            "idx": least | (by & ~segment & 31),
        }[mode]
        valid = lanes <= most
    return np.where(valid, lanes, _LANES64), valid


@decodes("vote")
def _vote(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("sync")
    mode = qualifiers.one_of("all", "any", "uni", "ballot")
    kind = qualifiers.one_of("b32" if mode == "ballot" else "pred")
    qualifiers.end()
    result, value, members = instruction.operands
    to = destination(result, instruction, kind)
    values = lanes_of(source(value, "pred", instruction, program))
    who = read(members, "b32", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        check_members(warp, mask, who(warp))
        held = values(warp)
        here = held[mask]
        found: Any
        if mode == "ballot":
            found = np.full(LANES, _WEIGHTS[mask & held].sum(dtype=np.uint32), np.uint32)
        elif mode == "all":
            found = np.full(LANES, here.all())
        elif mode == "any":
            found = np.full(LANES, here.any())
        else:
            found = np.full(LANES, here.all() or not here.any())
        if to is not None:
            warp.put(to, found, mask)

    return going_on(step)


@decodes("match")
def _match(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    mode = qualifiers.one_of("any", "all")
    qualifiers.one_of("sync")
    kind = qualifiers.one_of("b32", "b64")
    qualifiers.end()
    result, value, members = instruction.operands
    holds = None
    if isinstance(result, Pair) and mode == "all":
        holds = destination(result.second, instruction, "pred")
        result = result.first
    to = destination(result, instruction, "b32")
    values = read(value, kind, instruction, program)
    who = read(members, "b32", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        check_members(warp, mask, who(warp))
        lanes = values(warp)
        equal = (lanes[:, None] == lanes[None, :]) & mask[None, :]
        found = (equal * _WEIGHTS[None, :]).sum(1, dtype=np.uint32)
        if mode == "all":
            same = bool(equal[int(np.flatnonzero(mask)[0])][mask].all())
            found = np.full(LANES, _WEIGHTS[mask].sum(dtype=np.uint32) if same else 0, np.uint32)
            if holds is not None:
                warp.put(holds, np.full(LANES, same), mask)
        if to is not None:
            warp.put(to, found, mask)

    return going_on(step)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


@decodes("redux")
def _reduce(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("sync")
    operation = qualifiers.one_of(*_REDUCTIONS)
    absolute = keeps_nan = False
    if operation in ("and", "or", "xor"):
        kind = qualifiers.one_of("b32")
    elif operation == "add":
        kind = qualifiers.one_of("u32", "s32")
    else:
        absolute, keeps_nan = qualifiers.flag("abs"), qualifiers.flag("NaN")
        kind = qualifiers.one_of("f32", *([] if absolute or keeps_nan else ["u32", "s32"]))
    qualifiers.end()
    result, value, members = instruction.operands
    to = destination(result, instruction, kind)
    values = lanes_of(source(value, kind, instruction, program))
    who = read(members, "b32", instruction, program)
    dtype, stored = natural_dtype(kind), storage_dtype(kind)
    reduce = _REDUCTIONS[operation]

    def of_floats(lanes: Any) -> Any:
        lanes = np.abs(lanes) if absolute else lanes
        nan = np.isnan(lanes)
        if nan.all() or (keeps_nan and nan.any()):
            return np.uint32(0x7FFF_FFFF).view(np.float32)
        ordered = sorted(lanes[~nan].tolist(), key=lambda number: (number, not np.signbit(number)))
        return np.float32(ordered[0 if operation == "min" else -1])

    def step(warp: Warp, mask: Mask) -> None:
        check_members(warp, mask, who(warp))
        lanes = values(warp)[mask]
        found = of_floats(lanes) if kind == "f32" else reduce(lanes, dtype=dtype)
        if to is not None:
            warp.put(to, np.full(LANES, found, dtype).view(stored), mask)

    return going_on(step)


@decodes("activemask")
def _active_mask(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("b32")
    qualifiers.end()
    (result,) = instruction.operands
    to = destination(result, instruction, "b32")

    def step(warp: Warp, mask: Mask) -> None:
        if to is not None:
            warp.put(to, np.full(LANES, _WEIGHTS[mask].sum(dtype=np.uint32), np.uint32), mask)

    return going_on(step)


@decodes("elect")
def _elect(instruction: Instruction, program: Program) -> Step:
    """Decodes the election of one lane: the first, as any would do."""
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("sync")
    qualifiers.end()
    result, members = instruction.operands
    if not isinstance(result, Pair):
        raise instruction.unknown(f"result {result}")
    to = destination(result.first, instruction, "b32")
    holds = destination(result.second, instruction, "pred")
    who = read(members, "b32", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        check_members(warp, mask, who(warp))
        if mask is FULL:
            if to is not None:
                warp.registers[to] = _FIRST
            if holds is not None:
                warp.registers[holds] = _IS_FIRST
            return
        first = mask.argmax()
        if to is not None:
            warp.put(to, np.full(LANES, first, np.uint32), mask)
        if holds is not None:
            warp.put(holds, first == _LANES64, mask)

    return going_on(step)
