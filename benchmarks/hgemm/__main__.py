"""Measures bundled kernels by the protocol of HGEMM-1000 (arXiv 2512.02551), on a GPU.

    python -m benchmarks.hgemm measure hgemm.json --sample 100   # on a GPU; continue with --resume
    python -m benchmarks.hgemm table hgemm.json                  # anywhere

fp16 with fp32 sums, all 10^3 sizes of 64, 128, ... 16384, NN and TN, against

- torch.matmul and cuBLAS, by their own choice;
- cuBLASLt: the heuristic's first algorithm, and the fastest of up to 100 suggestions: tried in
  random order on random operands, then the first --candidates measured like the rest;
- bundled: the best of --candidates kernels that installed bundles rank first for the size, each
  checked to be exact on zeros and ones.

Each mode chooses its best by other rounds than those reported: the fastest back to back need not be
the fastest in single requests.

TN and NN are the layouts of the call to cuBLAS (`cublas.ProtocolLayout`): ``tn`` and ``tt`` in
manifests. "max" is the faster layout on each side; NN and TN compare the same layout. offline and
server are those of `measuring`. Unlike in the published scripts, operands take turns beyond L2, and
host time of launches does not count: it would favour the shortest way from Python.

Sizes come in a fixed random order, so a sample is its beginning.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.hgemm.cublas import Cublas, ProtocolLayout
from benchmarks.hgemm.cublaslt import Algo, CublasLt, Plan
from benchmarks.hgemm.table import BUNDLED, MODES, Size, sizes, table
from benchmarks.shared.bundled import environment, load_exact
from benchmarks.shared.measuring import (
    Arena,
    Contender,
    Exact,
    Launch,
    Operands,
    offline_ns,
    server_ns,
    tuned,
)
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import Results, measuring_options
from benchmarks.shared.summaries import MIN_ROUNDS, Summary, chosen, summarized
from nvgemm_runtime import explain

WHAT = "hgemm"
WINDOW_NS = 1_000_000.0
ALGORITHMS = 100
TUNING_NS = 200_000.0
TUNING_PASSES = 3
TUNED = "tuned"
WRONG = 1e-2
"""Relative error, in the norm, from which a product is wrong."""


class Libraries:
    """Handles for NVIDIA's libraries, once a process."""

    def __init__(self) -> None:
        self.cublas = Cublas()
        self.lt = CublasLt()


def baselines(
    layout: ProtocolLayout, libraries: Libraries, plan: Plan, algorithms: Mapping[str, Algo]
) -> dict[str, Launch]:
    """Returns each baseline's launch in a layout, by method."""
    import torch

    def torch_mm(a: Any, b: Any, out: Any) -> None:
        torch.matmul(a, b, out=out)

    def cublas(a: Any, b: Any, out: Any) -> None:
        libraries.cublas.multiply(layout, a, b, out)

    return {
        f"torch-{layout.value}": torch_mm,
        f"cublas-{layout.value}": cublas,
        **{f"lt-{how}-{layout.value}": lt_launch(plan, algo) for how, algo in algorithms.items()},
    }


def lt_launch(plan: Plan, algo: Algo) -> Launch:
    """Returns a cuBLASLt algorithm's launch."""

    def launch(a: Any, b: Any, out: Any) -> None:
        plan.multiply(algo, a, b, out)

    return launch


def tune_lt(
    plan: Plan, sets: Sequence[Operands], order: random.Random, finalists: int
) -> tuple[dict[str, Algo], int]:
    """Returns the first algorithm, the fastest suggested ones, and the number suggested.

    The fastest are so many finalists, for a quick look does not tell near ones apart: ``tuned``,
    ``tuned2`` and so on.
    """
    suggested = plan.suggestions(ALGORITHMS)
    ways: dict[str, Contender] = {}
    for number, algo in enumerate(suggested):
        with contextlib.suppress(click.ClickException):  # a suggestion that fails
            plan.multiply(algo, *sets[0])
            ways[str(number)] = Contender(launch=lt_launch(plan, algo), sets=sets)
    if not ways:
        raise click.ClickException(f"cuBLASLt has no algorithm that runs, of {len(suggested)}")
    times = tuned(ways, TUNING_PASSES, TUNING_NS, order)
    first = next(iter(ways))
    found = {"heuristic": suggested[int(first)]}
    for rank, name in enumerate(sorted(times, key=lambda name: times[name])[:finalists], start=1):
        found[TUNED if rank == 1 else f"{TUNED}{rank}"] = suggested[int(name)]
    return found, len(ways)


def inexact(launches: Mapping[str, Launch], exact: Exact) -> list[str]:
    """Returns baselines that are not exact on zeros and ones: they add parts of k in fp16."""
    errors = {name: exact.error(launch) for name, launch in launches.items()}
    for name, error in errors.items():
        if not error <= WRONG:  # NaN is wrong too
            raise click.ClickException(f"{name} is wrong: relative error {error:g}")
    return [name for name, error in errors.items() if error]


def ranked_kernels(operands: Operands, count: int) -> tuple[list[str], str]:
    """Returns ids ranked first for operands, and the basis for their match."""
    a, b, _ = operands
    match = explain(a, b).match
    if match is None:
        return [], "not at all"
    return [served.kernel.id for served in match.kernels[:count]], match.basis.value


@contextlib.contextmanager
def plans(libraries: Libraries, size: Size) -> Iterator[dict[ProtocolLayout, Plan]]:
    """Yields a cuBLASLt plan for each layout."""
    with contextlib.ExitStack() as stack:
        yield {
            layout: stack.enter_context(libraries.lt.plan(layout, size.m, size.n, size.k))
            for layout in ProtocolLayout
        }


def measure_size(
    size: Size,
    arena: Arena,
    libraries: Libraries,
    *,
    candidates: int,
    rounds: int,
    requests: int,
    gap_s: float,
) -> dict[str, Any]:
    """Measures one size; `table.SizeTimes.from_json` reads the entry."""
    import torch

    order = random.Random(size.key)
    ways: dict[str, Contender] = {}
    rivals: dict[str, dict[str, Contender]] = {}  # the fastest counts
    entry: dict[str, Any] = {
        "algorithms": {},
        "basis": {},
        "inexact": [],
        "thrown_out": {},
        "chosen": {},
        "candidates": {},
    }
    with plans(libraries, size) as of_layout:
        for layout, plan in of_layout.items():
            sets = arena.sets(size.m, size.n, size.k, layout.layout)
            algorithms, count = tune_lt(plan, sets, order, candidates)
            launches = baselines(layout, libraries, plan, algorithms)
            exact = Exact.draw(size.m, size.n, size.k, layout.layout, torch.float16)
            entry["inexact"] += inexact(launches, exact)
            ids, basis = ranked_kernels(sets[0], candidates)
            checked = load_exact(ids, exact)
            entry["algorithms"][layout.value] = count
            entry["basis"][layout.value] = basis
            entry["thrown_out"] |= checked.thrown_out
            for name, launch in launches.items():
                way = Contender(launch=launch, sets=sets)
                if name.startswith(f"lt-{TUNED}"):
                    rivals.setdefault(f"lt-{TUNED}-{layout.value}", {})[name] = way
                else:
                    ways[name] = way
            if checked.launches:
                rivals[f"{BUNDLED}-{layout.value}"] = {
                    id_: Contender(launch=launch, sets=sets)
                    for id_, launch in checked.launches.items()
                }
        every = ways | {name: way for those in rivals.values() for name, way in those.items()}
        measured = {
            "offline": offline_ns(every, rounds, WINDOW_NS, order),
            "server": server_ns(every, requests, gap_s, order),
        }
    for mode in MODES:
        found = summarized(measured[mode])
        entry["chosen"][mode] = {
            name: chosen({one: found[one] for one in those}) for name, those in rivals.items()
        }
        times = {name: found[name] for name in ways}
        times |= {name: found[best] for name, best in entry["chosen"][mode].items()}
        entry[mode] = {name: one.to_json() for name, one in times.items()}
        entry["candidates"][mode] = {
            name: {one: found[one].to_json() for one in those} for name, those in rivals.items()
        }
    return entry


@click.group()
def main() -> None:
    """Measure bundled fp16 kernels by the protocol of HGEMM-1000."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's tables."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@measuring_options
@click.option("--sample", type=click.IntRange(1, 1000), help="Sizes to measure; all by default.")
@click.option(
    "--without",
    type=click.Path(path_type=Path, exists=True),
    help="Leave out the sizes that this file of results has.",
)
@click.option("--candidates", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=MIN_ROUNDS))
@click.option("--requests", default=20, show_default=True, type=click.IntRange(min=MIN_ROUNDS))
@click.option(
    "--gap-ms", default=1.0, show_default=True, type=click.FloatRange(min=0, min_open=True)
)
def measure(
    path: Path,
    resume: bool,
    budget: float | None,
    sample: int | None,
    without: Path | None,
    candidates: int,
    rounds: int,
    requests: int,
    gap_ms: float,
) -> None:
    """Measure, keeping results in PATH, and print the tables."""
    require_gpu()
    import torch

    torch.zeros(1, device="cuda")  # the libraries need a context
    libraries = Libraries()
    found = environment(cuBLASLt=libraries.lt.version())
    if not found["bundles"]:
        raise click.ClickException(
            "no usable bundle was found: install a kernel wheel, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        )
    settings = {"candidates": candidates, "rounds": rounds, "requests": requests}
    results = Results.begin(
        path,
        what=WHAT,
        environment=found,
        settings={
            **settings,
            "gap_ms": gap_ms,
            "window_ns": WINDOW_NS,
            "algorithms": ALGORITHMS,
            "chosen": "in each mode by itself",
        },
        resume=resume,
    )
    done = results.entries.keys() | (Results.read(without, WHAT).entries if without else {}).keys()
    left = [size for size in sizes(sample) if size.key not in done]
    if left:
        arena = Arena(torch.float16, [(size.m, size.n, size.k) for size in left])

    def work(size: Size) -> Callable[[], dict[str, Any]]:
        return lambda: measure_size(size, arena, libraries, **settings, gap_s=gap_ms / 1e3)

    try:
        results.fill([(size.key, work(size)) for size in left], budget, said)
    finally:
        results.end(table)


def said(entry: Mapping[str, Any]) -> str:
    """Describes the winner."""
    best = {mode: chosen(from_json(entry[mode])) for mode in MODES}
    return ", ".join(f"{mode} {name}" for mode, name in best.items())


def from_json(times: Mapping[str, Sequence[int]]) -> dict[str, Summary]:
    return {name: Summary.from_json(one) for name, one in times.items()}


if __name__ == "__main__":
    main()
