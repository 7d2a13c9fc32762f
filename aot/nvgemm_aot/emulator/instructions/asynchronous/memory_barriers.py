"""Memory barriers (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").

A state that an arrival returns holds the phase and the arrivals that were pending before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Block, Warp
from ...machine.lanes import FULL, LANES, Mask
from ...machine.meanings import Value
from ...machine.memory_barrier import TRANSACTION_LIMIT, MemoryBarrier
from ...machine.ordering import Clock
from ...machine.scheduler import RETRY, YIELD, Step
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Operand
from ..decoders import Qualifiers, decodes
from ..shared_addresses import (
    active_lanes,
    agree,
    locate,
    locate_own,
    shared_address,
)
from ..values import destination, read
from .late_effects import later
from .thread_copies import copy_queue

COUNT_LIMIT = (1 << 20) - 1
"""Arrivals that a barrier may expect (PTX ISA, "Size and alignment of mbarrier object")."""

_NO_LANES, _ALL_LANES = np.zeros(LANES, bool), np.ones(LANES, bool)
_PENDING_BITS = 20


class _Wait(NamedTuple):
    """A phase that an instruction waits for, as a deadlock's message prints it."""

    barrier: MemoryBarrier
    block: Block
    offset: int
    phase: int
    line: int

    def __str__(self) -> str:
        barrier = self.barrier
        missing = f"{'are missing, ' if barrier.bytes < 0 else ''}and {barrier.bytes_text}"
        return (
            f"the memory barrier at offset {self.offset} of block {self.block.index} to end a "
            f"phase of parity {self.phase & 1}; it is in phase {barrier.phase}, where "
            f"{barrier.pending} of {barrier.expected} arrivals {missing}"
        )


@decodes("mbarrier")
def _mbarrier(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    return _DECODERS[qualifiers.one_of(*_DECODERS)](qualifiers, instruction, program)


def _operands(instruction: Instruction, *counts: int) -> tuple[Operand, ...]:
    if len(instruction.operands) not in counts:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    return instruction.operands


def _own_space(qualifiers: Qualifiers) -> bool:
    """Reads the state space of the own block; returns whether the address is generic."""
    return qualifiers.option("shared", "shared::cta") is None


def _semantics(qualifiers: Qualifiers, *names: str) -> bool:
    """Reads ``.sem.scope``; returns whether it is relaxed."""
    found = qualifiers.option(*names)
    if found is not None:
        qualifiers.one_of("cta", "cluster")
    return found == "relaxed"


def _bounded(value: int, least: int, most: int, what: str) -> int:
    if not least <= value <= most:
        raise EmulationError(f"{what} is {value}, must be {least} to {most}")
    return value


def _init(qualifiers: Qualifiers, instruction: Instruction, program: Program) -> Step:
    generic = _own_space(qualifiers)
    qualifiers.one_of("b64")
    qualifiers.end()
    where, number = _operands(instruction, 2)
    place = shared_address(where, instruction, program, generic=generic)
    count = read(number, "u32", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            block, offset = locate_own(warp, place(warp, lane))
            expected = _bounded(int(count(warp)[lane]), 1, COUNT_LIMIT, "a barrier's count")
            block.initialise_barrier(offset, expected)
            warp.block.cluster.grid.ordering.write(warp, block, np.array([offset]), 8)

    return step


def _inval(qualifiers: Qualifiers, instruction: Instruction, program: Program) -> Step:
    generic = _own_space(qualifiers)
    qualifiers.one_of("b64")
    qualifiers.end()
    (where,) = _operands(instruction, 1)
    place = shared_address(where, instruction, program, generic=generic)

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            block, offset = locate_own(warp, place(warp, lane))
            block.barrier_at(offset)
            warp.block.cluster.grid.ordering.use_barrier(warp, block, offset)
            del block.barriers[offset]

    return step


def _arrive(
    qualifiers: Qualifiers, instruction: Instruction, program: Program, *, drop: bool = False
) -> Step:
    expects = qualifiers.flag("expect_tx")
    completes = not qualifiers.flag("noComplete")
    relaxed = _semantics(qualifiers, "release", "relaxed")
    space = qualifiers.option("shared", "shared::cta", "shared::cluster")
    qualifiers.one_of("b64")
    qualifiers.end()
    result, where, *rest = _operands(instruction, 2, 3)
    if (expects or not completes) and not rest:
        raise instruction.unknown("a missing count")
    to = destination(result, instruction)
    if space == "shared::cluster" and to is not None:
        raise instruction.unknown("a state of a barrier in .shared::cluster")
    place = shared_address(where, instruction, program, generic=space is None)
    located = locate_own if space in ("shared", "shared::cta") else locate
    number = read(rest[0], "u32", instruction, program) if rest else None

    def same(warp: Warp, mask: Mask) -> bool:
        return agree(place.lanes(warp), mask) and (number is None or agree(number(warp), mask))

    def step(warp: Warp, mask: Mask) -> None:
        grid = warp.block.cluster.grid
        ordering = grid.ordering
        clock = ordering.release_relaxed(warp) if relaxed else ordering.release(warp)
        states = np.zeros(LANES, np.uint64) if to is not None else None
        lanes, times = active_lanes(mask), 1
        if not expects and to is None and len(lanes) > 1 and same(warp, mask):
            block, offset = located(warp, place(warp, lanes[0]))
            value = 1 if number is None else int(number(warp)[lanes[0]])
            if value * len(lanes) <= block.barrier_at(offset).pending:
                # Arrivals of one phase count as one.
                lanes, times = lanes[:1], len(lanes)
        for lane in lanes:
            block, offset = located(warp, place(warp, lane))
            barrier = block.barrier_at(offset)
            ordering.use_barrier(warp, block, offset)
            value = 1 if number is None else int(number(warp)[lane])
            if states is not None:
                states[lane] = barrier.phase << _PENDING_BITS | barrier.pending
            if expects:
                _bounded(value, 0, TRANSACTION_LIMIT, "the number of bytes to expect")
                ended = barrier.arrive(grid.ordering, clock, expect=value, drop=drop)
            else:
                _bounded(value, 1, COUNT_LIMIT, "the count of arrivals")
                ended = barrier.arrive(grid.ordering, clock, count=value * times, drop=drop)
            if ended and not completes:
                raise EmulationError(
                    f"an arrival with .noComplete ends a phase of the barrier at offset {offset}"
                )
            grid.progress += ended
        if to is not None:
            warp.put(to, states, mask)

    return step


def _arrive_drop(qualifiers: Qualifiers, instruction: Instruction, program: Program) -> Step:
    return _arrive(qualifiers, instruction, program, drop=True)


def _transaction(
    qualifiers: Qualifiers, instruction: Instruction, program: Program
) -> tuple[Callable[[Warp, int], tuple[Block, int]], Value]:
    """Returns the reader of a lane's barrier: its block and offset there; and that of the bytes."""
    _semantics(qualifiers, "relaxed")
    space = qualifiers.option("shared", "shared::cta", "shared::cluster")
    qualifiers.one_of("b64")
    qualifiers.end()
    where, number = _operands(instruction, 2)
    place = shared_address(where, instruction, program, generic=space is None)
    located = locate_own if space in ("shared", "shared::cta") else locate
    return (
        lambda warp, lane: located(warp, place(warp, lane)),
        read(number, "u32", instruction, program),
    )


def _expect_tx(qualifiers: Qualifiers, instruction: Instruction, program: Program) -> Step:
    place, size = _transaction(qualifiers, instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            block, offset = place(warp, lane)
            count = int(size(warp)[lane])
            _bounded(count, 0, TRANSACTION_LIMIT, "the number of bytes to expect")
            warp.block.cluster.grid.ordering.use_barrier(warp, block, offset)
            block.barrier_at(offset).expect(count)

    return step


def _complete_tx(qualifiers: Qualifiers, instruction: Instruction, program: Program) -> Step:
    place, size = _transaction(qualifiers, instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        grid = warp.block.cluster.grid
        for lane in active_lanes(mask):
            block, offset = place(warp, lane)
            count = int(size(warp)[lane])
            grid.ordering.use_barrier(warp, block, offset)
            grid.progress += block.barrier_at(offset).complete(grid.ordering, None, count)

    return step


def _wait(
    qualifiers: Qualifiers, instruction: Instruction, program: Program, *, suspends: bool
) -> Step:
    parity = qualifiers.flag("parity")
    relaxed = _semantics(qualifiers, "acquire", "relaxed")
    generic = _own_space(qualifiers)
    qualifiers.one_of("b64")
    qualifiers.end()
    result, where, awaited, *limit = _operands(instruction, *((3, 4) if suspends else (3,)))
    to = destination(result, instruction)
    if to is None:
        raise instruction.unknown("a result that is not kept")
    place = shared_address(where, instruction, program, generic=generic)
    phase = read(awaited, "u32" if parity else "u64", instruction, program)
    for each in limit:
        read(each, "u32", instruction, program)

    def phase_missing(warp: Warp, lane: int) -> _Wait | None:
        """Returns the phase that a lane still waits for; acquires it if it has ended."""
        block, offset = locate_own(warp, place(warp, lane))
        barrier = block.barrier_at(offset)
        ordering = warp.block.cluster.grid.ordering
        ordering.use_barrier(warp, block, offset)
        value = int(phase(warp)[lane])
        if parity:
            wanted = value & 1  # quack's pingpong kernels count on past 1, and are right on an H200
            passed = barrier.phase & 1 != wanted
        else:
            wanted = value >> _PENDING_BITS
            passed = barrier.phase > wanted
        if not passed:
            return _Wait(barrier, block, offset, wanted, instruction.line)
        if relaxed:
            ordering.acquire_relaxed(warp, barrier.passed)
        else:
            ordering.acquire(warp, barrier.passed)
        return None

    def step(warp: Warp, mask: Mask) -> str | None:
        before, warp.waiting = warp.waiting, None
        if agree(place.lanes(warp), mask) and agree(phase(warp), mask):
            missing = phase_missing(warp, 0 if mask is FULL else int(mask.argmax()))
            warp.waiting = missing
            if suspends and missing is not None and missing == before:
                # A loop asks again and again: the phase's end wakes it.
                missing.barrier.suspended.append(warp)
                warp.suspended = True
                return RETRY
            warp.put(to, _ALL_LANES if missing is None else _NO_LANES, mask)
            return None if missing is None else YIELD
        lanes = active_lanes(mask)
        passed = np.zeros(LANES, bool)
        for lane in lanes:
            missing = phase_missing(warp, lane)
            passed[lane] = missing is None
            warp.waiting = missing or warp.waiting
        warp.put(to, passed, mask)
        return None if passed[lanes].all() else YIELD

    return step


def _test_wait(qualifiers: Qualifiers, instruction: Instruction, program: Program) -> Step:
    return _wait(qualifiers, instruction, program, suspends=False)


def _try_wait(qualifiers: Qualifiers, instruction: Instruction, program: Program) -> Step:
    return _wait(qualifiers, instruction, program, suspends=True)


def _pending_count(qualifiers: Qualifiers, instruction: Instruction, program: Program) -> Step:
    qualifiers.one_of("b64")
    qualifiers.end()
    result, state = _operands(instruction, 2)
    to = destination(result, instruction)
    if to is None:
        raise instruction.unknown("a result that is not kept")
    value = read(state, "u64", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        pending = value(warp) & np.uint64((1 << _PENDING_BITS) - 1)
        warp.put(to, pending.astype(np.uint32), mask)

    return step


@decodes("cp.async.mbarrier.arrive")
def _arrive_behind_copies(instruction: Instruction, program: Program) -> Step:
    """Decodes the arrival that follows the ``cp.async`` copies which a thread made before."""
    qualifiers = Qualifiers(instruction)
    for name in ("async", "mbarrier", "arrive"):
        qualifiers.one_of(name)
    counted = qualifiers.flag("noinc")
    generic = _own_space(qualifiers)
    qualifiers.one_of("b64")
    qualifiers.end()
    (where,) = _operands(instruction, 1)
    place = shared_address(where, instruction, program, generic=generic)

    def step(warp: Warp, mask: Mask) -> None:
        grid = warp.block.cluster.grid
        clock = grid.ordering.release(warp)
        for lane in active_lanes(mask):
            block, offset = locate_own(warp, place(warp, lane))
            block.barrier_at(offset).pending += not counted
            grid.ordering.use_barrier(warp, block, offset)
            arrive = functools.partial(_arrive_later, block, offset, clock)
            later(warp, instruction, copy_queue(warp), arrive)

    return step


def _arrive_later(block: Block, offset: int, clock: Clock) -> None:
    grid = block.cluster.grid
    grid.progress += block.barrier_at(offset).arrive(grid.ordering, clock)


_DECODERS: dict[str, Callable[[Qualifiers, Instruction, Program], Step]] = {
    "init": _init,
    "inval": _inval,
    "arrive": _arrive,
    "arrive_drop": _arrive_drop,
    "expect_tx": _expect_tx,
    "complete_tx": _complete_tx,
    "test_wait": _test_wait,
    "try_wait": _try_wait,
    "pending_count": _pending_count,
}
