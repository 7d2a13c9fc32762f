"""Runs a launch: clusters in turns, warps in turns, and effects that come late."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..emulation_errors import DeadlockError, EmulationError
from ..ptx.program import Instruction, Program
from .fusion import Run, failing_instruction, joined
from .hierarchy import Block, Cluster, Grid, Warp
from .lanes import ALL_BYTES, FULL, NO_BYTES, Mask
from .meanings import PARK as PARK
from .meanings import RETRY as RETRY
from .meanings import YIELD as YIELD
from .meanings import Branch as Branch
from .meanings import Meanings
from .meanings import Step as Step

_IDLE_ROUNDS = 100
"""Rounds in which all warps wait, before a kernel counts as deadlocked."""

_FRUITLESS_ROUNDS = 5000
"""Rounds in which warps run and change nothing that others see, before it counts as deadlocked."""


_SUSPENDED_ROUNDS = 50
"""Rounds in which other warps run and change nothing, before suspended warps go on."""


@dataclass(kw_only=True)
class Execution:
    """Outcome of a launch.

    Attributes:
        program: The program that ran.
        counts: Times that warps ran each instruction of the program.
        findings: Mistakes that did not stop the kernel.
        reads_unwritten: True if one is a read of memory that nobody has written.
    """

    program: Program
    counts: list[int]
    findings: list[str] = field(default_factory=list)
    reads_unwritten: bool = False

    @property
    def warp_instructions(self) -> int:
        """Instructions that warps ran."""
        return sum(self.counts)

    @property
    def covered(self) -> float:
        """Share of the program's instructions that ran, from 0 to 1."""
        return sum(map(bool, self.counts)) / len(self.counts)

    def ran(self) -> dict[int, int]:
        """Returns how often the instructions of each line of the PTX ran, if they did."""
        lines: collections.Counter[int] = collections.Counter()
        for instruction, count in zip(self.program.instructions, self.counts):
            if count:
                lines[instruction.line] += count
        return dict(lines)

    def never_ran(self) -> tuple[Instruction, ...]:
        """Returns the instructions that no warp reached."""
        return tuple(
            instruction
            for instruction, count in zip(self.program.instructions, self.counts)
            if not count
        )


class Plan:
    """A decoded program, and those parts of it that were joined to functions so far."""

    def __init__(self, program: Program, meanings: Meanings) -> None:
        self.meanings = meanings
        self.runs: list[Run | None] = [None] * len(meanings)
        self._stops = frozenset(program.reconvergence) | frozenset(
            meaning.target
            for meaning, _, _ in meanings
            if isinstance(meaning, Branch) and meaning.target is not None
        )

    def run_at(self, place: int) -> Run:
        """Returns the run that begins at an instruction, which is no branch."""
        run = self.runs[place] = joined(self.meanings, place, self._stops)
        return run


class Scheduler:
    """Runs one grid."""

    def __init__(self, grid: Grid, plan: Plan) -> None:
        self.grid = grid
        self._plan = plan
        self._branches = [isinstance(meaning, Branch) for meaning, _, _ in plan.meanings]
        self._counts = [0] * len(plan.meanings)
        self._live: list[Cluster] = []
        self._ran = 0
        self._computed = False
        self._unfinished: set[int] = set()

    def run(self) -> Execution:
        """Runs until all blocks have ended.

        Raises:
            EmulationError: If the kernel does something that it must not do.
        """
        with np.errstate(all="ignore"):
            self._run_rounds()
            while self.grid.late:
                self._do_late()
        return Execution(
            program=self.grid.program,
            counts=self._spread_counts(),
            findings=self.grid.findings,
            reads_unwritten=self.grid.reads_unwritten,
        )

    def _run_rounds(self) -> None:
        grid = self.grid
        idle, fruitless, last = 0, 0, -1
        while grid.todo or self._live:
            while grid.todo and len(self._live) < grid.schedule.resident:
                first = grid.take_cluster()
                assert first is not None
                self._live.append(Cluster(grid, grid.program, first))
                grid.progress += 1
            self._do_late()
            warps = [
                warp
                for cluster in self._live
                for warp in cluster.warps
                if not (warp.parked or warp.suspended or warp.done)
            ]
            if grid.schedule.delay:
                grid.random.shuffle(warps)
            self._computed = False
            for warp in warps:
                self._run_warp(warp)
            for cluster in [each for each in self._live if all(w.done for w in each.warps)]:
                self._end(cluster)
            if grid.progress != last or grid.late:
                idle = fruitless = 0
            else:
                idle = 0 if self._computed else idle + 1
                fruitless += 1
            last = grid.progress
            if idle > _IDLE_ROUNDS or fruitless > _FRUITLESS_ROUNDS:
                raise DeadlockError(self._deadlock())
            if self._ran > grid.schedule.limit:
                raise DeadlockError(
                    f"the kernel has not ended after {self._ran} instructions, must take at most "
                    f"{grid.schedule.limit}; {self._deadlock()}"
                )
            if idle or (fruitless and fruitless % _SUSPENDED_ROUNDS == 0):
                self._resume()

    def _spread_counts(self) -> list[int]:
        """Returns how often each instruction ran, from how often each run began."""
        counts = [0] * len(self._counts)
        for place, count in enumerate(self._counts):
            run = self._plan.runs[place]
            for each in range(place, place + 1 if run is None else run.end):
                counts[each] += count
        return counts

    def _do_late(self) -> None:
        for queue in list(self.grid.late):
            actions = self.grid.late[queue]
            while actions and self.grid.random.random() * self.grid.schedule.delay < 1:
                actions.popleft()()
                self.grid.progress += 1
            if not actions:
                del self.grid.late[queue]

    def _resume(self) -> None:
        """Ends the waits of suspended warps in vain, as if their time limits had passed."""
        for cluster in self._live:
            for warp in cluster.warps:
                if warp.suspended:
                    warp.suspended = False
                    warp.waiting = None

    def _end(self, cluster: Cluster) -> None:
        self._live.remove(cluster)
        self.grid.progress += 1
        for block in cluster.blocks:
            if block.tensor.allocated:
                raise EmulationError(
                    f"block {block.index} ends without freeing its tensor memory, "
                    f"{block.tensor.describe()}; tcgen05.dealloc must come before"
                )
            self._check_phases(block)

    def _check_phases(self, block: Block) -> None:
        """Reports a barrier that is left within a phase: its count is not that of its arrivals."""
        for offset, barrier in block.barriers.items():
            if not barrier.is_between_phases and offset not in self._unfinished:
                self._unfinished.add(offset)
                self.grid.findings.append(
                    f"block {block.index} ends within phase {barrier.phase} of the memory barrier "
                    f"at offset {offset}: {barrier.expected - barrier.pending} of "
                    f"{barrier.expected} arrivals have come, {barrier.bytes_text}; missing: "
                    "an arrival or a copy, or the barrier's count is wrong"
                )

    def _deadlock(self) -> str:
        waits = (
            f"{warp} {f'waits for {warp.waiting}' if warp.waiting else 'is'} at "
            f"{self._line(warp.stack[-1][0] - warp.parked)}"
            for cluster in self._live
            for warp in cluster.warps
            if not warp.done
        )
        return "no warp can go on: " + "; ".join(waits)

    def _line(self, place: int) -> str:
        if place >= len(self.grid.program.instructions):
            return "the end"
        instruction = self.grid.program.instructions[place]
        return f"line {instruction.line} ({instruction.text})"

    def _run_warp(self, warp: Warp) -> None:
        try:
            self._run_lanes(warp)
        except EmulationError as error:
            place = warp.stack[-1][0]
            if (run := self._plan.runs[place]) is not None:
                place = failing_instruction(error, run)
            raise type(error)(f"{warp} at {self._line(place)}: {error}") from error

    def _run_lanes(self, warp: Warp) -> None:
        plan, counts, branches = self._plan, self._counts, self._branches
        runs, stack, registers = plan.runs, warp.stack, warp.registers
        end, left = len(runs), self.grid.schedule.quantum
        while left > 0:
            current = stack[-1]
            place = current[0]
            while place == current[2] and len(stack) > 1:
                stack.pop()
                current = stack[-1]
                place = current[0]
            if place == end:
                self._ran += self.grid.schedule.quantum - left
                self._finish(warp)
                return
            counts[place] += 1
            if branches[place]:
                left -= 1
                if self._branch(warp, current, place):
                    self._ran += self.grid.schedule.quantum - left
                    return
                continue
            run = runs[place] or plan.run_at(place)
            mask = current[1]
            left -= run.end - place
            if mask is FULL:
                signal = run.all_lanes(warp, FULL, FULL, registers)
            else:
                signal = run.some_lanes(warp, mask, FULL, registers)
            if signal is None:
                current[0] = run.end
                continue
            current[0] = run.end - 1 if signal is RETRY else run.end
            self._ran += self.grid.schedule.quantum - left
            if signal is not PARK and len(stack) > 1 and _let_siblings_go_on(stack):
                warp.suspended = False
            return
        self._computed = True
        self._ran += self.grid.schedule.quantum - left

    def _branch(self, warp: Warp, current: list[Any], place: int) -> bool:
        """Runs a branch; returns whether the warp has ended."""
        branch, predicate, negated = self._plan.meanings[place]
        assert isinstance(branch, Branch)
        mask = current[1]
        if predicate is None:
            active = mask
        else:
            value = warp.registers[predicate]
            active = ~value if negated else value
            if mask is not FULL:
                active = mask & active
            key = active.tobytes()
            if key == NO_BYTES:
                current[0] = place + 1
                return False
            if key == (ALL_BYTES if mask is FULL else mask.tobytes()):
                active = mask
        if branch.target is None:
            return self._exit(warp, active)
        if active is mask:
            current[0] = branch.target
        else:
            together = self.grid.program.reconvergence[place]
            current[0] = together
            for begin, lanes in ((place + 1, mask & ~active), (branch.target, active)):
                if begin != together:
                    warp.stack.append([begin, lanes, together])
        return False

    def _exit(self, warp: Warp, lanes: Mask) -> bool:
        """Ends lanes; returns whether the warp has none left."""
        current = warp.stack[-1]
        for entry in warp.stack:
            entry[1] = entry[1] & ~lanes
        warp.stack[:] = [entry for entry in warp.stack if entry[1].any()]
        if not warp.stack:
            self._finish(warp)
            return True
        if warp.stack[-1] is current:
            current[0] += 1
        return False

    def _finish(self, warp: Warp) -> None:
        warp.done = True
        warp.waiting = None
        self.grid.progress += 1
        self.grid.ordering.leave(warp)
        warp.block.cluster.leave(warp)


def _let_siblings_go_on(stack: list[list[Any]]) -> bool:
    """Lets lanes that took the other side of a branch run, while these wait, if there are any.

    Lanes of a warp may wait for each other (CUDA C++ Programming Guide, "Independent Thread
    Scheduling").
    """
    here, other = stack[-1], stack[-2]
    if other[2] == here[2] and other[0] != other[2]:
        stack[-2:] = [here, other]
        return True
    return False
