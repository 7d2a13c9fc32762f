"""Runs one launch of a program."""

from __future__ import annotations

from .instructions.decoding import plan_of
from .machine.global_memory import GlobalMemory
from .machine.hierarchy import Grid
from .machine.launch import Launch, Schedule
from .machine.ordering import Ordering
from .machine.scheduler import Execution, Scheduler
from .ptx.program import Program
from .races.detector import RaceDetector


def execute(
    program: Program,
    launch: Launch,
    memory: GlobalMemory,
    schedule: Schedule | None = None,
    ordering: Ordering | None = None,
) -> Execution:
    """Runs a launch to its end on memory of this process.

    Raises:
        UnsupportedPtxError: If the program has an instruction that is not known.
        DeadlockError: If no warp can go on.
        MemoryAccessError: If the kernel reads or writes outside its memory.
        EmulationError: If it does something else that it must not do.
    """
    grid = Grid(program, launch, memory, schedule or Schedule(), ordering or RaceDetector())
    return Scheduler(grid, plan_of(program)).run()
