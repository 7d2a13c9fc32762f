"""Measures the load under which autotuning finds the fastest gated kernel.

Autotuning times kernels for some milliseconds, on a GPU that was idle while torch compiled. After a
pause, bundled kernels for the products of benchmarks.gated are timed

- alone: one after the other, as `nvgemm_runtime.inductor.autotuning.gpu_times` times short calls;
- 0, 30, 60, 150: in turns with torch.compile's result without bundles, after so many milliseconds
  of load.

The table compares each way's pick with the fastest kernel, both under lasting load: in CUDA graphs
with operands from memory, as in benchmarks.gated, after a second of such calls.

    export NVGEMM_AOT_BUNDLES=gated-mlps-….nvgemm
    python -m benchmarks.gated.loads measure loads.json
    python -m benchmarks.gated.loads table loads.json
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.gated.__main__ import MODELS, Mlp, bundled, in_rounds, one_product, operand_sets
from benchmarks.shared.bundled import environment
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import Results, measuring_options
from benchmarks.shared.summaries import Summary, geomean
from nvgemm_aot.tuning.measuring.gpu import GpuTimer
from nvgemm_runtime.bundle.ranking_entries import APART
from nvgemm_runtime.inductor.autotuning import gpu_times

WHAT = "gated-loads"

ROWS = (512, 1024, 4096)

LOADS_MS = (0.0, 30.0, 60.0, 150.0)

PAUSE_S = 0.5

TIMES = 2
"""Timings of all kernels, per way."""

LASTING_S = 1.0
"""Seconds of load before kernels are timed under it."""

ROUNDS = 20
"""Samples of each kernel under lasting load."""

Calls = Mapping[str, Callable[[], object]]


def ways(other: Callable[[], object]) -> dict[str, Callable[[Calls], dict[str, float]]]:
    """Returns timers of calls by name: milliseconds, or shares of another call's time.

    Args:
        other: A call that the calls take turns with.
    """

    def alone(calls: Calls) -> dict[str, float]:
        return {name: gpu_times.measure_ms(call) for name, call in calls.items()}

    def in_turns(load_ms: float, calls: Calls) -> dict[str, float]:
        shares = {}
        for name, call in calls.items():
            own_ms, other_ms = gpu_times.measure_in_turns_ms(call, other, load_ms=load_ms)
            shares[name], load_ms = own_ms / other_ms, 0.0
        return shares

    loads = {f"{load_ms:g}": functools.partial(in_turns, load_ms) for load_ms in LOADS_MS}
    return {"alone": alone, **loads}


def picks(calls: Calls, other: Callable[[], object]) -> dict[str, list[str]]:
    """Returns the fastest call by each way, each time."""
    import torch

    found: dict[str, list[str]] = {}
    for _ in range(TIMES):
        for way, timed in ways(other).items():
            torch.cuda.synchronize()
            time.sleep(PAUSE_S)
            times = timed(calls)
            found.setdefault(way, []).append(min(times, key=times.__getitem__))
    return found


def under_lasting_load(samples: Mapping[str, Callable[[], float]]) -> dict[str, Summary]:
    """Returns the samples' summaries, in nanoseconds, by name."""
    end = time.perf_counter() + LASTING_S
    while time.perf_counter() < end:
        for sample in samples.values():
            sample()
    return in_rounds(samples, ROUNDS)


def measure_size(mlp: Mlp, m: int) -> dict[str, Any]:
    """Returns each way's picks, and kernel times under lasting load."""
    import torch

    torch._dynamo.reset()  # or all sizes together would count for the recompilation limit
    sets, timer = operand_sets(mlp, m), GpuTimer()
    x, weight = sets[0]
    options = {"nvgemm_aot_mode": "off", "fx_graph_cache": False}
    stock = torch.compile(one_product(mlp.epilogue), dynamic=False, options=options)
    with torch.no_grad():
        kernels = bundled(mlp, x, weight)
        calls = {name: functools.partial(call, x, weight) for name, call in kernels.items()}
        picked = picks(calls, functools.partial(stock, x, weight))
        samples = {
            name: timer.prepare([functools.partial(call, *one) for one in sets], launches=APART)
            for name, call in kernels.items()
        }
        lasting = under_lasting_load(samples)
    return {"picked": picked, "lasting": {name: one.to_json() for name, one in lasting.items()}}


def losses(entry: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns each way's picks as times over the fastest."""
    times = {name: Summary.from_json(one).report_ns for name, one in entry["lasting"].items()}
    best = min(times.values())
    return {way: [times[name] / best for name in names] for way, names in entry["picked"].items()}


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row for each size, and one for all."""
    found = {key: losses(entry) for key, entry in entries.items()}
    names = list(dict.fromkeys(way for row in found.values() for way in row))
    yield f"{'times as long':<28} " + " ".join(f"{name:>13}" for name in names)
    for key, row in found.items():
        yield f"{key:<28} " + _cells(row, names)
    every = {name: [one for row in found.values() for one in row[name]] for name in names}
    yield f"{f'all {len(found)}':<28} " + _cells(every, names)
    yield "each: geometric mean (most)"


def _cells(row: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    return " ".join(f"{geomean(row[name]):.3f} ({max(row[name]):.3f})" for name in names)


@click.group()
def main() -> None:
    """Measure which kernels ways of timing pick."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's table."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@measuring_options
@click.option("--rows", multiple=True, type=int, default=ROWS, show_default=True)
def measure(path: Path, resume: bool, budget: float | None, rows: Sequence[int]) -> None:
    """Measure, keeping results in PATH, and print the table."""
    require_gpu()
    settings = {"loads_ms": list(LOADS_MS), "rounds": ROUNDS}
    results = Results.begin(
        path, what=WHAT, environment=environment(), settings=settings, resume=resume
    )
    sizes = {
        f"{name} m{m}": functools.partial(measure_size, mlp, m)
        for m in rows
        for name, mlp in MODELS.items()
    }
    try:
        left = [(key, one) for key, one in sizes.items() if key not in results.entries]
        results.fill(left, budget, lambda entry: f"{geomean(losses(entry)['60']):.3f}")
    finally:
        results.end(table)


if __name__ == "__main__":
    main()
