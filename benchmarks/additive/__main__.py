"""Compares models compiled with bundles and without.

Small models of several kinds are compiled at several batches, each by several fresh processes with
empty caches. A process compiles a model twice over the same weights and inputs: with bundles and
with the plug-in off, in either order. Then each process times both sides in alternating windows
while the others rest: calls from Python, CUDA graphs with ten calls, and the kernels of such graphs
by the profiler. Clocks, neighbours and chance affect both sides alike. Kernels decide if a model is
slower (see `kernel_time`). Processes compile side by side, but only one times choices on the GPU.

    pip install the wheel of benchmarks/additive/manifest.yaml, then:
    python -m benchmarks.additive measure additive.json            # all, which takes long
    python -m benchmarks.additive measure additive.json --budget 500 --thin 3       # some of them
    python -m benchmarks.additive measure additive.json --resume --budget 500       # continue
    python -m benchmarks.additive table additive.json

``--backends default`` autotunes nothing: kernels join by measured rankings, so the bundle must come
from `nvgemm-aot tune`. `benchmarks.repeated` tunes such a bundle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.additive.models import BATCHES, MODELS
from benchmarks.additive.pool import BACKENDS, DEFAULT, REPEATED, Case, Deadline, started
from benchmarks.additive.table import T_95, judge, table
from benchmarks.additive.worker import modes_on, work
from benchmarks.shared.bundled import environment
from benchmarks.shared.compiling import names_of, read_from_disk
from benchmarks.shared.resuming import BEGUN, Results, measuring_options

WHAT = "additive"

CASES_A_PROCESS = 2
"""Compiled cases that a process keeps until they are timed, per case that it compiles first."""


@click.group()
def main() -> None:
    """Compare models with bundles and without."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's table."""
    Results.read(path, WHAT).write_table(judged)


@main.command(hidden=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), required=True)
@click.option("--lock", type=click.Path(path_type=Path), required=True)
def worker(device: str, lock: Path) -> None:
    """Runs a worker process."""
    work(device, lock)


@main.command()
@measuring_options
@click.option(
    "--models",
    default=",".join(MODELS),
    show_default=True,
    callback=names_of(MODELS),
    help="What to compile.",
)
@click.option(
    "--batches",
    default=",".join(map(str, BATCHES)),
    show_default=True,
    callback=names_of([str(batch) for batch in BATCHES]),
    help="Of which batches, in this order.",
)
@click.option(
    "--backends",
    multiple=True,
    type=click.Choice([*BACKENDS, DEFAULT, REPEATED]),
    default=BACKENDS,
    show_default=True,
    help="What bundled kernels compete with; may be given more than once.",
)
@click.option(
    "--thin",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Of the models take one in so many at a batch, and others at the next.",
)
@click.option(
    "--draws",
    default=3,
    show_default=True,
    type=click.IntRange(min=2, max=max(T_95) + 1),
    help="Processes that compile a model, on both sides.",
)
@click.option(
    "--processes",
    default=8,
    show_default=True,
    type=click.IntRange(min=2),
    help="Processes in all; at least --draws.",
)
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=2))
@click.option("--window-ms", default=3.0, show_default=True, help="Milliseconds of a turn.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
def measure(
    path: Path,
    resume: bool,
    budget: float | None,
    models: Sequence[str],
    batches: Sequence[str],
    backends: Sequence[str],
    thin: int,
    draws: int,
    processes: int,
    rounds: int,
    window_ms: float,
    device: str,
) -> None:
    """Measure, keeping results in PATH, and print the table."""
    found = environment()
    if not found["bundles"]:
        raise click.ClickException(
            "no usable bundle was found: install a kernel wheel, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        )
    settings = {"draws": draws, "processes": processes, "device": device}
    results = Results.begin(
        path,
        what=WHAT,
        environment=found,
        settings={**settings, "rounds": rounds, "window_ms": window_ms},
        resume=resume,
    )
    read_from_disk()
    deadline = Deadline(
        at_s=None if budget is None else BEGUN + budget,
        timing_s=draws * len(modes_on(device)) * _timing_s(rounds, window_ms),
    )
    at_once = CASES_A_PROCESS * max(draws, processes)
    left, failures = 0, []
    try:
        for over in backends:
            cases = [
                case
                for case in thinned(over, models, list(map(int, batches)), thin)
                if case.key not in results.entries
            ]
            left += len(cases)
            if not cases:
                continue
            with started(over, processes, draws, device) as pool:
                for some in (cases[at : at + at_once] for at in range(0, len(cases), at_once)):
                    compiled = pool.compile(some, deadline)
                    for number, case in enumerate(some):
                        begin = time.monotonic()
                        reports = compiled.get(case)
                        entry = reports and pool.time(number, case, reports, rounds, window_ms)
                        deadline.note_timed(case, time.monotonic() - begin)
                        if entry:
                            results.add(case.key, entry)
                            left -= 1
                    pool.forget()
                failures += pool.failures
    finally:
        results.end(judged)
    if left:
        click.echo(f"{left} cases are left; --resume goes on with them")
    if failures:
        raise click.ClickException("\n".join(failures))


def _timing_s(rounds: int, window_ms: float) -> float:
    """Estimates seconds that a process needs to time both sides in one mode."""
    return 2 * rounds * 1.5 * window_ms / 1e3 + 0.2


def thinned(backends: str, models: Sequence[str], batches: Sequence[int], thin: int) -> list[Case]:
    """Picks every so many-th model at each batch, and different ones at the next batch."""
    return [
        Case(backends=backends, model=model, batch=batch)
        for number, batch in enumerate(batches)
        for model in models[number % thin :: thin]
    ]


def judged(entries: dict[str, Any]) -> list[str]:
    """Returns the table's lines."""
    cases = list(entries.values())
    judge(cases)
    return table(cases)


if __name__ == "__main__":
    main()
