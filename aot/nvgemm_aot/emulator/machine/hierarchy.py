"""A grid while it runs: clusters of blocks of warps, with their memories and barriers."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..emulation_errors import EmulationError, MemoryAccessError
from ..ptx.program import Program
from .addresses import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, SHARED_WINDOW, WINDOW_SHIFT
from .global_memory import GlobalMemory
from .lanes import FULL, LANES, Mask, register_dtype
from .launch import Extent, Launch, Schedule
from .memory_barrier import MemoryBarrier
from .named_barriers import NamedBarriers
from .ordering import Clock, Ordering
from .tensor_memory import TensorMemory

_BARRIER_MARK = 0x6D62_6172_7269_0000
"""Opaque content of a live memory barrier, to which its offset is added."""


class Warp:
    """A warp.

    Attributes:
        registers: One array of 32 lanes for each register; of ``b128``, 32 pairs.
        stack: ``[next instruction, lanes, where they come together]``, outermost first; the last
            entry runs.
        waiting: Condition that it waits for, as messages print it, or None.
        parked: True while it waits until somebody clears this.
        suspended: True while it waits so, or until no other warp can go on.
        memory: Values that extensions keep for a warp, by their names.
    """

    __slots__ = (
        "block",
        "done",
        "index",
        "memory",
        "parked",
        "registers",
        "stack",
        "suspended",
        "waiting",
    )

    def __init__(self, block: Block, index: int, program: Program, lanes: Mask) -> None:
        self.block = block
        self.index = index
        self.registers: list[Any] = block.cluster.grid.empty_registers.copy()
        self.stack: list[list[Any]] = [[0, lanes, len(program.instructions)]]
        self.done = False
        self.parked = False
        self.suspended = False
        self.waiting: object = None
        self.memory: dict[str, Any] = {}

    def put(self, register: int, value: Any, mask: Mask) -> None:
        """Sets the lanes of a register."""
        if mask is FULL:
            self.registers[register] = value
        else:
            old = self.registers[register]
            self.registers[register] = np.where(
                mask if old.ndim == 1 else mask[:, None], value, old
            )

    def __str__(self) -> str:
        return f"block {self.block.index} warp {self.index}"


class Block:
    """A thread block.

    Attributes:
        index: Its place in the grid, ``place`` in its cluster, along x, y, z.
        rank: Its number in the cluster.
        shared: Bytes of its shared memory, static variables first.
        shared_cells: The same bytes and padding, which makes them whole units of any access.
        barriers: Memory barriers by their offsets in it.
    """

    def __init__(
        self, cluster: Cluster, program: Program, index: Extent, place: Extent, rank: int
    ) -> None:
        launch = cluster.grid.launch
        self.cluster = cluster
        self.index = index
        self.place = place
        self.rank = rank
        dynamic = max(program.shared_symbols.values(), default=program.static_shared_bytes)
        size = dynamic + launch.shared_bytes
        unwritten = cluster.grid.schedule.unwritten
        self.shared_cells = np.full(-(-size // 128) * 128, unwritten, np.uint8)
        self.shared = self.shared_cells[:size]
        self.barriers: dict[int, MemoryBarrier] = {}
        self.named = NamedBarriers()
        self.tensor = TensorMemory(unwritten)
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.warps = [
            Warp(self, number, program, _lanes(self.threads - number * LANES))
            for number in range(-(-self.threads // LANES))
        ]

    @property
    def shared_base(self) -> int:
        """Address of its shared memory in the shared window."""
        return SHARED_BASE | self.rank << RANK_SHIFT

    def locate(self, address: int) -> tuple[Block, int]:
        """Returns the block that an address of the shared window names, and the byte offset there.

        Raises:
            MemoryAccessError: If the cluster has no such block.
        """
        rank = address >> RANK_SHIFT
        if rank >= len(self.cluster.blocks):
            raise MemoryAccessError(
                f"shared address {address:#x} is of block {rank} of a cluster of "
                f"{len(self.cluster.blocks)}"
            )
        return self.cluster.blocks[rank], (address & OFFSET_MASK) - SHARED_BASE

    def barrier(self, address: int) -> MemoryBarrier:
        """Returns the memory barrier at an address of the shared window.

        Raises:
            EmulationError: If none was initialised there.
        """
        block, offset = self.locate(address)
        return block.barrier_at(offset)

    def barrier_at(self, offset: int) -> MemoryBarrier:
        """Returns the memory barrier at a byte offset of shared memory."""
        if offset not in self.barriers:
            raise EmulationError(
                f"uses a memory barrier at offset {offset} of the shared memory of block "
                f"{self.index}, where none was initialised"
            )
        if self.shared[offset : offset + 8].tobytes() != _barrier_bytes(offset):
            raise EmulationError(
                f"uses the memory barrier at offset {offset} of the shared memory of block "
                f"{self.index}, which ordinary data has overwritten; mbarrier.inval frees its bytes"
            )
        return self.barriers[offset]

    def initialise_barrier(self, offset: int, count: int) -> None:
        """Makes a memory barrier in 8 bytes of shared memory.

        Raises:
            EmulationError: If the place is not aligned, or holds a barrier already.
            MemoryAccessError: If it lies outside shared memory.
        """
        self.check_shared(offset, 8, "initialises a memory barrier at")
        if offset % 8:
            raise EmulationError(
                f"initialises a memory barrier at offset {offset}, must be a multiple of 8"
            )
        if offset in self.barriers:
            raise EmulationError(
                f"initialises the memory barrier at offset {offset} again; mbarrier.inval must "
                "come first"
            )
        self.barriers[offset] = MemoryBarrier(count)
        self.shared[offset : offset + 8] = np.frombuffer(_barrier_bytes(offset), np.uint8)

    def check_shared(self, offset: int, size: int, verb: str) -> None:
        """Checks that bytes lie in its shared memory.

        Raises:
            MemoryAccessError: If they do not.
        """
        if not 0 <= offset <= len(self.shared) - size:
            raise MemoryAccessError(
                f"{verb} offsets {offset} to {offset + size - 1} of the shared memory of block "
                f"{self.index}, which has {len(self.shared)} bytes"
            )

    @property
    def ended(self) -> bool:
        """True once all its warps have ended."""
        return all(warp.done for warp in self.warps)


def _barrier_bytes(offset: int) -> bytes:
    """Returns the bytes of a live barrier, by which data written over it is found."""
    return (_BARRIER_MARK + offset).to_bytes(8, "little")


class Cluster:
    """Blocks that run together; ``index`` is the first one's place in the grid.

    Attributes:
        warps: Warps of all blocks.
    """

    def __init__(self, grid: Grid, program: Program, index: Extent) -> None:
        self.grid = grid
        self.blocks: list[Block] = []
        x, y, z = grid.launch.cluster
        for rank, place in enumerate(itertools.product(range(z), range(y), range(x))):
            within = (place[2], place[1], place[0])
            at = (index[0] + within[0], index[1] + within[1], index[2] + within[2])
            self.blocks.append(Block(self, program, at, within, rank))
        self.warps = [warp for block in self.blocks for warp in block.warps]
        self._phase = 0
        self._arrived: set[int] = set()
        self._clock: Clock = None
        self._passed: dict[int, Clock] = {}

    def arrive(self, warp: Warp, clock: Clock) -> None:
        """Counts a warp's arrival at the cluster's barrier; the last one opens it.

        Raises:
            EmulationError: If the warp has arrived already, and the barrier has not opened since.
        """
        if id(warp) in self._arrived:
            raise EmulationError(
                "arrives at the cluster's barrier again before it opened; wait for it first"
            )
        warp.memory["cluster phase"] = self._phase
        self._arrived.add(id(warp))
        self._clock = self.grid.ordering.merge(self._clock, clock)
        self._open_barrier()
        self.grid.progress += 1

    def _open_barrier(self) -> None:
        """Opens the barrier if all warps have arrived that have not ended."""
        if self._arrived >= {id(each) for each in self.warps if not each.done}:
            self._passed[self._phase] = self._clock
            self._phase += 1
            self._arrived, self._clock = set(), None

    def passed(self, warp: Warp) -> bool:
        """Returns whether the barrier opened at which the warp arrived last; then acquires it.

        Raises:
            EmulationError: If it has not arrived.
        """
        phase = warp.memory.get("cluster phase")
        if phase is None:
            raise EmulationError("waits at the cluster's barrier, where it has not arrived")
        if phase >= self._phase:
            return False
        self.grid.ordering.acquire(warp, self._passed[phase])
        return True

    def leave(self, warp: Warp) -> None:
        """Opens barriers that waited for nobody but a warp which has ended (PTX ISA, "exit")."""
        if self._arrived:
            self._open_barrier()
        warp.block.named.leave(self.grid.ordering)


class Grid:
    """One launch while it runs.

    Attributes:
        parameter_cells: Bytes of the parameter space and padding.
        parameters_read: Values that loads from constant addresses of it returned, by instruction.
        empty_registers: Registers of a warp that has not begun.
        progress: Counts what other warps may wait for; a round without any is idle.
        findings: Mistakes that did not stop the kernel.
        reads_unwritten: True once a finding is a read of memory that nobody has written.
        todo: Clusters that have not begun, along z, y, x.
        late: Effects that have not happened yet, by their queues.
    """

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        schedule: Schedule,
        ordering: Ordering,
    ) -> None:
        if any(size % part for size, part in zip(launch.grid, launch.cluster)):
            raise EmulationError(f"grid {launch.grid} is not whole clusters of {launch.cluster}")
        if program.required_block not in (None, launch.block):
            raise EmulationError(
                f"blocks have {launch.block} threads, must have {program.required_block}"
            )
        if len(launch.parameters) < program.parameter_bytes:
            raise EmulationError(
                f"parameters have {len(launch.parameters)} bytes, must have "
                f"{program.parameter_bytes}"
            )
        self.program = program
        self.launch = launch
        self.parameter_cells = np.frombuffer(
            launch.parameters[: program.parameter_bytes].ljust(
                -(-(program.parameter_bytes + 1) // 128) * 128, b"\0"
            ),
            np.uint8,
        )
        self.parameters_read: dict[object, Any] = {}
        self.empty_registers = list(map(_empty_register, program.registers))
        self.memory = memory
        self.ordering = ordering
        self.progress = 0
        self.findings: list[str] = []
        self.reads_unwritten = False
        self.schedule = schedule
        self.random = random.Random(schedule.seed)
        x, y, z = (size // part for size, part in zip(launch.grid, launch.cluster))
        self.todo = collections.deque(itertools.product(range(z), range(y), range(x)))
        self._released: dict[tuple[int, Cluster | None], Clock] = {}
        self.late: dict[Hashable, collections.deque[Callable[[], None]]] = {}

    def take_cluster(self) -> Extent | None:
        """Returns the first block of a cluster that has not begun, which now never will."""
        if not self.todo:
            return None
        z, y, x = self.todo.popleft()
        cluster = self.launch.cluster
        return x * cluster[0], y * cluster[1], z * cluster[2]

    def release_at(self, warp: Warp, addresses: Any, *, relaxed: bool = False) -> None:
        """Keeps, for who acquires from these addresses, what happened before in a warp.

        With ``relaxed``, what its last fence published.
        """
        clock = self.ordering.release_relaxed(warp) if relaxed else self.ordering.release(warp)
        if clock is not None:
            for place in _places(warp, addresses):
                self._released[place] = self.ordering.merge(self._released.get(place), clock)

    def acquire_from(self, warp: Warp, addresses: Any, *, relaxed: bool = False) -> None:
        """Makes a warp acquire what was released at these addresses; ``relaxed``, at a fence."""
        acquire = self.ordering.acquire_relaxed if relaxed else self.ordering.acquire
        if self._released:
            for place in self._released.keys() & _places(warp, addresses):
                acquire(warp, self._released[place])

    def later(self, queue: Hashable, action: Callable[[], None]) -> None:
        """Does something at a random time, after whatever was given to the queue before."""
        if not self.schedule.delay:
            action()
            self.progress += 1
        else:
            self.late.setdefault(queue, collections.deque()).append(action)


def _lanes(count: int) -> Mask:
    return FULL if count >= LANES else np.arange(LANES) < count


@functools.cache
def _empty_register(kind: str) -> Any:
    """Returns zeros, which warps share: instructions replace a register, and never change it."""
    shape, dtype = ((LANES, 2), np.uint64) if kind == "b128" else (LANES, register_dtype(kind))
    zeros = np.zeros(shape, dtype)
    zeros.flags.writeable = False
    return zeros


def _places(warp: Warp, addresses: Any) -> set[tuple[int, Cluster | None]]:
    """Returns addresses, those of shared memory (32 bits, or generic) with their cluster."""

    def is_shared(address: int) -> bool:
        return address < 1 << 32 or address >> WINDOW_SHIFT == SHARED_WINDOW >> WINDOW_SHIFT

    cluster = warp.block.cluster
    return {(each, cluster if is_shared(each) else None) for each in addresses.tolist()}
