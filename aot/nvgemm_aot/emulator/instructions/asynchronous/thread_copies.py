"""Asynchronous copies that each thread makes for itself (PTX ISA, "cp.async")."""

from __future__ import annotations

import collections
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...machine.accesses import Space, load, store
from ...machine.addresses import OFFSET_MASK, SHARED_BASE
from ...machine.hierarchy import Warp
from ...machine.lanes import Mask
from ...machine.meanings import RETRY, Step, going_on, lanes_of
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Immediate
from ..decoders import Qualifiers, decodes
from ..values import BITS, address, read, source
from .late_effects import later


@decodes("cp.async")
def _copy_async(instruction: Instruction, program: Program) -> Step:
    """Decodes ``cp.async.ca`` and ``cp.async.cg``, which write late.

    Meanwhile their destination holds poison.
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
        if not warp.block.cluster.grid.schedule.delay:
            store(warp, Space.SHARED, places, data)
            return
        store(warp, Space.SHARED, places, np.full_like(data, _POISON))
        _write_later(warp, instruction, places, data)

    return going_on(step)


_POISON = 0xFF


@dataclass(kw_only=True)
class _Copy:
    """A copy that some lanes of a warp made."""

    is_done: bool = False


@dataclass(kw_only=True)
class _Groups:
    """A warp's copies: those of its open group, and of those that it committed."""

    open: list[_Copy] = field(default_factory=list)
    committed: collections.deque[list[_Copy]] = field(default_factory=collections.deque)


_KEY = "copy groups"


def copy_queue(warp: Warp) -> Hashable:
    """Returns the queue of a warp's copies, which are done in order."""
    return (_KEY, id(warp))


def _write_later(warp: Warp, instruction: Instruction, places: Any, data: Any) -> None:
    block = warp.block
    offsets = (places & places.dtype.type(OFFSET_MASK)).astype(np.int64) - SHARED_BASE
    copy = _Copy()
    groups: _Groups = warp.memory.setdefault(_KEY, _Groups())
    groups.open.append(copy)

    def write() -> None:
        if not block.ended:
            block.shared[offsets[:, None] + np.arange(data.shape[1])] = data
        copy.is_done = True

    later(warp, instruction, copy_queue(warp), write)


@decodes("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")
def _copy_group(instruction: Instruction, program: Program) -> Step:
    """Decodes ``cp.async.commit_group``, ``wait_group`` and ``wait_all``."""
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("async")
    action = qualifiers.one_of("commit_group", "wait_group", "wait_all")
    qualifiers.end()
    operands = instruction.operands
    if len(operands) != (1 if action == "wait_group" else 0):
        raise instruction.unknown(f"a number of {len(operands)} operands")
    if action == "commit_group":
        return _commit
    allowed = 0
    if operands:
        if not isinstance(operands[0], Immediate) or operands[0].value < 0:
            raise instruction.unknown(f"operand {operands[0]}")
        allowed = operands[0].value
    commits = action == "wait_all"

    def wait(warp: Warp, mask: Mask) -> str | None:
        groups: _Groups | None = warp.memory.get(_KEY)
        if groups is None:
            return None
        if commits:
            _commit(warp, mask)
        while len(groups.committed) > allowed:
            left = sum(not copy.is_done for copy in groups.committed[0])
            if left:
                warp.waiting = f"{left} copies to shared memory (cp.async)"
                return RETRY
            groups.committed.popleft()
        warp.waiting = None
        return None

    return wait


@going_on
def _commit(warp: Warp, mask: Mask) -> None:
    """Closes a warp's open group.

    Groups are a thread's by the manual. Where lanes commit at different times, a warp has more
    groups than each of them, and waits for more copies than they must.
    """
    groups: _Groups | None = warp.memory.get(_KEY)
    if groups is not None:
        groups.committed.append(groups.open)
        groups.open = []
