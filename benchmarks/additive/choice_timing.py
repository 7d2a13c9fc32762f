"""Compares ways of timing a GEMM's choices with their times in a CUDA graph.

For GEMMs in the bundle of benchmarks/additive/manifest.yaml, each way times ATen and the ranked
kernels, and chooses one:

- stock: as Inductor does, by events around the host's call, after L2 is overwritten;
- cold: without the launch, after L2 is overwritten by reads;
- gpu_time: the mean of cold and warm calls, as in
  `nvgemm_runtime.inductor.autotuning.choice_timing`.

The table shows how much longer each way's choice takes than the fastest in a CUDA graph: behind a
small kernel each, with operands from memory, as `nvgemm-aot tune` measures, or from L2, as in a
small model; and in a row, with operands from memory. In a row, kernels of programmatic dependent
launch, cuBLAS's among them, overlap with themselves.

    export NVGEMM_AOT_BUNDLES=additive-….nvgemm
    python -m benchmarks.additive.choice_timing --json timing.json
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.cases import write_cases
from benchmarks.shared.bundled import declared, environment
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import this_run
from nvgemm_aot.tuning.measuring.gpu import GpuTimer, buffer_bytes
from nvgemm_runtime.bundle.ranking_entries import APART, BACK_TO_BACK
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Problem
from nvgemm_runtime.inductor.autotuning import gpu_times
from nvgemm_runtime.launch.api import load_kernel

if TYPE_CHECKING:
    import torch

ROWS = (2, 16, 24, 96, 128, 384)
"""m values. Launches take about as long as most of these kernels, or longer."""

WAYS = ("stock", "cold", "gpu_time")
GRAPHS = ("memory", "cache", "in a row")
"""Sources of a graph's operands with a small kernel before each launch, and launches in a row."""


def time_us(calls: list[Callable[[], object]]) -> dict[str, float]:
    """Times a call in each way and in CUDA graphs, in microseconds."""
    from torch._inductor.runtime.benchmarking import benchmarker

    timer = GpuTimer()
    samples = {
        "memory": timer.prepare(calls, launches=APART),
        "cache": timer.prepare(calls[:1], launches=APART),
        "in a row": timer.prepare(calls, launches=BACK_TO_BACK),
    }
    return {
        "stock": float(benchmarker.benchmark_gpu(calls[0])) * 1e3,
        "cold": _cold_ms(calls[0]) * 1e3,
        "gpu_time": gpu_times.measure_ms(calls[0]) * 1e3,
        **{
            name: statistics.median(sample() for _ in range(7)) / 1e3
            for name, sample in samples.items()
        },
    }


def _cold_ms(call: Callable[[], object]) -> float:
    """Returns the median of calls that follow reads as large as L2, without the launch."""
    import torch

    call()
    flush = gpu_times._l2_flush()
    torch.cuda._sleep(int(4 * gpu_times.CYCLES_PER_MS))
    sent = [gpu_times._timed_call(call, flush) for _ in range(gpu_times.MOST_CALLS)]
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end, _ in sent)


def measure(problem: Problem, kernels: list[str]) -> dict[str, dict[str, float]]:
    """Times ATen and each kernel, by name."""
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
    """Returns a line for each GEMM, then each way's loss."""
    heads = " ".join(f"{way:>8}" for way in WAYS)
    lines = [
        f"{'m':>5} {'n':>6} {'k':>6} " + " ".join(f"{one + ', us':>13} {heads}" for one in GRAPHS)
    ]
    losses: dict[tuple[str, str], list[float]] = {}
    slower: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        times = row["times_us"]
        columns = []
        for graph in GRAPHS:
            fastest = min(one[graph] for one in times.values())
            columns.append(f"{fastest:13.1f}")
            for way in WAYS:
                chosen = times[min(times, key=lambda name: times[name][way])][graph]
                losses.setdefault((way, graph), []).append(chosen / fastest)
                slower.setdefault((way, graph), []).append(chosen / times["aten"][graph])
                columns.append(f"{chosen / fastest:8.3f}")
        lines.append(f"{row['m']:>5} {row['n']:>6} {row['k']:>6} {' '.join(columns)}")
    for (way, graph), ratios in losses.items():
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        against = slower[way, graph]
        lines.append(
            f"{way}, {graph}: its choices take {mean:.4f} times as long as the fastest in the "
            f"geometric mean, at most {max(ratios):.4f}; longer than ATen by over 2 % in "
            f"{sum(one > 1.02 for one in against)} of {len(against)}, at most {max(against):.4f}"
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
        if is_linear and problem.m in ROWS:
            times = measure(problem, kernels[:4])
            rows.append({"m": problem.m, "n": problem.n, "k": problem.k, "times_us": times})
    if not rows:
        raise click.ClickException("install the wheel of benchmarks/additive/manifest.yaml")
    found = environment()
    if json_path is not None:
        json_path.write_text(json.dumps({"versions": found, "rows": rows}, indent=1) + "\n")
        raw = {"rows": rows}
        write_cases(json_path, "additive.choice_timing", raw, found, **this_run())
    click.echo(f"{found['gpu']}, torch {found['torch']}, nvgemm-aot {found['nvgemm-aot']}")
    for line in table(rows):
        click.echo(line)


if __name__ == "__main__":
    main()
