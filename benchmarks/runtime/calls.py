"""Measures host time of a GEMM's call: in code that torch.compile generates, and by `linear`.

    python -m benchmarks.runtime.calls [--python-only] [--json calls.json]
    python -m benchmarks.runtime.calls --cache DIR --compile-only   # during other work, first

The calls are ``mm`` of 256 x 256 x 256 in bf16, with the GPU behind the host:

- stock: ATen's call: ``extern_kernels.mm``, or in C++ ``aoti_torch_cuda_mm_out``;
- kernel: the call of one bundled kernel;
- by m, kernel: dispatch among two kernels and ATen, where the rows of A pick a kernel;
- by m, ATen: the same with one row of A more, for which dispatch names ATen; compared with the
  stock call for as many rows.

First, the functions that generated Python calls are timed alone, and ``nvgemm_runtime.linear``
beside ``torch.nn.functional.linear``, whose results are new tensors. Then come compiled chains of
products, each the next one's A, in generated Python and with ``cpp_wrapper``: the time of `LONG`
products less that of `SHORT`, over the difference. Guards, arguments and everything else that a
graph does once cancel out, so Python and C++ compare. A chain counts only if its generated code has
the intended call for every product, and if the GPU ran the intended kernels.

Measurements are made up (`benchmarks.runtime.made_up`): any bundle with two bf16 kernels in layout
tn will do, such as that of benchmarks/runtime/manifest.yaml. One process per chain compiles C++,
all at the same time.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import click
import torch
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import fresh_cache

from benchmarks.cases import write_cases
from benchmarks.runtime.chains import (
    LONG,
    ROWS_OF,
    SHORT,
    SQUARE,
    WINDOWS,
    WITH_ONE_ROW_MORE,
    Language,
    Row,
    Way,
    build_chains,
    chain_calls,
    check_what_ran,
    compile_chain,
    in_default_mode,
    kernels_on_gpu,
    name_of,
    operands,
    time_chains,
)
from benchmarks.runtime.host_time import host_times_us
from benchmarks.runtime.made_up import Square, made_up_rankings
from benchmarks.shared.bundled import environment
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import this_run
from nvgemm_runtime.launch import compiled
from nvgemm_runtime.launch.dispatch_table import dispatch_table
from nvgemm_runtime.launch.dispatched import dispatched
from nvgemm_runtime.launch.linear import linear
from nvgemm_runtime.matching.thresholds import ATEN, DispatchTable

FUNCTION_WINDOW_CALLS = 200
"""Calls in a window of one function."""

LEAST_BOUNDS = 3
"""Least bounds for a table that is worth measuring."""

MOST_RATIO = 0.6
"""Goal: most that a bundled kernel's call may take of the stock call's time."""

MOST_ADDED_US = 0.3
"""Goal: most that choosing by m may add."""


def table_of(square: Square) -> tuple[DispatchTable, Mapping[str, str]]:
    """Returns default mode's table for a square, and each kernel's source by id.

    Raises:
        click.ClickException: If the table has too few bounds, or names another thing than wanted.
    """
    decided = dispatch_table(*operands(square, Row.BY_M_KERNEL)).decided
    table = decided.table
    is_apt = table.at(square.size) != ATEN and table.at(square.left_to_aten) == ATEN
    if len(table.bounds) < LEAST_BOUNDS or len(table.used) < 2 or not is_apt:
        raise click.ClickException(
            f"the table by m is {table}; must have {LEAST_BOUNDS} bounds and two kernels, one at "
            f"m {square.size}, and leave m {square.left_to_aten} to ATen"
        )
    return table, {one: decided.measured[one].bundle.origin for one in table.used}


def functions(square: Square) -> dict[Row, Callable[[], object]]:
    """Returns the functions that generated Python calls, with operands."""
    table, origins = table_of(square)
    stock = extern_kernels.mm
    fastest = table.at(square.size)
    one = compiled.gemm(stock, fastest, origins[fastest])
    by_m = dispatched(stock, table.bounds, table.kernels, origins)

    def call(function: Callable[..., object], row: Row) -> Callable[[], object]:
        a, b = operands(square, row)
        out = torch.empty(a.shape[0], square.size, dtype=a.dtype, device=a.device)
        return lambda: function(a, b, out=out)

    chosen = {
        Row.STOCK: stock,
        Row.KERNEL: one,
        Row.BY_M_KERNEL: by_m,
        Row.STOCK_BESIDE: stock,
        Row.BY_M_ATEN: by_m,
    }
    return {row: call(function, row) for row, function in chosen.items()}


EAGER_ROWS = (Row.STOCK, Row.BY_M_KERNEL, Row.STOCK_BESIDE, Row.BY_M_ATEN)
"""Rows of eager calls, which always choose by m."""


def linears(square: Square) -> dict[Row, Callable[[], object]]:
    """Returns eager calls with operands: `linear`, and torch's function as the stock."""

    def call(row: Row) -> Callable[[], object]:
        a, b = operands(square, row)
        weight = b.t()
        is_stock = row in (Row.STOCK, Row.STOCK_BESIDE)
        function = torch.nn.functional.linear if is_stock else linear
        return lambda: function(a, weight)

    return {row: call(row) for row in EAGER_ROWS}


Times = Mapping[str, Sequence[float]]


def goals(functions_us: Times, chains_us: Mapping[str, Times]) -> list[str]:
    """Returns the goals, each with its figure and verdict."""
    lines = []
    chains = {f"chains in {language}": times for language, times in chains_us.items()}
    for name, times in {"functions": functions_us, **chains}.items():
        middle = {row: statistics.median(times[row.value]) for row in Row}
        ratio = middle[Row.KERNEL] / middle[Row.STOCK]
        added = middle[Row.BY_M_KERNEL] - middle[Row.KERNEL]
        lines += [
            f"{name}: kernel at most {MOST_RATIO:g} x stock: {ratio:.2f} x, "
            f"{_met(ratio <= MOST_RATIO)}",
            f"{name}: by m at most {MOST_ADDED_US:g} us more than kernel: {added:+.2f} us, "
            f"{_met(added <= MOST_ADDED_US)}",
        ]
    if len(chains_us) < len(Language):
        return lines
    for row in (Row.KERNEL, Row.BY_M_KERNEL):
        in_python, in_cpp = (
            statistics.median(chains_us[language.value][row.value]) for language in Language
        )
        lines.append(
            f"chains: {row.value} in C++ at most as in Python: {in_cpp:.2f} and {in_python:.2f} "
            f"us, {_met(in_cpp <= in_python)}"
        )
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def report(results: Mapping[str, Any]) -> list[str]:
    """Returns the table's lines."""
    lines = [f"{'us a call':<34} {'median':>8} {'least':>8} {'most':>8} {'x stock':>8}"]
    tables = {
        "function": results["functions_us"],
        "linear": results["linears_us"],
        **{f"{language}, by difference": times for language, times in results["chains_us"].items()},
    }
    for name, times in tables.items():
        lines.append(name)
        for row in (row for row in Row if row.value in times):
            values = times[row.value]
            beside = Row.STOCK_BESIDE if row in WITH_ONE_ROW_MORE else Row.STOCK
            middle = statistics.median(values)
            ratio = middle / statistics.median(times[beside.value])
            lines.append(
                f"  {row.value:<32} {middle:8.2f} {min(values):8.2f} {max(values):8.2f} "
                f"{ratio:8.2f}"
            )
    return [*lines, "", *goals(results["functions_us"], results["chains_us"])]


def measure(square: Square, languages: Sequence[Language], *, windows: int) -> dict[str, Any]:
    """Measures functions and chains; `made_up_rankings` and `in_default_mode` must hold."""
    begin = time.perf_counter()
    chains = build_chains(square, languages)
    compiled_s = time.perf_counter() - begin
    calls = functions(square)
    functions_us = host_times_us(
        {row.value: call for row, call in calls.items()},
        windows=windows,
        window_calls=FUNCTION_WINDOW_CALLS,
    )
    eager = linears(square)
    linears_us = host_times_us(
        {row.value: call for row, call in eager.items()},
        windows=windows,
        window_calls=FUNCTION_WINDOW_CALLS,
    )
    chains_us = time_chains(square, chains, windows=windows)
    ran: dict[str, tuple[Row, frozenset[str]]] = {}
    if square.device == "cuda":  # last: a profiler may leave launches slower
        named = {f"function/{row.value}": (row, call) for row, call in calls.items()}
        named |= {f"linear/{row.value}": (row, call) for row, call in eager.items()}
        timed = chain_calls(square, chains)
        for chain in chains:
            for row in ROWS_OF[chain.way]:
                name = name_of(chain.language, row, chain.length)
                named[name] = row, timed[name]
        ran = {name: (row, kernels_on_gpu(call)) for name, (row, call) in named.items()}
    return {
        "ran": {name: [row.value, sorted(names)] for name, (row, names) in ran.items()},
        "compiled_s": compiled_s,
        "chain_lengths": [SHORT, LONG],
        "functions_us": functions_us,
        "linears_us": linears_us,
        "chains_us": {
            language.value: {row.value: values for row, values in rows.items()}
            for language, rows in chains_us.items()
        },
    }


def _compiled_into(cache: Path | None) -> AbstractContextManager[object]:
    """Sets the cache of this process and of those that it starts."""
    if cache is None:
        return cast(AbstractContextManager[object], fresh_cache())
    return mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(cache.absolute())})


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
@click.option("--python-only", is_flag=True, help="Leave out C++, which takes minutes to compile.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep compiled C++ here, and use what is there; otherwise all is compiled anew.",
)
@click.option("--compile-only", is_flag=True, help="Compile into --cache, and measure nothing.")
@click.option("--compile", "only", hidden=True, help="Compile one chain in C++, and no more.")
def main(
    json_path: Path | None,
    python_only: bool,
    cache: Path | None,
    compile_only: bool,
    only: str | None,
) -> None:
    """Measure and print a table."""
    require_gpu()
    if compile_only and cache is None:
        raise click.UsageError("--compile-only keeps what it compiles in --cache; name one")
    if only is not None:
        way, length = only.rsplit("-", 1)
        with made_up_rankings(SQUARE), in_default_mode():
            compile_chain(SQUARE, int(length), Way(way), Language.CPP)
        return
    languages = (Language.PYTHON,) if python_only else tuple(Language)
    begin = time.perf_counter()
    with _compiled_into(cache), made_up_rankings(SQUARE), in_default_mode():
        if compile_only:
            build_chains(SQUARE, languages)
            return
        results = measure(SQUARE, languages, windows=WINDOWS)
    results = {**environment(), **results, "wall_s": time.perf_counter() - begin}
    click.echo(f"{results['gpu']}, torch {results['torch']}, {results['wall_s']:.0f} s")
    for line in report(results):
        click.echo(line)
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=2) + "\n")
        write_cases(json_path, "runtime.calls", results, results, **this_run())
    ran = {name: (Row(row), frozenset(names)) for name, (row, names) in results["ran"].items()}
    if ran:  # empty without a GPU
        check_what_ran(ran)


if __name__ == "__main__":
    main()
