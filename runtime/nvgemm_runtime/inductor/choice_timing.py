"""Times the choices for a GEMM so that bundled kernels make no program slower.

Inductor times a choice between two events around the host's call. Where the host takes longer than
the kernel, as for most GEMMs of a small batch, that measures the launch, which costs nothing under
CUDA graphs. All choices that bundled kernels join are timed here instead: the calls wait in the
stream behind a kernel that spins until the host has sent them all, so that the GPU never waits for
the host (`time_on_gpu`).

One case is harder. ATen's operators take the host longer to launch than Triton's kernels. Where
both compete and nobody says that calls are recorded in CUDA graphs, a choice by the GPU's time
could take an operator whose launches the program then waits for. There Inductor's own choice, by
its own times, stands unless a bundled kernel takes less of the GPU's time (`time_beside_inductor`).

A weight comes from memory in a model that is larger than the L2 cache, and from the cache in a
small one, and a kernel that wins in one case may lose in the other. So a choice's time is the mean
of a call with a cold cache, after reading a buffer of the cache's size, and of one with a warm
cache. Each timed call runs behind another kernel, the one that reads the buffer or a small one, and
its own time is subtracted: kernels of programmatic dependent launch overlap with each other in a
row, and hardly ever with what stands between two GEMMs of a model. Inductor writes such a buffer
instead, and then kernels also wait for the cache to be written back, some more than others.
`benchmarks.additive.choice_timing` compares ways of timing.

Long calls make the GPU's clocks fall, so those of bundled kernels take turns with what they must
beat, with a cold cache alone (`LONG_MS`), after a load that lasts (`LOAD_MS`). `gpu_times` has the
stopwatches.

The names of torch that are used here are private, and were read on torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.runtime import benchmarking

from . import gpu_times

LONG_MS = 0.1
"""Milliseconds from which on bundled kernels are timed in turns with what they must beat. A GPU
that was idle while torch compiled soon runs slower under full load: later times of a product of
0.26 ms were up to 1.05 times the first on an H100, of one of 2.1 ms 1.17 times, and of one of 0.14
ms within 1.4 % (`benchmarks.additive.clocks`). Of shorter ones a load still changes which kernel
is the fastest: of a gated product of 0.16 ms, the kernel that is picked by its time alone took
1.047 times as long as the fastest under lasting load (`benchmarks.gated.loads`)."""

LOAD_MS = 60.0
"""Milliseconds of load before a GEMM's kernels are timed in turns. At the lower clocks of a GPU
under load another kernel may be the fastest. After loads of 0, 30, 60 and 150 ms, the kernels that
were picked took 1.013, 1.014, 1.006 and 1.002 times as long as the fastest under lasting load, on
an H200 (`benchmarks.gated.loads`); with 150 ms each such GEMM would take 0.09 s longer."""

LEAST_GAIN = 0.98
"""Share of the time of Inductor's choice that a bundled kernel may take on the GPU to be used where
launches may count: 2 % are the noise of single times, and the kernel's launch is the dearer one."""

_STOCK_TIMERS = ("InductorBenchmarker", "TritonBenchmarker")
"""Benchmarkers of torch that time launches too; its profiler-based one and a user's own stay."""

_Benchmark = Callable[..., float]

_Measure = Callable[[Callable[[], object], float], float]
"""``measure(call, longest_ms)`` gives milliseconds of a call, timed for about so long."""

_thread = threading.local()
"""Its ``measure`` says how choices are timed; None or nothing is Inductor's own way."""


@dataclass
class _Best:
    """The best of Inductor's own choices so far.

    Attributes:
        ms: Milliseconds, as Inductor was told.
        gpu_ms: Milliseconds on the GPU, the least that was seen.
        repeat: Times it again, with the tensors that a bundled kernel is timed with; None where it
            takes others.
        is_loaded: Whether kernels have taken turns with it, so that the GPU is under load.
    """

    ms: float = math.inf
    gpu_ms: float = math.inf
    repeat: _Benchmark | None = None
    is_loaded: bool = False


def time_on_gpu(others: Iterable[Any], kernels: Iterable[Any]) -> None:
    """Have all choices of one GEMM timed by their time on the GPU, in the same way.

    If the best of the others takes `LONG_MS`, each kernel takes turns with it, after `LOAD_MS` of
    load, and its time is stated relative to that. Otherwise the first kernel that takes less has it
    timed again, right behind itself: the GPU may have run at lower clocks before, or for another
    process. Times of kernels are then stated relative to the lower of the two, so one wins if it
    beats both. Choices of Triton's take other tensors, and are timed once.

    Inductor's caches keep these times apart from those that Inductor took itself. A profiler that
    the user's settings name is used as it is.

    Args:
        others: Inductor's choices, which it benchmarks first.
        kernels: The bundled ones.
    """
    if config.profile_bandwidth_with_do_bench_using_profiling or not _replace_timer():
        return
    best = _Best()
    for choice in others:
        repeatable = _takes_tensors_of_kernels(choice)
        _wrap_requests(choice)
        choice.benchmark = functools.partial(_benchmark_other, best, repeatable, choice.benchmark)
        choice.hash_key = functools.partial(_hash_key, choice.hash_key, "on-gpu-under-load")
    for choice in kernels:
        _wrap_requests(choice)
        choice.benchmark = functools.partial(_benchmark_against, best, 1.0, choice.benchmark)
        choice.hash_key = functools.partial(_hash_key, choice.hash_key, "on-gpu-under-load")


def _requests(choice: Any) -> list[str]:
    """Names of a choice's requests to processes that benchmark."""
    return [name for name in ("bmreq", "_bmreq") if vars(choice).get(name) is not None]


def _takes_tensors_of_kernels(choice: Any) -> bool:
    """Whether Inductor times a choice with the tensors that it times bundled kernels with.

    So it does with all extern calls, which have requests too, and with parts of a graph.
    """
    from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
    from torch._inductor.select_algorithm import ExternKernelCaller

    kinds = ExternKernelCaller, SubgraphChoiceCaller
    return isinstance(choice, kinds) or not _requests(choice)


def _wrap_requests(choice: Any) -> None:
    for name in _requests(choice):
        setattr(choice, name, TimedRequest(vars(choice)[name]))


def _benchmark_other(
    best: _Best, repeatable: bool, benchmark: _Benchmark, *args: Any, **kwargs: Any
) -> float:
    ms = _benchmark(benchmark, *args, **kwargs)
    if ms < best.ms:
        best.ms = best.gpu_ms = ms
        best.repeat = benchmark if repeatable else None
    return ms


def time_beside_inductor(others: Iterable[Any], kernels: Iterable[Any]) -> None:
    """Have Inductor time its choices of one GEMM as always, and bundled kernels against the best.

    A bundled kernel's time is that of Inductor's best choice, scaled as their times on the GPU and
    by `LEAST_GAIN`. So it wins if it clearly beats on the GPU what Inductor alone would take, and
    its launch is no advantage. Inductor benchmarks choices in their order, so kernels must stand
    behind the others.
    """
    if config.profile_bandwidth_with_do_bench_using_profiling or not _replace_timer():
        return
    best = _Best()
    for choice in others:
        repeatable = _takes_tensors_of_kernels(choice)
        choice.benchmark = functools.partial(_benchmark_stock, best, repeatable, choice.benchmark)
    for choice in kernels:
        choice.benchmark = functools.partial(_benchmark_against, best, LEAST_GAIN, choice.benchmark)
        choice.hash_key = functools.partial(_hash_key, choice.hash_key, "beside-under-load")


def _benchmark_stock(
    best: _Best, repeatable: bool, benchmark: _Benchmark, *args: Any, **kwargs: Any
) -> float:
    ms = benchmark(*args, **kwargs)
    if ms < best.ms:
        best.ms, best.gpu_ms = ms, _benchmark(benchmark, *args, **kwargs)
        best.repeat = benchmark if repeatable else None
    return ms


def _benchmark_against(
    best: _Best, share: float, benchmark: _Benchmark, *args: Any, **kwargs: Any
) -> float:
    if math.isinf(best.ms):
        return _benchmark(benchmark, *args, **kwargs)
    if best.repeat is not None and best.gpu_ms >= LONG_MS:
        load_ms = 0.0 if best.is_loaded else LOAD_MS
        gpu_ms, beside_ms = _benchmark_in_turns(load_ms, benchmark, best.repeat, *args, **kwargs)
        if beside_ms is not None:
            best.is_loaded = True
            return best.ms * gpu_ms / (beside_ms * share)
    else:
        gpu_ms = _benchmark(benchmark, *args, **kwargs)
    if best.repeat is not None and gpu_ms < best.gpu_ms:
        best.gpu_ms = min(best.gpu_ms, _benchmark(best.repeat, *args, **kwargs))
        best.repeat = None  # once, or times of kernels would not compare with each other
    return best.ms * gpu_ms / (best.gpu_ms * share)


class _OtherFailedError(BaseException):
    """What a choice was timed in turns with failed.

    It passes through the choice's own benchmark, which would take an Exception for one of its own.
    """


def _benchmark_in_turns(
    load_ms: float, benchmark: _Benchmark, other: _Benchmark, *args: Any, **kwargs: Any
) -> tuple[float, float | None]:
    """Milliseconds of two choices that take turns, the first last, after ``load_ms`` of load.

    Where they cannot be called together, those of the first by itself, and None: it is called in
    another process, or the other one has no call here or fails in turns.
    """
    calls: list[Callable[[], object]] = []
    times: list[tuple[float, float]] = []

    def keep(call: Callable[[], object], _: float) -> float:
        calls.append(call)
        return 1.0  # milliseconds that nobody reads

    with _timing(keep):
        other(*args, **kwargs)
    if not calls:
        return _benchmark(benchmark, *args, **kwargs), None

    def call_other() -> None:
        try:
            calls[-1]()
        except Exception as error:
            raise _OtherFailedError from error

    def measure(call: Callable[[], object], longest_ms: float) -> float:
        with _lock(), _timing(None):
            times.append(
                gpu_times.measure_in_turns_ms(
                    call, call_other, longest_ms=longest_ms, load_ms=load_ms
                )
            )
        return times[-1][0]

    try:
        with _timing(measure):
            gpu_ms = benchmark(*args, **kwargs)
    except _OtherFailedError:
        return _benchmark(benchmark, *args, **kwargs), None
    return gpu_ms, times[-1][1] if times else None


SizedOperands = Callable[[], tuple[Sequence[torch.Tensor], torch.Tensor]]
"""Makes operands and a result of a GEMM at one size."""


@dataclass
class _Lead:
    """The best choices so far: milliseconds of the best, and the best of the extern ones."""

    ms: float = math.inf
    extern_ms: float = math.inf
    extern: Any = None


def time_over_sizes(
    choices: Iterable[Any], by_m: Any, is_extern: Callable[[Any], bool], sizes: list[SizedOperands]
) -> None:
    """Have a choice that takes another kernel at other sizes timed at several of them.

    Its time is that of the best choice, scaled by the geometric mean, over Inductor's own size and
    the others, of what it takes compared with the best. Triton's kernels are compiled for one size,
    so at the others the best extern choice stands for the best. Where the best is not an extern
    one, the choice must beat it at Inductor's size as well.

    Args:
        choices: The others, which Inductor benchmarks before.
        by_m: The choice.
        is_extern: Whether one of the others may be called at any size.
        sizes: What makes operands of the other sizes.
    """
    lead = _Lead()
    for choice in choices:
        noting = functools.partial(_benchmark_noting, lead, choice, is_extern(choice))
        choice.benchmark = functools.partial(noting, choice.benchmark)
    by_m.benchmark = functools.partial(_benchmark_over, lead, by_m, sizes, by_m.benchmark)


def _benchmark_noting(
    lead: _Lead, choice: Any, is_extern: bool, benchmark: _Benchmark, *args: Any, **kwargs: Any
) -> float:
    ms = benchmark(*args, **kwargs)
    lead.ms = min(lead.ms, ms)
    if is_extern and ms < lead.extern_ms:
        lead.extern_ms, lead.extern = ms, choice
    return ms


def _benchmark_over(
    lead: _Lead,
    by_m: Any,
    sizes: list[SizedOperands],
    benchmark: _Benchmark,
    *args: Any,
    **kwargs: Any,
) -> float:
    here_ms = benchmark(*args, **kwargs)
    if lead.extern is None or not math.isfinite(here_ms):
        return here_ms
    ratios, load_ms = [here_ms / lead.ms], LOAD_MS
    for make in sizes:
        operands, out = make()
        own, best = _benchmark_both(
            load_ms, stock_benchmark(by_m), stock_benchmark(lead.extern), *operands, out=out
        )
        if LONG_MS <= own < math.inf:
            load_ms = 0.0
        if math.isinf(own):
            return math.inf
        if math.isfinite(best):  # a size at which the other cannot be called compares nothing
            ratios.append(own / best)
    overall = math.exp(statistics.fmean(map(math.log, ratios)))
    return lead.ms * (overall if lead.extern_ms == lead.ms else max(overall, ratios[0]))


def _benchmark_both(
    load_ms: float, benchmark: _Benchmark, other: _Benchmark, *args: Any, **kwargs: Any
) -> tuple[float, float]:
    """Milliseconds of two choices, in turns after ``load_ms`` of load where the first is long."""
    ms = _benchmark(benchmark, *args, **kwargs)
    if LONG_MS <= ms < math.inf:
        in_turns, other_ms = _benchmark_in_turns(load_ms, benchmark, other, *args, **kwargs)
        if other_ms is not None:
            return in_turns, other_ms
    return ms, _benchmark(other, *args, **kwargs)


def stock_benchmark(choice: Any) -> _Benchmark:
    """The benchmark of a choice as its class has it, whatever stands in its place."""
    return functools.partial(type(choice).benchmark, choice)


class TimedRequest:
    """A benchmark request of Inductor whose calls are timed on the GPU, in whatever process.

    Its class is the request's: Inductor compiles requests of certain classes in other processes.
    """

    def __init__(self, request: Any) -> None:
        object.__setattr__(self, "_request", request)

    def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor | None = None) -> float:
        """Milliseconds that a call takes on the GPU."""
        _replace_timer()  # not yet done in a process that torch started for benchmarks
        with _timing(getattr(_thread, "measure", None) or _measure):
            return float(self._request.benchmark(*tensors, out=out))

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._request, name, value)

    def __reduce__(self) -> tuple[type[TimedRequest], tuple[Any]]:
        return TimedRequest, (self._request,)


def timing_as_usual() -> contextlib.AbstractContextManager[None]:
    """Have Inductor time as stock torch does, inside a choice that is itself timed."""
    return _timing(None)


def _benchmark(benchmark: _Benchmark, *args: Any, **kwargs: Any) -> float:
    with _timing(_measure):
        return benchmark(*args, **kwargs)


def _measure(call: Callable[[], object], longest_ms: float) -> float:
    with _lock():
        return gpu_times.measure_ms(call, longest_ms=longest_ms)


def _lock() -> contextlib.AbstractContextManager[None]:
    """From torch 2.13 on, processes may be told to keep away from each other's benchmarks."""
    lock = getattr(benchmarking, "maybe_gpu_benchmark_lock", contextlib.nullcontext)
    return lock()


def _hash_key(hash_key: Callable[[], str], way: str) -> str:
    return f"{hash_key()}-{way}"


@contextlib.contextmanager
def _timing(measure: _Measure | None) -> Iterator[None]:
    before = getattr(_thread, "measure", None)
    _thread.measure = measure
    try:
        yield
    finally:
        _thread.measure = before


def _replace_timer() -> bool:
    """Have torch's benchmarker ask `_thread` how to measure, where choices are timed on the GPU.

    Returns:
        Whether it does. A benchmarker that the user chose or replaced stays as it is.
    """
    benchmarker: Any = benchmarking.benchmarker
    found = vars(benchmarker).get("benchmark_gpu")
    if found is None and type(benchmarker).__name__ in _STOCK_TIMERS:
        benchmarker.benchmark_gpu = found = _Timer(benchmarker)
    return isinstance(found, _Timer)


class _Timer:
    """Replaces ``benchmark_gpu`` of a benchmarker for choices that are timed on the GPU."""

    def __init__(self, benchmarker: Any) -> None:
        self._benchmarker = benchmarker

    def __call__(self, call: Callable[[], Any], *args: Any, **options: Any) -> Any:
        measure: _Measure | None = getattr(_thread, "measure", None)
        if measure is None:
            stock = type(self._benchmarker).benchmark_gpu
            return stock(self._benchmarker, call, *args, **options)
        return measure(call, min(gpu_times.LONGEST_MS, float(options.get("rep", 1e9))))
