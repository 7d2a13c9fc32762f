"""Does an installed bundle ever make a model slower?

Small models of several kinds, at several batches, have their GEMMs autotuned, each by several
fresh processes with empty caches. A process compiles a model twice, with bundles and with the
plug-in off, one or the other first, over the same weights and inputs. Then each process times both,
window by window in turns, while the others rest: called from Python, and in a CUDA graph of ten
calls, as servers do. So clocks, neighbours and the luck of a process do to both sides what they do.
While processes compile side by side, only one of them has the GPU.

    pip install the wheel of benchmarks/additive/manifest.yaml, then:
    python -m benchmarks.additive --json additive.json

With ``--backends default`` nothing is autotuned, and NVGEMM_AOT_DEFAULT_MODE is 1: kernels join
where two GPUs measured them to beat ATen, so the bundle must be one that `nvgemm-aot tune` made.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.additive.models import BATCHES, MODELS
from benchmarks.additive.table import SIDES, T_95, judge, table
from benchmarks.additive.worker import CALLS, GRAPHS, work
from benchmarks.shared.compiling import Worker, fresh_environment, names_of, read_from_disk

BACKENDS = ("ATEN", "ATEN,TRITON")
"""What bundled kernels compete with: max_autotune_gemm_backends."""

DEFAULT = "default"
"""In place of backends: no max-autotune."""


class Processes:
    """The workers over one choice of backends."""

    def __init__(self, workers: Sequence[Worker], draws: int) -> None:
        self._workers = workers
        self._draws = draws

    def compare(
        self, names: Sequence[str], batch: int, rounds: int, window_ms: float
    ) -> Iterator[dict[str, Any]]:
        """Compile models side by side, then time them one after the other."""
        chosen = {
            name: [
                self._workers[(number + draw) % len(self._workers)] for draw in range(self._draws)
            ]
            for number, name in enumerate(names)
        }
        # First draws come first: second ones then find Triton's kernels compiled. A worker answers
        # in the order of its questions.
        order = [(draw, name) for draw in range(self._draws) for name in names]
        for draw, name in order:
            first = list(SIDES)[draw % len(SIDES)]
            chosen[name][draw].tell({"compile": [name, batch], "first": first})
        reports: dict[str, list[Any]] = {name: [] for name in names}
        for draw, name in order:
            reports[name].append(_answered(chosen[name][draw], name, batch))
        for name, workers in chosen.items():
            on_gpu = reports[name][0]["with"]["versions"]["device"] != "cpu"
            modes = {}
            for mode in [CALLS, GRAPHS] if on_gpu else [CALLS]:
                question = {"time": [name, batch], "mode": mode}
                question.update(rounds=rounds, window_ms=window_ms)
                modes[mode] = {"times_us": [worker.ask(question) for worker in workers]}
            yield {"model": name, "batch": batch, "modes": modes, "reports": reports[name]}
        for worker in self._workers:
            worker.ask({"forget": True})


def _answered(worker: Worker, name: str, batch: int) -> Any:
    try:
        return worker.answer()
    except click.ClickException as error:
        raise click.ClickException(f"{name} {batch}: {error.message}") from None


@contextlib.contextmanager
def started(backends: str, processes: int, draws: int, device: str) -> Iterator[Processes]:
    """Start processes; Triton's compiled kernels are all that they share."""
    with contextlib.ExitStack() as stack:

        def directory() -> Path:
            path = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            return Path(stack.enter_context(path))

        shared = directory()
        workers = []
        for _ in range(processes):
            own = directory()
            environment = fresh_environment(
                own,
                TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS=None if backends == DEFAULT else backends,
                NVGEMM_AOT_DEFAULT_MODE="1" if backends == DEFAULT else None,
                TORCHINDUCTOR_COMPILE_THREADS="4",
                # Both sides are compiled, rather than one found where it equals the other.
                TORCHINDUCTOR_FX_GRAPH_CACHE="0",
                TORCHINDUCTOR_AUTOGRAD_CACHE="0",
                TRITON_CACHE_DIR=str(shared / "triton"),
            )
            arguments = ["--worker", "--device", device, "--lock", str(shared / "lock")]
            worker = Worker("benchmarks.additive", arguments, own, environment)
            workers.append(stack.enter_context(worker))
        yield Processes(workers, draws)


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
    type=click.Choice([*BACKENDS, DEFAULT]),
    default=BACKENDS,
    show_default=True,
    help="What bundled kernels compete with; may be given more than once.",
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
    default=10,
    show_default=True,
    type=click.IntRange(min=2),
    help="Processes in all; at least --draws.",
)
@click.option(
    "--thin",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Of the models take one in so many at a batch, and others at the next.",
)
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=2))
@click.option("--window-ms", default=3.0, show_default=True, help="Milliseconds of a turn.")
@click.option(
    "--budget",
    default=3600.0,
    show_default=True,
    help="Seconds after which no further batch is compiled.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
@click.option("--worker", is_flag=True, hidden=True)
@click.option("--lock", type=click.Path(path_type=Path), hidden=True)
def main(
    models: tuple[str, ...],
    batches: tuple[str, ...],
    backends: tuple[str, ...],
    draws: int,
    processes: int,
    thin: int,
    rounds: int,
    window_ms: float,
    budget: float,
    json_path: Path | None,
    device: str,
    worker: bool,
    lock: Path | None,
) -> None:
    """Measure and print a table."""
    if worker:
        assert lock is not None
        work(device, lock)
        return
    read_from_disk()
    end = time.monotonic() + budget
    cases: list[dict[str, Any]] = []
    left = 0
    failure: click.ClickException | None = None
    for over in backends:
        try:
            with started(over, max(draws, processes), draws, device) as pool:
                for number, batch in enumerate(map(int, batches)):
                    names = models[number % thin :: thin]
                    if time.monotonic() > end:
                        left += len(names)
                        continue
                    for case in pool.compare(names, batch, rounds, window_ms):
                        _check_bundles(case)
                        cases.append({"backends": over, **case})
                        click.echo(f"{over} {case['model']} {batch}", err=True)
                    if json_path is not None:  # as far as it came, should it be stopped
                        json_path.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
        except click.ClickException as error:  # what was measured is shown first
            failure = click.ClickException(f"over {over}: {error.message}")
            break
    if failure is not None and not cases:
        raise failure
    if not cases:
        raise click.ClickException(f"--budget {budget:g} is too short to compile one batch")
    judge(cases)
    if json_path is not None:
        json_path.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
    found = cases[0]["reports"][0]["with"]["versions"]
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
    if not case["reports"][0]["with"]["versions"]["bundles"]:
        raise click.ClickException(
            "no usable bundle was found: install a kernel wheel, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        )


if __name__ == "__main__":
    main()
