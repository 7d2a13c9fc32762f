"""How well do ways of timing a GEMM's choices find the one that is fastest in a CUDA graph?

For GEMMs that the bundle of additive.yaml declares, ATen and the ranked kernels are timed

- stock: as Inductor does, by events around the host's call, the L2 cache written over before;
- written: without the launch, as `nvgemm_runtime.inductor.gpu_time` does, but with L2 written over;
- read: as gpu_time does, which reads a buffer instead;
- graph: as `nvgemm-aot tune` does, in CUDA graphs over operands that take turns.

Each of the first three chooses; the table says how much longer its choice takes in the graph than
the fastest.

    NVGEMM_AOT_BUNDLES=additive-….nvgemm python benchmarks/choice_timing.py --json timing.json
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from bundled import declared, environment
from records import require_gpu

from nvgemm_aot.tuning.timer import GpuTimer, buffer_bytes
from nvgemm_runtime.api import load_kernel
from nvgemm_runtime.inductor import gpu_time
from nvgemm_runtime.problem import DType, Layout, Op, Problem

if TYPE_CHECKING:
    import torch

BATCHES = (2, 24, 96, 384)
LEAST_K = 2560
"""Sizes of six_linears: launches take longer than their kernels, or about as long."""

WAYS = ("stock", "written", "read")


def time_us(calls: list[Callable[[], object]]) -> dict[str, float]:
    """Microseconds of a call in each way, and in a CUDA graph."""
    from torch._inductor.runtime.benchmarking import benchmarker

    sample = GpuTimer().prepare(calls)
    return {
        "stock": float(benchmarker.benchmark_gpu(calls[0])) * 1e3,
        "written": _with_written_cache(calls[0]) * 1e3,
        "read": gpu_time.measure_ms(calls[0]) * 1e3,
        "graph": statistics.median(sample() for _ in range(7)) / 1e3,
    }


def _with_written_cache(call: Callable[[], object]) -> float:
    import torch

    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.empty(size // 4, dtype=torch.int32, device="cuda")
    read, gpu_time._l2_flush = gpu_time._l2_flush, lambda: buffer.zero_
    try:
        return gpu_time.measure_ms(call)
    finally:
        gpu_time._l2_flush = read


def measure(problem: Problem, kernels: list[str]) -> dict[str, dict[str, float]]:
    """Times of ATen and of each kernel, by name."""
    import torch

    m, n, k = problem.m, problem.n, problem.k
    bytes_of_one = 2 * (m * k + n * k + m * n)
    sets = []
    for _ in range(max(2, min(12, -(-buffer_bytes() // bytes_of_one)))):
        a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
        sets.append((a, b.T, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)))
    launches: dict[str, Callable[..., object]] = {
        kernel: load_kernel(kernel).launch for kernel in kernels
    }

    def aten(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b, out=out)

    return {
        name: time_us([lambda one=one, launch=launch: launch(*one) for one in sets])  # type: ignore[misc]
        for name, launch in {"aten": aten, **launches}.items()
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines: a GEMM each, then what each way loses."""
    heads = " ".join(f"{way + ' takes':>13}" for way in WAYS)
    lines = [f"{'m':>5} {'n':>6} {'k':>6} {'fastest, us':>12} {heads}"]
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    for row in rows:
        times = row["times_us"]
        fastest = min(one["graph"] for one in times.values())
        columns = []
        for way in WAYS:
            chosen = min(times, key=lambda name: times[name][way])
            losses[way].append(times[chosen]["graph"] / fastest)
            columns.append(f"{times[chosen]['graph']:6.1f} {chosen[:6]:>6}")
        lines.append(
            f"{row['m']:>5} {row['n']:>6} {row['k']:>6} {fastest:>12.1f} {' '.join(columns)}"
        )
    for way, ratios in losses.items():
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        lines.append(
            f"{way}: its choices take {mean:.4f} times as long as the fastest in the geometric "
            f"mean, at most {max(ratios):.4f}"
        )
    for way in WAYS:
        errors = [one[way] - one["graph"] for row in rows for one in row["times_us"].values()]
        lines.append(
            f"{way}: {statistics.median(errors):.1f} us more than in the graph, the median; "
            f"{min(errors):.1f} to {max(errors):.1f}"
        )
    return lines


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
def main(json_path: Path | None) -> None:
    """Measure and print a table."""
    require_gpu()
    rows = []
    for problem, kernels in declared([DType.BF16]).items():
        signature = problem.signature
        is_linear = (signature.op, signature.layout) == (Op.MM, Layout.TN)
        if is_linear and problem.m in BATCHES and min(problem.n, problem.k) >= LEAST_K:
            times = measure(problem, kernels[:4])
            rows.append({"m": problem.m, "n": problem.n, "k": problem.k, "times_us": times})
    if not rows:
        raise click.ClickException("install the wheel of benchmarks/additive.yaml")
    found = environment()
    if json_path is not None:
        json_path.write_text(json.dumps({"versions": found, "rows": rows}, indent=1) + "\n")
    click.echo(f"{found['gpu']}, torch {found['torch']}, nvgemm-aot {found['nvgemm-aot']}")
    for line in table(rows):
        click.echo(line)


if __name__ == "__main__":
    main()
