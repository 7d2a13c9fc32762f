"""Runs a launch: clusters in turns, warps in turns, and effects that come late."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import DeadlockError, EmulationError
from .hierarchy import Cluster, Grid, Warp
from .lanes import FULL, Mask

RETRY, YIELD, PARK = "retry", "yield", "park"
"""Signals: run the instruction again later; let others run; wait until woken."""

Step: TypeAlias = Callable[[Warp, Mask], "str | None"]
"""What an instruction does to a warp's lanes."""


@dataclass(frozen=True)
class Branch:
    """A jump, or, without a target, the lanes' end."""

    target: int | None


Steps: TypeAlias = Sequence["tuple[Step | Branch, int | None, bool]"]
"""For each instruction what it does, and its predicate: register and whether negated."""

_IDLE_ROUNDS = 100
"""Rounds in which nothing happens before a kernel counts as deadlocked."""


@dataclass(kw_only=True)
class Execution:
    """Outcome of a launch.

    Attributes:
        counts: How often a warp ran each instruction of the program.
        findings: What was wrong and did not stop the kernel.
    """

    counts: list[int]
    findings: list[str] = field(default_factory=list)

    @property
    def warp_instructions(self) -> int:
        """Instructions that warps ran."""
        return sum(self.counts)


class Scheduler:
    """Runs one grid."""

    def __init__(self, grid: Grid, steps: Steps) -> None:
        self.grid = grid
        self.execution = Execution(
            counts=[0] * len(grid.program.instructions), findings=grid.findings
        )
        self._steps = steps
        self._live: list[Cluster] = []
        self._ran = 0

    def run(self) -> Execution:
        """Runs until all blocks have ended.

        Raises:
            EmulationError: If the kernel does something that it must not do.
        """
        idle, last = 0, -1
        while self.grid.todo or self._live:
            while self.grid.todo and len(self._live) < self.grid.schedule.resident:
                first = self.grid.take_cluster()
                assert first is not None
                self._live.append(Cluster(self.grid, self.grid.program, first))
                self.grid.progress += 1
            self._do_late()
            warps = [warp for cluster in self._live for warp in cluster.warps if not warp.done]
            if self.grid.schedule.delay:
                self.grid.random.shuffle(warps)
            for warp in warps:
                if not warp.parked and not warp.done:
                    self._run_warp(warp)
            for cluster in [each for each in self._live if all(w.done for w in each.warps)]:
                self._end(cluster)
            idle = idle + 1 if self.grid.progress == last and not self.grid.late else 0
            last = self.grid.progress
            if idle > _IDLE_ROUNDS:
                raise DeadlockError(self._deadlock())
            if self._ran > self.grid.schedule.limit:
                raise DeadlockError(f"the kernel has not ended after {self._ran} instructions")
        while self.grid.late:
            self._do_late()
        return self.execution

    def _do_late(self) -> None:
        for queue in list(self.grid.late):
            actions = self.grid.late[queue]
            while actions and self.grid.random.randrange(self.grid.schedule.delay) == 0:
                actions.popleft()()
                self.grid.progress += 1
            if not actions:
                del self.grid.late[queue]

    def _end(self, cluster: Cluster) -> None:
        self._live.remove(cluster)
        self.grid.progress += 1
        for block in cluster.blocks:
            if block.tensor.allocated:
                raise EmulationError(
                    f"block {block.index} ends without freeing its tensor memory: columns "
                    f"{block.tensor.allocated}"
                )

    def _deadlock(self) -> str:
        waits = collections.Counter(
            f"{warp}: {warp.waiting or 'nothing'} at {self._place(warp)}"
            for cluster in self._live
            for warp in cluster.warps
            if not warp.done
        )
        return "no warp can go on; they wait for: " + "; ".join(waits)

    def _place(self, warp: Warp) -> str:
        where = warp.stack[-1][0] if warp.stack else len(self.grid.program.instructions)
        if where >= len(self.grid.program.instructions):
            return "the end"
        instruction = self.grid.program.instructions[where]
        return f"line {instruction.line} ({instruction.text})"

    def _run_warp(self, warp: Warp) -> None:
        try:
            self._run_steps(warp)
        except EmulationError as error:
            raise type(error)(f"{warp} at {self._place(warp)}: {error}") from error

    def _run_steps(self, warp: Warp) -> None:
        steps, counts, reconvergence = (
            self._steps,
            self.execution.counts,
            self.grid.program.reconvergence,
        )
        end, stack = len(steps), warp.stack
        for _ in range(self.grid.schedule.quantum):
            current = stack[-1]
            while current[0] == current[2] and len(stack) > 1:
                stack.pop()
                current = stack[-1]
            place, mask = current[0], current[1]
            if place == end:
                self._finish(warp)
                return
            self._ran += 1
            counts[place] += 1
            step, predicate, negated = steps[place]
            if predicate is not None:
                value = warp.registers[predicate]
                active = mask & ~value if negated else mask & value
                if not active.any():
                    current[0] = place + 1
                    continue
                if active.all():
                    active = FULL
            else:
                active = mask
            if type(step) is Branch:
                if step.target is None:
                    if self._exit(warp, active):
                        return
                elif active is mask or (active == mask).all():
                    current[0] = step.target
                else:
                    together = reconvergence[place]
                    current[0] = together
                    stack.append([place + 1, mask & ~active, together])
                    stack.append([step.target, active, together])
                continue
            signal = step(warp, active)
            if signal is None:
                current[0] = place + 1
            elif signal is RETRY:
                return
            else:
                current[0] = place + 1
                return

    def _exit(self, warp: Warp, lanes: Mask) -> bool:
        """Ends lanes; returns whether the warp has none left."""
        current = warp.stack[-1]
        for entry in warp.stack:
            entry[1] = entry[1] & ~lanes
        while warp.stack and not warp.stack[-1][1].any():
            warp.stack.pop()
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
