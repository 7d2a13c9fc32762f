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

The names of torch that are used here are private, and were read on torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.runtime import benchmarking

_log = logging.getLogger(__name__)

MOST_CALLS = 30
"""Calls of a choice that are timed each way, and at least `FEWEST_CALLS`."""

FEWEST_CALLS = 3

LONGEST_MS = 10.0
"""Milliseconds on the GPU after which a choice is timed no more often, unless the user allows less
(``TORCHINDUCTOR_DEFAULT_AUTOTUNE_REP``)."""

GROUPS = 5
"""Calls with a warm cache are timed in so many groups, of which the middle ones count: another
process on the GPU may disturb some."""

TRIAL_CALLS = 5
"""Calls that say how long the host and the GPU take for one."""

WARM_UP_READS = 50
"""Reads of the buffer before calls are timed, about a millisecond: the GPU is idle while torch
compiles, and the first choice must not be timed at lower clocks than the others."""

LAUNCH_SHARE = 1 / 512
"""Share of a call's time on the host that is added to its time on the GPU: of choices that take the
same time on the GPU, the cheapest launch wins, and no more than that. Launches take 4 to 40
microseconds, so this adds less than 0.1."""

LEAST_GAIN = 0.98
"""Share of the time of Inductor's choice that a bundled kernel may take on the GPU to be used where
launches may count: 2 % are the noise of single times, and the kernel's launch is the dearer one."""

CYCLES_PER_MS = 2_000_000
"""Clock cycles, as `torch.cuda._sleep` counts; Hopper and Blackwell run at up to 1.98 GHz."""

LONGEST_WAIT_MS = 200.0
"""Most milliseconds that calls wait for the host: a call that itself waits for the GPU would wait
that long."""

ATTEMPTS = 3
"""How often the wait is doubled where the host did not keep ahead of the GPU."""

_STOCK_TIMERS = ("InductorBenchmarker", "TritonBenchmarker")
"""Benchmarkers of torch that time launches too; its profiler-based one and a user's own stay."""

_Benchmark = Callable[..., float]

_thread = threading.local()


@dataclass
class _Best:
    """The best of Inductor's own choices so far.

    Attributes:
        ms: Milliseconds, as Inductor was told.
        gpu_ms: Milliseconds on the GPU, the least that was seen.
        repeat: Times it again, with the tensors that a bundled kernel is timed with; None where it
            takes others.
    """

    ms: float = math.inf
    gpu_ms: float = math.inf
    repeat: _Benchmark | None = None


def time_on_gpu(others: Iterable[Any], kernels: Iterable[Any]) -> None:
    """Have all choices of one GEMM timed by their time on the GPU, in the same way.

    The first kernel that takes less than the best of the others has that one timed again, right
    behind itself: the GPU may have run at lower clocks before, or for another process. Times of
    kernels are stated relative to the lower of the two, so one wins if it beats both.

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
        repeatable = not _requests(choice)
        _wrap_requests(choice)
        choice.benchmark = functools.partial(_benchmark_other, best, repeatable, choice.benchmark)
        choice.hash_key = functools.partial(_hash_key, choice.hash_key, "on-gpu")
    for choice in kernels:
        _wrap_requests(choice)
        choice.benchmark = functools.partial(_benchmark_against, best, 1.0, choice.benchmark)
        choice.hash_key = functools.partial(_hash_key, choice.hash_key, "on-gpu")


def _requests(choice: Any) -> list[str]:
    """Names of a choice's requests to processes that benchmark; extern calls have none."""
    return [name for name in ("bmreq", "_bmreq") if vars(choice).get(name) is not None]


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
        repeatable = not _requests(choice)
        choice.benchmark = functools.partial(_benchmark_stock, best, repeatable, choice.benchmark)
    for choice in kernels:
        choice.benchmark = functools.partial(_benchmark_against, best, LEAST_GAIN, choice.benchmark)
        choice.hash_key = functools.partial(_hash_key, choice.hash_key, "beside-inductor")


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
    gpu_ms = _benchmark(benchmark, *args, **kwargs)
    if math.isinf(best.ms):
        return gpu_ms
    if best.repeat is not None and gpu_ms < best.gpu_ms:
        best.gpu_ms = min(best.gpu_ms, _benchmark(best.repeat, *args, **kwargs))
        best.repeat = None  # once, or times of kernels would not compare with each other
    return best.ms * gpu_ms / (best.gpu_ms * share)


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
    ratios = [here_ms / lead.ms]
    for make in sizes:
        operands, out = make()
        own, best = (
            _benchmark(stock_benchmark(choice), *operands, out=out)
            for choice in (by_m, lead.extern)
        )
        if math.isinf(own):
            return math.inf
        if math.isfinite(best):  # a size at which the other cannot be called compares nothing
            ratios.append(own / best)
    overall = math.exp(statistics.fmean(map(math.log, ratios)))
    return lead.ms * (overall if lead.extern_ms == lead.ms else max(overall, ratios[0]))


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
        return _benchmark(self._request.benchmark, *tensors, out=out)

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
    return _timing(on_gpu=False)


def _benchmark(benchmark: _Benchmark, *args: Any, **kwargs: Any) -> float:
    with _timing(on_gpu=True):
        return benchmark(*args, **kwargs)


def _hash_key(hash_key: Callable[[], str], way: str) -> str:
    return f"{hash_key()}-{way}"


@contextlib.contextmanager
def _timing(*, on_gpu: bool) -> Iterator[None]:
    before = getattr(_thread, "on_gpu", False)
    _thread.on_gpu = on_gpu
    try:
        yield
    finally:
        _thread.on_gpu = before


def _replace_timer() -> bool:
    """Have torch's benchmarker call `measure_ms` where choices are timed on the GPU.

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
        if not getattr(_thread, "on_gpu", False):
            stock = type(self._benchmarker).benchmark_gpu
            return stock(self._benchmarker, call, *args, **options)
        # From torch 2.13 on, processes may be told to keep away from each other's benchmarks.
        lock = getattr(benchmarking, "maybe_gpu_benchmark_lock", contextlib.nullcontext)
        with lock():
            return measure_ms(call, longest_ms=min(LONGEST_MS, float(options.get("rep", 1e9))))


def measure_ms(call: Callable[[], object], *, longest_ms: float = LONGEST_MS) -> float:
    """Milliseconds of a call on the current GPU, plus `LAUNCH_SHARE` of the host's time.

    Args:
        call: Sends work to the current stream. One call warms up.
        longest_ms: About how long all timed calls may take on the GPU.

    Returns:
        The mean of its time with a cold and with a warm cache.
    """
    call()  # loads code, and lets libraries choose their kernels
    torch.cuda.synchronize()
    flush, between = _l2_flush(), _small_kernel()
    trial = [_timed_call(call, flush) for _ in range(TRIAL_CALLS)]
    torch.cuda.synchronize()
    launch_ms = statistics.median(host_ms for *_, host_ms in trial)
    gpu_ms = min(_elapsed_ms(begin, end) for begin, end, _ in trial)
    count = max(FEWEST_CALLS, min(MOST_CALLS, int(longest_ms / 2 / max(gpu_ms, 1e-3))))

    size = -(-count // GROUPS)
    groups = -(-count // size)
    wait_ms = min(LONGEST_WAIT_MS, 4 * count * launch_ms)
    for attempt in range(ATTEMPTS):
        for _ in range(WARM_UP_READS if attempt == 0 else 0):
            flush()
        torch.cuda._sleep(int(wait_ms * CYCLES_PER_MS))
        cold = [_timed_call(call, flush) for _ in range(count)]
        warm = [_calls_between_events(lambda: (between(), call()), size) for _ in range(groups)]
        alone = [_calls_between_events(between, size) for _ in range(groups)]
        kept_ahead = not cold[0][0].query()
        torch.cuda.synchronize()
        if kept_ahead:
            break
        wait_ms = min(LONGEST_WAIT_MS, 2 * wait_ms)
    else:
        _log.debug("a choice was timed while the GPU waited for its launches")
    cold_ms = _middle_mean([_elapsed_ms(begin, end) for begin, end, _ in cold])
    both_ms, alone_ms = (
        _middle_mean([_elapsed_ms(*one) for one in group]) for group in (warm, alone)
    )
    warm_ms = max(0.0, both_ms - alone_ms) / size
    return (cold_ms + warm_ms) / 2 + LAUNCH_SHARE * launch_ms


def _middle_mean(times: list[float]) -> float:
    """The mean of the middle half: finer than the median where events count in steps."""
    outer = len(times) // 4
    return statistics.fmean(sorted(times)[outer : len(times) - outer])


_TimedCall = tuple[torch.cuda.Event, torch.cuda.Event, float]


def _timed_call(call: Callable[[], object], flush: Callable[[], object]) -> _TimedCall:
    """Send a call behind a flush of the L2 cache: its events, and milliseconds of the host."""
    start = time.perf_counter()
    flush()
    begin, end = _calls_between_events(call, 1)
    return begin, end, (time.perf_counter() - start) * 1e3


def _calls_between_events(
    call: Callable[[], object], count: int
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Send calls one after the other, and return the events before and behind them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    return begin, end


def _elapsed_ms(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end))


def _l2_flush() -> Callable[[], object]:
    """A function that evicts the current GPU's L2 cache by reading a buffer of its size."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    buffer = torch.ones(int(properties.L2_cache_size) // 4, dtype=torch.float32, device="cuda")
    total = torch.empty((), dtype=torch.float32, device="cuda")
    return lambda: torch.sum(buffer, dim=0, out=total)


def _small_kernel() -> Callable[[], object]:
    """A function that launches a small kernel, which waits for the one before it to end."""
    values = torch.zeros(1024, dtype=torch.float32, device="cuda")
    return lambda: values.add_(1.0)
