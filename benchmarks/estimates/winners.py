"""Lists the fastest designs at a file's problems, and compares them with ATen."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nvgemm_runtime.gemm.problem import Problem

NEAR = 1.01
"""Ratio to the fastest up to which a design counts at a problem."""

Times = Mapping[str, float]
"""Nanoseconds by operator."""


def winners(record: Mapping[str, Any]) -> str:
    """Returns a line for each problem, the geometric mean, and a line for each design that counts.

    Args:
        record: Record of `measuring.measure`, with ATen's times.
    """
    lines, ratios = [], []
    near: Counter[str] = Counter()
    first: Counter[str] = Counter()
    for problem, times in sorted(_problems(record), key=lambda one: one[0]):
        best = min(times, key=lambda name: times[name])
        aten = record["aten_ns"][problem.key]
        ratios.append(aten / times[best])
        first[best] += 1
        near.update(name for name, ns in times.items() if ns <= NEAR * times[best])
        lines.append(
            f"m {problem.m:<5} n {problem.n:<6} k {problem.k:<6}{aten / 1000:>9.1f}"
            f"{times[best] / 1000:>9.1f}{ratios[-1]:>8.3f}  {short_name(best)}"
        )
    designs = sorted(near, key=lambda name: (-near[name], -first[name], name))
    return "\n".join(
        [
            f"{'problem':<25}{'ATen us':>10}{'best us':>9}{'ratio':>8}  the fastest design",
            *lines,
            f"{len(ratios)} problems: ATen takes {statistics.geometric_mean(ratios):.3f} times as "
            f"long as the fastest, {min(ratios):.3f} at least",
            f"{'fastest':>7}{f'within {NEAR - 1:.0%}':>12}  design",
            *(f"{first[name]:>7}{near[name]:>12}  {short_name(name)}" for name in designs),
        ]
    )


def _problems(record: Mapping[str, Any]) -> Iterator[tuple[Problem, Times]]:
    operators: Sequence[str] = [operator for _, _, operator, _ in record["kernels"]]
    for key, row in record["times_ns"].items():
        times = {name: ns for name, ns in zip(operators, row) if ns is not None}
        yield Problem.parse(key), times


def short_name(operator: str) -> str:
    """Returns an operator's name without element types, which the problem has."""
    return re.sub(r"_[tn]{3}_A\w+?_(?=cluster)", "_", operator)
