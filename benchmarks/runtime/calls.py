"""What a GEMM's call costs the host in code that torch.compile generated, in Python and in C++.

    python -m benchmarks.runtime.calls [--json calls.json]

The calls are those of ``mm`` of 256 x 256 x 256 in bf16, with the GPU behind the host:

- stock: ATen's call: ``extern_kernels.mm``, or in C++ ``aoti_torch_cuda_mm_out``;
- kernel: the call of one bundled kernel;
- by m, kernel: a table of two kernels and ATen, where the rows of A pick a kernel;
- by m, ATen: the same, for one row of A more, which the table leaves to ATen. Beside it is the
  stock call for as many rows.

First come the very functions that generated Python calls, apart. Then compiled chains of products,
each the A of the next one, in generated Python and with ``cpp_wrapper``: what a chain of `LONG`
products takes more than one of `SHORT`, over the difference. So guards, arguments and all else that
a graph does once are not counted, and Python and C++ compare. A chain counts only if its generated
code has the intended call for every product, and if the GPU ran what that call should launch.

Measurements are made up (`benchmarks.runtime.made_up`): any bundle with two bf16 kernels of the
layout tn will do, such as that of benchmarks/runtime/manifest.yaml. C++ is compiled by as many
processes as there are chains, at the same time.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import click
import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import fresh_cache

from benchmarks.runtime.host_time import STREAM_DEPTH, host_times_us
from benchmarks.runtime.made_up import Square, made_up_rankings
from benchmarks.shared.bundled import environment, plain
from benchmarks.shared.compiling import ROOT, gemm_calls
from benchmarks.shared.records import require_gpu
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Layout
from nvgemm_runtime.launch import compiled
from nvgemm_runtime.launch.dispatch_table import dispatch_table
from nvgemm_runtime.launch.dispatched import dispatched
from nvgemm_runtime.matching.thresholds import ATEN, DispatchTable
from nvgemm_runtime.settings import COMPILE_OPTION, DEFAULT_MODE_VARIABLE, Mode

SQUARE = Square(device="cuda", signature=plain(DType.BF16, Layout.TN), size=256)

SHORT, LONG = 10, 40
"""Products of the two chains."""

WINDOWS = 60
WINDOW_CALLS = 20
"""Of a chain; `LONG` products each are fewer launches than wait in a stream."""

assert LONG * WINDOW_CALLS < STREAM_DEPTH

FUNCTION_WINDOW_CALLS = 200
"""Of a function by itself."""

LEAST_BOUNDS = 3
"""Of a table that is worth measuring."""

MOST_RATIO = 0.6
"""Goal: most that a bundled kernel's call may take of the stock call's time."""

MOST_ADDED_US = 0.3
"""Goal: most that choosing by m may add."""


class Row(str, enum.Enum):
    """A line of the tables."""

    STOCK = "stock"
    KERNEL = "kernel"
    BY_M_KERNEL = "by m, kernel"
    STOCK_BESIDE = "stock, one row more"
    BY_M_ATEN = "by m, ATen, one row more"


class Way(str, enum.Enum):
    """What the graph of a chain calls."""

    STOCK = "stock"
    KERNEL = "kernel"
    BY_M = "by-m"


ROWS_OF = {
    Way.STOCK: (Row.STOCK, Row.STOCK_BESIDE),
    Way.KERNEL: (Row.KERNEL,),
    Way.BY_M: (Row.BY_M_KERNEL, Row.BY_M_ATEN),
}
"""By way: what its graph is called for. Those with two rows are compiled for a dynamic m."""

WITH_ONE_ROW_MORE = (Row.STOCK_BESIDE, Row.BY_M_ATEN)

RUNS_ATEN = (Row.STOCK, *WITH_ONE_ROW_MORE)


class Language(str, enum.Enum):
    """Of generated code."""

    PYTHON = "Python"
    CPP = "C++"


Operands = tuple[torch.Tensor, torch.Tensor]


def operands(square: Square, row: Row) -> Operands:
    """A and B, the same for all rows; B is orthogonal, so that a chain's products stay as large."""
    m = square.left_to_aten if row in WITH_ONE_ROW_MORE else square.size
    signature, size = square.signature, square.size
    generator = torch.Generator().manual_seed(0)
    b = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    b = b.contiguous() if signature.layout.b_row_major else b.t().contiguous().t()
    a = torch.randn(m, size, generator=generator)
    return (
        a.to(square.device, torch_dtype(signature.a)),
        b.to(square.device, torch_dtype(signature.b)),
    )


def table_of(square: Square) -> tuple[DispatchTable, Mapping[str, str]]:
    """The table that default mode has for a square, and by id what brought its kernels.

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
    """The functions that generated Python calls, with their operands; `made_up_rankings` hold."""
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


def chain_of(length: int, way: Way, language: Language) -> Callable[..., torch.Tensor]:
    """A function of A and B: A times B, and the result times B, and so on.

    Each has code of its own: torch looks for compiled code among all that a function's has.
    """

    def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            a = a @ b
        return a

    name = f"chain_{language.name}_{way.name}_{length}"
    code = chain.__code__.replace(co_name=name)
    return FunctionType(code, globals(), name, closure=chain.__closure__)


_STOCK_IN_CPP = re.compile(r"\baoti_torch_\w+_mm_out\(")

_IN_CPP = {
    Way.KERNEL: re.compile(r"\(!nvgemm_aot::gemm\("),
    Way.BY_M: re.compile(r"\(!nvgemm_aot::gemm_by_rows\("),
}


def calls_in(code: str, language: Language) -> Counter[Way]:
    """The products that a generated module calls, by who computes them.

    In C++, every other call has the stock one behind it.
    """
    if language is Language.PYTHON:
        found: Counter[Way] = Counter()
        for name, count in gemm_calls(code).items():
            if name.startswith("nvgemm_mm_by_m_"):
                found[Way.BY_M] += count
            else:
                found[Way.KERNEL if name.startswith("nvgemm_mm_") else Way.STOCK] += count
        return found
    found = Counter({way: len(call.findall(code)) for way, call in _IN_CPP.items()})
    found[Way.STOCK] = len(_STOCK_IN_CPP.findall(code)) - found.total()
    return +found


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A compiled chain of products.

    Attributes:
        length: Products.
        way: What it calls.
        language: Of its code.
        function: It.
    """

    length: int
    way: Way
    language: Language
    function: Callable[..., torch.Tensor]


def compile_chain(square: Square, length: int, way: Way, language: Language) -> Chain:
    """Compile a chain in default mode; `made_up_rankings` and `asked_for` must hold.

    Raises:
        click.ClickException: If the code does not have the intended call for every product.
    """
    rows = ROWS_OF[way]
    a, b = operands(square, rows[0])
    if len(rows) > 1:
        torch._dynamo.mark_dynamic(a, 0)
    mode = Mode.OFF if way is Way.STOCK else Mode.AUTO
    options: dict[str, Any] = {
        COMPILE_OPTION: mode.value,
        "cpp_wrapper": language is Language.CPP,
        "fx_graph_cache": False,  # a graph from the cache does not show its code
    }
    function = torch.compile(chain_of(length, way, language), options=options)
    codes: list[str] = []
    # Not torch's run_and_get_code, which throws away what was compiled before.
    with mock.patch.object(GraphLowering, "save_output_code", codes.append):
        function(a, b)
    calls = [found for found in (calls_in(code, language) for code in codes) if found]
    if calls != [Counter({way: length})]:
        raise click.ClickException(
            f"the generated {language.value} of {length} products ({way.value}) calls "
            f"{[{one.value: count for one, count in found.items()} for found in calls]}; "
            f"must be one module with {length} calls of {way.value}"
        )
    return Chain(length=length, way=way, language=language, function=function)


@contextlib.contextmanager
def asked_for() -> Iterator[None]:
    """Ask for kernels in default mode, without gradients; every chain is compiled once."""
    with (
        torch.no_grad(),
        mock.patch.dict(os.environ, {DEFAULT_MODE_VARIABLE: "1"}),
        torch._inductor.config.patch(max_autotune=False, max_autotune_gemm=False),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        yield


def chain_calls(square: Square, chains: Sequence[Chain]) -> dict[str, Callable[[], object]]:
    """The calls of chains for each of their rows, by `_name`."""

    def call(chain: Chain, row: Row) -> Callable[[], object]:
        a, b = operands(square, row)
        return lambda: chain.function(a, b)

    return {
        _name(chain.language, row, chain.length): call(chain, row)
        for chain in chains
        for row in ROWS_OF[chain.way]
    }


def _name(language: Language, row: Row, length: int) -> str:
    return f"{language.value}/{row.value}/{length}"


def by_difference(short_us: Sequence[float], long_us: Sequence[float]) -> list[float]:
    """Microseconds a product, of each window, by the times of both chains in it."""
    return [(long - short) / (LONG - SHORT) for short, long in zip(short_us, long_us)]


def time_chains(
    square: Square, chains: Sequence[Chain], *, windows: int
) -> dict[Language, dict[Row, list[float]]]:
    """Microseconds a product, window by window."""
    calls = chain_calls(square, chains)
    times = host_times_us(calls, windows=windows, window_calls=WINDOW_CALLS)
    return {
        language: {
            row: by_difference(*(times[_name(language, row, one)] for one in (SHORT, LONG)))
            for row in Row
        }
        for language in Language
    }


def kernels_on_gpu(call: Callable[[], object]) -> frozenset[str]:
    """Names of the kernels that the GPU runs in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return frozenset(event.key for event in profile.key_averages())


def check_what_ran(ran: Mapping[str, tuple[Row, frozenset[str]]]) -> None:
    """See that all calls of bundled kernels ran the same one, and those of ATen only what ATen has.

    Args:
        ran: By a call's name, its row, and the kernels that the GPU ran in it.

    Raises:
        click.ClickException: If one did otherwise, or ran nothing.
    """
    atens = frozenset().union(*(names for row, names in ran.values() if _is_stock(row)))
    bundled = next(names for row, names in ran.values() if row is Row.KERNEL)
    for call, (row, names) in ran.items():
        is_right = names <= atens if row in RUNS_ATEN else names == bundled and not names & atens
        if not names or not is_right:
            raise click.ClickException(
                f"{call} ran {sorted(names)} on the GPU; stock calls run {sorted(atens)}, and the "
                f"first of a bundled kernel {sorted(bundled)}"
            )


def _is_stock(row: Row) -> bool:
    return row in (Row.STOCK, Row.STOCK_BESIDE)


def build_chains(square: Square) -> list[Chain]:
    """Compile every chain; as long as those in Python take, other processes compile the C++."""
    with _cpp_compiled_beside():
        in_python = _compile_all(square, Language.PYTHON)
    return in_python + _compile_all(square, Language.CPP)


def _compile_all(square: Square, language: Language) -> list[Chain]:
    return [
        compile_chain(square, length, way, language)
        for way, length in itertools.product(Way, (SHORT, LONG))
    ]


@contextlib.contextmanager
def _cpp_compiled_beside() -> Iterator[None]:
    """At the end, the caches of this process have the C++ of all chains, compiled a process each.

    One that fails is compiled by this process itself, which says what is wrong with it.
    """
    command = [sys.executable, "-m", "benchmarks.runtime.calls", "--compile"]
    processes = [
        subprocess.Popen([*command, f"{way.value}-{length}"], cwd=ROOT, stdout=subprocess.DEVNULL)
        for way, length in itertools.product(Way, (SHORT, LONG))
    ]
    try:
        yield
    finally:
        for process in processes:
            process.wait()


Times = Mapping[str, Sequence[float]]


def goals(functions_us: Times, chains_us: Mapping[str, Times]) -> list[str]:
    """The goals in words, each with the figure and whether it is met."""
    python, cpp = chains_us[Language.PYTHON.value], chains_us[Language.CPP.value]
    lines = []
    for name, times in (
        ("functions", functions_us),
        ("chains in Python", python),
        ("chains in C++", cpp),
    ):
        middle = {row: statistics.median(times[row.value]) for row in Row}
        ratio = middle[Row.KERNEL] / middle[Row.STOCK]
        added = middle[Row.BY_M_KERNEL] - middle[Row.KERNEL]
        lines += [
            f"{name}: kernel at most {MOST_RATIO:g} x stock: {ratio:.2f} x, "
            f"{_met(ratio <= MOST_RATIO)}",
            f"{name}: by m at most {MOST_ADDED_US:g} us more than kernel: {added:+.2f} us, "
            f"{_met(added <= MOST_ADDED_US)}",
        ]
    for row in (Row.KERNEL, Row.BY_M_KERNEL):
        in_python, in_cpp = (statistics.median(times[row.value]) for times in (python, cpp))
        lines.append(
            f"chains: {row.value} in C++ at most as in Python: {in_cpp:.2f} and {in_python:.2f} "
            f"us, {_met(in_cpp <= in_python)}"
        )
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def report(results: Mapping[str, Any]) -> list[str]:
    """Lines of the table."""
    lines = [f"{'us a call':<34} {'median':>8} {'least':>8} {'most':>8} {'x stock':>8}"]
    tables = {
        "function": results["functions_us"],
        **{
            f"{language.value}, by difference": results["chains_us"][language.value]
            for language in Language
        },
    }
    for name, times in tables.items():
        lines.append(name)
        for row in Row:
            values = times[row.value]
            beside = Row.STOCK_BESIDE if row in WITH_ONE_ROW_MORE else Row.STOCK
            middle = statistics.median(values)
            ratio = middle / statistics.median(times[beside.value])
            lines.append(
                f"  {row.value:<32} {middle:8.2f} {min(values):8.2f} {max(values):8.2f} "
                f"{ratio:8.2f}"
            )
    return [*lines, "", *goals(results["functions_us"], results["chains_us"])]


def measure(square: Square, *, windows: int) -> dict[str, Any]:
    """Measure functions and chains; `made_up_rankings` and `asked_for` must hold."""
    begin = time.perf_counter()
    chains = build_chains(square)
    compiled_s = time.perf_counter() - begin
    calls = functions(square)
    functions_us = host_times_us(
        {row.value: call for row, call in calls.items()},
        windows=windows,
        window_calls=FUNCTION_WINDOW_CALLS,
    )
    chains_us = time_chains(square, chains, windows=windows)
    if square.device == "cuda":  # at the end: a profiler may leave launches slower
        named = {f"function/{row.value}": (row, call) for row, call in calls.items()}
        timed = chain_calls(square, chains)
        for chain in chains:
            for row in ROWS_OF[chain.way]:
                name = _name(chain.language, row, chain.length)
                named[name] = row, timed[name]
        check_what_ran({name: (row, kernels_on_gpu(call)) for name, (row, call) in named.items()})
    return {
        "compiled_s": compiled_s,
        "chain_lengths": [SHORT, LONG],
        "functions_us": functions_us,
        "chains_us": {
            language.value: {row.value: values for row, values in rows.items()}
            for language, rows in chains_us.items()
        },
    }


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
@click.option("--compile", "only", hidden=True, help="Compile one chain in C++, and no more.")
def main(json_path: Path | None, only: str | None) -> None:
    """Measure and print a table."""
    require_gpu()
    if only is not None:
        way, length = only.rsplit("-", 1)
        with made_up_rankings(SQUARE), asked_for():
            compile_chain(SQUARE, int(length), Way(way), Language.CPP)
        return
    begin = time.perf_counter()
    with fresh_cache(), made_up_rankings(SQUARE), asked_for():
        results = measure(SQUARE, windows=WINDOWS)
    results = {**environment(), **results, "wall_s": time.perf_counter() - begin}
    click.echo(f"{results['gpu']}, torch {results['torch']}, {results['wall_s']:.0f} s")
    for line in report(results):
        click.echo(line)
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
