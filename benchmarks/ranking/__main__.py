"""Measures rankings for undeclared sizes.

    python -m benchmarks.ranking measure BUNDLE times.json  # on a GPU
    python -m benchmarks.ranking compare BUNDLE times.json  # anywhere
    python -m benchmarks.ranking between times.json         # anywhere
    python -m benchmarks.ranking gpus RANKINGS.json...      # anywhere

``compare`` holds a problem back from the bundle's rankings, ranks its kernels from the rest in
several ways, and prints by how much each way's choice is slower than the bundle's best kernel: its
first kernel, and the best of its first few, which autotuning picks from. It holds back one problem
("m": other m with its n and k stay declared), every second m ("2nd m"), or all problems with its n
and k ("n, k"). The rest is ranked as shipped, by estimates for a few kernels, or by measurements:
of the same kernels, or of all in the bundle.

``between`` holds back one m after the other, and prints the loss of a kernel that is near the
fastest at both neighbouring m, as dispatch tables use it between them.

``gpus`` reads rankings with measurements on several GPUs of one product, and prints the loss on one
GPU from taking another's fastest kernel.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.ranking.gpus import (
    find_third_opinions,
    find_transfers,
    gpus_cases,
    gpus_table,
    measured_with,
    third_opinions_table,
)
from benchmarks.record import Case
from benchmarks.shared import measuring
from benchmarks.shared.h200 import H200
from benchmarks.shared.measuring import Arena, Exact, offline_ns
from benchmarks.shared.records import as_written, check_output, read_record, require_gpu, write
from benchmarks.shared.resuming import command_line, recording, records_option, today
from nvgemm_aot.rankings.entries import merge
from nvgemm_aot.rankings.file import read_rankings
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import (
    APART,
    Conditions,
    Measured,
    Ranked,
    Ranking,
    RankingSource,
)
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.operands import MAX_ALIGNMENT_BYTES
from nvgemm_runtime.gemm.problem import Layout, Problem
from nvgemm_runtime.matching.device import DeviceFacts
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView, Miss
from nvgemm_runtime.matching.nearest import NearestSizes
from nvgemm_runtime.matching.thresholds import FEW_ROWS, MARGIN

WHAT = "ranking"
OFFERED = (1, 2, 3, 4)
"""Kernels that autotuning picks from."""
ROUNDS = 5
WINDOW_NS = 2_000_000.0

TUNED = RankingSource(
    kind="measurement",
    by="benchmarks.ranking",
    gpu=H200.name,
    conditions=Conditions(driver="", torch="", cuda="13.0", date="", launches=APART),
)
"""Ranking source as if `nvgemm-aot tune` had measured on this GPU."""

Order = list[int]
"""Kernel positions in the bundle, best first."""
Times = dict[str, list[float]]
"""Each bundle kernel's nanoseconds, by problem."""
Ranker = Callable[[Problem, "list[Ranking]"], Order]
"""Ranks kernels for a problem from declared problems' rankings."""


def by_runtime(header: Header, facts: DeviceFacts) -> Ranker:
    """Ranks as the runtime does."""

    def rank(problem: Problem, declared: list[Ranking]) -> Order:
        index = Index(
            [BundleView(name="", header=replace(header, rankings=tuple(declared)))], facts
        )
        found = index.match(problem, MAX_ALIGNMENT_BYTES)
        if isinstance(found, Miss):
            raise click.ClickException("\n".join(found.reasons))
        return [numbers[served.kernel.id] for served in found.kernels]

    numbers = {kernel.id: number for number, kernel in enumerate(header.kernels)}
    return rank


def by_nearest(problem: Problem, declared: list[Ranking]) -> Order:
    """Ranks by the nearest n and k, then the nearest m, in the shipped order."""
    nearest = (
        NearestSizes((ranking.problem, ranking) for ranking in declared).around(problem).nearest
    )
    return [place.kernel for place in nearest.kernels]


def with_measured_times(header: Header, times: Times, *, all_kernels: bool) -> Header:
    """Returns the header that `nvgemm-aot tune` would write, for the ranked kernels or for all."""
    rankings = []
    for ranking in header.rankings:
        row = times[ranking.problem.key]
        ranked = range(len(row)) if all_kernels else [place.kernel for place in ranking.kernels]
        order = sorted(ranked, key=row.__getitem__)
        places = tuple(Ranked(kernel=kernel, time_ns=round(row[kernel])) for kernel in order)
        measured = Measured(spreads_ns=(0,) * len(order), aten=None, triton=None, doubts=())
        rankings.append(replace(ranking, source=0, kernels=places, measured=measured))
    return replace(header, sources=(TUNED,), rankings=tuple(rankings))


def for_first_product(header: Header) -> Header:
    """Returns a bundle's header with one ranking a problem: the first."""
    return replace(header, rankings=tuple(one for one in header.rankings if not one.is_further))


def without_interpolation(header: Header) -> Header:
    """Returns the same times as estimates: the nearer m is scaled by waves."""
    rankings = (replace(ranking, measured=None) for ranking in header.rankings)
    return replace(header, rankings=tuple(rankings))


def held_back(header: Header, mode: str) -> Iterable[tuple[Ranking, list[Ranking]]]:
    kept = sorted({ranking.problem.m for ranking in header.rankings})[::2]
    for ranking in header.rankings:
        problem = ranking.problem
        if mode == "m":
            left = [other for other in header.rankings if other is not ranking]
        elif mode == "2nd m":
            if problem.m in kept:
                continue
            left = [other for other in header.rankings if other.problem.m in kept]
        else:
            size = (problem.n, problem.k)
            left = [o for o in header.rankings if (o.problem.n, o.problem.k) != size]
        yield ranking, left


@click.group()
def main() -> None:
    """Measure kernels, and compare ways to rank them."""


@main.command()
@click.argument("bundle_path", type=click.Path(path_type=Path, exists=True))
@click.argument("times_path", type=click.Path(path_type=Path, exists=True))
@records_option
def compare(bundle_path: Path, times_path: Path, records_path: Path | None) -> None:
    """Print how much each way to rank loses."""
    with as_written(bundle_path):
        header = for_first_product(Bundle(bundle_path).header)
    record = read_record(times_path, WHAT, {"gpu": str, "kernels": list, "times_ns": dict})
    if record["kernels"] != [kernel.id for kernel in header.kernels]:
        raise click.ClickException(f"{times_path} was measured over another bundle; measure again")
    with (
        recording(records_path, "ranking", record, is_measured=False) as cases,
        as_written(times_path),
    ):
        print_comparison(header, record, cases)


def print_comparison(header: Header, record: dict[str, Any], cases: list[Case]) -> None:
    times: Times = record["times_ns"]
    few = with_measured_times(header, times, all_kernels=False)
    measured = with_measured_times(header, times, all_kernels=True)
    scaled = without_interpolation(measured)
    ways: list[tuple[str, Header, Ranker]] = [
        ("the runtime, as shipped", header, by_runtime(header, H200)),
        ("nearest n and k, then m, as shipped", header, by_nearest),
        ("nearer m scaled, all measured", scaled, by_runtime(scaled, H200)),
        ("the runtime, ranked measured", few, by_runtime(few, H200)),
        ("the runtime, all measured", measured, by_runtime(measured, H200)),
    ]
    if "command" in record:  # older files have none
        click.echo(f"$ {record['command']}    # {record['date']}, torch {record['torch']}")
    click.echo(f"{record['gpu']}: {len(header.kernels)} kernels, {len(times)} problems")
    click.echo("time over that of the bundle's best kernel, geometric mean (worst)")
    heads = ["first", *(f"best of {count}" for count in OFFERED[1:])]
    click.echo(f"{'':<54}" + "".join(f"{head:>14}" for head in heads))
    for name, shipped in (("own estimate", header), ("those ranked, measured", few)):
        orders = [[place.kernel for place in ranking.kernels] for ranking in shipped.rankings]
        report(f"declared: {name}", header.rankings, orders, times, cases)
    for mode, (name, shipped, way) in itertools.product(("m", "2nd m", "n, k"), ways):
        held = list(held_back(shipped, mode))
        orders = [way(ranking.problem, left) for ranking, left in held]
        rankings = [ranking for ranking, _ in held]
        report(f"{mode} held back: {name}", rankings, orders, times, cases)


def report(
    label: str,
    rankings: Sequence[Ranking],
    orders: list[Order],
    times: Times,
    cases: list[Case],
) -> None:
    cells = []
    for count in OFFERED:
        ratios = []
        for ranking, order in zip(rankings, orders):
            row = times[ranking.problem.key]
            ratios.append(min(row[kernel] for kernel in order[:count]) / min(row))
        title = "first" if count == 1 else f"best of {count}"
        mean = statistics.geometric_mean(ratios)
        cases.append(Case(name=f"{label}/{title}", figure=mean, unit="times the best"))
        cells.append(f"{mean:.3f} ({max(ratios):.2f})")
    click.echo(f"{label:<54}" + "".join(f"{cell:>14}" for cell in cells))


@main.command()
@click.argument("times_path", type=click.Path(path_type=Path, exists=True))
def between(times_path: Path) -> None:
    """Print what kernels lose between two m at both of which they are near the fastest."""
    record = read_record(times_path, WHAT, {"gpu": str, "kernels": list, "times_ns": dict})
    with as_written(times_path):
        print_between(record)


def print_between(record: dict[str, Any]) -> None:
    """Prints held-back m by the rows of the upper neighbour; see `thresholds.FEW_ROWS`."""
    rows: dict[object, dict[int, list[float]]] = {}
    for key, times in record["times_ns"].items():
        problem = Problem.parse(key)
        rows.setdefault((problem.signature, problem.n, problem.k), {})[problem.m] = times
    click.echo(f"{record['gpu']}: {len(record['kernels'])} kernels, {len(rows)} pairs of n and k")
    click.echo("time over that of the best kernel at m held back, geometric mean (worst)")
    click.echo(f"{'neighbours':<20}{'apart':>14}{'within':>8}{'bridged':>12}{'lost':>16}")
    for name, are_few in ((f"up to m {FEW_ROWS}", True), (f"beyond m {FEW_ROWS}", False)):
        for margin in (MARGIN / 2, MARGIN, 5 * MARGIN):
            apart, losses = [], []
            for row in rows.values():
                ms = sorted(row)
                for low, held, high in zip(ms, ms[1:], ms[2:]):
                    if (high <= FEW_ROWS) == are_few:
                        apart.append(high / low)
                        losses.append(loss_between(row[low], row[held], row[high], margin))
            bridged = [loss for loss in losses if loss is not None]
            ratios = f"{min(apart):.1f} to {max(apart):.1f} x" if apart else "-"
            lost = "-"
            if bridged:
                lost = f"{statistics.geometric_mean(bridged):.3f} ({max(bridged):.2f})"
            count = f"{len(bridged)} of {len(losses)}"
            click.echo(f"{name:<20}{ratios:>14}{f'{margin:.0%}':>8}{count:>12}{lost:>16}")


def loss_between(
    low: Sequence[float], held: Sequence[float], high: Sequence[float], margin: float
) -> float | None:
    """Returns the loss of the kernel within a margin at both ends, or None."""
    behind = [(one / min(low), other / min(high)) for one, other in zip(low, high)]
    near = [at for at, both in enumerate(behind) if max(both) <= 1 + margin]
    if not near:
        return None
    return held[min(near, key=lambda at: sum(behind[at]))] / min(held)


@main.command()
@click.argument("paths", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@records_option
def gpus(paths: Sequence[Path], records_path: Path | None) -> None:
    """Print what is lost on one GPU by trusting the times of another."""
    rankings = merge([read_rankings(path) for path in paths])
    found = find_transfers(rankings)
    if not found:
        raise click.ClickException("no problem was measured on two known GPUs of one product")
    click.echo("\n".join(gpus_table(found)))
    gpu = measured_with(rankings)
    with recording(records_path, "ranking.gpus", gpu, is_measured=False) as cases:
        cases += gpus_cases(found)
    if third := find_third_opinions(rankings):
        click.echo("\n".join(["", *third_opinions_table(third)]))


@main.command()
@click.argument("bundle_path", type=click.Path(path_type=Path, exists=True))
@click.argument("times_path", type=click.Path(path_type=Path))
def measure(bundle_path: Path, times_path: Path) -> None:
    """Time every kernel of a bundle of mm/tn/bf16 kernels at every problem it declares."""
    check_output(times_path)
    require_gpu()
    import torch

    from nvgemm_runtime.launch.loading.loader import LOADER

    with as_written(bundle_path):
        bundle = Bundle(bundle_path)
    header = for_first_product(bundle.header)
    if not header.rankings:
        raise click.ClickException(
            f"{bundle_path} declares nothing; build benchmarks/ranking/manifest.yaml"
        )
    launches = {kernel.id: LOADER.load(bundle, kernel).launch for kernel in header.kernels}
    problems = [ranking.problem for ranking in header.rankings]
    arena = Arena(torch.bfloat16, [(one.m, one.n, one.k) for one in problems])
    times: Times = {}
    for problem in problems:
        size = (problem.m, problem.n, problem.k)
        exact = Exact.draw(*size, Layout.TN, torch.bfloat16)
        for id_, launch in launches.items():
            error = exact.error(launch)
            if error != 0.0:  # NaN is wrong too
                raise click.ClickException(f"{problem.key}: {id_[:12]} is wrong by {error:.2e}")
        sets = arena.sets(*size, Layout.TN)
        ways = {
            id_: measuring.Contender(launch=launch, sets=sets) for id_, launch in launches.items()
        }
        measured = offline_ns(ways, ROUNDS, WINDOW_NS, random.Random(problem.key))
        times[problem.key] = [statistics.median(measured[kernel.id]) for kernel in header.kernels]
        click.echo(f"{problem.key}: {min(times[problem.key]) / 1e3:.1f} us", err=True)
    record: dict[str, Any] = {
        "what": WHAT,
        "command": command_line(),
        "date": today(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernels": [kernel.id for kernel in header.kernels],
        "times_ns": times,
    }
    write(times_path, f"{json.dumps(record)}\n")


if __name__ == "__main__":
    main()
