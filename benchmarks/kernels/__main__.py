"""Measures bundled kernels, ATen and Triton at the declared sizes, on a GPU.

    python -m benchmarks.kernels measure kernels.json --budget 450   # on a GPU; again with --resume
    python -m benchmarks.kernels table kernels.json                  # anywhere
    python -m benchmarks.kernels join kernels.json bf16.json fp16.json

Measures the bf16 and fp16 products that installed bundles declare, e.g. the wheel of
manifests/llama-3.1-8b.yaml for sm_90a, in a fixed random order, so that a partial run is a sample:

- aten: ``torch.mm(out=)``;
- triton: Inductor's max-autotune over Triton's templates alone;
- bundle: every kernel that bundles rank for the problem, if it is exact on zeros and ones.

Operands take turns beyond L2. Launches are CUDA graphs in random order (`measuring`): apart, behind
a small kernel each, then back to back. Rounds that choose the fastest are not those that are
reported (`summaries`), so best-of can be below 1.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.kernels.table import table
from benchmarks.kernels.triton_gemm import compile_triton, triton_version
from benchmarks.shared.bundled import declared, environment, load_exact
from benchmarks.shared.compiling import names_of
from benchmarks.shared.measuring import Arena, Contender, Exact, Operands, offline_ns
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import ORDER_SEED, Results, measuring_options
from benchmarks.shared.summaries import MIN_ROUNDS, Summary, chosen, summarized
from nvgemm_runtime.bundle.ranking_entries import APART, BACK_TO_BACK
from nvgemm_runtime.gemm.problem import DType, Problem

WHAT = "kernels"
WINDOW_NS = 1_000_000.0


def in_order(problems: Mapping[Problem, Any], sample: int | None) -> list[Problem]:
    """Returns problems in their fixed order of measurement."""
    ordered = sorted(problems)
    random.Random(ORDER_SEED).shuffle(ordered)
    return ordered[:sample]


def is_done(entry: Mapping[str, Any] | None, wants_triton: bool) -> bool:
    """Returns True if nothing is left to measure for a problem."""
    return entry is not None and not (wants_triton and entry["triton_s"] is None)


def measure_problem(
    problem: Problem, ids: Sequence[str], arena: Arena, with_triton: bool, rounds: int
) -> dict[str, Any]:
    """Measures one problem; `table.ProblemTimes.from_json` reads the entry."""
    import torch

    layout = problem.signature.layout
    m, n, k = problem.m, problem.n, problem.k
    sets: list[Operands] = arena.sets(m, n, k, layout)
    exact = Exact.draw(m, n, k, layout, sets[0][0].dtype)
    checked = load_exact(ids, exact)
    del exact
    for id_, why in checked.thrown_out.items():
        click.echo(f"{problem.key}: THROWN OUT {id_[:12]}: {why}", err=True)
    ways = {"aten": Contender(launch=lambda a, b, out: torch.mm(a, b, out=out), sets=sets)}
    triton = compile_triton(sets[0]) if with_triton else None
    if triton is not None and triton.launch is not None:
        ways["triton"] = Contender(launch=triton.launch, sets=sets)
    ways |= {id_: Contender(launch=launch, sets=sets) for id_, launch in checked.launches.items()}
    order = random.Random(problem.key)
    apart, back_to_back = (
        summarized(offline_ns(ways, rounds, WINDOW_NS, order, launches=launches))
        for launches in (APART, BACK_TO_BACK)
    )

    def times(summaries: Mapping[str, Summary]) -> dict[str, Any]:
        found = {name: one.to_json() for name, one in summaries.items()}
        return {
            "aten": found["aten"],
            "triton": found.get("triton"),
            "kernels": {id_: found[id_] for id_ in checked.launches},
        }

    return {
        **times(apart),
        "back_to_back": times(back_to_back),
        "triton_s": None if triton is None else round(triton.seconds, 2),
        "why_no_triton": None if triton is None else triton.why_none,
        "thrown_out": dict(checked.thrown_out),
    }


@click.group()
def main() -> None:
    """Measure bundled kernels beside ATen and Triton."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's table."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("parts", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
def join(path: Path, parts: tuple[Path, ...]) -> None:
    """Write PATH from PARTS, measured of different types in turn, and print its table."""
    Results.joined(path, parts, WHAT).end(table)


@main.command()
@measuring_options
@click.option("--sample", type=click.IntRange(min=1), help="Problems to measure; all by default.")
@click.option(
    "--triton",
    "triton_count",
    type=click.IntRange(min=0),
    help="Problems to have Triton compiled for, seconds each; all by default.",
)
@click.option(
    "--dtypes", default="bf16,fp16", show_default=True, callback=names_of(("bf16", "fp16"))
)
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(min=MIN_ROUNDS))
def measure(
    path: Path,
    resume: bool,
    budget: float | None,
    sample: int | None,
    triton_count: int | None,
    dtypes: tuple[str, ...],
    rounds: int,
) -> None:
    """Measure, keeping results in PATH, and print the table."""
    os.environ["NVGEMM_AOT"] = "off"  # measures Triton without the plug-in
    require_gpu()
    from nvgemm_runtime.gemm.operands import torch_dtype

    kernels = declared([DType(dtype) for dtype in dtypes])
    if not kernels:
        raise click.ClickException(
            f"no usable bundle declares a matrix product in {', '.join(dtypes)}: install a kernel "
            "wheel, or name bundles in NVGEMM_AOT_BUNDLES"
        )
    results = Results.begin(
        path,
        what=WHAT,
        environment=environment(Triton=triton_version()),
        settings={"rounds": rounds, "window_ns": WINDOW_NS, "launches": APART},
        resume=resume,
    )
    problems = in_order(kernels, sample)
    with_triton = set(problems[:triton_count])
    left = [p for p in problems if not is_done(results.entries.get(p.key), p in with_triton)]
    arenas = {
        dtype: Arena(
            torch_dtype(DType(dtype)),
            [(p.m, p.n, p.k) for p in left if p.signature.a.value == dtype],
        )
        for dtype in sorted({p.signature.a.value for p in left})
    }

    def work(problem: Problem) -> Callable[[], dict[str, Any]]:
        arena = arenas[problem.signature.a.value]
        triton = problem in with_triton
        return lambda: measure_problem(problem, kernels[problem], arena, triton, rounds)

    try:
        results.fill([(problem.key, work(problem)) for problem in left], budget, said)
    finally:
        results.end(table)


def said(entry: Mapping[str, Any]) -> str:
    """Describes the winner."""
    times = {"aten": entry["aten"], **entry["kernels"]}
    if entry["triton"] is not None:
        times["triton"] = entry["triton"]
    best = chosen({name: Summary.from_json(one) for name, one in times.items()})
    by_whom = best if best in ("aten", "triton") else f"bundled {best[:12]}"
    return f"{by_whom}, {times[best][1] / 1e3:.1f} us"


if __name__ == "__main__":
    main()
