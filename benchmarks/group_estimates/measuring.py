"""Times a bundle's grouped kernels, and torch, at all cases."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.estimates.measuring import ATEN, kernel_json
from benchmarks.group_estimates.cases import Case, cases
from benchmarks.shared.measuring import Contender, tuned
from benchmarks.shared.records import as_written, check_output, require_gpu, write
from benchmarks.shared.resuming import ORDER_SEED, command_line, in_time, today
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.types import DType

WHAT = "group estimates"
PASSES = 3
WINDOW_NS = 600_000.0
MOST_ERROR = 0.01
"""A right kernel's largest difference from torch's result, in the norm."""


def measure(bundle_path: Path, times_path: Path, budget_s: float | None) -> None:
    """Times a bundle's kernels at `cases`, in a fixed random order."""
    check_output(times_path)
    require_gpu()
    import torch

    from nvgemm_runtime.launch.loading.loader import LOADER

    with as_written(bundle_path):
        bundle = Bundle(bundle_path)
    kernels = bundle.header.kernels
    launches = {kernel.id: LOADER.load(bundle, kernel).launch for kernel in kernels}
    record: dict[str, Any] = {
        "what": WHAT,
        "command": command_line(),
        "date": today(),
        "gpu": torch.cuda.get_device_name(),
        "uuid": str(torch.cuda.get_device_properties(0).uuid)[:8],
        "torch": torch.__version__,
        "kernels": [kernel_json(kernel) for kernel in kernels],
        "wrong": {},
        "times_ns": {},
    }
    ordered = list(cases())
    random.Random(ORDER_SEED).shuffle(ordered)
    begun = time.monotonic()
    try:
        for number, case in in_time(ordered, budget_s):
            own = {
                kernel.id: launches[kernel.id]
                for kernel in kernels
                if kernel.signature == case.problem.signature and kernel.id not in record["wrong"]
            }
            times = _measure_case(case, own, record["wrong"])
            record["times_ns"][case.key] = times
            least = min((one for name, one in times.items() if name != ATEN), default=0.0)
            click.echo(
                f"{number + 1}/{len(ordered)} {time.monotonic() - begun:.0f} s {case.key}: "
                f"{least / 1e3:.1f} us, ATen {times[ATEN] / 1e3:.1f} us",
                err=True,
            )
    finally:
        if record["times_ns"]:
            write(times_path, f"{json.dumps(record)}\n")


def _measure_case(
    case: Case, launches: dict[str, Callable[..., Any]], wrong: dict[str, str]
) -> dict[str, float]:
    """Returns each right kernel's and ATen's nanoseconds."""
    import torch

    a, b, out = _operands(case)
    offsets = case.offsets()
    aten = torch._grouped_mm(a, b, offs=offsets)
    right = {}
    for name, launch in launches.items():
        out.fill_(float("nan"))
        launch(a, b, out, offsets)
        error = float((out.float() - aten.float()).norm() / aten.float().norm())
        if error < MOST_ERROR:
            right[name] = launch
        else:  # NaN is wrong too
            wrong[name] = f"{case.key}: relative error {error:g}"
    del aten

    def grouped(launch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda a, b, out: launch(a, b, out, offsets)

    sets = [(a, b, out)]
    ways = {name: Contender(launch=grouped(launch), sets=sets) for name, launch in right.items()}
    ways[ATEN] = Contender(
        launch=lambda a, b, out: torch._grouped_mm(a, b, offs=offsets), sets=sets
    )
    return tuned(ways, PASSES, WINDOW_NS, random.Random(case.key))


def _operands(case: Case) -> tuple[Any, Any, Any]:
    import torch

    problem = case.problem
    m, n, k, groups = problem.m, problem.n, problem.k, problem.groups
    assert problem.signature.out is DType.BF16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    if problem.signature.op is Op.K_GROUPED_MM:
        return draw(k, m).t(), draw(k, n), draw(groups, m, n)
    b = draw(groups, k, n) if problem.signature.layout.b_row_major else draw(groups, n, k).mT
    return draw(m, k), b, draw(m, n)
