"""Measures a whole model in a serving engine, stock and with a kernel wheel, on a GPU.

    python -m benchmarks.serving --json serving.json                        # Llama-3.1-8B in vLLM
    python -m benchmarks.serving --json serving.json --resume --budget 560  # goes on with it
    python -m benchmarks.serving --model qwen3-8b --json qwen3.json
    python -m benchmarks.serving --engine transformers --layers 6 --json transformers.json
    python -m benchmarks.serving --show serving.json                        # anywhere

The engine and the model's kernel wheel must be installed, with torch 2.11 for shipped rankings.
Weights are random, so nothing is downloaded. Processes take turns, with NVGEMM_AOT=off and auto:
off, auto, auto, off, off, auto. Of each mode's processes the first and third start with empty
caches, the second with those of the first. One process measures everything of its mode:

- start: import of torch, start of the engine, and first request.
- memory: GPU memory in use after it; the cache of keys and values has the same size in both modes.
- rate: tokens a second, by the clock. Decode is the time of --tokens and one tokens less that of
  the first; prefill is one prompt with its first token.
- kernels: time of a step, or prefill, in which a kernel ran, by the profiler. Replays of CUDA
  graphs vary by a third between processes, so kernels decide if a size is slower.
- served: share of the GEMMs' kernel time that bundled kernels take over.
- log probabilities: difference of the first tokens' from those of the same weights in fp32.
- digests: of the GEMM choices in generated code, of Inductor's choices for its own reductions, and
  of all tokens generated. Equal digests in all processes of a mode mean equal choices.

vLLM runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) with nothing configured but the model,
the longest sequence, the most sequences and the cache's bytes. transformers runs `generate` with a
static cache, which compiles decode alone.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.cases import write_cases
from benchmarks.cold_start.modes import refuse_other, refuse_other_machine
from benchmarks.serving.engines import ENGINES, environment
from benchmarks.serving.table import Start, table
from benchmarks.serving.turns import Caches, Process, left_of, turns
from benchmarks.serving.worker import work
from benchmarks.serving.workload import MODELS, Workload
from benchmarks.shared.compiling import Worker, fresh_environment, numbers, read_from_disk
from benchmarks.shared.records import as_written, check_output, read_record, require_gpu, write
from benchmarks.shared.resuming import command_line, in_time, this_run, today
from nvgemm_runtime.settings import Mode

WHAT = "serving"

NO_BUNDLE = (
    "no usable bundle was found: install the model's kernel wheel, or name bundles in "
    "NVGEMM_AOT_BUNDLES"
)
"""Error of mode auto without kernels."""

Measure = Callable[[Process], dict[str, Any]]


def measure(process: Process, workload: Workload, caches: Caches) -> dict[str, Any]:
    """Measures one process."""
    directory = caches.of(process)
    variables = {
        **environment(directory, workload),
        "NVGEMM_AOT": process.mode.value,
        "NVGEMM_AOT_JIT_CANDIDATES": "0",
    }
    arguments = ["--worker", json.dumps(workload.to_json()), "--directory", str(directory)]
    with Worker(
        "benchmarks.serving", arguments, directory, fresh_environment(directory, **variables)
    ) as worker:
        run: dict[str, Any] = worker.answer()
    return {"mode": process.mode.value, "start": process.start.value, **run}


def require_bundles() -> None:
    """Checks that there is a bundle; whether the GPU can use it is known from the first run."""
    import nvgemm_runtime

    if not nvgemm_runtime.bundles():
        raise click.ClickException(NO_BUNDLE)


def refuse_unusable(runs: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Raises if a run had no bundle, or other versions or bundles than earlier runs."""
    if run["mode"] == Mode.AUTO.value and not run["versions"]["bundles"]:
        raise click.ClickException(NO_BUNDLE)
    for earlier in runs:
        refuse_other_machine(earlier, run)
        refuse_other("engine", earlier["versions"]["engine"], run["versions"]["engine"])
        if earlier["mode"] == run["mode"]:
            refuse_other("bundles", earlier["versions"]["bundles"], run["versions"]["bundles"])


def read(path: Path) -> dict[str, Any]:
    """Reads a result file; see `read_record`."""
    return read_record(path, WHAT, {"commands": list, "workload": dict, "runs": list})


def begin(path: Path | None, workload: Workload, *, resume: bool) -> dict[str, Any]:
    """Returns a new record, or an existing file's record to continue."""
    if path is not None:
        check_output(path, resume=resume)
        if path.exists():
            record = read(path)
            for name, value in workload.to_json().items():
                if record["workload"].get(name) != value:
                    raise click.ClickException(
                        f"{path} has {name} {record['workload'].get(name)}, and here it is "
                        f"{value}; measure into another file"
                    )
            return record
    return {"what": WHAT, "commands": [], "workload": workload.to_json(), "runs": []}


def done(record: dict[str, Any]) -> list[Process]:
    """Returns the processes that a record has."""
    return [Process(mode=Mode(run["mode"]), start=Start(run["start"])) for run in record["runs"]]


def fill(
    record: dict[str, Any],
    order: list[Process],
    budget: float | None,
    path: Path | None,
    measure_one: Measure,
) -> list[str]:
    """Measures in this order while there is time and saves each; returns modes that failed."""
    failed: list[Mode] = []
    before = len(record["runs"])
    for number, process in in_time(order, budget):
        if process.mode in failed:
            continue
        try:
            run = measure_one(process)
            refuse_unusable(record["runs"], run)
        except click.ClickException as error:
            click.echo(f"{process.label} FAILED: {error.message}", err=True)
            failed.append(process.mode)
            continue
        if len(record["runs"]) == before:
            record["commands"].append({"command": command_line(), "date": today()})
        record["runs"].append(run)
        click.echo(f"{number + 1}/{len(order)} {process.label}: {progress(run)}", err=True)
        if path is not None:  # saves progress in case time runs out
            save(path, record)
    return [mode.value for mode in failed]


def progress(run: dict[str, Any]) -> str:
    """Returns a run in one line."""
    rates = ", ".join(
        f"{size}: {statistics.median(row['rates']):,.0f}" for size, row in run["decode"].items()
    )
    return (
        f"start {run['seconds']['start']:.1f} s, {run['count']['nvgemm']} of "
        f"{sum(run['count'].values())} GEMM calls bundled, tokens/s by batch {rates}"
    )


def save(path: Path, record: dict[str, Any]) -> None:
    """Writes a file, its table and its records."""
    write(path, f"{json.dumps(record, indent=1)}\n")
    text = "\n".join(table(record))
    write(path.with_suffix(".txt"), f"{text}\n")
    write_cases(path, WHAT, record, record["runs"][0]["versions"], **this_run())


@click.command()
@click.option("--engine", type=click.Choice(list(ENGINES)), default="vllm", show_default=True)
@click.option("--model", type=click.Choice(list(MODELS)), default="llama-3.1-8b", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), help="Fewer layers than the model has.")
@click.option(
    "--batches",
    default="1,8,16,32,64,128,256",
    show_default=True,
    callback=numbers,
    help="Sequences that decode.",
)
@click.option(
    "--prefills",
    default="512,2048,8192",
    show_default=True,
    callback=numbers,
    help="Tokens of prompts to prefill.",
)
@click.option(
    "--tokens",
    default=128,
    show_default=True,
    type=click.IntRange(min=8),
    help="Tokens that each sequence decodes.",
)
@click.option(
    "--timings",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Timings of each size in a process.",
)
@click.option(
    "--repeat",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Processes of each mode.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Set TORCHINDUCTOR_DETERMINISTIC, so that Inductor times no reductions.",
)
@click.option(
    "--fuse", is_flag=True, help="Set NVGEMM_AOT_FUSE, so that gated products may be fused."
)
@click.option("--budget", type=click.FloatRange(min=1), help="Seconds after which to stop.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
@click.option("--resume", is_flag=True, help="Go on with the file of --json.")
@click.option(
    "--show",
    type=click.Path(path_type=Path, exists=True),
    help="Measure nothing; print the table of this file.",
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
@click.option("--worker", hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), hidden=True)
def main(
    engine: str,
    model: str,
    layers: int | None,
    batches: tuple[int, ...],
    prefills: tuple[int, ...],
    tokens: int,
    timings: int,
    repeat: int,
    deterministic: bool,
    fuse: bool,
    budget: float | None,
    json_path: Path | None,
    resume: bool,
    show: Path | None,
    device: str,
    worker: str | None,
    directory: Path | None,
) -> None:
    """Serve a model stock and with a kernel wheel, in processes that take turns.

    Prints a table: tokens a second, kernels' time, GEMM time served, start, memory, differences
    from fp32, and digests of choices. A table (.txt) and records (.jsonl) go beside --json.
    """
    if worker is not None:
        assert directory is not None
        work(Workload.from_json(json.loads(worker)), directory)
        return
    if show is not None:
        with as_written(show):
            click.echo("\n".join(table(read(show))))
        return
    if resume and json_path is None:
        raise click.UsageError("--resume goes on with the file of --json; name one")
    workload = Workload(
        engine=engine,
        model=model,
        layers=layers or MODELS[model].layers,
        batches=batches,
        prefills=prefills,
        tokens=tokens,
        repeats=timings,
        is_deterministic=deterministic,
        is_fusing=fuse,
    )
    if workload.longest > MODELS[model].positions:
        raise click.UsageError(
            f"--prefills and --tokens need {workload.longest} positions; {model} has "
            f"{MODELS[model].positions}"
        )
    ENGINES[engine].require_installed()
    if device == "cuda":
        require_gpu()
        require_bundles()
    record = begin(json_path, workload, resume=resume)
    order = left_of(turns(repeat), done(record))
    if order:
        read_from_disk(ENGINES[engine].modules)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        caches = Caches(Path(name))
        failed = fill(record, order, budget, json_path, lambda one: measure(one, workload, caches))
    if record["runs"]:
        click.echo("\n".join(table(record)))
    left = len(left_of(turns(repeat), done(record)))
    if left and not failed:
        click.echo(f"{left} processes are left; --resume goes on with them", err=True)
    if failed:
        raise click.ClickException(f"{', '.join(failed)} FAILED, for the reasons above")


if __name__ == "__main__":
    main()
