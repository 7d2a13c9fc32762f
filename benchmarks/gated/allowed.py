"""Compares plain torch.compile with gated products fused and not: time of kernels, and errors.

Layers of a gated MLP, each with its own weights, are compiled once for a dynamic m: by stock torch,
with bundles, and with bundles and ``nvgemm_aot_fuse``. Their CUDA graphs take turns under the
profiler, which gives the time in which kernels ran. Errors are those of the gated values and of the
MLP's result, relative to fp32: the difference's norm over the norm.

    export NVGEMM_AOT_BUNDLES=tuned.nvgemm  # with gated and plain products that tune measured
    python -m benchmarks.gated.allowed measure allowed.json
    python -m benchmarks.gated.allowed table allowed.json
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.additive.kernel_time import kernel_times_us
from benchmarks.gated.__main__ import MODELS, Mlp, one_product
from benchmarks.shared.bundled import environment
from benchmarks.shared.kernel_intervals import start_tracing
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import Results, measuring_options

if TYPE_CHECKING:
    import torch

WHAT = "gated-allowed"

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

SIDES: dict[str, dict[str, Any]] = {
    "stock": {"nvgemm_aot_mode": "off"},
    "with bundles": {"nvgemm_aot_fuse": False},
    "fused": {"nvgemm_aot_fuse": True},
}
"""Options of torch.compile by side."""

LAYERS = 3
"""Layers in one call: their weights, a gigabyte, do not stay in L2."""

ROUNDS = 4

Weights = Sequence["torch.Tensor"]


class Compiled:
    """A side's compiled functions for a model, for any m."""

    def __init__(self, mlp: Mlp, options: Mapping[str, Any]) -> None:
        import torch

        gated = one_product(mlp.epilogue)

        def layers(x: torch.Tensor, weights: Weights) -> torch.Tensor:
            for index in range(0, len(weights), 2):
                x = gated(x, weights[index]) @ weights[index + 1].t()
            return x

        def first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return gated(x, weight)

        def whole(x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            return gated(x, weight) @ down.t()

        self.layers = torch.compile(layers, fullgraph=True, options=dict(options))
        self.first = torch.compile(first, fullgraph=True, options=dict(options))
        self.whole = torch.compile(whole, fullgraph=True, options=dict(options))


def make_weights(mlp: Mlp) -> list[torch.Tensor]:
    """Returns [gate; up] and down weights for each layer, scaled so that values keep their size."""
    import torch

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda").mul_(scale).bfloat16()

    return [
        weight
        for _ in range(LAYERS)
        for weight in (
            matrix(2 * mlp.half, mlp.hidden, mlp.hidden**-0.5),
            matrix(mlp.hidden, mlp.half, 2 * mlp.half**-0.5),
        )
    ]


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the difference's norm over the norm."""
    return float((result.float() - exact).norm() / exact.norm())


def measure_size(
    mlp: Mlp, sides: Mapping[str, Compiled], weights: Weights, m: int
) -> dict[str, Any]:
    """Returns each side's microseconds per layer and errors."""
    import torch

    x = torch.randn(m, mlp.hidden, device="cuda").bfloat16()
    if m > 1:  # torch compiles one row apart
        torch._dynamo.mark_dynamic(x, 0)
    gated = one_product(mlp.epilogue)
    exact = gated(x.float(), weights[0].float())
    whole = exact @ weights[1].float().t()
    errors, calls = {}, {}
    for name, side in sides.items():
        value = side.first(x, weights[0])
        result = side.whole(x, weights[0], weights[1])
        errors[name] = [relative_error(value, exact), relative_error(result, whole)]
        calls[name] = _captured(lambda side=side: side.layers(x, weights))  # type: ignore[misc]
    times = kernel_times_us(calls, ROUNDS)
    return {
        "us": {name: statistics.median(times[name]) / LAYERS for name in sides},
        "errors": errors,
    }


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """Returns a function that replays a call from a CUDA graph."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> object:
        return graph.replay()

    return replay


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row for each model and m."""
    yield (
        f"{'model':<20} {'m':>5} {'stock, us':>10} {'with bundles':>13} {'fused':>8} "
        f"{'x stock':>8} {'x bundles':>9}  errors of gated values, and of the MLP: stock, fused"
    )
    for key, entry in entries.items():
        name, m = key.rsplit(" m", 1)
        stock, bundles, fused = (entry["us"][side] for side in SIDES)
        (gate, whole), (fused_gate, fused_whole) = (
            entry["errors"][side] for side in ("stock", "fused")
        )
        yield (
            f"{name:<20} {m:>5} {stock:10.1f} {bundles:13.1f} {fused:8.1f} {stock / fused:8.3f} "
            f"{bundles / fused:9.3f}  {gate:.2e} {fused_gate:.2e}, {whole:.2e} {fused_whole:.2e}"
        )


@click.group()
def main() -> None:
    """Compare gated products, fused and not."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's table."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@measuring_options
@click.option("--model", "models", multiple=True, type=click.Choice([*MODELS]))
@click.option("--rows", multiple=True, type=int, default=ROWS, show_default=True)
def measure(
    path: Path, resume: bool, budget: float | None, models: Sequence[str], rows: Sequence[int]
) -> None:
    """Measure, keeping results in PATH, and print the table."""
    import torch

    require_gpu()
    results = Results.begin(
        path, what=WHAT, environment=environment(), settings={"layers": LAYERS}, resume=resume
    )
    start_tracing()  # before graphs are captured
    try:
        for name in models or ("llama-3.1-8b",):
            mlp = MODELS[name]
            torch._dynamo.reset()
            sides = {side: Compiled(mlp, options) for side, options in SIDES.items()}
            weights = make_weights(mlp)
            work = [
                (key, lambda m=m: measure_size(mlp, sides, weights, m))  # noqa: B023
                for m in rows
                if (key := f"{name} m{m}") not in results.entries
            ]
            # All sides share their functions' code, whose graphs torch counts together.
            with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
                results.fill(work, budget, lambda entry: str(entry["us"]))
    finally:
        results.end(table)


if __name__ == "__main__":
    main()
