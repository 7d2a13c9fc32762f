"""Executes caught launches by interpreting the kernels' PTX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from ...verify.device.cubin import Cubin
from ..driver.caught_launch import CaughtLaunch
from ..machine.global_memory import GlobalMemory, Region
from ..machine.launch import Extent, Launch, Schedule
from ..machine.scheduler import Execution
from ..ptx.program import Program
from ..ptx.ptx_operands import Special
from ..run import execute

Programs = Callable[[Cubin, str], Program]
"""Returns the PTX that a cubin's kernel, given by name, was compiled from."""


class PtxRunner:
    """Interprets launches, for `nvgemm_aot.emulator.session.emulated_device.start`.

    All blocks of a cooperative launch are resident. Odd seeds form the preferred clusters of
    launches that name them, where a GPU may form either.

    Attributes:
        schedule: Order in which warps run, for launches from now on.
        most_clusters: Most clusters for launches from now on, as for a GPU with fewer
            multiprocessors; None for as many as a launcher asks for. A launch has fewer only if its
            kernel reads the number of blocks, by which such a kernel steps from tile to tile.
    """

    def __init__(self, programs: Programs, schedule: Schedule | None = None) -> None:
        self._programs = programs
        self.schedule = schedule or Schedule()
        self.most_clusters: int | None = None

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
        laid_out = emulated_launch(launch, program, self.most_clusters)
        if launch.preferred_cluster is not None and schedule.seed % 2:
            laid_out = replace(laid_out, cluster=launch.preferred_cluster)
        return execute(program, laid_out, GlobalMemory(regions), schedule)


def emulated_launch(
    caught: CaughtLaunch, program: Program, most_clusters: int | None = None
) -> Launch:
    """Returns a caught launch with its parameters laid out as a program declares them.

    Args:
        caught: The launch.
        program: The launched kernel.
        most_clusters: As of `PtxRunner`.
    """
    layout = [(parameter.offset, parameter.size) for parameter in program.parameters]
    return Launch(
        grid=_smaller_grid(caught, program, most_clusters),
        block=caught.block,
        cluster=caught.cluster,
        shared_bytes=caught.shared_bytes,
        is_dependent=caught.is_dependent,
        parameters=caught.parameter_bytes(layout, program.parameter_bytes),
    )


def _smaller_grid(caught: CaughtLaunch, program: Program, most_clusters: int | None) -> Extent:
    """Returns the grid with at most so many clusters along the only axis that has several.

    A kernel with a preferred cluster keeps its grid, whose axes depend on both clusters.
    """
    if caught.preferred_cluster is not None:
        return caught.grid
    grid, cluster = list(caught.grid), caught.cluster
    axes = [axis for axis in range(3) if grid[axis] > cluster[axis]]
    if most_clusters is not None and len(axes) == 1:
        (axis,) = axes
        if Special(f"%nctaid.{'xyz'[axis]}") in itertools.chain.from_iterable(
            instruction.operands for instruction in program.instructions
        ):
            grid[axis] = min(grid[axis], most_clusters * cluster[axis])
    x, y, z = grid
    return x, y, z
