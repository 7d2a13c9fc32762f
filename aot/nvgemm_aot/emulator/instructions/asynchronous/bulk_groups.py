"""Groups of bulk copies that a thread can wait for (PTX ISA, "cp.async.bulk.commit_group")."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...machine.hierarchy import Warp
from ...machine.lanes import Mask
from ...machine.ordering import Clock
from ...machine.scheduler import RETRY, Step
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Immediate
from ..decoders import Qualifiers, decodes
from ..shared_addresses import active_lanes

_KEY = "bulk groups"


@dataclass(kw_only=True)
class BulkCopy:
    """A copy whose completion belongs to a group of each thread that asked for it.

    Attributes:
        unaware: Threads that have not waited for it.
        has_read: Set once it has read all of its source.
        is_done: Set once its writes are made, too.
        clock: Clock of what it has done so far.
    """

    unaware: set[int]
    has_read: bool = False
    is_done: bool = False
    clock: Clock = None


@dataclass(kw_only=True)
class _Groups:
    """Copies of one thread: of its open group, and of those that it committed."""

    open: list[BulkCopy] = field(default_factory=list)
    committed: collections.deque[list[BulkCopy]] = field(default_factory=collections.deque)


def add_to_group(warp: Warp, lanes: Sequence[int]) -> BulkCopy:
    """Returns a new copy in the open groups of threads."""
    threads: dict[int, _Groups] = warp.memory.setdefault(_KEY, {})
    copy = BulkCopy(unaware=set(lanes))
    for lane in lanes:
        threads.setdefault(lane, _Groups()).open.append(copy)
    return copy


@decodes("cp.async.bulk.commit_group")
def _commit_group(instruction: Instruction, program: Program) -> Step:
    if instruction.qualifiers[2:] != ("commit_group",) or instruction.operands:
        raise instruction.unknown("a qualifier or operand")

    def step(warp: Warp, mask: Mask) -> None:
        threads: dict[int, _Groups] = warp.memory.get(_KEY, {})
        for lane in active_lanes(mask) if threads else ():
            if (groups := threads.get(lane)) is not None:
                groups.committed.append(groups.open)
                groups.open = []

    return step


@decodes("cp.async.bulk.wait_group")
def _wait_group(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    for name in ("async", "bulk", "wait_group"):
        qualifiers.one_of(name)
    only_read = qualifiers.flag("read")
    qualifiers.end()
    if len(instruction.operands) != 1 or not isinstance(instruction.operands[0], Immediate):
        raise instruction.unknown("an operand that is no constant")
    allowed = instruction.operands[0].value
    if allowed < 0:
        raise instruction.unknown(f"a number of {allowed} groups")

    def step(warp: Warp, mask: Mask) -> str | None:
        threads: dict[int, _Groups] = warp.memory.get(_KEY, {})
        ordering = warp.block.cluster.grid.ordering
        for lane in active_lanes(mask) if threads else ():
            if (groups := threads.get(lane)) is None:
                continue
            groups_to_end = list(groups.committed)[: max(0, len(groups.committed) - allowed)]
            copies = [copy for group in groups_to_end for copy in group]
            left = [copy for copy in copies if not (copy.is_done or (only_read and copy.has_read))]
            if left:
                warp.waiting = f"{len(left)} bulk copies of lane {lane}"
                return RETRY
            for copy in copies:
                copy.unaware.discard(lane)
                if not copy.unaware:
                    ordering.acquire(warp, copy.clock)
            while groups.committed and all(copy.is_done for copy in groups.committed[0]):
                if len(groups.committed) <= allowed:
                    break
                groups.committed.popleft()
        warp.waiting = None
        return None

    return step
