"""In which order kernels are tried for sizes that were not declared.

A GPU runs a grid in waves of as many thread blocks as it has streaming multiprocessors, and a wave
that is nearly empty takes as long as a full one. That is what makes a kernel good at one size and
bad at the next. Measured on an H200 (`benchmarks.ranking`): scaling a near problem's times by
the waves halves what its order loses where autotuning picks among the first four.

A kernel's time for one wave changes slowly with m. Between two measured m, the time of a wave is
interpolated, both on logarithmic scales, and multiplied by the waves. Over what was measured on an
H200 (`benchmarks.ranking compare`) this loses less than scaling the nearer problem's times or
interpolating the times themselves; over estimates it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..bundle.format import KernelDesign
from ..gemm.problem import Problem


def waves(
    design: KernelDesign, problem: Problem, multiprocessors: int, *, m: int | None = None
) -> int:
    """Waves that a kernel needs for a problem, with one thread block a multiprocessor.

    Rows are taken to be shared out evenly among groups. Blocks that share the k of a tile count one
    by one. ``m`` stands for the problem's own.
    """
    cluster_m, cluster_n = design.cluster
    rows = -(-(problem.m if m is None else m) // problem.groups)
    blocks_m = -(-rows // design.tile[0]) * design.ctas_per_tile
    blocks_n = -(-problem.n // design.tile[1])
    # Clusters are launched whole.
    clusters = -(-blocks_m // cluster_m) * -(-blocks_n // cluster_n)
    blocks = clusters * cluster_m * cluster_n * problem.batch * problem.groups * design.splits
    return -(-blocks // multiprocessors)


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Nanoseconds that each kernel takes for one problem, by id."""

    problem: Problem
    times_ns: Mapping[str, int]


def order_between(
    problem: Problem,
    designs: Mapping[str, KernelDesign],
    *,
    below: KernelTimes,
    above: KernelTimes,
    multiprocessors: int,
) -> list[str]:
    """Ids of kernels, the one that should be fastest first.

    ``below`` and ``above`` are of problems with the same n and k; each kernel is in one of them.
    """
    around: Any = {"below": below, "above": above, "multiprocessors": multiprocessors}
    return sorted(designs, key=lambda id_: interpolate(problem, designs[id_], id_, **around))


def interpolate(
    problem: Problem,
    design: KernelDesign,
    kernel_id: str,
    *,
    below: KernelTimes,
    above: KernelTimes,
    multiprocessors: int,
) -> float:
    """Nanoseconds that one kernel should take; arguments as those of `order_between`."""
    low, high = below.times_ns.get(kernel_id), above.times_ns.get(kernel_id)
    if low is None or high is None or below.problem.m >= above.problem.m:
        row, alone = (above, high) if low is None else (below, low)
        assert alone is not None  # a row has it
        here, there = (waves(design, one, multiprocessors) for one in (problem, row.problem))
        return here * alone / there
    ends = ((below.problem.m, low), (above.problem.m, high))
    return curve_between(design, problem, *ends, multiprocessors)(problem.m)


def curve_between(
    design: KernelDesign,
    problem: Problem,
    below: tuple[int, int],
    above: tuple[int, int],
    multiprocessors: int,
) -> Callable[[int], float]:
    """What a kernel should take at any m between two that were measured.

    Args:
        design: The kernel's.
        problem: The GEMM, at any m.
        below: The smaller m, and the kernel's nanoseconds there.
        above: The larger m, and the kernel's nanoseconds there.
        multiprocessors: Of the GPU.

    Returns:
        From an m to nanoseconds.
    """

    def waves_at(m: int) -> int:
        return waves(design, problem, multiprocessors, m=m)

    (least, low), (most, high) = below, above
    low_wave, high_wave = low / waves_at(least), high / waves_at(most)
    scale = math.log(most / least)

    def time_ns(m: int) -> float:
        share = math.log(m / least) / scale
        return float(waves_at(m) * low_wave ** (1 - share) * high_wave**share)

    return time_ns
