"""Which way of timing finds the gated kernel that is fastest under lasting load?

Autotuning times kernels for some milliseconds, on a GPU that was idle while torch compiled. For the
products of benchmarks.gated, after a pause, bundled kernels are timed

- alone: each by itself, as `nvgemm_runtime.inductor.gpu_times` times short calls;
- 0, 30, 60, 150: in turns with ATen's product of the same operands, after so many milliseconds of
  load.

The table says how many times as long as the fastest the kernel takes that was the fastest in each
way. What they take is measured as benchmarks.gated does: in CUDA graphs, over operands that come
from memory, for as long as all rounds take.

    export NVGEMM_AOT_BUNDLES=gated-mlps-….nvgemm
    python -m benchmarks.gated.choice_timing
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from benchmarks.gated.__main__ import MODELS, Mlp, bundled, operand_sets
from benchmarks.shared.bundled import environment
from benchmarks.shared.records import require_gpu
from benchmarks.shared.summaries import geomean
from nvgemm_aot.tuning.gpu import GpuTimer
from nvgemm_runtime.bundle.format import APART
from nvgemm_runtime.inductor import gpu_times

if TYPE_CHECKING:
    import torch

ROWS = (512, 1024, 4096, 8192)

LOADS_MS = (0.0, 30.0, 60.0, 150.0)

PAUSE_S = 0.5

TIMES = 3
"""How often each way times all kernels."""

ROUNDS = 8
"""Of what kernels take under lasting load."""

Calls = Mapping[str, Callable[[], object]]


def ways(other: Callable[[], object]) -> dict[str, Callable[[Calls], dict[str, float]]]:
    """By name, what times calls: shares of the time of another, or milliseconds.

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


def measure(mlp: Mlp, m: int) -> dict[str, list[float]]:
    """By way, how many times as long as the fastest each kernel takes that it chose."""
    import torch

    sets = operand_sets(mlp, m)
    x, weight = sets[0]
    kernels = bundled(mlp, x, weight)
    product = torch.empty(m, 2 * mlp.half, dtype=x.dtype, device=x.device)
    lasting_ns = _under_lasting_load(kernels, sets)
    best_ns = min(lasting_ns.values())
    calls = {name: functools.partial(call, x, weight) for name, call in kernels.items()}
    losses: dict[str, list[float]] = {}
    for way, timed in ways(lambda: torch.mm(x, weight.t(), out=product)).items():
        for _ in range(TIMES):
            torch.cuda.synchronize()
            time.sleep(PAUSE_S)
            found = timed(calls)
            losses.setdefault(way, []).append(
                lasting_ns[min(found, key=found.__getitem__)] / best_ns
            )
    return losses


def _under_lasting_load(
    kernels: Mapping[str, Callable[..., object]], sets: Sequence[tuple[torch.Tensor, ...]]
) -> dict[str, float]:
    """Nanoseconds of each kernel, medians over rounds."""
    timer = GpuTimer()
    samples = {
        name: timer.prepare([functools.partial(call, *one) for one in sets], launches=APART)
        for name, call in kernels.items()
    }
    times: dict[str, list[float]] = {name: [] for name in samples}
    for _ in range(ROUNDS):
        for name, sample in samples.items():
            times[name].append(sample())
    return {name: statistics.median(found) for name, found in times.items()}


def table(found: Mapping[tuple[str, int], Mapping[str, Sequence[float]]]) -> Iterator[str]:
    """A row a size, and all together."""
    names = list(dict.fromkeys(way for losses in found.values() for way in losses))
    yield f"{'times as long':<20} {'m':>5} " + " ".join(f"{name:>13}" for name in names)
    every: dict[str, list[float]] = {name: [] for name in names}
    for (model, m), losses in found.items():
        for name, values in losses.items():
            every[name].extend(values)
        yield f"{model:<20} {m:>5} " + _cells(losses, names)
    yield f"{'all':<20} {len(found):>5} " + _cells(every, names)
    yield "each: geometric mean (most)"


def _cells(losses: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    return " ".join(f"{geomean(losses[one]):.3f} ({max(losses[one]):.3f})" for one in names)


@click.command()
@click.option("--rows", multiple=True, type=int, default=ROWS, show_default=True)
def main(rows: Sequence[int]) -> None:
    """Measure and print a table."""
    import torch

    require_gpu()
    described = environment()
    click.echo(
        f"{described['gpu']}, torch {described['torch']}, nvgemm-aot {described['nvgemm-aot']}"
    )
    with torch.no_grad():
        found = {(name, m): measure(mlp, m) for m in rows for name, mlp in MODELS.items()}
    for line in table(found):
        click.echo(line)


if __name__ == "__main__":
    main()
