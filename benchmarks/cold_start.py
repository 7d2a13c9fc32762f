"""What bundled kernels cost and bring at torch.compile's cold start, on a GPU, from kernel wheels.

    python benchmarks/cold_start.py [--modes aten,aten+bundle] [--choices 1,2,4] [--json out.json]
    python benchmarks/cold_start.py --estimated E.nvgemm --measured M.nvgemm --jit --json out.json
    python benchmarks/cold_start.py --batches 64,1,4,16,256,1024 …   # as a server starts
    python benchmarks/cold_start.py --show out.json          # anywhere

Each measurement is a fresh process with empty caches that compiles the same bf16 model: a decoder
layer of Llama-3.1-8B for a prefill and a decode, with part of the head; ten distinct GEMMs, of
which the kernel wheels of manifests/quickstart.yaml and manifests/llama-3.1-8b.yaml declare eight,
and serve the other two by their signatures. Each further number of ``--batches`` compiles the layer
for a decode of so many sequences, as a server does for the batches that it has CUDA graphs of: four
more distinct GEMMs, of which the wheels declare three. Modes take turns, ``--repeat`` times.

- import: of ``import torch``, with the plug-in where it is on.
- first result: from before ``torch.compile`` until there is a result of every batch; the model and
  its inputs are on the GPU already.
- call: of the compiled model without CUDA graphs, once for every batch, over windows of calls.
- graph: of the same calls as replays of one CUDA graph.
- of us: what the plug-in spent by its own clock, in matching, in timing and loading kernels, and in
  waiting for a compiler.

Every result is checked against eager fp32. The modes:

- default: without autotuning.
- aten, aten+triton: autotuning over these backends, the plug-in off.
- aten+bundle: the plug-in on, with the installed bundles, or those of --estimated.
- aten+measured: with the bundles of --measured, whose rankings `nvgemm-aot tune` has measured, and
  NVGEMM_AOT_TRUST_RANKING=1.
- jit: with no bundle and an empty cache, so that as many kernels as aten+bundle is offered are
  compiled meanwhile; where the builder side is installed, and no kernel wheel is.
"""

from __future__ import annotations

import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from cold_start_modes import BACKENDS, Variant, refuse_other_kernels, turns, variants
from cold_start_table import BUNDLE_MODE, table
from compiling import (
    Worker,
    answering,
    check_results,
    count_gemms,
    fresh_environment,
    generated_gemms,
    names_of,
    read_from_disk,
    versions,
)
from resuming import command_line, in_time

from nvgemm_aot.storage import write_atomic

WINDOWS = 30
WINDOW_CALLS = 10

MAX_BATCHES = 8
"""As many sizes of one function torch compiles: ``torch._dynamo.config.recompile_limit``."""


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def times_us(call: Callable[[], object], device: str) -> list[float]:
    """Microseconds a call, window by window."""
    for _ in range(2 * WINDOW_CALLS):
        call()
    times = []
    for _ in range(WINDOWS):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(WINDOW_CALLS):
            call()
        synchronize(device)
        times.append((time.perf_counter() - begin) / WINDOW_CALLS * 1e6)
    return times


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """The same call as the replay of a CUDA graph; it must have been made before."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def work(mode: str, device: str, directory: Path, batches: tuple[int, ...]) -> None:
    """Measure one mode in this process."""
    send = answering()
    begin = time.perf_counter()
    import torch

    import_s = time.perf_counter() - begin
    from cold_start_model import build_model

    model, inputs = build_model(device, batches)
    synchronize(device)
    backends = BACKENDS[mode]
    options: dict[str, Any] = {}
    if backends is not None:
        options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": backends}

    def all_of(called: Callable[..., tuple[Any, ...]]) -> list[Any]:
        return [result for prefill, decode in inputs for result in called(prefill, decode)]

    with torch.no_grad():
        begin = time.perf_counter()
        compiled = torch.compile(model, dynamic=False, options=options)
        results = all_of(compiled)
        synchronize(device)
        first_s = time.perf_counter() - begin
        call_us = times_us(lambda: all_of(compiled), device)
        graph_us = []
        if device == "cuda":
            graph_us = times_us(replayed(lambda: all_of(compiled)), device)
        eager = all_of(model)
        inputs = [(None if one is None else one.float(), other.float()) for one, other in inputs]
        exact = all_of(model.float())
    calls = generated_gemms(directory)
    send(
        {
            "mode": mode,
            "import_s": import_s,
            "first_result_s": first_s,
            "call_us": call_us,
            "graph_us": graph_us,
            "gemms": calls,
            "count": count_gemms(calls),
            "error": check_results(results, eager, exact),
            "stats": plugin_stats(),
            "versions": versions(),
        }
    )


def plugin_stats() -> dict[str, Any]:
    """What the plug-in did in this process, and milliseconds by what it spent them on."""
    import nvgemm_runtime

    found = nvgemm_runtime.stats()
    return {
        "declared": found.declared,
        "signature": found.signature,
        "jit": found.jit,
        "jit_kernels": found.jit_kernels,
        "missed": found.missed,
        "milliseconds": dict(found.milliseconds),
    }


def measure(variant: Variant, device: str, batches: tuple[int, ...]) -> dict[str, Any]:
    """One measurement in a process of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        environment = fresh_environment(directory, **variant.variables())
        arguments = [__file__, "--worker", variant.mode, "--device", device, "--directory", name]
        arguments += ["--batches", ",".join(map(str, batches))]
        with Worker(arguments, directory, environment) as worker:
            run: dict[str, Any] = worker.answer()
    refuse_other_kernels(variant, run)
    return {**run, "label": variant.label, "choices": variant.choices}


def numbers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...]:
    if value is None:
        return ()
    parts = value.split(",")
    if not all(part.isdecimal() and int(part) for part in parts) or len(set(parts)) < len(parts):
        raise click.BadParameter(
            f"must be different positive numbers, with commas between (got {value!r})"
        )
    return tuple(map(int, parts))


def batch_sizes(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    found = numbers(context, option, value)
    if len(found) > MAX_BATCHES:
        raise click.BadParameter(f"must be at most {MAX_BATCHES} (got {len(found)})")
    return found


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
    default="64",
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
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
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
        click.echo("\n".join(table(json.loads(show.read_text()))))
        return
    read_from_disk()
    record: dict[str, Any] = {
        "what": "cold_start",
        "command": command_line(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "batches": batches,
        "runs": [],
    }
    found = variants(modes_, choices, estimated, measured, jit)
    if not found:
        raise click.UsageError("there is nothing to measure")
    order = turns(found, repeat, once)
    failures: dict[str, str] = {}
    for number, variant in in_time(order, budget):
        if variant.label in failures:
            continue
        try:
            run = measure(variant, device, batches)
        except click.ClickException as error:
            failures[variant.label] = f"{variant.label} FAILED: {error.message}"
            click.echo(failures[variant.label], err=True)
            continue
        record["runs"].append(run)
        click.echo(
            f"{number + 1}/{len(order)} {variant.label}: first result "
            f"{run['first_result_s']:.2f} s, call {statistics.median(run['call_us']):.1f} us, "
            f"{run['count']['nvgemm']} of {sum(run['count'].values())} GEMMs ours",
            err=True,
        )
        if json_path is not None:  # as far as it came, should the time run out
            write_atomic(json_path, f"{json.dumps(record, indent=1)}\n".encode())
    if record["runs"]:
        text = "\n".join(table(record))
        if json_path is not None:
            write_atomic(json_path.with_suffix(".txt"), f"{text}\n".encode())
        click.echo(text)
    if failures:
        raise click.ClickException("\n".join(failures.values()))


if __name__ == "__main__":
    main()
