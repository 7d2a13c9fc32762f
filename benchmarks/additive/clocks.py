"""Times a call again and again while a GPU's clocks fall.

The first call follows a pause, as while torch compiles. Each time over the first should be 1, and
so should each of two equal calls that take turns. So bundled kernels and ATen are compared in
turns, short and long calls alike (`nvgemm_runtime.inductor.autotuning.choice_timing`).

    python -m benchmarks.additive.clocks
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.record import Baseline, Case
from benchmarks.shared.bundled import environment
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import recording, records_option
from nvgemm_runtime.inductor.autotuning import gpu_times

if TYPE_CHECKING:
    import torch

SIZES = (
    (16, 4096, 4096),
    (512, 4096, 4096),
    (512, 24576, 4096),
    (1024, 24576, 4096),
    (2048, 24576, 4096),
    (4096, 24576, 4096),
    (8192, 24576, 4096),
)
"""(m, n, k) of bf16 products in an 8B model's attention and gated MLP."""

PAUSE_S = 2.0

TIMES = 12


def measure(m: int, n: int, k: int) -> tuple[list[float], list[float]]:
    """Returns milliseconds of consecutive calls, and ratios of two calls that take turns."""
    import torch

    a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def call() -> torch.Tensor:
        return torch.mm(a, b.T, out=out)

    def paused() -> range:
        call()
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        return range(TIMES)

    alone = [gpu_times.measure_ms(call) for _ in paused()]
    turns = [gpu_times.measure_in_turns_ms(call, call) for _ in paused()]
    return alone, [first / second for first, second in turns]


def table(rows: Sequence[tuple[tuple[int, int, int], list[float], list[float]]]) -> Iterator[str]:
    """Returns a line for each size."""
    yield f"{'m':>5} {'n':>6} {'k':>6} {'first, ms':>10} {'over the first':>16} {'in turns':>16}"
    for (m, n, k), alone, turns in rows:
        later = [one / alone[0] for one in alone[1:]]
        yield (
            f"{m:>5} {n:>6} {k:>6} {alone[0]:10.4f} {min(later):7.3f} to {max(later):.3f} "
            f"{min(turns):7.3f} to {max(turns):.3f}"
        )


@click.command()
@records_option
def main(records_path: Path | None) -> None:
    """Measure and print a table."""
    require_gpu()
    found = environment()
    click.echo(f"{found['gpu']}, torch {found['torch']}, nvgemm-aot {found['nvgemm-aot']}")
    rows = [(size, *measure(*size)) for size in SIZES]
    for line in table(rows):
        click.echo(line)
    with recording(records_path, "additive.clocks", found) as cases:
        for (m, n, k), alone, _ in rows:
            first = Baseline(name="first timing", value=alone[0] * 1e3)
            name = f"m{m}n{n}k{k}/longest of {TIMES} timings"
            cases.append(Case(name=name, figure=max(alone) * 1e3, unit="us", baseline=first))


if __name__ == "__main__":
    main()
