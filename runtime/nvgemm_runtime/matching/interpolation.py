"""Ranking kernels for an undeclared m, from what was measured at the declared m around it.

A kernel's time for one wave of its tiles changes slowly with m, and its waves are known. So the
time of a wave is interpolated, both on logarithmic scales, and multiplied by the waves. Over what
was measured on an H200 (`benchmarks/ranking.py compare`) this loses less than scaling the nearer
problem's times or interpolating the times themselves; over estimates it does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..bundle.format import KernelDesign
from ..gemm.problem import Problem
from .waves import waves


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one problem.

    Attributes:
        problem: The problem.
        times_ns: Nanoseconds of each kernel, by id.
    """

    problem: Problem
    times_ns: Mapping[str, int]


def order_between(
    problem: Problem,
    designs: Mapping[str, KernelDesign],
    *,
    below: Row,
    above: Row,
    multiprocessors: int,
) -> list[str]:
    """Ids of kernels, the one that should be fastest first.

    Args:
        problem: What is to be computed.
        designs: Of the kernels, by id; at least one row has each.
        below: Of a problem with the same n and k and no larger m.
        above: Likewise, with no smaller m.
        multiprocessors: Streaming multiprocessors of the GPU.
    """

    def time(kernel_id: str) -> float:
        return interpolate(
            problem,
            designs[kernel_id],
            kernel_id,
            below=below,
            above=above,
            multiprocessors=multiprocessors,
        )

    return sorted(designs, key=time)


def interpolate(
    problem: Problem,
    design: KernelDesign,
    kernel_id: str,
    *,
    below: Row,
    above: Row,
    multiprocessors: int,
) -> float:
    """Nanoseconds that one kernel should take; arguments as those of `order_between`."""

    def of_wave(row: Row) -> float | None:
        time_ns = row.times_ns.get(kernel_id)
        return time_ns and time_ns / waves(design, row.problem, multiprocessors)

    low, high = of_wave(below), of_wave(above)
    here = waves(design, problem, multiprocessors)
    if low is None or high is None or below.problem.m >= above.problem.m:
        alone = high if low is None else low
        assert alone is not None  # a row has it
        return here * alone
    share = math.log(problem.m / below.problem.m) / math.log(above.problem.m / below.problem.m)
    return float(here * low ** (1 - share) * high**share)
