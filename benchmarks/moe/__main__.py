"""Measures experts, forward and backward, against torch's grouped products.

For four models at 24,576 tokens, routed with skew by a fixed seed, through autograd and with all
allocations:

- ``experts``: `nvgemm_runtime.moe.experts` with one weight for gate and up, and installed kernels;
- ``experts, 2 weights``: the same with a gate and an up weight, as torchtitan has them;
- ``torch``: torchtitan's way: three products of ``torch._grouped_mm`` with two weights, and the
  activation between; for gpt-oss, which has one weight, two products with a bias per row;
- ``torch, 1 product``: one weight, so one product for gate and up;
- each of these also by torch.compile.

Rows are sorted, or with ``--from tokens`` the experts start from tokens and a router's choice:
`nvgemm_runtime.moe.routed_experts`, and torchtitan's and transformers' (one weight) ways to gather
rows and to add results. `benchmarks.moe.turns` explains the measuring.

    nvgemm-aot build benchmarks/moe/manifest.yaml  # anywhere
    NVGEMM_AOT_BUNDLES=moe-sm_90a-linux_x86_64-cu13.nvgemm python -m benchmarks.moe measure moe.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.moe import rows, tokens
from benchmarks.moe.models import MODELS
from benchmarks.moe.turns import OURS, table
from benchmarks.shared.bundled import environment
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import Results, measuring_options

WHAT = "moe"
MEASURE = {"rows": rows.measure_model, "tokens": tokens.measure_model}
MODELS_OF = {
    "rows": tuple(MODELS),
    "tokens": tuple(name for name, model in MODELS.items() if model.chosen > 1),
}
"""Models by starting point. A rank's share of DeepSeek-V3's rows is no whole block: tokens come
from other ranks."""


@click.group()
def main() -> None:
    """Measure experts."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's table."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@measuring_options
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=3))
@click.option(
    "--from", "begin", default="rows", show_default=True, type=click.Choice(list(MEASURE))
)
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)))
def measure(
    path: Path,
    resume: bool,
    budget: float | None,
    rounds: int,
    begin: str,
    models: Sequence[str],
) -> None:
    """Measure, keeping results in PATH, and print the table."""
    require_gpu()
    if unknown := {*models} - {*MODELS_OF[begin]}:
        raise click.UsageError(f"--from {begin} has no model {', '.join(sorted(unknown))}")
    settings = {"rounds": rounds, "from": begin}
    results = Results.begin(
        path, what=WHAT, environment=environment(), settings=settings, resume=resume
    )

    def work(name: str) -> Callable[[], dict[str, Any]]:
        return lambda: MEASURE[begin](MODELS[name], rounds)

    left = [
        (name, work(name)) for name in models or MODELS_OF[begin] if name not in results.entries
    ]
    try:
        results.fill(left, budget, lambda entry: f"{entry['ways'][OURS]['forward_ms']:.2f} ms")
    finally:
        results.end(table)


if __name__ == "__main__":
    main()
