"""Times calls on the GPU without their launches.

Calls wait in the stream behind other work until the host has queued all of them, so the GPU never
waits for the host. The other work is a spinning kernel, or further calls if the GPU's clocks must
not rise meanwhile.

The torch names used here are private and were read in torch 2.11 to 2.15.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

_log = logging.getLogger(__name__)

MOST_CALLS = 30
"""Largest number of timed calls with each cache state. The smallest is `FEWEST_CALLS`."""

FEWEST_CALLS = 3

FEWEST_TURNS = 4
"""Smallest number of turns for two calls, however long. The middle turns count."""

LONGEST_MS = 10.0
"""Limit, in milliseconds on the GPU, for all of a call's repetitions. Callers may lower it."""

GROUPS = 5
"""Number of groups for calls with a warm cache. The middle groups count, because another process
on the GPU may disturb some."""

TRIAL_CALLS = 5
"""Calls that estimate the host's and the GPU's time for one call."""

WARM_UP_READS = 50
"""Buffer reads before calls are timed, about a millisecond. The GPU idles while torch compiles,
and the first choice must not be timed at lower clocks than the others."""

LAUNCH_SHARE = 1 / 512
"""Share of a call's host time that is added to its GPU time. It makes the cheapest launch win
among choices with equal GPU time, and no more. Launches take 4 to 40 microseconds, so this adds
less than 0.1."""

CYCLES_PER_MS = 2_000_000
"""Clock cycles per millisecond for `torch.cuda._sleep`. Hopper and Blackwell run at up to 1.98
GHz."""

LONGEST_WAIT_MS = 200.0
"""Longest wait for the host, in milliseconds. A call that itself waits for the GPU would wait so
long."""

ATTEMPTS = 3
"""Number of attempts. The wait doubles if the host did not stay ahead of the GPU."""

_Result = TypeVar("_Result")


def measure_ms(call: Callable[[], object], *, longest_ms: float = LONGEST_MS) -> float:
    """Returns a call's milliseconds on the current GPU, plus `LAUNCH_SHARE` of the host's time.

    Args:
        call: Sends work to the current stream. One call warms up.
        longest_ms: Approximate limit for all timed calls on the GPU.

    Returns:
        The mean of the times with a cold and a warm cache.
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

    def send() -> tuple[list[_TimedCall], list[_Events], list[_Events]]:
        cold = [_timed_call(call, flush) for _ in range(count)]
        warm = [_calls_between_events(lambda: (between(), call()), size) for _ in range(groups)]
        alone = [_calls_between_events(between, size) for _ in range(groups)]
        return cold, warm, alone

    for _ in range(WARM_UP_READS):
        flush()
    cold, warm, alone = _send_ahead(send, 4 * count * launch_ms)
    cold_ms = _middle_mean([_elapsed_ms(begin, end) for begin, end, _ in cold])
    both_ms, alone_ms = (
        _middle_mean([_elapsed_ms(*events) for events in group]) for group in (warm, alone)
    )
    warm_ms = max(0.0, both_ms - alone_ms) / size
    return (cold_ms + warm_ms) / 2 + LAUNCH_SHARE * launch_ms


def measure_in_turns_ms(
    call: Callable[[], object],
    other: Callable[[], object],
    *,
    longest_ms: float = LONGEST_MS,
    load_ms: float = 0.0,
) -> tuple[float, float]:
    """Returns milliseconds for two calls that take turns on the current GPU, with a cold cache.

    Both run at the same clocks. A turn is first, second, second, first, so that position effects
    are equal for both. The first time is the second multiplied by the mean ratio of first to second
    in a turn.

    Args:
        call: Sends work to the current stream. It warms up twice and comes last.
        other: The second call. It warms up twice.
        longest_ms: Approximate limit for all timed calls on the GPU.
        load_ms: Milliseconds of turns under load before the turns that count.
    """
    flush = _l2_flush()
    turn = call, other, other, call

    def send_turn() -> list[_TimedCall]:
        return [_timed_call(function, flush) for function in turn]

    send_turn()
    torch.cuda.synchronize()
    trial = send_turn()
    torch.cuda.synchronize()
    launch_ms = len(turn) * statistics.median(host_ms for *_, host_ms in trial)
    gpu_ms = sum(_elapsed_ms(begin, end) for begin, end, _ in trial)
    count = max(FEWEST_TURNS, min(MOST_CALLS // 2, int(longest_ms / max(gpu_ms, 1e-3))))

    wait_ms = min(LONGEST_WAIT_MS, 4 * count * launch_ms)

    def wait_under_load() -> None:
        for _ in range(math.ceil(max(load_ms, wait_ms) / max(gpu_ms, 1e-3))):
            send_turn()

    turns = _send_ahead(lambda: [send_turn() for _ in range(count)], wait_ms, wait_under_load)
    call_times, other_times = [], []
    for timed_calls in turns:
        first, second, third, fourth = (_elapsed_ms(begin, end) for begin, end, _ in timed_calls)
        call_times.append((first + fourth) / 2)
        other_times.append((second + third) / 2)
    ratios = [call_ms / other_ms for call_ms, other_ms in zip(call_times, other_times)]
    other_ms = _middle_mean(other_times)
    return other_ms * _middle_mean(ratios), other_ms


def _send_ahead(
    send: Callable[[], _Result], wait_ms: float, wait: Callable[[], None] | None = None
) -> _Result:
    """Sends work while the GPU waits, repeats if the host fell behind, and waits for the end.

    Args:
        send: Sends the work.
        wait_ms: Milliseconds for which the GPU spins.
        wait: Keeps the GPU busy instead of spinning, at the first attempt. If the host takes longer
            to send the work than the GPU to run it, the host gets ahead only of a spinning kernel.
    """
    for attempt in range(ATTEMPTS):
        wait_ms = min(LONGEST_WAIT_MS, wait_ms)
        if wait is not None and attempt == 0:
            wait()
        else:
            torch.cuda._sleep(int(wait_ms * CYCLES_PER_MS))
        wait_end = torch.cuda.Event(enable_timing=True)
        wait_end.record()
        result = send()
        is_ahead = not wait_end.query()
        torch.cuda.synchronize()
        if is_ahead:
            break
        wait_ms *= 2
    else:
        _log.debug("calls were timed while the GPU waited for their launches")
    return result


def _middle_mean(times: list[float]) -> float:
    """Returns the mean of the middle half, finer than the median if events count in steps."""
    outer = len(times) // 4
    return statistics.fmean(sorted(times)[outer : len(times) - outer])


_Events = tuple[torch.cuda.Event, torch.cuda.Event]
_TimedCall = tuple[torch.cuda.Event, torch.cuda.Event, float]


def _timed_call(call: Callable[[], object], flush: Callable[[], object]) -> _TimedCall:
    """Sends a call after an L2 flush. Returns its events and the host's milliseconds."""
    start = time.perf_counter()
    flush()
    begin, end = _calls_between_events(call, 1)
    return begin, end, (time.perf_counter() - start) * 1e3


def _calls_between_events(call: Callable[[], object], count: int) -> _Events:
    """Sends consecutive calls. Returns the events before and after them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    return begin, end


def _elapsed_ms(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end))


def _l2_flush() -> Callable[[], object]:
    """Returns a function that evicts the current GPU's L2 cache by reading a buffer as large."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    buffer = torch.ones(int(properties.L2_cache_size) // 4, dtype=torch.float32, device="cuda")
    total = torch.empty((), dtype=torch.float32, device="cuda")
    return lambda: torch.sum(buffer, dim=0, out=total)


def _small_kernel() -> Callable[[], object]:
    """Returns a function that launches a small kernel, which waits for the previous one to end."""
    values = torch.zeros(1024, dtype=torch.float32, device="cuda")
    return lambda: values.add_(1.0)
