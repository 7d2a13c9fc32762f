"""Messages about accesses that nothing orders."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from .segments import Knowledge, OperationState
from .shadow import Event

UNWRITTEN = "that nobody has written"
"""End of a finding about memory without content."""

MOST_OF_A_KIND = 3
"""Findings of a kind that are reported; a kernel that has one often has thousands."""


class Access(NamedTuple):
    """An access that is checked.

    Attributes:
        event: Its event's number.
        place: Index of its instruction.
        warp: Warp that makes it, or issued the operation that does.
        operation: The operation, or None.
        segment: Its segment.
        known: Knowledge of who makes it.
    """

    event: int
    place: int
    warp: Any
    operation: OperationState | None
    segment: int
    known: Knowledge


_COMPLETIONS = {
    "tcgen05.mma": "tcgen05.commit and a wait for its memory barrier",
    "tcgen05.cp": "tcgen05.commit and a wait for its memory barrier",
    "tcgen05.shift": "tcgen05.commit and a wait for its memory barrier",
    "tcgen05.ld": "tcgen05.wait::ld",
    "tcgen05.st": "tcgen05.wait::st",
    "wgmma.mma_async": "wgmma.commit_group and wgmma.wait_group",
}


class Findings:
    """Reports each pair of instructions once, to the grid."""

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()
        self._counts: collections.Counter[str] = collections.Counter()

    def report_unordered(
        self,
        access: Access,
        event: Event,
        block: Any,
        space: str,
        *,
        was_read: bool,
        reads: bool,
    ) -> None:
        """Reports an access that nothing orders behind an earlier one."""
        verb = "reads" if reads else "overwrites"
        kind = f"{space} {verb} {'read' if was_read else 'written'}"
        if not self._is_new(kind, access, event.place):
            return
        earlier = event.operation
        if space == "workspace":
            missing = "a flag that is released behind that and acquired before this, or a barrier"
        elif earlier is None:
            missing = "a barrier between the two warps"
        elif earlier.is_store:
            missing = "cp.async.bulk.wait_group.read"
            if earlier.warp is not access.warp:
                missing += ", and a barrier behind it"
        else:
            missing = _COMPLETIONS.get(earlier.opcode, "a wait for the copy's memory barrier")
            if earlier.warp is not access.warp and earlier.opcode in ("tcgen05.ld", "tcgen05.st"):
                missing += ", and a barrier behind it"
        self._report(
            access,
            f"{verb} {_memory(space, block)} that "
            f"{_name(event)} {'reads' if was_read else 'writes'}, not ordered behind it; "
            f"missing: {missing}",
        )

    def report_invisible(
        self, access: Access, event: Event, block: Any, *, was_read: bool, reads: bool
    ) -> None:
        """Reports an asynchronous access behind a generic one without a proxy fence between."""
        if not self._is_new(f"proxy {reads} {was_read}", access, event.place):
            return
        is_copy = event.warp.block.cluster.grid.program.instructions[event.place].opcode == "cp"
        self._report(
            access,
            f"{'reads' if reads else 'overwrites'} shared memory of block {block.index} that "
            f"{_name(event)} {'reads' if was_read else 'writes'} through the generic proxy; "
            "missing: fence.proxy.async "
            f"{'behind the wait for that copy' if is_copy else 'between that and the barrier'}",
        )

    def report_unwritten(self, access: Access, block: Any, space: str) -> None:
        """Reports a read of what nobody has written."""
        access.warp.block.cluster.grid.reads_unwritten = True
        if not self._is_new(f"unwritten {space}", access, None):
            return
        self._report(
            access,
            f"reads {space} memory of block {block.index} {UNWRITTEN}",
        )

    def report_barrier(
        self,
        warp: Any,
        place: int,
        block: Any,
        offset: int,
        event: Event,
        *,
        asynchronous: bool,
    ) -> None:
        """Reports the use of a memory barrier whose initialisation may not be visible."""
        user = "an operation" if asynchronous else "the warp"
        access = Access(0, place, warp, None, 0, Knowledge())
        if not self._is_new("barrier", access, event.place):
            return
        self._report(
            access,
            f"uses the memory barrier at offset {offset} of block {block.index} that "
            f"{_name(event)} initialises, perhaps not yet for {user}; missing: "
            "fence.mbarrier_init and a barrier behind it",
        )

    def report_dependent(self, warp: Any, place: int) -> None:
        """Reports an access that may come before the end of earlier launches."""
        access = Access(0, place, warp, None, 0, Knowledge())
        if not self._is_new("dependent", access, None):
            return
        self._report(
            access,
            "accesses global memory, perhaps before the launches on which this one depends have "
            "ended; missing: griddepcontrol.wait, in this warp or before a barrier that it passes",
        )

    def report_end(self, warp: Any, operation: OperationState) -> None:
        """Reports an operation that may still use shared memory of a block which has ended."""
        access = Access(0, operation.place, operation.warp, operation, 0, Knowledge())
        missing = (
            "cp.async.bulk.wait_group.read"
            if operation.is_store
            else _COMPLETIONS.get(operation.opcode, "a wait for the copy's memory barrier")
        )
        if not self._is_new("end", access, None):
            return
        self._report(
            access,
            f"may use shared memory after {warp} has ended; missing: {missing}",
        )

    def _is_new(self, kind: str, access: Access, earlier: int | None) -> bool:
        """Tells if a finding should be reported; a pair of instructions counts once."""
        key = (kind, access.place, earlier)
        if key in self._seen:
            return False
        self._seen.add(key)
        self._counts[kind] += 1
        return self._counts[kind] <= MOST_OF_A_KIND

    @staticmethod
    def _report(access: Access, text: str) -> None:
        grid = access.warp.block.cluster.grid
        grid.findings.append(f"{access.warp} at {_line(access.warp, access.place)}: {text}")


def _memory(space: str, block: Any) -> str:
    return "the workspace" if space == "workspace" else f"{space} memory of block {block.index}"


def _line(warp: Any, place: int) -> str:
    instruction = warp.block.cluster.grid.program.instructions[place]
    return f"line {instruction.line} ({instruction.text})"


def _name(event: Event) -> str:
    return f"{event.warp} at {_line(event.warp, event.place)}"
