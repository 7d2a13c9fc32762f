"""Times a GEMM's choices so that bundled kernels make no program slower.

Inductor times a choice between two events around the host's call. If the host takes longer than the
kernel, as for most small-batch GEMMs, that measures the launch, which costs nothing under CUDA
graphs. When bundled kernels join, all choices are timed here instead: a spinning kernel holds the
stream until the host has queued every call, so the GPU never waits for the host (`time_on_gpu`).

ATen's operators take longer to launch than Triton's kernels. If both compete and no CUDA graphs are
announced, choosing by GPU time could pick an operator whose launches slow the program. There
Inductor's own choice, by its own times, stays unless a bundled kernel takes less GPU time
(`time_against_inductor`).

Weights come from memory in a model larger than the L2 cache, and from the cache in a smaller one. A
kernel may win in one case and lose in the other. So a choice's time is the mean of two calls: one
with a cold cache, after reading a buffer as large as the cache, and one with a warm cache. Each
timed call runs behind another kernel, either the buffer read or a small one, whose own time is
subtracted. Otherwise consecutive kernels with programmatic dependent launch would overlap, which
they hardly ever do with the work between two GEMMs in a model. Inductor writes its buffer, so
kernels also wait for the cache's write-back, some longer than others.
`benchmarks.additive.choice_timing` compares these methods.

Long calls lower the GPU's clocks. From `LONG_MS` on, bundled kernels therefore take turns with the
choice they must beat, with a cold cache only, after `LOAD_MS` under load. The timers are in
`gpu_times`.

The torch names used here are private and were read in torch 2.11 to 2.15.
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
"""Milliseconds from which bundled kernels take turns with the choice they must beat.

A GPU that idles while torch compiles soon slows down under full load. On an H100, later times of a
0.26 ms GEMM were up to 1.05 times the first, 1.17 times for 2.1 ms, and within 1.4 % for 0.14 ms
(`benchmarks.additive.clocks`). Load also changes the fastest kernel for shorter GEMMs: for a gated
GEMM of 0.16 ms, the kernel picked by its time alone took 1.047 times as long as the fastest under
lasting load (`benchmarks.gated.loads`).
"""

LOAD_MS = 60.0
"""Milliseconds under load before a GEMM's kernels are timed in turns.

At a loaded GPU's lower clocks another kernel may be the fastest. On an H200, after 0, 30, 60 and
150 ms under load, the picked kernels took 1.013, 1.014, 1.006 and 1.002 times as long as the
fastest under lasting load (`benchmarks.gated.loads`). 150 ms would add 0.09 s for each such GEMM.
"""

LEAST_GAIN = 0.98
"""Largest ratio to Inductor's GPU time at which a bundled kernel is used where launches may count.

Single times vary by 2 %, and the bundled kernel costs more to launch.
"""

_STOCK_TIMERS = ("InductorBenchmarker", "TritonBenchmarker")
"""Torch benchmarkers that time launches too. Its profiler-based one and users' own are not
replaced."""

_Benchmark = Callable[..., float]

_Measure = Callable[[Callable[[], object], float], float]
"""``measure(call, longest_ms)`` returns a call's milliseconds, timed for about ``longest_ms``."""

_thread = threading.local()
"""Holds ``measure``, the way to time choices. None or unset selects Inductor's own way."""


@dataclass
class _Best:
    """Best among Inductor's own choices so far.

    Attributes:
        ms: Milliseconds reported to Inductor.
        gpu_ms: Lowest milliseconds measured on the GPU.
        repeat: Times the choice again, with a bundled kernel's tensors. None if it takes other
            tensors.
        is_loaded: True if kernels have taken turns with it, so that the GPU is under load.
    """

    ms: float = math.inf
    gpu_ms: float = math.inf
    repeat: _Benchmark | None = None
    is_loaded: bool = False


def time_on_gpu(others: Iterable[Any], kernels: Iterable[Any]) -> None:
    """Makes Inductor time all of a GEMM's choices by GPU time, in the same way.

    If the best other choice takes at least `LONG_MS`, each kernel takes turns with it after
    `LOAD_MS` under load, and reports its time relative to that choice. Otherwise the first faster
    kernel has that choice timed again, right after itself, because the GPU may have run at lower
    clocks before or for another process. Kernel times are then relative to the lower of the two, so
    a kernel wins if it beats both. Triton choices take other tensors and are timed once.

    Inductor's caches separate these times from its own. A profiler named by the user's settings is
    used unchanged.

    Args:
        others: Inductor's choices, which it benchmarks first.
        kernels: Bundled kernels.
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
        choice.benchmark = functools.partial(_benchmark_against_best, best, 1.0, choice.benchmark)
        choice.hash_key = functools.partial(_hash_key, choice.hash_key, "on-gpu-under-load")


def _requests(choice: Any) -> list[str]:
    """Returns the attribute names of a choice's requests to benchmark processes."""
    return [name for name in ("bmreq", "_bmreq") if vars(choice).get(name) is not None]


def _takes_tensors_of_kernels(choice: Any) -> bool:
    """Returns True if Inductor times a choice with the tensors it uses for bundled kernels.

    That is so for all extern calls, which have requests too, and for subgraphs.
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


def time_against_inductor(others: Iterable[Any], kernels: Iterable[Any]) -> None:
    """Lets Inductor time its own choices as usual, and times bundled kernels against the best.

    A bundled kernel's time is the time of Inductor's best choice, scaled by their ratio on the GPU
    and divided by `LEAST_GAIN`. So a kernel wins if it clearly beats Inductor's choice on the GPU,
    and its launch gives no advantage. Inductor benchmarks choices in order, so kernels must come
    last.
    """
    if config.profile_bandwidth_with_do_bench_using_profiling or not _replace_timer():
        return
    best = _Best()
    for choice in others:
        repeatable = _takes_tensors_of_kernels(choice)
        choice.benchmark = functools.partial(_benchmark_stock, best, repeatable, choice.benchmark)
    for choice in kernels:
        choice.benchmark = functools.partial(
            _benchmark_against_best, best, LEAST_GAIN, choice.benchmark
        )
        choice.hash_key = functools.partial(_hash_key, choice.hash_key, "beside-under-load")


def _benchmark_stock(
    best: _Best, repeatable: bool, benchmark: _Benchmark, *args: Any, **kwargs: Any
) -> float:
    ms = benchmark(*args, **kwargs)
    if ms < best.ms:
        best.ms, best.gpu_ms = ms, _benchmark(benchmark, *args, **kwargs)
        best.repeat = benchmark if repeatable else None
    return ms


def _benchmark_against_best(
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
        best.repeat = None  # once, so that kernel times stay comparable
    return best.ms * gpu_ms / (best.gpu_ms * share)


class _OtherFailedError(BaseException):
    """Failure in the other choice while two choices take turns.

    A BaseException, so that it passes through the choice's own benchmark, which would treat an
    Exception as its own failure.
    """


def _benchmark_in_turns(
    load_ms: float, benchmark: _Benchmark, other: _Benchmark, *args: Any, **kwargs: Any
) -> tuple[float, float | None]:
    """Returns the milliseconds of two choices that take turns after ``load_ms`` under load.

    The first choice runs last in each turn. If they cannot take turns, returns the first one's time
    alone, and None. That happens if the first runs in another process, or the other has no call
    here or fails.
    """
    calls: list[Callable[[], object]] = []
    times: list[tuple[float, float]] = []

    def collect(call: Callable[[], object], _: float) -> float:
        calls.append(call)
        return 1.0  # unused

    with _timing(collect):
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
"""Creates a GEMM's operands and result at one size."""


@dataclass
class _Lead:
    """Best choices so far: milliseconds for the best, and the best extern choice."""

    ms: float = math.inf
    extern_ms: float = math.inf
    extern: Any = None


def time_over_sizes(
    choices: Iterable[Any],
    dispatch: Any,
    is_extern: Callable[[Any], bool],
    sizes: list[SizedOperands],
) -> None:
    """Makes Inductor time a choice that dispatches by m at several sizes.

    Its time is the best choice's time, scaled by the geometric mean of their ratios over Inductor's
    own size and the others. Triton kernels are compiled for one size, so the best extern choice
    represents the best at the other sizes. If the best is not extern, the dispatching choice must
    also beat it at Inductor's size.

    Args:
        choices: Other choices, which Inductor benchmarks first.
        dispatch: The choice that dispatches by m.
        is_extern: Returns True if a choice can be called at any size.
        sizes: Create operands at the other sizes.
    """
    lead = _Lead()
    for choice in choices:
        choice.benchmark = functools.partial(
            _benchmark_and_note, lead, choice, is_extern(choice), choice.benchmark
        )
    dispatch.benchmark = functools.partial(
        _benchmark_over_sizes, lead, dispatch, sizes, dispatch.benchmark
    )


def _benchmark_and_note(
    lead: _Lead, choice: Any, is_extern: bool, benchmark: _Benchmark, *args: Any, **kwargs: Any
) -> float:
    ms = benchmark(*args, **kwargs)
    lead.ms = min(lead.ms, ms)
    if is_extern and ms < lead.extern_ms:
        lead.extern_ms, lead.extern = ms, choice
    return ms


def _benchmark_over_sizes(
    lead: _Lead,
    dispatch: Any,
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
        own_ms, best_ms = _benchmark_both(
            load_ms, stock_benchmark(dispatch), stock_benchmark(lead.extern), *operands, out=out
        )
        if LONG_MS <= own_ms < math.inf:
            load_ms = 0.0
        if math.isinf(own_ms):
            return math.inf
        if math.isfinite(best_ms):  # infinite if the other cannot be called at this size
            ratios.append(own_ms / best_ms)
    overall = math.exp(statistics.fmean(map(math.log, ratios)))
    return lead.ms * (overall if lead.extern_ms == lead.ms else max(overall, ratios[0]))


def _benchmark_both(
    load_ms: float, benchmark: _Benchmark, other: _Benchmark, *args: Any, **kwargs: Any
) -> tuple[float, float]:
    """Returns two choices' milliseconds, in turns after ``load_ms`` if the first is long."""
    ms = _benchmark(benchmark, *args, **kwargs)
    if LONG_MS <= ms < math.inf:
        in_turns, other_ms = _benchmark_in_turns(load_ms, benchmark, other, *args, **kwargs)
        if other_ms is not None:
            return in_turns, other_ms
    return ms, _benchmark(other, *args, **kwargs)


def stock_benchmark(choice: Any) -> _Benchmark:
    """Returns the benchmark that a choice's class defines, ignoring any replacement."""
    return functools.partial(type(choice).benchmark, choice)


class TimedRequest:
    """Inductor benchmark request whose calls are timed on the GPU, in any process.

    Its class is the request's: Inductor compiles requests of certain classes in other processes.
    """

    def __init__(self, request: Any) -> None:
        object.__setattr__(self, "_request", request)

    def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor | None = None) -> float:
        """Returns a call's milliseconds on the GPU."""
        _replace_timer()  # torch's benchmark processes have not done it yet
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
    """Makes Inductor time as stock torch does, inside a choice that is itself timed."""
    return _timing(None)


def _benchmark(benchmark: _Benchmark, *args: Any, **kwargs: Any) -> float:
    with _timing(_measure):
        return benchmark(*args, **kwargs)


def _measure(call: Callable[[], object], longest_ms: float) -> float:
    with _lock():
        return gpu_times.measure_ms(call, longest_ms=longest_ms)


def _lock() -> contextlib.AbstractContextManager[None]:
    """Returns torch's benchmark lock, which separates processes' benchmarks from torch 2.13 on."""
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
    """Makes torch's benchmarker measure as `_thread` says, for choices timed on the GPU.

    Returns:
        True if it does. A benchmarker that the user chose or replaced is not changed.
    """
    benchmarker: Any = benchmarking.benchmarker
    timer = vars(benchmarker).get("benchmark_gpu")
    if timer is None and type(benchmarker).__name__ in _STOCK_TIMERS:
        benchmarker.benchmark_gpu = timer = _Timer(benchmarker)
    return isinstance(timer, _Timer)


class _Timer:
    """Replaces a benchmarker's ``benchmark_gpu`` for choices timed on the GPU."""

    def __init__(self, benchmarker: Any) -> None:
        self._benchmarker = benchmarker

    def __call__(self, call: Callable[[], Any], *args: Any, **options: Any) -> Any:
        measure: _Measure | None = getattr(_thread, "measure", None)
        if measure is None:
            stock = type(self._benchmarker).benchmark_gpu
            return stock(self._benchmarker, call, *args, **options)
        return measure(call, min(gpu_times.LONGEST_MS, float(options.get("rep", 1e9))))
