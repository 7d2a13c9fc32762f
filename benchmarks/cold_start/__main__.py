"""Measures torch.compile's cold start with kernel wheels, on a GPU.

    python -m benchmarks.cold_start [--modes aten,aten+bundle] [--choices 1,2,4] [--json out.json]
    python -m benchmarks.cold_start --estimated E.nvgemm --measured M.nvgemm --jit --json out.json
    python -m benchmarks.cold_start --batches 64 …           # ten GEMMs alone
    python -m benchmarks.cold_start --show out.json          # anywhere

Each measurement is a fresh process with empty caches that compiles the same bf16 model, a decoder
layer of Llama-3.1-8B with part of the head, as a server does: for 4 sequences of 512 tokens to
prefill with some that decode, and then for each further number of ``--batches`` that decode. That
is ten distinct GEMMs, and four more for each further number, all declared in
benchmarks/cold_start/manifest.yaml. Modes take turns, ``--repeat`` times.

- import: of ``import torch``, with the plug-in where it is on.
- first result: from before ``torch.compile`` until there is a result of every batch; the model and
  its inputs are on the GPU already.
- call: of the compiled model without CUDA graphs, once for every batch, over windows of calls.
- graph: of the same calls as replays of one CUDA graph.
- plug-in: what it spent by its own clock, in matching, in timing and loading kernels, and in
  waiting for a compiler.
- seen on the stack: how long nvgemm-aot, what it imports and what it calls were on the main
  thread's stack before the first result, by a look every few ms (benchmarks.shared.stacks).

Every result is checked against eager fp32. The modes:

- default: without autotuning.
- default+measured: the same with the plug-in on and the bundles of --measured, of whose rankings
  those count that two GPUs confirm.
- aten, aten+triton: autotuning over these backends, the plug-in off.
- aten+bundle: the plug-in on, with the installed bundles, or those of --estimated.
- aten+measured: with the bundles of --measured, whose rankings `nvgemm-aot tune` has measured, and
  NVGEMM_AOT_TRUST_RANKING=1.
- jit: with no bundle and an empty cache, so that as many kernels as aten+bundle is offered are
  compiled meanwhile; where the builder is installed, and no kernel wheel is.
- kept: another process, with the kernels that jit compiled, and nothing else of its caches.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.cases import write_cases
from benchmarks.cold_start.modes import (
    BACKENDS,
    Variant,
    check_named,
    left_of,
    refuse_other_kernels,
    refuse_other_machine,
    refuse_other_work,
    turns,
    variants,
)
from benchmarks.cold_start.table import BUNDLE_MODE, JIT_MODE, table
from benchmarks.cold_start.worker import work
from benchmarks.shared.compiling import (
    Worker,
    fresh_environment,
    names_of,
    numbers,
    read_from_disk,
)
from benchmarks.shared.records import as_written, check_output, read_record, require_gpu, write
from benchmarks.shared.resuming import command_line, in_time, this_run, today

WHAT = "cold_start"

MAX_BATCHES = 8
"""Most sizes for which torch compiles one function: ``torch._dynamo.config.recompile_limit``."""


def measure(variant: Variant, device: str, batches: tuple[int, ...], kept: Path) -> dict[str, Any]:
    """Takes one measurement in its own process."""
    if variant.mode == JIT_MODE:
        shutil.rmtree(kept, ignore_errors=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        environment = fresh_environment(directory, **variant.variables(kept))
        arguments = ["--worker", variant.mode, "--device", device, "--directory", name]
        arguments += ["--batches", ",".join(map(str, batches))]
        with Worker("benchmarks.cold_start", arguments, directory, environment) as worker:
            run: dict[str, Any] = worker.answer()
    refuse_other_kernels(variant, run)
    return {**run, "label": variant.label, "choices": variant.choices}


def batch_sizes(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    found = numbers(context, option, value)
    if len(found) > MAX_BATCHES:
        raise click.BadParameter(f"must be at most {MAX_BATCHES} (got {len(found)})")
    return found


def read(path: Path) -> dict[str, Any]:
    """Reads a result file; see `read_record`."""
    return read_record(path, WHAT, {"commands": list, "batches": list, "runs": list})


def begin(path: Path | None, batches: tuple[int, ...], *, resume: bool) -> dict[str, Any]:
    """Returns a new record, or an existing file's record to continue."""
    record: dict[str, Any] = {
        "what": WHAT,
        "commands": [],
        "batches": list(batches),
        "runs": [],
    }
    if path is not None:
        check_output(path, resume=resume)
        if path.exists():
            record = read(path)
            if record["batches"] != list(batches):
                raise click.ClickException(
                    f"{path} is of batches {record['batches']}, and here they are {list(batches)}; "
                    "measure into another file"
                )
    return record


def fill(
    record: dict[str, Any],
    order: list[Variant],
    budget: float | None,
    path: Path | None,
    measure_one: Callable[[Variant], dict[str, Any]],
) -> list[str]:
    """Measures in this order while there is time and saves each run; returns labels that failed."""
    failed: list[str] = []
    before = len(record["runs"])
    for number, variant in in_time(order, budget, kind=lambda variant: variant.mode):
        if variant.label in failed:
            continue
        try:
            run = measure_one(variant)
            refuse_other_work(record["runs"], run)
        except click.ClickException as error:
            click.echo(f"{variant.label} FAILED: {error.message}", err=True)
            failed.append(variant.label)
            continue
        if record["runs"]:
            refuse_other_machine(record["runs"][0], run)
        if len(record["runs"]) == before:
            record["commands"].append({"command": command_line(), "date": today()})
        record["runs"].append(run)
        click.echo(
            f"{number + 1}/{len(order)} {variant.label}: first result "
            f"{run['first_result_s']:.2f} s, call {statistics.median(run['call_us']):.1f} us, "
            f"{run['count']['nvgemm']} of {sum(run['count'].values())} GEMMs bundled",
            err=True,
        )
        if path is not None:  # saves progress in case time runs out
            write(path, f"{json.dumps(record, indent=1)}\n")
    return failed


@click.command()
@click.option(
    "--modes",
    "modes_",
    default=",".join(BACKENDS),
    show_default=True,
    callback=names_of(BACKENDS),
    help="What to measure.",
)
@click.option(
    "--choices",
    callback=numbers,
    help=f"Values of NVGEMM_AOT_MAX_CHOICES for {BUNDLE_MODE}, e.g. 1,2,4.",
)
@click.option(
    "--batches",
    default="64,1,4,16,256,1024",
    show_default=True,
    callback=batch_sizes,
    help="Sequences to decode; the model is compiled for each.",
)
@click.option("--estimated", help="Bundles for aten+bundle, as in NVGEMM_AOT_BUNDLES.")
@click.option("--measured", help="Bundles with measured rankings, for aten+measured.")
@click.option("--jit", is_flag=True, help="Measure jit, too, where the builder is installed.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--once",
    default="aten+triton,jit",
    show_default=True,
    callback=names_of(BACKENDS),
    help="Modes that take long, to be measured in the first turn alone.",
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
@click.option("--worker", type=click.Choice(list(BACKENDS)), hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), hidden=True)
def main(
    modes_: tuple[str, ...],
    choices: tuple[int, ...],
    batches: tuple[int, ...],
    estimated: str | None,
    measured: str | None,
    jit: bool,
    repeat: int,
    once: tuple[str, ...],
    budget: float | None,
    json_path: Path | None,
    resume: bool,
    show: Path | None,
    device: str,
    worker: str | None,
    directory: Path | None,
) -> None:
    """Measure and print a table."""
    if worker is not None:
        assert directory is not None
        work(worker, device, directory, batches)
        return
    if show is not None:
        with as_written(show):
            click.echo("\n".join(table(read(show))))
        return
    if resume and json_path is None:
        raise click.UsageError("--resume goes on with the file of --json; name one")
    check_named(estimated, "--estimated")
    check_named(measured, "--measured")
    found = variants(modes_, choices, estimated, measured, jit)
    if not found:
        raise click.UsageError("there is nothing to measure")
    if device == "cuda":
        require_gpu()
    record = begin(json_path, batches, resume=resume)
    order = left_of(turns(found, repeat, once), (run["label"] for run in record["runs"]))
    read_from_disk()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        kept = Path(name) / "kernels"
        failed = fill(
            record, order, budget, json_path, lambda one: measure(one, device, batches, kept)
        )
    if record["runs"]:
        text = "\n".join(table(record))
        if json_path is not None:
            write(json_path.with_suffix(".txt"), f"{text}\n")
            write_cases(json_path, WHAT, record, record["runs"][0]["versions"], **this_run())
        click.echo(text)
    if failed:
        raise click.ClickException(f"{', '.join(failed)} FAILED, for the reasons above")


if __name__ == "__main__":
    main()
