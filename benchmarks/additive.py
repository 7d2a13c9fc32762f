"""Does an installed bundle ever make a model slower?

Small models of several kinds, at several batches, are compiled with max-autotune in fresh processes
with empty caches, with bundles and with NVGEMM_AOT=off. Each is called from Python, and as a CUDA
graph of a call, as servers do. Processes of both sides take turns, so that clocks and neighbours of
the machine do to both what they do; while they compile side by side, only one of them has the GPU.

    pip install the wheel of benchmarks/additive.yaml, then:
    python benchmarks/additive.py --json additive.json
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from additive_models import BATCHES, MODELS
from additive_table import SIDES, T_95, judge, table
from additive_worker import CALLS, GRAPHS, work
from compiling import Worker, fresh_environment, names_of, read_from_disk

BACKENDS = ("ATEN", "ATEN,TRITON")
"""What bundled kernels compete with: max_autotune_gemm_backends."""


class Processes:
    """The workers of both sides, over one choice of backends."""

    def __init__(self, workers: dict[str, list[Worker]]) -> None:
        self._workers = workers

    def compare(self, name: str, batch: int, rounds: int, window_ms: float) -> dict[str, Any]:
        """Compile a model everywhere at once, then let the processes take turns."""
        every = [worker for side in SIDES for worker in self._workers[side]]
        for worker in every:
            worker.tell({"compile": [name, batch]})
        reports = {side: [one.answer() for one in self._workers[side]] for side in SIDES}
        modes = {
            mode: self._times(name, batch, mode, rounds, window_ms)
            for mode in (
                [CALLS] if reports["with"][0]["versions"]["device"] == "cpu" else [CALLS, GRAPHS]
            )
        }
        return {"model": name, "batch": batch, "modes": modes, "reports": reports}

    def _times(
        self, name: str, batch: int, mode: str, rounds: int, window_ms: float
    ) -> dict[str, Any]:
        question = {"time": [name, batch], "mode": mode, "calls": 10}
        once_us = min(self._workers["without"][0].ask(question) for _ in range(2))
        question["calls"] = max(3, round(window_ms * 1e3 / once_us))
        turns = [(side, worker) for side in SIDES for worker in range(len(self._workers[side]))]
        times: dict[str, list[list[float]]] = {
            side: [[] for _ in self._workers[side]] for side in SIDES
        }
        for number in range(rounds):
            for side, worker in turns if number % 2 else reversed(turns):
                times[side][worker].append(self._workers[side][worker].ask(question))
        # Neighbours of the machine only ever add to a time, most of all to the host's.
        least = {side: [min(one) for one in times[side]] for side in SIDES}
        return {"calls": question["calls"], "times_us": times, "least_us": least}


@contextlib.contextmanager
def started(backends: str, draws: int, device: str) -> Iterator[Processes]:
    """Start processes of both sides; Triton's compiled kernels are all that they share."""
    with contextlib.ExitStack() as stack:

        def directory() -> Path:
            path = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            return Path(stack.enter_context(path))

        shared = directory()
        workers: dict[str, list[Worker]] = {side: [] for side in SIDES}
        for _ in range(draws):
            for side, mode in SIDES.items():
                own = directory()
                environment = fresh_environment(
                    own,
                    NVGEMM_AOT=mode,
                    TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS=backends,
                    TORCHINDUCTOR_COMPILE_THREADS="4",
                    TRITON_CACHE_DIR=str(shared / "triton"),
                )
                arguments = [__file__, "--worker", "--device", device, "--directory", str(own)]
                arguments += ["--lock", str(shared / "lock")]
                workers[side].append(stack.enter_context(Worker(arguments, own, environment)))
        yield Processes(workers)


@click.command()
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
    help="Of which batches.",
)
@click.option(
    "--backends",
    multiple=True,
    type=click.Choice(BACKENDS),
    default=BACKENDS,
    show_default=True,
    help="What bundled kernels compete with; may be given more than once.",
)
@click.option(
    "--draws",
    default=3,
    show_default=True,
    type=click.IntRange(min=2, max=max(T_95) // 2 + 1),
    help="Processes that compile, of each side.",
)
@click.option("--rounds", default=11, show_default=True, type=click.IntRange(min=2))
@click.option("--window-ms", default=5.0, show_default=True, help="Milliseconds of a turn.")
@click.option(
    "--budget",
    default=3600.0,
    show_default=True,
    help="Seconds after which no further model is compiled.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
@click.option("--worker", is_flag=True, hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), hidden=True)
@click.option("--lock", type=click.Path(path_type=Path), hidden=True)
def main(
    models: tuple[str, ...],
    batches: tuple[str, ...],
    backends: tuple[str, ...],
    draws: int,
    rounds: int,
    window_ms: float,
    budget: float,
    json_path: Path | None,
    device: str,
    worker: bool,
    directory: Path | None,
    lock: Path | None,
) -> None:
    """Measure and print a table."""
    if worker:
        assert directory is not None
        assert lock is not None
        work(device, directory, lock)
        return
    read_from_disk()
    end = time.monotonic() + budget
    cases: list[dict[str, Any]] = []
    left = 0
    failure: click.ClickException | None = None
    # Batch by batch, so that little time still means every model.
    wanted = [(batch, name) for batch in map(int, batches) for name in models]
    for over in backends:
        try:
            with started(over, draws, device) as processes:
                for batch, name in wanted:
                    if time.monotonic() > end:
                        left += 1
                        continue
                    case = processes.compare(name, batch, rounds, window_ms)
                    _check_bundles(case)
                    cases.append({"backends": over, **case})
                    click.echo(f"{over} {name} {batch}", err=True)
                    if json_path is not None:  # as far as it came, should it be stopped
                        json_path.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
        except click.ClickException as error:  # what was measured is shown first
            failure = click.ClickException(f"{name} {batch} over {over}: {error.message}")
            break
    if failure is not None and not cases:
        raise failure
    if not cases:
        raise click.ClickException(f"--budget {budget:g} is too short to compile one model")
    judge(cases)
    if json_path is not None:
        json_path.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
    found = cases[0]["reports"]["with"][0]["versions"]
    click.echo(f"{found['device']}, torch {found['torch']}, nvgemm-aot {found['nvgemm-aot']}")
    for bundle in found["bundles"]:
        click.echo(f"  {bundle}")
    for line in table(cases):
        click.echo(line)
    if left:
        click.echo(f"{left} models and batches were left out: the budget of {budget:g} s was spent")
    if failure is not None:
        raise failure


def _check_bundles(case: dict[str, Any]) -> None:
    if not case["reports"]["with"][0]["versions"]["bundles"]:
        raise click.ClickException(
            "no usable bundle was found: install a kernel wheel, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        )


if __name__ == "__main__":
    main()
