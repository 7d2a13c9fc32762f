"""Measures the first half of gated MLPs, with the gate in the product's kernel.

For four models and m from 512 on, these take turns in CUDA graphs with operands from memory:

- torch.compile without bundles under max-autotune, ATEN and TRITON: one product and the gate, and
  two products with separate gate and up weights;
- torch.compile with bundles: one product and the gate;
- each bundled kernel alone.

A small kernel that signals no dependent launch runs before each call, as in a program; its time is
subtracted. With --back-to-back there is none.

    nvgemm-aot build benchmarks/gated/manifest.yaml --wheel  # anywhere; install it on the GPU
    python -m benchmarks.gated measure gated.json
    python -m benchmarks.gated table gated.json
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.shared.bundled import environment
from benchmarks.shared.compiling import check_results
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import Results, measuring_options
from benchmarks.shared.summaries import (
    MIN_ROUNDS,
    Summary,
    chosen,
    fastest,
    geomean,
    ratio,
    summarized,
)
from benchmarks.shared.turns import compiling
from nvgemm_aot.tuning.measuring.gpu import GpuTimer, buffer_bytes
from nvgemm_runtime.bundle.ranking_entries import APART, BACK_TO_BACK
from nvgemm_runtime.gemm.epilogues import Epilogue, Gate, WeightOrder, find_gated
from nvgemm_runtime.gemm.extra_operands import ExtraOperands

if TYPE_CHECKING:
    import torch

WHAT = "gated"

ROWS = (512, 1024, 2048, 4096, 8192)

OPTIONS = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "fx_graph_cache": False,
}
"""torch.compile options, on both sides."""

STOCK = ("one product", "two products")
"""torch.compile's results without bundles."""

COMPILED = "with bundles"


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A model's gated MLP, from its published config.

    Attributes:
        hidden: k.
        half: Result columns on one rank; the product has twice as many.
    """

    hidden: int
    half: int
    epilogue: Epilogue


SWIGLU, GEGLU = (find_gated(gate, WeightOrder.HALVES) for gate in (Gate.SWIGLU, Gate.GEGLU))

MODELS = {
    "llama-3.1-8b": Mlp(hidden=4096, half=14336, epilogue=SWIGLU),
    "qwen3-8b": Mlp(hidden=4096, half=12288, epilogue=SWIGLU),
    "llama-3.3-70b, tp 8": Mlp(hidden=8192, half=3584, epilogue=SWIGLU),
    "gemma-2-9b": Mlp(hidden=3584, half=14336, epilogue=GEGLU),
}

Call = Callable[["torch.Tensor", "torch.Tensor"], Any]
"""``call(x, weight)``, with x of [m, hidden] and weight of [2 * half, hidden]."""


def one_product(epilogue: Epilogue) -> Call:
    """Builds the gated MLP with one weight."""
    activation = _activation(epilogue)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ weight.t()).chunk(2, dim=-1)
        return activation(gate) * up

    return call


def two_products(epilogue: Epilogue) -> Call:
    """Builds the gated MLP with two weights, passed separately."""
    activation = _activation(epilogue)

    def call(x: torch.Tensor, gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
        return activation(x @ gates.t()) * (x @ ups.t())

    return call


def _activation(epilogue: Epilogue) -> Callable[[torch.Tensor], torch.Tensor]:
    from torch.nn import functional

    assert epilogue.activation is not None
    row = epilogue.activation.row
    return lambda x: getattr(functional, row.torch_name)(x, **row.torch_options)  # type: ignore[no-any-return]


def bundled(mlp: Mlp, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Call]:
    """Returns every bundled kernel's call for such operands, by operator.

    Raises:
        click.ClickException: If there is none.
    """
    from nvgemm_runtime import explain
    from nvgemm_runtime.launch.api import load_kernel

    found = explain(x, weight.t(), extras=ExtraOperands(gated=mlp.epilogue))
    if found.match is None:
        raise click.ClickException(f"no bundled kernel: {'; '.join(found.reasons)}")
    calls: dict[str, Call] = {}
    for served in found.match.kernels:
        launch = load_kernel(served.kernel.id).launch

        def call(x: torch.Tensor, weight: torch.Tensor, launch: Any = launch) -> torch.Tensor:
            out = x.new_empty(x.shape[0], mlp.half)
            launch(x, weight.t(), out)
            return out

        calls[served.kernel.operator] = call
    return calls


def contenders(mlp: Mlp, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Call]:
    """Returns calls by name, each compiled and right."""
    import torch

    torch._dynamo.reset()  # or all sizes together would count for the recompilation limit

    def compiled(function: Any, mode: str) -> Any:
        options = {**OPTIONS, "nvgemm_aot_mode": mode}
        return torch.compile(function, dynamic=False, fullgraph=True, options=options)

    two = compiled(two_products(mlp.epilogue), "off")
    calls: dict[str, Call] = {
        STOCK[0]: compiled(one_product(mlp.epilogue), "off"),
        STOCK[1]: lambda x, weight: two(x, weight[: mlp.half], weight[mlp.half :]),
        COMPILED: compiled(one_product(mlp.epilogue), "auto"),
    }
    eager = one_product(mlp.epilogue)(x, weight)
    exact = one_product(mlp.epilogue)(x.float(), weight.float())
    with compiling():
        results = {name: call(x, weight) for name, call in calls.items()}
    calls |= bundled(mlp, x, weight)
    results |= {name: call(x, weight) for name, call in calls.items() if name not in results}
    for result in results.values():
        check_results([result], [eager], [exact])
    return calls


def operand_sets(mlp: Mlp, m: int) -> list[tuple[torch.Tensor, ...]]:
    """Returns so many (x, weight) pairs that L2 holds none."""
    import torch

    once = 2 * (m * mlp.hidden + 2 * mlp.half * mlp.hidden)
    count = max(2, -(-buffer_bytes() // once))
    return [
        tuple(
            torch.randn(rows, mlp.hidden, device="cuda").bfloat16() / mlp.hidden**0.25
            for rows in (m, 2 * mlp.half)
        )
        for _ in range(count)
    ]


def measure_size(mlp: Mlp, m: int, rounds: int, apart: bool) -> dict[str, Any]:
    """Returns summaries by name."""
    import torch

    sets, timer, samples = operand_sets(mlp, m), GpuTimer(), {}
    with torch.no_grad():
        for name, call in contenders(mlp, *sets[0]).items():
            turns = [functools.partial(call, *operands) for operands in sets]
            samples[name] = timer.prepare(turns, launches=APART if apart else BACK_TO_BACK)
        times = in_rounds(samples, rounds)
    return {"times": {name: one.to_json() for name, one in times.items()}}


def in_rounds(samples: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Summary]:
    """Returns summaries in nanoseconds, by name; a round takes all in random order."""
    order, times = random.Random(0), {name: [] for name in samples}
    for _ in range(rounds):
        for name in order.sample(list(samples), len(samples)):
            times[name].append(samples[name]())
    return summarized(times)


def read(entry: Mapping[str, Any]) -> tuple[Summary, Summary, Summary, str]:
    """Returns the best stock result, the one with bundles, the best kernel, and its name."""
    times = {name: Summary.from_json(one) for name, one in entry["times"].items()}
    stock = fastest(times[name] for name in STOCK)
    kernels = {name: one for name, one in times.items() if name not in (*STOCK, COMPILED)}
    best = chosen(kernels)
    return stock, times[COMPILED], kernels[best], best


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row for each model and m, and geometric means."""
    ratios: dict[str, list[float]] = {"compiled": [], "kernel": []}
    yield (
        f"{'model':<20} {'m':>5} {'without, us':>12} {'with':>8} {'x':>6} {'kernel':>8} {'x':>6}  "
        "which"
    )
    for key, entry in sorted(entries.items(), key=lambda one: _place(one[0])):
        name, m = key.rsplit(" m", 1)
        stock, compiled, kernel, operator = read(entry)
        ratios["compiled"].append(ratio(stock, compiled))
        ratios["kernel"].append(ratio(stock, kernel))
        yield (
            f"{name:<20} {m:>5} {stock.report_ns / 1e3:12.1f} {compiled.report_ns / 1e3:8.1f} "
            f"{ratios['compiled'][-1]:6.3f} {kernel.report_ns / 1e3:8.1f} "
            f"{ratios['kernel'][-1]:6.3f}  {operator.removeprefix('quack.')}"
        )
    yield (
        f"geometric means over {len(ratios['kernel'])}: torch.compile with bundles "
        f"{geomean(ratios['compiled']):.3f} times as fast as the best without, the best kernel "
        f"{geomean(ratios['kernel']):.3f}; least {min(ratios['compiled'], default=0):.3f} and "
        f"{min(ratios['kernel'], default=0):.3f}"
    )


def _place(key: str) -> tuple[int, int]:
    name, m = key.rsplit(" m", 1)
    return list(MODELS).index(name), int(m)


@click.group()
def main() -> None:
    """Measure gated MLPs."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's table."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@measuring_options
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(min=MIN_ROUNDS))
@click.option("--back-to-back", is_flag=True, help="Run nothing between two calls.")
@click.option("--rows", multiple=True, type=int, default=ROWS, show_default=True)
def measure(
    path: Path,
    resume: bool,
    budget: float | None,
    rounds: int,
    back_to_back: bool,
    rows: Sequence[int],
) -> None:
    """Measure, keeping results in PATH, and print the table."""
    require_gpu()
    results = Results.begin(
        path,
        what=WHAT,
        environment=environment(),
        settings={"rounds": rounds, "apart": not back_to_back},
        resume=resume,
    )

    def work(mlp: Mlp, m: int) -> Callable[[], dict[str, Any]]:
        return lambda: measure_size(mlp, m, rounds, apart=not back_to_back)

    sizes = {f"{name} m{m}": work(mlp, m) for m in rows for name, mlp in MODELS.items()}
    try:
        left = [(key, one) for key, one in sizes.items() if key not in results.entries]
        results.fill(left, budget, lambda entry: f"{ratio(*read(entry)[:2]):.3f}")
    finally:
        results.end(table)


if __name__ == "__main__":
    main()
