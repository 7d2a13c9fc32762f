"""Whether bundled kernels ever make a compiled model slower, on a GPU, from kernel wheels.

    nvgemm-aot build benchmarks/additive.yaml -o dist --wheel  # anywhere; install the wheel
    python benchmarks/additive.py [--models gated_mlp,attention] [--json out.json]

An extern kernel cannot absorb an epilogue as a Triton template can, so a choice that wins alone
could lose the fusion that was worth more. Each small bf16 model is compiled with max-autotune over
ATen and Triton in three fresh processes with empty caches: with bundles, without (NVGEMM_AOT=off),
and without again. All three stay alive and take turns, a window of calls each, so that clocks and
drift hit them equally; idle ones have no work on the GPU.

- cold: seconds from before ``torch.compile`` until the first result is there.
- call: microseconds a call, median over windows, and half their interquartile range.
- ratio: with over without in the same round, median over rounds.
- noise: without again over without, in the same way, for each sixth of the rounds: the medians
  furthest down and up. Both chose for themselves, so this holds what choosing anew changes.

A model is slower if its ratio is over 1.01 by more than noise is off 1. Every result is checked
against eager fp32.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from additive_models import MODELS, build
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

if TYPE_CHECKING:
    import torch

SIDES: dict[str, str | None] = {"with": None, "without": "off", "again": "off"}
"""Processes of a model, and NVGEMM_AOT in each."""

ALLOWED = 0.01
"""A model may be slower by this share, beyond noise."""

GROUPS = 6
"""Parts of the rounds that noise is told from."""

Results = list["torch.Tensor"]


def run(model: Any, module: torch.nn.Module, inputs: Results, training: bool) -> Results:
    """One call: the results, or in training also the gradients of everything."""
    import torch

    if not training:
        with torch.no_grad():
            result = model(*inputs)
        return [result]
    inputs = [one.detach().requires_grad_() for one in inputs]
    result = model(*inputs)
    leaves = [*inputs, *module.parameters()]
    # Half the squared norm is the loss: its gradient is there already.
    return [result.detach(), *torch.autograd.grad(result, leaves, result.detach())]


def time_us(call: Callable[[], object], calls: int, device: str) -> float:
    """Microseconds a call, of so many in a row, behind a warm-up of half as many."""
    import torch

    for _ in range(calls // 2 + 1):
        call()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls * 1e3


def work(name: str, mode: str, device: str, directory: Path) -> None:
    """Compile a model in this process, then measure as often as asked."""
    send = answering()
    import torch

    module, inputs = build(name, device)
    training = MODELS[name].training
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    compiled = torch.compile(module, mode=mode)
    results = [one.clone() for one in run(compiled, module, inputs, training)]
    if device == "cuda":
        torch.cuda.synchronize()
    cold_s = time.perf_counter() - begin
    for _ in range(3):  # under CUDA graphs: the recording, and replays
        run(compiled, module, inputs, training)
    last = [one.clone() for one in run(compiled, module, inputs, training)]
    eager = run(module, module, inputs, training)
    calls = generated_gemms(directory)
    exact_module, exact_inputs = build(name, device, exact=True)
    exact = run(exact_module, exact_module, exact_inputs, training)
    check_results(last, eager, exact)
    send(
        {
            "cold_s": cold_s,
            "gemms": calls,
            "count": count_gemms(calls),
            "error": check_results(results, eager, exact),
            "versions": versions(),
        }
    )
    del exact_module, exact, eager, results, last
    for line in sys.stdin:
        windows = json.loads(line)["calls"]
        send(time_us(lambda: run(compiled, module, inputs, training), windows, device))


def compare(name: str, mode: str, device: str, rounds: int, window_ms: float) -> dict[str, Any]:
    """Compile a model in three processes, one behind the other, and let them take turns."""
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        reports: dict[str, Any] = {}
        turn = list(MODELS).index(name) % len(SIDES)
        for side in [*SIDES, *SIDES][turn : turn + len(SIDES)]:  # none is always the first
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            )
            environment = fresh_environment(
                directory,
                NVGEMM_AOT=SIDES[side],
                TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS="ATEN,TRITON",
            )
            arguments = [__file__, "--worker", name, "--mode", mode, "--device", device]
            worker = Worker([*arguments, "--directory", str(directory)], directory, environment)
            workers[side] = stack.enter_context(worker)
            reports[side] = worker.answer()
        calls = {"calls": 10}
        calls["calls"] = max(3, round(window_ms * 1e3 / workers["without"].ask(calls)))
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(rounds):
            order = list(SIDES) if number % 2 else list(reversed(SIDES))
            for side in order:
                times[side].append(workers[side].ask(calls))
    if not reports["with"]["versions"]["bundles"]:
        raise click.ClickException(
            "no usable bundle was found: install a kernel wheel, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        )
    return {"model": name, **calls, "times_us": times, "reports": reports, **judge(times)}


def judge(times: dict[str, list[float]]) -> dict[str, Any]:
    """Ratio and noise of a model's times, and whether it is slower."""

    def ratios(side: str) -> list[float]:
        return [own / other for own, other in zip(times[side], times["without"])]

    again = ratios("again")
    size = max(1, len(again) // GROUPS)
    groups = [statistics.median(again[at : at + size]) for at in range(0, len(again), size)]
    noise = (min(groups), max(groups))
    ratio = statistics.median(ratios("with"))
    return {
        "ratio": ratio,
        "noise": noise,
        "slower": ratio > 1 + ALLOWED + max(abs(one - 1) for one in noise),
    }


def call_cell(times: list[float]) -> str:
    lower, middle, upper = statistics.quantiles(times, n=4)
    return f"{middle:.1f} ±{(upper - lower) / 2:.1f}"


def row(compared: dict[str, Any]) -> str:
    reports, times = compared["reports"], compared["times_us"]
    low, high = compared["noise"]

    def counts(side: str) -> str:
        count = reports[side]["count"]
        return "/".join(str(count[who]) for who in ("nvgemm", "aten", "triton"))

    cold = " ".join(f"{reports[side]['cold_s']:6.1f}" for side in SIDES)
    calls = " ".join(f"{call_cell(times[side]):>15}" for side in ("with", "without"))
    said = "SLOWER" if compared["slower"] else "no"
    return (
        f"{compared['model']:<16} {cold} {calls} {compared['ratio']:7.4f} {low:7.4f}-{high:<7.4f}"
        f" {said:>6}  {counts('with'):>7} {counts('without'):>7}"
    )


def print_table(compared: list[dict[str, Any]]) -> None:
    cold = " ".join(f"{side:>6}" for side in ("with", "w/o", "again"))
    click.echo(
        f"{'cold, s:':<16} {cold} {'with, us':>15} {'without, us':>15} {'ratio':>7} "
        f"{'noise':^15} {'slower':>6}  {'with':>7} {'without':>7}"
    )
    for one in compared:
        click.echo(row(one))
    click.echo("last columns: GEMMs that bundled kernels / ATen / Triton compute")
    for one in compared:
        ours = {
            call: count
            for call, count in one["reports"]["with"]["gemms"].items()
            if call.startswith("nvgemm")
        }
        won = ", ".join(f"{count} x {call}" for call, count in ours.items()) or "none"
        click.echo(f"{one['model']}: {won}")
    slower = [one["model"] for one in compared if one["slower"]]
    click.echo(
        f"slower than {ALLOWED:.0%} beyond noise: {', '.join(slower) or 'none'} "
        f"({len(slower)} of {len(compared)})"
    )


@click.command()
@click.option(
    "--models",
    default=",".join(MODELS),
    show_default=True,
    callback=names_of(MODELS),
    help="What to compile.",
)
@click.option(
    "--mode",
    default="max-autotune",
    show_default=True,
    type=click.Choice(["max-autotune", "max-autotune-no-cudagraphs"]),
)
@click.option("--rounds", default=60, show_default=True, type=click.IntRange(min=2))
@click.option("--window-ms", default=20.0, show_default=True, help="Milliseconds of a turn.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
@click.option("--worker", type=click.Choice(list(MODELS)), hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), hidden=True)
def main(
    models: tuple[str, ...],
    mode: str,
    rounds: int,
    window_ms: float,
    json_path: Path | None,
    device: str,
    worker: str | None,
    directory: Path | None,
) -> None:
    """Measure and print a table."""
    if worker is not None:
        assert directory is not None
        work(worker, mode, device, directory)
        return
    read_from_disk()
    compared: list[dict[str, Any]] = []
    for name in models:
        compared.append(compare(name, mode, device, rounds, window_ms))
        click.echo(row(compared[-1]), err=True)
        if json_path is not None:  # as far as it came, should the time run out
            json_path.write_text(json.dumps({"mode": mode, "models": compared}, indent=1) + "\n")
    found = compared[0]["reports"]["with"]["versions"]
    click.echo(f"{found['device']}, torch {found['torch']}, nvgemm-aot {found['nvgemm-aot']}")
    for bundle in found["bundles"]:
        click.echo(f"  {bundle}")
    print_table(compared)


if __name__ == "__main__":
    main()
