"""Bundled kernels beside ATen and Triton, at the sizes that bundles declare, on a GPU.

    python benchmarks/kernels.py measure kernels.json --budget 450   # on a GPU; again with --resume
    python benchmarks/kernels.py table kernels.json                  # anywhere

Measured are the matrix products in bf16 and fp16 that installed bundles declare, e.g. the wheel of
manifests/llama-3.1-8b.yaml for sm_90a, in a fixed random order, so that whatever a run gets done is
a sample of them all. Each is computed by

- aten: ``torch.mm(out=)``;
- triton: what Inductor's max-autotune makes of it over Triton's templates alone;
- bundle: every kernel that bundles rank for it, after a check that it is exact on zeros and ones;

with operands in turn beyond L2, as CUDA graphs, in random order (`measuring`). Rounds that choose
the fastest are not those that are reported (`summaries`), so best-of can be below 1.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from bundled import declared, environment, load_exact
from compiling import names_of
from measuring import Arena, Exact, Operands, Way, offline_ns
from records import require_gpu
from resuming import ORDER_SEED, Results
from summaries import (
    MIN_ROUNDS,
    Summary,
    chosen,
    fastest,
    geomean,
    grouped,
    ratio,
    share,
    summarized,
)
from triton_gemm import compile_triton, triton_version

from nvgemm_runtime.gemm.problem import DType, Problem

WHAT = "kernels"
WINDOW_NS = 1_000_000.0
CLEAR = 1.01
"""What is faster than this has won."""
TOKENS = (1, 2, 16, 128, 1024)
"""Lower bounds of m in the table."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What was measured of one problem.

    Attributes:
        problem: It.
        aten: Times of ATen.
        triton: Times of Triton, where it was measured.
        kernels: Times of the bundled kernels that are exact, by id, best-ranked first.
    """

    problem: Problem
    aten: Summary
    triton: Summary | None
    kernels: Mapping[str, Summary]

    @classmethod
    def from_json(cls, key: str, entry: Mapping[str, Any]) -> Entry:
        """Read what `measure_problem` gave."""
        triton = entry["triton"]
        return cls(
            problem=Problem.parse(key),
            aten=Summary.from_json(entry["aten"]),
            triton=None if triton is None else Summary.from_json(triton),
            kernels={id_: Summary.from_json(one) for id_, one in entry["kernels"].items()},
        )

    @property
    def others(self) -> list[Summary]:
        """ATen's, and Triton's where there are any."""
        return [self.aten] if self.triton is None else [self.aten, self.triton]

    @property
    def of_others(self) -> Summary:
        """The faster of ATen and Triton."""
        return fastest(self.others)

    @property
    def best_of_all(self) -> float:
        """How many times as fast the best of all is as the best of ATen and Triton."""
        return ratio(self.of_others, fastest([*self.others, *self.kernels.values()]))

    @property
    def bundle(self) -> float:
        """Likewise, the best of the bundle alone."""
        return ratio(self.of_others, fastest(self.kernels.values()))

    @property
    def bundle_to_aten(self) -> float:
        """The best of the bundle over ATen."""
        return ratio(self.aten, fastest(self.kernels.values()))

    @property
    def first_ranked(self) -> float:
        """The kernel that is ranked first, over the best of the bundle."""
        return ratio(fastest(self.kernels.values()), next(iter(self.kernels.values())))


def in_order(problems: Mapping[Problem, Any], sample: int | None) -> list[Problem]:
    """Problems in the order in which they are measured: the same for the same problems."""
    ordered = sorted(problems)
    random.Random(ORDER_SEED).shuffle(ordered)
    return ordered[:sample]


def is_done(entry: Mapping[str, Any] | None, wants_triton: bool) -> bool:
    """Whether nothing is left to be measured of a problem."""
    return entry is not None and not (wants_triton and entry["triton_s"] is None)


def measure_problem(
    problem: Problem, ids: Sequence[str], arena: Arena, with_triton: bool, rounds: int
) -> dict[str, Any]:
    """Measure one problem; the entry is what `Entry.from_json` reads."""
    import torch

    layout = problem.signature.layout
    m, n, k = problem.m, problem.n, problem.k
    sets: list[Operands] = arena.sets(m, n, k, layout)
    exact = Exact.draw(m, n, k, layout, sets[0][0].dtype)
    checked = load_exact(ids, exact)
    del exact
    for id_, why in checked.thrown_out.items():
        click.echo(f"{problem.key}: THROWN OUT {id_[:12]}: {why}", err=True)
    ways = {"aten": Way(launch=lambda a, b, out: torch.mm(a, b, out=out), sets=sets)}
    triton = compile_triton(sets[0]) if with_triton else None
    if triton is not None and triton.launch is not None:
        ways["triton"] = Way(launch=triton.launch, sets=sets)
    ways |= {id_: Way(launch=launch, sets=sets) for id_, launch in checked.launches.items()}
    times = offline_ns(ways, rounds, WINDOW_NS, random.Random(problem.key))
    summaries = {name: one.to_json() for name, one in summarized(times).items()}
    return {
        "aten": summaries["aten"],
        "triton": summaries.get("triton"),
        "triton_s": None if triton is None else round(triton.seconds, 2),
        "why_no_triton": None if triton is None else triton.why_none,
        "kernels": {id_: summaries[id_] for id_ in checked.launches},
        "thrown_out": dict(checked.thrown_out),
    }


def speedups_row(label: str, entries: Sequence[Entry]) -> str:
    """One row of the table, over problems."""
    best, own = [one.best_of_all for one in entries], [one.bundle for one in entries]
    return (
        f"{label:<22} {len(entries):5d} {geomean(best):8.3f} {min(best):7.3f} {geomean(own):8.3f} "
        f"{geomean([one.bundle_to_aten for one in entries]):8.3f} "
        f"{share(one > CLEAR for one in own):7.0%} {share(one > 1.05 for one in own):7.0%}"
    )


def table(record: Mapping[str, Any]) -> list[str]:
    """Lines of the table over a file's entries."""
    entries = [Entry.from_json(key, one) for key, one in record.items() if one["kernels"]]
    thrown_out = {key: one["thrown_out"] for key, one in record.items() if one["thrown_out"]}
    full = [one for one in entries if one.triton is not None]
    head = (
        f"{'':<22} {'':>5} {'best of':>8} {'':>7} {'bundle':>8} {'bundle':>8} {'wins':>7} "
        f"{'wins':>7}"
    )
    columns = (
        f"{'':<22} {'count':>5} {'all':>8} {'least':>7} {'alone':>8} {'to ATen':>8} {'> 1%':>7} "
        f"{'> 5%':>7}"
    )
    lines = [head, columns]
    if full:
        lines.append(speedups_row("over ATen and Triton", full))
        for label, group in grouped(full, TOKENS, lambda one: one.problem.m):
            lines.append(speedups_row(f"  m {label}", group))
        for dtype in sorted({one.problem.signature.a.value for one in full}):
            of_type = [one for one in full if one.problem.signature.a.value == dtype]
            lines.append(speedups_row(f"  {dtype}", of_type))
    rest = [one for one in entries if one.triton is None]
    if rest:
        lines.append(speedups_row("over ATen alone", rest))
    lines += [
        "speed-ups: geometric means of time over time; above 1 bundled kernels are faster.",
        "best of all: of bundle, ATen and Triton over the best of ATen and Triton, chosen by other",
        "rounds than those reported; least: at the worst problem; wins: share of problems.",
    ]
    if entries:
        first = geomean([one.first_ranked for one in entries])
        kernels = {id_ for one in entries for id_ in one.kernels}
        lines.append(
            f"The kernel ranked first is {first:.3f} times as fast as the bundle's best "
            f"({len(kernels)} kernels)."
        )
    triton_s = [one["triton_s"] for one in record.values() if one["triton_s"] is not None]
    if triton_s:
        none = sum(one["why_no_triton"] is not None for one in record.values())
        lines.append(
            f"Compiling and autotuning Triton took {sum(triton_s):.0f} s for {len(triton_s)} "
            f"problems; {none} have no Triton kernel."
        )
    without = [key for key, one in record.items() if not one["kernels"]]
    lines += [f"no bundled kernel was exact: {key}" for key in without]
    for key, why in thrown_out.items():
        lines += [f"THROWN OUT at {key}: {id_[:12]}: {reason}" for id_, reason in why.items()]
    return lines


@click.group()
def main() -> None:
    """Measure bundled kernels beside ATen and Triton."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print the table of a file."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--resume", is_flag=True, help="Go on with what the file holds.")
@click.option("--budget", type=click.FloatRange(min=1), help="Seconds after which to stop.")
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
    os.environ["NVGEMM_AOT"] = "off"  # Triton is measured as it is without us
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
        settings={"rounds": rounds, "window_ns": WINDOW_NS},
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
    """What won."""
    times = {"aten": entry["aten"], **entry["kernels"]}
    if entry["triton"] is not None:
        times["triton"] = entry["triton"]
    best = chosen({name: Summary.from_json(one) for name, one in times.items()})
    by_whom = best if best in ("aten", "triton") else f"bundled {best[:12]}"
    return f"{by_whom}, {times[best][1] / 1e3:.1f} us"


if __name__ == "__main__":
    main()
