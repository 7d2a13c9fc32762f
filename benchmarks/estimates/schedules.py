"""Compares dynamic schedules with the same kernels' static ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import click

from benchmarks.estimates.records import Measurements
from nvgemm_aot.providers import Candidate
from nvgemm_aot.providers.base import DYNAMIC_PERSISTENT, STATIC_PERSISTENT

Row = Sequence[tuple[Candidate, float]]
"""One problem's candidates, each with its nanoseconds."""


def compare(measured: Measurements) -> str:
    """Returns a line for each problem, and the geometric means.

    The first ratio is the fastest dynamic kernel's speed over the fastest static one's, the second
    the median of dynamic kernels' over that of their twins: above 1, the dynamic one is faster.

    Raises:
        click.ClickException: If no problem has times of a dynamic kernel and its twin.
    """
    lines, best_of_all, twins_of_all = [], [], []
    for problem, row in sorted(measured.rows.items()):
        twins = [*_twins(row)]
        if not twins:
            continue
        static = min(ns for one, ns in row if one.design.scheduler == STATIC_PERSISTENT)
        dynamic = min(ns for one, ns in row if one.design.scheduler == DYNAMIC_PERSISTENT)
        best, twin = static / dynamic, statistics.median(twins)
        best_of_all.append(best)
        twins_of_all.append(twin)
        lines.append(
            f"{problem.key}  {static / 1000:.1f}  {dynamic / 1000:.1f}  {_both(best, twin)}"
        )
    if not lines:
        raise click.ClickException("no problem has times of a dynamic kernel and of its twin")
    means = map(statistics.geometric_mean, (best_of_all, twins_of_all))
    wins = sum(one > 1 for one in best_of_all)
    return "\n".join(
        [
            measured.source,
            "problem  best static us  best dynamic us  dynamic over static: best  median of twins",
            *lines,
            f"{len(lines)} problems, at {wins} the fastest is dynamic  {_both(*means)}",
        ]
    )


def _both(best: float, twin: float) -> str:
    return f"{best:.3f}  {twin:.3f}"


def _twins(row: Row) -> Iterator[float]:
    """Returns, for each dynamic kernel with a static twin, the twin's time over its own."""
    static = {_apart_from_schedule(one): ns for one, ns in row if not _is_dynamic(one)}
    for one, ns in row:
        twin = static.get(_apart_from_schedule(one), math.nan)
        if _is_dynamic(one) and not math.isnan(twin):
            yield twin / ns


def _is_dynamic(candidate: Candidate) -> bool:
    return candidate.design.scheduler == DYNAMIC_PERSISTENT


def _apart_from_schedule(candidate: Candidate) -> Hashable:
    design = replace(candidate.design, scheduler=STATIC_PERSISTENT)
    same = (candidate.design.scheduler in (DYNAMIC_PERSISTENT, STATIC_PERSISTENT),)
    return (candidate.provider, candidate.traits, candidate.block_shape, design, same)
