"""Chains of products that torch.compile turns into Python or C++, for timing each product.

`calls` times them. A chain counts only if its generated code has the intended call for every
product, and if the GPU ran the intended kernels.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest import mock

import click
import torch
from torch._inductor.graph import GraphLowering

from benchmarks.runtime.host_time import STREAM_DEPTH, host_times_us
from benchmarks.runtime.made_up import Square
from benchmarks.shared.bundled import plain
from benchmarks.shared.compiling import ROOT, gemm_calls
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Layout
from nvgemm_runtime.settings import COMPILE_OPTION, DEFAULT_MODE_VARIABLE, Mode

SQUARE = Square(device="cuda", signature=plain(DType.BF16, Layout.TN), size=256)

SHORT, LONG = 10, 40
"""Products in the two chains."""

WINDOWS = 60
WINDOW_CALLS = 20
"""Calls of a chain in a window. `LONG` products each are fewer launches than a stream holds."""

assert LONG * WINDOW_CALLS < STREAM_DEPTH


class Row(str, enum.Enum):
    """Table line."""

    STOCK = "stock"
    KERNEL = "kernel"
    BY_M_KERNEL = "by m, kernel"
    STOCK_BESIDE = "stock, one row more"
    BY_M_ATEN = "by m, ATen, one row more"


class Way(str, enum.Enum):
    """Call in a chain's graph."""

    STOCK = "stock"
    KERNEL = "kernel"
    BY_M = "by-m"


ROWS_OF = {
    Way.STOCK: (Row.STOCK, Row.STOCK_BESIDE),
    Way.KERNEL: (Row.KERNEL,),
    Way.BY_M: (Row.BY_M_KERNEL, Row.BY_M_ATEN),
}
"""Rows per way. Ways with two rows are compiled for a dynamic m."""

WITH_ONE_ROW_MORE = (Row.STOCK_BESIDE, Row.BY_M_ATEN)

RUNS_ATEN = (Row.STOCK, *WITH_ONE_ROW_MORE)


class Language(str, enum.Enum):
    """Generated language."""

    PYTHON = "Python"
    CPP = "C++"


Operands = tuple[torch.Tensor, torch.Tensor]


def operands(square: Square, row: Row) -> Operands:
    """Returns A and B, the same for all rows; B is orthogonal, so products keep their size."""
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


def chain_of(length: int, way: Way, language: Language) -> Callable[..., torch.Tensor]:
    """Returns a function that multiplies A by B again and again."""

    def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            a = a @ b
        return a

    return with_code_of_its_own(chain, f"chain_{language.name}_{way.name}_{length}")


def with_code_of_its_own(
    function: Callable[..., torch.Tensor], name: str
) -> Callable[..., torch.Tensor]:
    """Copies a function and its code, by which torch finds compiled code."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, closure=function.__closure__)


_STOCK_IN_CPP = re.compile(r"\baoti_torch_\w+_mm_out\(")

_IN_CPP = {
    Way.KERNEL: re.compile(r"\(!nvgemm_aot::gemm\("),
    Way.BY_M: re.compile(r"\(!nvgemm_aot::gemm_by_rows\("),
}


def calls_in(code: str, language: Language) -> Counter[Way]:
    """Counts the products that a generated module calls, by who computes them.

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
    """Compiled product chain.

    Attributes:
        length: Products.
        way: Call in its graph.
        language: Code language.
        function: The compiled chain.
    """

    length: int
    way: Way
    language: Language
    function: Callable[..., torch.Tensor]


def compile_chain(square: Square, length: int, way: Way, language: Language) -> Chain:
    """Compiles a chain in default mode; `made_up_rankings` and `in_default_mode` must hold.

    Raises:
        click.ClickException: If the code does not have the intended call for every product.
    """
    rows = ROWS_OF[way]
    a, b = operands(square, rows[0])
    if len(rows) > 1:
        torch._dynamo.mark_dynamic(a, 0)
    mode = Mode.OFF if way is Way.STOCK else Mode.AUTO
    function, calls = compiled_with_calls(
        chain_of(length, way, language), (a, b), language, {COMPILE_OPTION: mode.value}
    )
    if calls != [Counter({way: length})]:
        raise click.ClickException(
            f"the generated {language.value} of {length} products ({way.value}) calls "
            f"{[{one.value: count for one, count in found.items()} for found in calls]}; "
            f"must be one module with {length} calls of {way.value}"
        )
    return Chain(length=length, way=way, language=language, function=function)


def compiled_with_calls(
    function: Callable[..., torch.Tensor],
    given: Operands,
    language: Language,
    options: Mapping[str, Any] | None = None,
) -> tuple[Callable[..., torch.Tensor], list[Counter[Way]]]:
    """Compiles a function for operands; returns it and each generated module's calls.

    Modules that call no product are left out.

    Args:
        function: The function.
        given: The function's operands.
        language: Generated language.
        options: Further torch.compile options.
    """
    all_of_them = {
        "cpp_wrapper": language is Language.CPP,
        "fx_graph_cache": False,  # a cached graph does not show its code
        **(options or {}),
    }
    compiled = torch.compile(function, options=all_of_them)
    codes: list[str] = []
    # torch's run_and_get_code would drop earlier compilations.
    with mock.patch.object(GraphLowering, "save_output_code", codes.append):
        compiled(*given)
    return compiled, [found for found in (calls_in(code, language) for code in codes) if found]


@contextlib.contextmanager
def in_default_mode() -> Iterator[None]:
    """Sets default mode with kernels, without gradients; every chain is compiled once."""
    with (
        torch.no_grad(),
        mock.patch.dict(os.environ, {DEFAULT_MODE_VARIABLE: "1"}),
        torch._inductor.config.patch(max_autotune=False, max_autotune_gemm=False),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        yield


def chain_calls(square: Square, chains: Sequence[Chain]) -> dict[str, Callable[[], object]]:
    """Returns the calls of chains for each of their rows, by `name_of`."""

    def call(chain: Chain, row: Row) -> Callable[[], object]:
        a, b = operands(square, row)
        return lambda: chain.function(a, b)

    return {
        name_of(chain.language, row, chain.length): call(chain, row)
        for chain in chains
        for row in ROWS_OF[chain.way]
    }


def name_of(language: Language, row: Row, length: int) -> str:
    """Returns a chain call's name for a row."""
    return f"{language.value}/{row.value}/{length}"


def by_difference(short_us: Sequence[float], long_us: Sequence[float]) -> list[float]:
    """Returns microseconds a product in each window, from both chains' times."""
    return [(long - short) / (LONG - SHORT) for short, long in zip(short_us, long_us)]


def time_chains(
    square: Square, chains: Sequence[Chain], *, windows: int
) -> dict[Language, dict[Row, list[float]]]:
    """Returns microseconds a product, window by window, for each compiled language."""
    calls = chain_calls(square, chains)
    times = host_times_us(calls, windows=windows, window_calls=WINDOW_CALLS)
    return {
        language: {
            row: by_difference(*(times[name_of(language, row, one)] for one in (SHORT, LONG)))
            for row in Row
        }
        for language in dict.fromkeys(chain.language for chain in chains)
    }


def kernels_on_gpu(call: Callable[[], object]) -> frozenset[str]:
    """Returns the kernels that the GPU runs in a call, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return kernels_among(profile.events())


def kernels_among(events: Iterable[Any]) -> frozenset[str]:
    """Returns GPU kernels' names among a profiler's events, without copies and fills."""
    return frozenset(
        event.name
        for event in events
        # By value: each profiler event has its own object.
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memset", "Memcpy"))
    )


def check_what_ran(ran: Mapping[str, tuple[Row, frozenset[str]]]) -> None:
    """Checks that calls of bundled kernels ran the same kernel, and those of ATen only ATen's.

    Args:
        ran: Each call's row and GPU kernels, by its name.

    Raises:
        click.ClickException: If one did otherwise, or ran nothing.
    """
    atens = frozenset().union(*(names for row, names in ran.values() if row in ROWS_OF[Way.STOCK]))
    bundled = next(names for row, names in ran.values() if row is Row.KERNEL)
    for call, (row, names) in ran.items():
        is_right = names <= atens if row in RUNS_ATEN else names == bundled and not names & atens
        if not names or not is_right:
            raise click.ClickException(
                f"{call} ran {sorted(names)} on the GPU; stock calls run {sorted(atens)}, and the "
                f"first of a bundled kernel {sorted(bundled)}"
            )


def build_chains(square: Square, languages: Sequence[Language]) -> list[Chain]:
    """Compiles every chain; other processes compile the C++ meanwhile."""
    if Language.CPP not in languages:
        return _compile_all(square, Language.PYTHON)
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
    """Compiles all chains' C++ into this process' caches, one process each.

    This process compiles a failed chain again and raises its error.
    """
    command = [sys.executable, "-m", "benchmarks.runtime.calls", "--compile"]
    processes = [
        subprocess.Popen([*command, f"{way.value}-{length}"], cwd=ROOT, stdout=subprocess.DEVNULL)
        for way, length in itertools.product(Way, (SHORT, LONG))
    ]
    try:
        yield
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.wait()
