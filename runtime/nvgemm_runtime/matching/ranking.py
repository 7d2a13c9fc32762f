"""Kernel order for undeclared sizes.

A GPU runs a grid in waves, one thread block per streaming multiprocessor, and a nearly empty wave
takes as long as a full one. That makes a kernel good at one size and bad at the next. Measured on
an H200 (`benchmarks.ranking`): scaling a nearby problem's times by waves halves the loss from its
order if autotuning picks among the first four.

A kernel's time per wave changes slowly with m. Between two measured m, the time per wave is
interpolated on log-log scales and multiplied by the waves. With measurements from an H200
(`benchmarks.ranking compare`), this loses less than scaling the nearer problem's times or
interpolating the times themselves; with estimates it does not.
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
    """Returns a kernel's wave count for a problem, at one thread block per multiprocessor.

    Assumes that rows are evenly distributed among groups. Blocks that share a tile's k count
    separately. ``m`` overrides the problem's.
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
    """Nanoseconds per kernel for one problem, by id."""

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
    """Returns kernel ids, expected fastest first.

    ``below`` and ``above`` are for problems with the same n and k; each kernel is in at least one.
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
    """Returns one kernel's expected nanoseconds; arguments as in `order_between`."""
    low, high = below.times_ns.get(kernel_id), above.times_ns.get(kernel_id)
    if low is None or high is None or below.problem.m >= above.problem.m:
        measured, time_ns = (above, high) if low is None else (below, low)
        assert time_ns is not None  # each kernel is in at least one of them
        own_waves, measured_waves = (
            waves(design, sized, multiprocessors) for sized in (problem, measured.problem)
        )
        return own_waves * time_ns / measured_waves
    ends = ((below.problem.m, low), (above.problem.m, high))
    return curve_between(design, problem, *ends, multiprocessors)(problem.m)


def curve_between(
    design: KernelDesign,
    problem: Problem,
    below: tuple[int, int],
    above: tuple[int, int],
    multiprocessors: int,
) -> Callable[[int], float]:
    """Returns a kernel's expected time as a function of m, between two measured m.

    Args:
        design: Kernel design.
        problem: GEMM, at any m.
        below: Smaller m, and the kernel's nanoseconds there.
        above: Larger m, and the kernel's nanoseconds there.
        multiprocessors: Multiprocessors on the GPU.

    Returns:
        Function from m to nanoseconds.
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
