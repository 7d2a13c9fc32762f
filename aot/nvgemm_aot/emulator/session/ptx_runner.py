"""Executes caught launches by interpreting the kernels' PTX."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ...verify.device.cubin import Cubin
from ..driver.caught_launch import CaughtLaunch
from ..machine.global_memory import GlobalMemory, Region
from ..machine.launch import Launch, Schedule
from ..machine.scheduler import Execution
from ..ptx.program import Program
from ..run import execute

Programs = Callable[[Cubin, str], Program]
"""Returns the PTX that a cubin's kernel, given by name, was compiled from."""


class PtxRunner:
    """Interprets launches, for `nvgemm_aot.emulator.session.emulated_device.start`.

    All blocks of a cooperative launch are resident. Odd seeds form the preferred clusters of
    launches that name them, where a GPU may form either.

    Attributes:
        schedule: Order in which warps run, for launches from now on.
    """

    def __init__(self, programs: Programs, schedule: Schedule | None = None) -> None:
        self._programs = programs
        self.schedule = schedule or Schedule()

    def __call__(
        self, launch: CaughtLaunch, cubin: Cubin, regions: tuple[Region, ...]
    ) -> Execution:
        """Executes a launch on the memory that it may touch.

        Raises:
            EmulationError: If the kernel does what it must not do.
        """
        program = self._programs(cubin, launch.kernel)
        schedule = self.schedule
        if launch.is_cooperative:
            clusters = math.prod(launch.grid) // math.prod(launch.cluster)
            schedule = replace(schedule, resident=clusters)
        laid_out = emulated_launch(launch, program)
        if launch.preferred_cluster is not None and schedule.seed % 2:
            laid_out = replace(laid_out, cluster=launch.preferred_cluster)
        return execute(program, laid_out, GlobalMemory(regions), schedule)


def emulated_launch(caught: CaughtLaunch, program: Program) -> Launch:
    """Returns a caught launch with its parameters laid out as a program declares them."""
    layout = [(parameter.offset, parameter.size) for parameter in program.parameters]
    return Launch(
        grid=caught.grid,
        block=caught.block,
        cluster=caught.cluster,
        shared_bytes=caught.shared_bytes,
        parameters=caught.parameter_bytes(layout, program.parameter_bytes),
    )
