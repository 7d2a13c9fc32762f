"""A launch that can be executed again, by changed programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..machine.global_memory import Bytes, GlobalMemory, Region
from ..machine.launch import Launch, Schedule
from ..machine.ordering import Ordering
from ..machine.scheduler import Execution
from ..ptx.program import Program
from ..run import execute


@dataclass(frozen=True, kw_only=True)
class RecordedLaunch:
    """A launch, and what its memory held before and after.

    It owns copies of the memory, at the addresses that parameters and tensor maps hold: a workspace
    is freed when the call ends, and writing there again would damage the heap.

    Attributes:
        program: The kernel that was launched.
        launch: Its grid and parameters.
        regions: Copies of the memory that it may touch.
        before: The regions' bytes before the launch.
        after: The bytes that the kernel left, which a caller has checked.
        execution: Counts and findings.
    """

    program: Program
    launch: Launch
    regions: tuple[Region, ...]
    before: tuple[Bytes, ...]
    after: tuple[Bytes, ...]
    execution: Execution

    def replay(
        self,
        program: Program,
        schedule: Schedule | None = None,
        ordering: Ordering | None = None,
    ) -> Execution:
        """Executes a program as the kernel was; the regions then hold its results.

        Raises:
            EmulationError: If the program does what it must not do.
        """
        return execute(program, self.launch, self.restored_memory(), schedule, ordering)

    def restored_memory(self) -> GlobalMemory:
        """Returns the regions with what they held before the launch."""
        for region, content in zip(self.regions, self.before):
            region.data[:] = content
        return GlobalMemory(self.regions)

    def differing_bytes(self) -> int:
        """Returns how many bytes in the regions now differ from what the kernel left."""
        return sum(
            int(np.count_nonzero(region.data != content))
            for region, content in zip(self.regions, self.after)
        )


def record(
    program: Program,
    launch: Launch,
    regions: Sequence[Region],
    schedule: Schedule | None = None,
) -> RecordedLaunch:
    """Executes a launch on the caller's memory, and keeps what replaying it needs.

    Raises:
        EmulationError: If the kernel does what it must not do.
    """
    before = tuple(region.data.copy() for region in regions)
    execution = execute(program, launch, GlobalMemory(regions), schedule)
    return RecordedLaunch(
        program=program,
        launch=launch,
        regions=tuple(replace(region, data=region.data.copy()) for region in regions),
        before=before,
        after=tuple(region.data.copy() for region in regions),
        execution=execution,
    )
