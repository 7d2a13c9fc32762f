"""Whether bundled kernels ever make a compiled model slower, on a GPU, from kernel wheels.

    nvgemm-aot build benchmarks/additive.yaml -o dist --wheel  # anywhere; install the wheel
    python benchmarks/additive.py [--models gated_mlp,attention] [--json out.json]

An extern kernel cannot absorb an epilogue as a Triton template can, so a choice that wins alone
could lose the fusion that was worth more. Each small bf16 model is compiled with max-autotune over
ATen and Triton in fresh processes with empty caches, several with bundles and as many without
(NVGEMM_AOT=off): autotuning picks other kernels at every draw, for softmaxes too, which moves a
model by a few per cent. All stay alive and take turns, a window of calls each, so that clocks and
drift hit them equally; idle ones have no work on the GPU.

- cold: seconds from before ``torch.compile`` until the first result is there, median over draws.
- call: microseconds a call: the median over windows of each process, fastest to slowest.
- ratio: geometric mean over the processes with bundles, over that of those without.
- noise: how much of that ratio drawing anew explains, one-sided at 95 %, by Student's t from the
  spread between processes of a side.

A model is slower if its ratio is over 1.01 by more than noise. Every result is checked against
eager fp32.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
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

SIDES: dict[str, str | None] = {"with": None, "without": "off"}
"""What is compared, and NVGEMM_AOT in each."""

ALLOWED = 0.01
"""A model may be slower by this share, beyond noise."""

T_95 = {2: 2.920, 4: 2.132, 6: 1.943, 8: 1.860}
"""Student's t at 95 %, one-sided, by degrees of freedom; from any table of it."""

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


def compare(
    name: str, mode: str, device: str, draws: int, rounds: int, window_ms: float
) -> dict[str, Any]:
    """Compile a model in all processes, one behind the other, and let them take turns."""
    with contextlib.ExitStack() as stack:
        workers: dict[str, list[Worker]] = {side: [] for side in SIDES}
        reports: dict[str, list[Any]] = {side: [] for side in SIDES}
        for draw in range(draws):
            for side in list(SIDES) if draw % 2 else list(reversed(SIDES)):
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
                workers[side].append(stack.enter_context(worker))
                reports[side].append(worker.answer())
        calls = {"calls": 10}
        calls["calls"] = max(3, round(window_ms * 1e3 / workers["without"][0].ask(calls)))
        times: dict[str, list[list[float]]] = {side: [[] for _ in range(draws)] for side in SIDES}
        turns = [(side, draw) for draw in range(draws) for side in SIDES]
        for number in range(rounds):
            for side, draw in turns if number % 2 else reversed(turns):
                times[side][draw].append(workers[side][draw].ask(calls))
    if not reports["with"][0]["versions"]["bundles"]:
        raise click.ClickException(
            "no usable bundle was found: install a kernel wheel, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        )
    medians = {side: [statistics.median(one) for one in times[side]] for side in SIDES}
    return {
        "model": name,
        **calls,
        "times_us": times,
        "medians_us": medians,
        "reports": reports,
        **judge(medians),
    }


def judge(medians_us: dict[str, list[float]]) -> dict[str, Any]:
    """Ratio and noise of a model's times by process, and whether it is slower."""
    logs = {side: [math.log(time) for time in medians_us[side]] for side in SIDES}
    draws = len(logs["with"])
    ratio = math.exp(statistics.fmean(logs["with"]) - statistics.fmean(logs["without"]))
    variance = statistics.fmean(statistics.variance(logs[side]) for side in SIDES)
    noise = T_95[2 * draws - 2] * math.sqrt(2 * variance / draws)
    return {"ratio": ratio, "noise": noise, "slower": ratio > 1 + ALLOWED + noise}


def row(compared: dict[str, Any]) -> str:
    reports, medians = compared["reports"], compared["medians_us"]

    def counts(side: str) -> str:
        count = reports[side][0]["count"]
        return "/".join(str(count[who]) for who in ("nvgemm", "aten", "triton"))

    colds = {side: statistics.median(one["cold_s"] for one in reports[side]) for side in SIDES}
    cold = " ".join(f"{colds[side]:6.1f}" for side in SIDES)
    calls = " ".join(f"{min(one):6.1f}-{max(one):<6.1f}" for one in medians.values())
    said = "SLOWER" if compared["slower"] else "no"
    return (
        f"{compared['model']:<16} {cold} {calls} {compared['ratio']:7.4f} ±{compared['noise']:.4f}"
        f" {said:>6}  {counts('with'):>7} {counts('without'):>7}"
    )


def print_table(compared: list[dict[str, Any]]) -> None:
    click.echo(
        f"{'cold, s:':<16} {'with':>6} {'w/o':>6} {'with, us':^13} {'without, us':^13} "
        f"{'ratio':>7} {'noise':>7} {'slower':>6}  {'with':>7} {'without':>7}"
    )
    for one in compared:
        click.echo(row(one))
    click.echo(
        "last columns: GEMMs that bundled kernels / ATen / Triton compute, in the first draw"
    )
    for one in compared:
        ours = Counter(
            call
            for report in one["reports"]["with"]
            for call in report["gemms"]
            if call.startswith("nvgemm")
        )
        won = ", ".join(f"{call} in {count}" for call, count in ours.items()) or "none"
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
@click.option(
    "--draws",
    default=3,
    show_default=True,
    type=click.IntRange(min=2, max=5),
    help="Processes that compile, of each side.",
)
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(min=2))
@click.option("--window-ms", default=20.0, show_default=True, help="Milliseconds of a turn.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
@click.option("--worker", type=click.Choice(list(MODELS)), hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), hidden=True)
def main(
    models: tuple[str, ...],
    mode: str,
    draws: int,
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
        compared.append(compare(name, mode, device, draws, rounds, window_ms))
        click.echo(row(compared[-1]), err=True)
        if json_path is not None:  # as far as it came, should the time run out
            json_path.write_text(json.dumps({"mode": mode, "models": compared}, indent=1) + "\n")
    found = compared[0]["reports"]["with"][0]["versions"]
    click.echo(f"{found['device']}, torch {found['torch']}, nvgemm-aot {found['nvgemm-aot']}")
    for bundle in found["bundles"]:
        click.echo(f"  {bundle}")
    print_table(compared)


if __name__ == "__main__":
    main()
