"""Measures dispatch by m at sizes that no ranking has, on a GPU.

    nvgemm-aot tune BUNDLE -o tuned.nvgemm --grid            # on a GPU; then, with it installed or
    NVGEMM_AOT_BUNDLES=tuned.nvgemm python -m benchmarks.dispatch measure dispatch.json
    python -m benchmarks.dispatch table dispatch.json        # anywhere
    python -m benchmarks.dispatch choose dispatch.json tuned.nvgemm        # by today's rules

For every n and k that a tuned bundle measured at several m, as a plain bf16 or fp16 product,
`HELD_BACK` further m between the least and the largest are measured: ATen and every bundled kernel
of the signature, behind a small kernel each (`benchmarks.shared.measuring`). Choices are compared
with the best of them:

- dispatch: the choice of `nvgemm_runtime.dispatch_table` for that m;
- hint m: the fastest measured at that m, used for every m, as max-autotune does if the graph's
  first call has that m;
- ATen;
- compiled, with ``--compiled``: one graph for each n and k with a dynamic m, as torch.compile makes
  it without max-autotune, by rankings that two GPUs confirm. The graph itself is timed, and must
  give exact results at every size without another compilation.

Rounds that choose the best are not those that are reported, so a choice can gain.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.shared.bundled import declared, environment, load_exact
from benchmarks.shared.h200 import H200
from benchmarks.shared.measuring import Arena, Contender, Exact, offline_ns
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import Results, measuring_options
from benchmarks.shared.summaries import MIN_ROUNDS, Summary, chosen, geomean, ratio, summarized
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import APART
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.operands import MAX_ALIGNMENT_BYTES, Request
from nvgemm_runtime.gemm.problem import DType, Problem
from nvgemm_runtime.launch.dispatch_table import dispatch_table
from nvgemm_runtime.matching.device import TorchVersions
from nvgemm_runtime.matching.dispatch import decide_dispatch
from nvgemm_runtime.matching.evidence import Evidence
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView
from nvgemm_runtime.matching.thresholds import DispatchTable
from nvgemm_runtime.matching.trust import Terms

WHAT = "dispatch"
WINDOW_NS = 1_000_000.0

HELD_BACK = 40
"""m values for each n and k."""

HINTS = (16, 512, 4096)
"""Values of m at which a graph with one choice was compiled; the nearest measured m counts."""

ATEN = "aten"

COMPILED = "compiled"
"""A compiled graph's way and choice."""

_COMPILED_FOR = 64
"""Example for a dynamic m, for compiling graphs."""


def held_back(measured: Sequence[int], count: int) -> list[int]:
    """Returns m values between the least and the largest measured ones, and no measured one.

    They lie as evenly as may be on a logarithmic scale, and each is odd or even as it comes.
    """
    least, largest = min(measured), max(measured)
    steps = 8 * count
    rising = (round(least * (largest / least) ** (step / steps)) for step in range(1, steps))
    free = [m for m in dict.fromkeys(rising) if m not in measured]
    taken = min(count, len(free))
    return [free[place * len(free) // taken] for place in range(taken)]


def lines_of(problems: Mapping[Problem, Sequence[str]]) -> dict[Problem, dict[int, Problem]]:
    """Returns declared problems by m, keyed by their n and k, if there are several."""
    lines: dict[Problem, dict[int, Problem]] = {}
    for problem in sorted(problems):
        lines.setdefault(replace(problem, m=1), {})[problem.m] = problem
    return {line: of_m for line, of_m in lines.items() if len(of_m) > 1}


def operands(problem: Problem, device: str = "cuda") -> tuple[Any, Any]:
    """Returns A and B; only shapes and strides matter."""
    import torch

    from nvgemm_runtime.gemm.operands import torch_dtype

    layout, dtype = problem.signature.layout, torch_dtype(problem.signature.a)

    def matrix(rows: int, columns: int, *, row_major: bool) -> torch.Tensor:
        shape = (rows, columns) if row_major else (columns, rows)
        made = torch.empty(shape, dtype=dtype, device=device)
        return made if row_major else made.t()

    a = matrix(problem.m, problem.k, row_major=layout.a_row_major)
    return a, matrix(problem.k, problem.n, row_major=layout.b_row_major)


def choices(problem: Problem, measured: Sequence[int], *, measured_once: bool) -> dict[str, str]:
    """Returns each choice's kernel id, or `ATEN`, for a problem."""
    sizes = dispatch_table(*operands(problem), measured_once=measured_once)
    found = {"dispatch": sizes.decided.table.at(problem.m) or ATEN}
    by_m = {size.m: size for size in sizes.decided.sizes}
    for hint in HINTS:
        nearest = min((m for m in measured if m in by_m), key=lambda m: abs(m - hint), default=None)
        if nearest is not None:
            size = by_m[nearest]
            times = {id_: one.timing.time_ns for id_, one in size.kernels.items()}
            times[ATEN] = size.aten.time_ns
            found[f"hint {hint}"] = min(times, key=lambda name: times[name])
    return found


def choices_of_bundle(
    header: Header, problems: Sequence[Problem], torch: str, cuda: str
) -> list[str]:
    """Returns this version's choices for each problem from a bundle's rankings, on an H200.

    Rankings count that no other GPU has confirmed.
    """
    versions = TorchVersions(torch=torch, cuda=cuda)
    index = Index([BundleView(name="the bundle", header=header)], H200, versions=versions)
    tables: dict[Problem, DispatchTable] = {}
    for problem in problems:
        line = replace(problem, m=1)
        if line not in tables:
            tables[line] = decide_dispatch(
                index.ranked_sizes(problem),
                Request(problem=problem, alignment_bytes=MAX_ALIGNMENT_BYTES),
                H200,
                versions,
                Terms(limit=1),
                evidence=Evidence.ONCE,
            ).table
    return [tables[replace(problem, m=1)].at(problem.m) or ATEN for problem in problems]


def one_graph(line: Problem, device: str = "cuda") -> Callable[[Any, Any], Any]:
    """Compiles a product into one graph with a dynamic m, with confirmed rankings.

    `benchmarks.runtime.chains.in_default_mode` must hold, also where it is called.

    Raises:
        click.ClickException: If the graph does not choose by m.
    """
    import torch

    from benchmarks.runtime.chains import (
        Language,
        Way,
        compiled_with_calls,
        with_code_of_its_own,
    )

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    a, b = operands(replace(line, m=_COMPILED_FOR), device)
    torch._dynamo.mark_dynamic(a, 0)
    own = with_code_of_its_own(multiply, f"multiply_n{line.n}_k{line.k}_{line.signature.a.value}")
    function, calls = compiled_with_calls(own, (a, b), Language.PYTHON)
    if calls != [{Way.BY_M: 1}]:
        raise click.ClickException(
            f"the graph of n {line.n}, k {line.k} does not choose by m (it calls "
            f"{[{way.value: count for way, count in one.items()} for one in calls]}): default mode "
            "needs rankings of several m that two GPUs confirm; see nvgemm-aot explain"
        )
    return function


def measure_size(
    problem: Problem,
    ids: Sequence[str],
    chosen_ids: Mapping[str, str],
    rounds: int,
    graph: Callable[[Any, Any], Any] | None = None,
) -> dict[str, Any]:
    """Measures one size; ``times`` are summaries by kernel, ATen and the graph.

    Raises:
        click.ClickException: If the graph's result is not exact.
    """
    import torch

    from nvgemm_runtime.gemm.operands import torch_dtype

    m, n, k = problem.m, problem.n, problem.k
    dtype = torch_dtype(problem.signature.a)
    sets = Arena(dtype, [(m, n, k)]).sets(m, n, k, problem.signature.layout)
    exact = Exact.draw(m, n, k, problem.signature.layout, dtype)
    checked = load_exact(ids, exact)
    ways = {ATEN: Contender(launch=lambda a, b, out: torch.mm(a, b, out=out), sets=sets)}
    ways |= {id_: Contender(launch=launch, sets=sets) for id_, launch in checked.launches.items()}
    taken = dict(chosen_ids)
    if graph is not None:
        error = exact.error(lambda a, b, out: out.copy_(graph(a, b)))
        if error:
            raise click.ClickException(f"{problem.key}: the graph's error is {error:g}, must be 0")
        ways[COMPILED] = Contender(launch=lambda a, b, out: graph(a, b), sets=sets)
        taken[COMPILED] = COMPILED
    order = random.Random(problem.key)
    times = summarized(offline_ns(ways, rounds, WINDOW_NS, order, launches=APART))
    return {
        "times": {name: one.to_json() for name, one in times.items()},
        "choices": taken,
        "thrown_out": dict(checked.thrown_out),
    }


def best_of(times: Mapping[str, Summary]) -> str:
    """Returns the reference for all choices: the fastest kernel, or ATen."""
    return chosen({name: one for name, one in times.items() if name != COMPILED})


def losses(entry: Mapping[str, Any]) -> dict[str, float]:
    """Returns each choice's time over the best."""
    times = {name: Summary.from_json(one) for name, one in entry["times"].items()}
    best = times[best_of(times)]
    named = {**entry["choices"], ATEN: ATEN}
    return {choice: ratio(times[name], best) for choice, name in named.items() if name in times}


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row for each n and k, one for all, then the largest losses of dispatch."""
    by_line: dict[str, dict[Problem, dict[str, float]]] = {}
    for key, entry in entries.items():
        problem = Problem.parse(key)
        line = f"{problem.signature.a.value} n{problem.n} k{problem.k}"
        by_line.setdefault(line, {})[problem] = losses(entry)
    names = list(
        dict.fromkeys(n for rows in by_line.values() for one in rows.values() for n in one)
    )
    yield f"{'times as long as the best':<28} {'sizes':>5} " + " ".join(f"{n:>17}" for n in names)
    every: dict[Problem, dict[str, float]] = {}
    for line, rows in by_line.items():
        every |= rows
        yield _row(line, list(rows.values()), names)
    yield _row("all", list(every.values()), names)
    yield "each: geometric mean (most)"
    worst = sorted(every, key=lambda problem: -every[problem].get("dispatch", 1.0))[:5]
    for problem in worst:
        entry = entries[problem.key]
        name = entry["choices"]["dispatch"]
        best = best_of({n: Summary.from_json(one) for n, one in entry["times"].items()})
        loss = every[problem]["dispatch"]
        yield f"dispatch, {problem.key}: {loss:.3f}: {name[:12]} for {best[:12]}"


def _row(label: str, rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> str:
    cells = []
    for name in names:
        found = [row[name] for row in rows if name in row]
        text = f"{geomean(found):.4f} ({max(found):.3f})" if found else "-"
        cells.append(f"{text:>17}")
    return f"{label:<28} {len(rows):>5} " + " ".join(cells)


@click.group()
def main() -> None:
    """Measure what choosing by m loses."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's table."""
    Results.read(path, WHAT).write_table(table)


@main.command("choose")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
def choose_again(path: Path, bundle: Path) -> None:
    """Print the table of a file as if today's rules had chosen from the rankings of BUNDLE."""
    results = Results.read(path, WHAT)
    with Bundle(bundle) as opened:
        header = opened.header
    problems = [Problem.parse(key) for key in results.entries]
    measured_with = results.environment
    found = choices_of_bundle(header, problems, measured_with["torch"], measured_with["CUDA"])
    for problem, name in zip(problems, found):
        entry = results.entries[problem.key]
        if name not in entry["times"]:
            raise click.ClickException(f"{path} has no time of kernel {name[:12]} at {problem.key}")
        entry["choices"]["dispatch"] = name
    chose = f"$ python -m benchmarks.dispatch choose {path.name} {bundle.name}"
    # Printed only: the table beside the file has the choices made when it was measured.
    click.echo("\n".join([*results.heading(), chose, "", *table(results.entries)]))


@main.command()
@measuring_options
@click.option("--rounds", default=12, show_default=True, type=click.IntRange(min=MIN_ROUNDS))
@click.option("--sizes", default=HELD_BACK, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--measured-once", is_flag=True, help="Rankings count that no other GPU has confirmed."
)
@click.option("--compiled", is_flag=True, help="Measure also one compiled graph of each n and k.")
def measure(
    path: Path,
    resume: bool,
    budget: float | None,
    rounds: int,
    sizes: int,
    measured_once: bool,
    compiled: bool,
) -> None:
    """Measure, keeping results in PATH, and print the table."""
    require_gpu()
    problems = declared([DType.BF16, DType.FP16])
    lines = lines_of(problems)
    if not lines:
        raise click.ClickException(
            "no usable bundle measured a matrix product at several m: tune one with --grid, and "
            "install its wheel or name it in NVGEMM_AOT_BUNDLES"
        )
    results = Results.begin(
        path,
        what=WHAT,
        environment=environment(),
        settings={
            "rounds": rounds,
            "sizes": sizes,
            "measured once": measured_once,
            "compiled": compiled,
        },
        resume=resume,
    )

    graphs = contextlib.ExitStack()
    by_line: dict[Problem, Callable[[Any, Any], Any]] = {}
    if compiled:
        from benchmarks.runtime.chains import in_default_mode

        graphs.enter_context(in_default_mode())
        by_line = {line: one_graph(line) for line in lines}

    def work(problem: Problem, of_m: Mapping[int, Problem]) -> Callable[[], dict[str, Any]]:
        ids = list(dict.fromkeys(id_ for one in of_m.values() for id_ in problems[one]))
        taken = choices(problem, list(of_m), measured_once=measured_once)
        graph = by_line.get(replace(problem, m=1))
        return lambda: measure_size(problem, ids, taken, rounds, graph)

    wanted = [
        (replace(line, m=m), of_m)
        for line, of_m in lines.items()
        for m in held_back(list(of_m), sizes)
    ]
    random.Random(0).shuffle(wanted)
    left = [
        (problem.key, work(problem, of_m))
        for problem, of_m in wanted
        if problem.key not in results.entries
    ]
    try:
        with graphs:
            results.fill(left, budget, lambda entry: f"dispatch {losses(entry)['dispatch']:.3f}")
    finally:
        results.end(table)


if __name__ == "__main__":
    main()
