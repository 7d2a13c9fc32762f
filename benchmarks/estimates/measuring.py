"""Times a bundle's kernels and ATen at its declared problems, launches apart."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.shared.measuring import (
    Arena,
    Contender,
    Exact,
    Launch,
    Operands,
    launch_ns,
    offline_ns,
)
from benchmarks.shared.records import as_written, check_output, require_gpu, write
from benchmarks.shared.resuming import ORDER_SEED, command_line, in_time, today
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import NvgemmError
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Problem

WHAT = "estimates"
APART = "apart"
ROUNDS = 3
WINDOW_NS = 600_000.0
SPACER = "spacer"
"""Small kernel between launches, timed alone."""
ATEN = "aten"
"""``torch.mm(out=)``."""

NEAR = 2.5
"""Ratio to the fastest from which a kernel is timed by two single launches only."""

_SPACER_ELEMENTS = 1024


def measure(bundle_path: Path, times_path: Path, budget_s: float | None) -> None:
    """Times a bundle's kernels for plain products, in a fixed random order of problems.

    Between two launches runs a small kernel of torch, so that a kernel which starts before the one
    before it has ended gains nothing; what it takes alone is taken off.
    """
    check_output(times_path)
    require_gpu()
    import torch

    from nvgemm_runtime.launch.loading.loader import LOADER

    with as_written(bundle_path):
        bundle = Bundle(bundle_path)
    header = bundle.header
    launches: dict[str, Launch] = {}
    for kernel in header.kernels:
        launches[kernel.id] = LOADER.load(bundle, kernel).launch
    problems = [ranking.problem for ranking in header.rankings]
    random.Random(ORDER_SEED).shuffle(problems)
    sizes = [(one.m, one.n, one.k) for one in problems]
    arena = Arena(torch_dtype(problems[0].signature.a), sizes)
    record: dict[str, Any] = {
        "what": WHAT,
        "command": command_line(),
        "date": today(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "timing": APART,
        "rounds": ROUNDS,
        "kernels": [kernel_json(kernel) for kernel in header.kernels],
        "wrong": {},
        "times_ns": {},
        "aten_ns": {},
    }
    begun = time.monotonic()
    try:
        for number, problem in in_time(problems, budget_s):
            row, aten = _measure_problem(problem, launches, arena, record["wrong"])
            record["times_ns"][problem.key] = row
            record["aten_ns"][problem.key] = aten
            seconds = time.monotonic() - begun
            least = min(one for one in row if one is not None)
            click.echo(
                f"{number + 1}/{len(problems)} {seconds:.0f} s {problem.key}: "
                f"{least / 1e3:.1f} us, ATen {aten / 1e3:.1f} us",
                err=True,
            )
    finally:
        if record["times_ns"]:
            write(times_path, f"{json.dumps(record)}\n")


def kernel_json(kernel: Kernel) -> list[str]:
    """Returns a record's name for a kernel: id, provider, operator and signature."""
    return [kernel.id, kernel.provider, kernel.operator, kernel.signature.key]


def _measure_problem(
    problem: Problem,
    launches: Mapping[str, Launch],
    arena: Arena,
    wrong: dict[str, str],
) -> tuple[list[float | None], float]:
    """Returns each kernel's and ATen's nanoseconds.

    None for a kernel that is not exact, whose fault goes to ``wrong``.
    """
    import torch

    size = (problem.m, problem.n, problem.k)
    layout = problem.signature.layout
    sets = arena.sets(*size, layout)
    small = torch.zeros(_SPACER_ELEMENTS, device="cuda")
    right = {id_: launch for id_, launch in launches.items() if id_ not in wrong}
    looks = {id_: _first_look_ns(launch, sets) for id_, launch in right.items()}
    near = [id_ for id_, look in looks.items() if look <= NEAR * min(looks.values())]
    exact = Exact.draw(*size, layout, sets[0][0].dtype)
    faults = {id_: fault for id_ in near if (fault := _fault(right[id_], exact)) is not None}
    del exact
    wrong |= {id_: f"{problem.key}: {fault}" for id_, fault in faults.items()}

    def spaced(launch: Launch) -> Launch:
        def run(a: Any, b: Any, out: Any) -> None:
            launch(a, b, out)
            small.add_(1.0)

        return run

    ways = {
        id_: Contender(launch=spaced(right[id_]), sets=sets) for id_ in near if id_ not in faults
    }
    ways[ATEN] = Contender(launch=spaced(lambda a, b, out: torch.mm(a, b, out=out)), sets=sets)
    ways[SPACER] = Contender(launch=lambda a, b, out: small.add_(1.0), sets=sets)
    measured = offline_ns(ways, ROUNDS, WINDOW_NS, random.Random(problem.key))
    rough = {id_: look for id_, look in looks.items() if id_ not in faults}
    *row, aten = without_spacer(measured, rough, [*launches, ATEN])
    assert aten is not None
    return row, aten


def without_spacer(
    measured: Mapping[str, Sequence[float]], looks: Mapping[str, float], ids: Sequence[str]
) -> list[float | None]:
    """Returns each kernel's median less the spacer's, or its first look, in nanoseconds.

    None for one that has neither, because its results are wrong.
    """
    spacer = statistics.median(measured[SPACER])
    times = {id_: max(1.0, statistics.median(row) - spacer) for id_, row in measured.items()}
    return [times.get(id_, looks.get(id_)) for id_ in ids]


def _first_look_ns(launch: Launch, sets: Sequence[Operands]) -> float:
    """Returns the better launch out of two, in nanoseconds."""
    way = Contender(launch=launch, sets=sets)
    return min(launch_ns(way), launch_ns(way, first=1))


def _fault(launch: Launch, exact: Exact) -> str | None:
    """Describes the fault in a kernel's result, or returns None."""
    try:
        error = exact.error(launch)
    except (NvgemmError, ValueError, TypeError, RuntimeError) as failure:
        return f"{type(failure).__name__}: {failure}"
    return None if error == 0.0 else f"relative error {error:g}"  # NaN is wrong too
