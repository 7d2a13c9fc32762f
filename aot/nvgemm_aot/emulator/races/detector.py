"""Finds accesses to memory that nothing orders, while a kernel runs.

The rules are those of causality order (PTX ISA, "Memory Consistency Model"), for whole warps:

- Accesses of two warps are ordered by barriers and by memory barriers' arrivals and waits.
- An asynchronous operation comes after what its warp knew when it issued it, and before what is
  behind a wait for its completion.
- Between generic accesses and its issue lies a proxy fence.

Of global memory, the workspace is watched, in which blocks exchange data. Any access to global
memory by a dependent launch comes after ``griddepcontrol.wait``.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from ..machine.fusion import running_instruction
from ..machine.ordering import Block, Clock, Offsets, Operation, Ordering, Region, Warp
from ..ptx.program import Program
from .race_findings import Access, Findings
from .segments import NOTHING, Knowledge, OperationState, WarpState
from .shadow import Cells, Content, Event, Histories, change_cells

_STATE = "races"

_EARLIER_LAUNCHES = 0
"""Number that no segment has; it stands for the launches on which this one depends."""

_WORD = 4
"""Bytes of a cell of the workspace's shadow."""

_LANE_GRANULE = 16
"""Lanes of tensor memory in a cell of its shadow; every access covers whole ones."""

_TENSOR_SHAPE = (128 // _LANE_GRANULE, 512)

_SMALL_TYPES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}


def _granule_bytes(program: Program) -> int:
    """Returns the size of the smallest access to shared memory, at most 4 bytes."""
    return min(
        (
            _SMALL_TYPES.get(qualifier, 4)
            for instruction in program.instructions
            if instruction.opcode in ("ld", "st", "atom", "red")
            and not {"global", "param", "const"}.intersection(instruction.qualifiers)
            for qualifier in instruction.qualifiers
        ),
        default=4,
    )


class RaceDetector(Ordering):
    """Watches one launch."""

    def __init__(self) -> None:
        self._histories = Histories()
        self._segments = 0
        self._granule = 0
        self._shared: weakref.WeakKeyDictionary[Block, Cells] = weakref.WeakKeyDictionary()
        self._tensor: weakref.WeakKeyDictionary[Block, Cells] = weakref.WeakKeyDictionary()
        self._operations: weakref.WeakKeyDictionary[Block, dict[int, OperationState]] = (
            weakref.WeakKeyDictionary()
        )
        self._workspaces: dict[int, Cells] = {}
        self._visible: set[tuple[int, int, bool]] = set()
        self._findings = Findings()

    # Synchronisation.

    def release(self, warp: Warp) -> Clock:
        """Returns what happened before this point of a warp."""
        state = self._state(warp)
        self._close(state)
        return state.known

    def release_relaxed(self, warp: Warp) -> Clock:
        """Returns what a warp's last fence published."""
        return self._state(warp).published

    def acquire(self, warp: Warp, clock: Clock) -> None:
        """Adds a clock to what a warp knows."""
        if clock is not None:
            state = self._state(warp)
            if state.known is not clock:
                state.known |= clock

    def acquire_relaxed(self, warp: Warp, clock: Clock) -> None:
        """Keeps a clock until the warp's next fence."""
        if clock is not None:
            self._state(warp).pending |= clock

    def merge(self, first: Clock, second: Clock) -> Clock:
        """Returns what either clock holds."""
        if first is None:
            return second
        return first if second is None or first is second else first | second

    def fence(self, warp: Warp) -> None:
        """Publishes what a warp knows, and acquires what it observed."""
        state = self._state(warp)
        self._close(state)
        state.known |= state.pending
        state.pending = NOTHING
        state.published = state.known

    def fence_async(self, warp: Warp) -> None:
        """Makes what happened before visible to asynchronous operations."""
        state = self._state(warp)
        self._close(state)
        state.known = state.known._replace(asynchronous=state.known.generic)

    def fence_initialised_barriers(self, warp: Warp) -> None:
        """Makes memory barriers that were initialised before visible to everybody."""
        state = self._state(warp)
        self._close(state)
        state.known = state.known._replace(barriers=state.known.generic)
        state.published |= Knowledge(barriers=state.known.generic)

    def _state(self, warp: Warp) -> WarpState:
        state: WarpState | None = warp.memory.get(_STATE)
        if state is None:
            state = warp.memory[_STATE] = WarpState(warp, self._new_segment())
        return state

    def _new_segment(self) -> int:
        self._segments += 1
        return self._segments

    def _close(self, state: WarpState) -> None:
        """Lets a new segment begin, if the current one has accesses."""
        if state.touched:
            known = state.known
            state.known = known._replace(generic=known.generic | 1 << state.segment)
            state.segment = self._new_segment()
            state.touched = False

    # Asynchronous operations.

    def begin(self, warp: Warp) -> Operation:
        """Gives an operation what its warp knows."""
        state = self._state(warp)
        self._close(state)
        place = running_instruction(warp)
        instruction = warp.block.cluster.grid.program.instructions[place]
        opcode = ".".join((instruction.opcode, *instruction.qualifiers[:1]))
        return OperationState(
            warp,
            place,
            opcode,
            self._new_segment(),
            state.known,
            is_store="bulk_group" in instruction.qualifiers,
        )

    def finish(self, operation: Operation) -> Clock:
        """Returns what the operation knows, and itself."""
        itself = 1 << operation.segment
        return operation.known | Knowledge(generic=itself, asynchronous=itself)

    # Shared memory.

    def read(self, warp: Warp, block: Block, offsets: Offsets, size: int) -> None:
        """Checks that the data was written, and before."""
        self._read(self._of_warp(warp), block, *self._shared_cells(block, offsets, size))

    def write(self, warp: Warp, block: Block, offsets: Offsets, size: int) -> None:
        """Checks that whoever accessed these bytes did so before."""
        self._write(self._of_warp(warp), block, *self._shared_cells(block, offsets, size))

    def operation_read(
        self, operation: Operation, block: Block, offsets: Offsets, size: int
    ) -> None:
        """Checks that the data was written before, visibly for the operation."""
        if size:
            self._operations.setdefault(block, {})[operation.segment] = operation
            access = self._of_operation(operation)
            self._read(access, block, *self._shared_cells(block, offsets, size))

    def operation_write(
        self, operation: Operation, block: Block, offsets: Offsets, size: int
    ) -> None:
        """Checks that whoever accessed these bytes did so before, visibly for the operation."""
        if size:
            self._operations.setdefault(block, {})[operation.segment] = operation
            access = self._of_operation(operation)
            self._write(access, block, *self._shared_cells(block, offsets, size))

    def use_barrier(
        self, warp: Warp, block: Block, offset: int, *, asynchronous: bool = False
    ) -> None:
        """Checks that a memory barrier is initialised for a warp, or for its operation."""
        if (cells := self._shared.get(block)) is None:
            return
        content = int(cells[offset // self._granule])
        key = (id(warp), content, asynchronous)
        if key in self._visible:
            return
        event = self._histories.events[self._histories.contents[content].writer]
        if event is None:
            return
        known = self._state(warp).known
        seen = known.barriers | (known.asynchronous if asynchronous else known.generic)
        if seen >> event.segment & 1 or (event.warp is warp and not asynchronous):
            self._visible.add(key)
            return
        self._findings.report_barrier(
            warp, running_instruction(warp), block, offset, event, asynchronous=asynchronous
        )

    def leave(self, warp: Warp) -> None:
        """Checks that operations which use a block's shared memory end before it does."""
        state = self._state(warp)
        self._close(state)
        block = warp.block
        operations = self._operations.get(block, {})
        known = state.known.generic
        for operation in operations.values():
            if operation.warp is warp and operation.is_store and not known >> operation.segment & 1:
                self._findings.report_end(warp, operation)
        if not block.ended:
            return
        for each in block.warps:
            known |= self._state(each).known.generic
        for operation in operations.values():
            if not operation.is_store and not known >> operation.segment & 1:
                self._findings.report_end(warp, operation)

    def _shared_cells(self, block: Block, offsets: Offsets, size: int) -> tuple[Any, Any, str]:
        cells = self._shared.get(block)
        if cells is None:
            if not self._granule:
                self._granule = _granule_bytes(block.cluster.grid.program)
            cells = np.zeros(len(block.shared_cells) // self._granule, np.int32)
            self._shared[block] = cells
        granule = self._granule
        if len(offsets) == 1:
            first = int(offsets[0])
            index: Any = slice(first // granule, -(-(first + size) // granule))
            return cells, index, "shared"
        if size <= granule:
            return cells, offsets // granule, "shared"
        return cells.reshape(-1, size // granule), offsets // size, "shared"

    # Global memory.

    def depend(self, warp: Warp) -> None:
        """Orders earlier launches before what the warp does next."""
        self._state(warp).known |= Knowledge(generic=1 << _EARLIER_LAUNCHES)

    def use_global(self, warp: Warp) -> None:
        """Checks that launches on which this one depends have ended."""
        if not warp.block.cluster.grid.launch.is_dependent:
            return
        if not self._state(warp).known.generic >> _EARLIER_LAUNCHES & 1:
            self._findings.report_dependent(warp, running_instruction(warp))

    def global_read(self, warp: Warp, region: Region, offsets: Offsets, size: int) -> None:
        """Checks that whoever wrote these bytes did so before."""
        cells, words = self._workspace_cells(region, offsets, size)
        self._read(self._of_warp(warp), region, cells, words, "workspace")

    def global_write(self, warp: Warp, region: Region, offsets: Offsets, size: int) -> None:
        """Checks that whoever accessed these bytes did so before."""
        cells, words = self._workspace_cells(region, offsets, size)
        self._write(self._of_warp(warp), region, cells, words, "workspace")

    def _workspace_cells(self, region: Region, offsets: Offsets, size: int) -> tuple[Any, Any]:
        if (cells := self._workspaces.get(region.address)) is None:
            cells = np.zeros(-(-len(region.data) // _WORD), np.int32)
            self._workspaces[region.address] = cells
        return cells, offsets[:, None] // _WORD + np.arange(max(1, size // _WORD))

    # Tensor memory.

    def tensor_read(self, by: Operation, block: Block, lanes: slice, columns: slice) -> None:
        """Checks that the cells were written, and before."""
        self._read(self._of_operation(by), block, *self._tensor_cells(block, lanes, columns))

    def tensor_write(self, by: Operation, block: Block, lanes: slice, columns: slice) -> None:
        """Checks that whoever accessed these cells did so before."""
        self._write(self._of_operation(by), block, *self._tensor_cells(block, lanes, columns))

    def tensor_free(self, warp: Warp, block: Block, columns: slice) -> None:
        """Checks that whoever accessed these cells did so before; nobody has written them now."""
        cells, index, space = self._tensor_cells(block, slice(0, 128), columns)
        self._write(self._of_warp(warp), block, cells, index, space)
        cells[index] = 0

    def _tensor_cells(self, block: Block, lanes: slice, columns: slice) -> tuple[Any, Any, str]:
        if (cells := self._tensor.get(block)) is None:
            cells = self._tensor[block] = np.zeros(_TENSOR_SHAPE, np.int32)
        rows = slice(lanes.start // _LANE_GRANULE, -(-lanes.stop // _LANE_GRANULE))
        return cells, (rows, columns), "tensor"

    # Checks.

    def _of_warp(self, warp: Warp) -> Access:
        state = self._state(warp)
        state.touched = True
        place = running_instruction(warp)
        number = self._histories.event(state.segment, place, warp, None)
        return Access(number, place, warp, None, state.segment, state.known)

    def _of_operation(self, operation: OperationState) -> Access:
        number = self._histories.event(
            operation.segment, operation.place, operation.warp, operation
        )
        return Access(
            number,
            operation.place,
            operation.warp,
            operation,
            operation.segment,
            operation.known,
        )

    def _read(
        self, access: Access, block: Block | Region, cells: Any, index: Any, space: str
    ) -> None:
        histories = self._histories

        def change(number: int) -> int:
            content = histories.contents[number]
            writer = histories.events[content.writer]
            if writer is not None:
                self._check(access, writer, block, space, was_read=False, reads=True)
            elif space != "workspace":  # which the runtime has zeroed where a kernel needs that
                self._findings.report_unwritten(access, block, space)
            if access.event in content.readers:
                return number
            readers = [each for each in content.readers if not self._is_implied(each, access)]
            return histories.content(Content(content.writer, frozenset((*readers, access.event))))

        change_cells(cells, index, change)

    def _write(
        self, access: Access, block: Block | Region, cells: Any, index: Any, space: str
    ) -> None:
        histories = self._histories
        new = histories.content(Content(access.event, frozenset()))

        def change(number: int) -> int:
            content = histories.contents[number]
            for reader in content.readers:
                event = histories.events[reader]
                assert event is not None
                self._check(access, event, block, space, was_read=True, reads=False)
            writer = histories.events[content.writer]
            if writer is not None:
                self._check(access, writer, block, space, was_read=False, reads=False)
            return new

        change_cells(cells, index, change)

    def _is_implied(self, reader: int, access: Access) -> bool:
        """Tells if who comes after an access also comes, visibly, after an earlier reader."""
        event = self._histories.events[reader]
        assert event is not None
        earlier, later = event.operation, access.operation
        if (
            earlier is not None
            and later is not None
            and earlier.place == later.place
            and earlier.known is later.known
        ):
            return True  # one warp issued both, and waits for both or for none
        same_proxy = earlier is not None or later is None
        return same_proxy and self._is_before(event, access)

    def _is_before(self, event: Event, access: Access) -> bool:
        """Tells if an event happened before an access."""
        if event.segment == access.segment or access.known.generic >> event.segment & 1:
            return True
        earlier, later = event.operation, access.operation
        return (
            earlier is not None
            and later is not None
            and earlier.is_pipelined
            and later.is_pipelined
            and earlier.warp is later.warp
        )

    def _check(
        self, access: Access, event: Event, block: Block, space: str, *, was_read: bool, reads: bool
    ) -> None:
        if not self._is_before(event, access):
            if _is_strong(access.warp, access.place) and _is_strong(event.warp, event.place):
                return
            self._findings.report_unordered(
                access, event, block, space, was_read=was_read, reads=reads
            )
        elif (
            space == "shared"
            and access.operation is not None
            and event.operation is None
            and not access.known.asynchronous >> event.segment & 1
        ):
            self._findings.report_invisible(access, event, block, was_read=was_read, reads=reads)


_STRONG = {"relaxed", "acquire", "release", "volatile", "mmio"}


def _is_strong(warp: Warp, place: int) -> bool:
    """Tells if an instruction is one of those of which any two are never a race.

    PTX ISA, "Morally strong operations".
    """
    instruction = warp.block.cluster.grid.program.instructions[place]
    return instruction.opcode in ("atom", "red") or (
        instruction.opcode in ("ld", "st") and not _STRONG.isdisjoint(instruction.qualifiers)
    )
