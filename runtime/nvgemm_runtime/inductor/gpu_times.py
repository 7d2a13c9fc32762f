"""Times calls on the GPU without their launches.

Calls wait in the stream behind other work until the host has sent them all, so that the GPU never
waits for the host: behind a kernel that spins, or, where clocks must not rise meanwhile, behind
calls like themselves.

The names of torch that are used here are private, and were read on torch 2.11 to 2.15.
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
"""Calls that are timed each way, and at least `FEWEST_CALLS`."""

FEWEST_CALLS = 3

FEWEST_TURNS = 4
"""Times that two calls take turns, of which the middle ones count, of however long a call."""

LONGEST_MS = 10.0
"""Milliseconds on the GPU after which a call is timed no more often, unless the caller allows
less."""

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

CYCLES_PER_MS = 2_000_000
"""Clock cycles, as `torch.cuda._sleep` counts; Hopper and Blackwell run at up to 1.98 GHz."""

LONGEST_WAIT_MS = 200.0
"""Most milliseconds that calls wait for the host: a call that itself waits for the GPU would wait
that long."""

ATTEMPTS = 3
"""How often the wait is doubled where the host did not keep ahead of the GPU."""

_Sent = TypeVar("_Sent")


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

    def send() -> tuple[list[_TimedCall], list[_Events], list[_Events]]:
        cold = [_timed_call(call, flush) for _ in range(count)]
        warm = [_calls_between_events(lambda: (between(), call()), size) for _ in range(groups)]
        alone = [_calls_between_events(between, size) for _ in range(groups)]
        return cold, warm, alone

    for _ in range(WARM_UP_READS):
        flush()
    cold, warm, alone = _sent_ahead(send, 4 * count * launch_ms)
    cold_ms = _middle_mean([_elapsed_ms(begin, end) for begin, end, _ in cold])
    both_ms, alone_ms = (
        _middle_mean([_elapsed_ms(*one) for one in group]) for group in (warm, alone)
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
    """Milliseconds of two calls that take turns on the current GPU, each with a cold cache.

    Both then run at the same clocks, whatever those are. A turn is the first, the second, the
    second and the first: what a call gains or loses by its place, both do. The first time is the
    second one times the mean ratio of the first to the second in a turn.

    Args:
        call: Sends work to the current stream. Two calls warm up, and the last one is of it.
        other: Likewise, but for the last one.
        longest_ms: About how long all timed calls may take on the GPU.
        load_ms: Milliseconds for which both first take turns that do not count.
    """
    flush = _l2_flush()
    turn = call, other, other, call

    def send_turn() -> list[_TimedCall]:
        return [_timed_call(one, flush) for one in turn]

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

    turns = _sent_ahead(lambda: [send_turn() for _ in range(count)], wait_ms, wait_under_load)
    own, others = [], []
    for sent in turns:
        first, second, third, fourth = (_elapsed_ms(begin, end) for begin, end, _ in sent)
        own.append((first + fourth) / 2)
        others.append((second + third) / 2)
    other_ms = _middle_mean(others)
    return other_ms * _middle_mean([one / two for one, two in zip(own, others)]), other_ms


def _sent_ahead(
    send: Callable[[], _Sent], wait_ms: float, wait: Callable[[], None] | None = None
) -> _Sent:
    """Send work while the GPU waits, and again if it did not wait for all; it has run then.

    Args:
        send: Sends the work.
        wait_ms: Milliseconds for which the GPU spins.
        wait: Keeps the GPU busy instead, at the first attempt: if the host takes longer to send
            work than the GPU to run it, the host gets ahead of a spinning kernel alone.
    """
    for attempt in range(ATTEMPTS):
        wait_ms = min(LONGEST_WAIT_MS, wait_ms)
        if wait is not None and attempt == 0:
            wait()
        else:
            torch.cuda._sleep(int(wait_ms * CYCLES_PER_MS))
        waited = torch.cuda.Event(enable_timing=True)
        waited.record()
        sent = send()
        kept_ahead = not waited.query()
        torch.cuda.synchronize()
        if kept_ahead:
            break
        wait_ms *= 2
    else:
        _log.debug("calls were timed while the GPU waited for their launches")
    return sent


def _middle_mean(times: list[float]) -> float:
    """The mean of the middle half: finer than the median where events count in steps."""
    outer = len(times) // 4
    return statistics.fmean(sorted(times)[outer : len(times) - outer])


_Events = tuple[torch.cuda.Event, torch.cuda.Event]
_TimedCall = tuple[torch.cuda.Event, torch.cuda.Event, float]


def _timed_call(call: Callable[[], object], flush: Callable[[], object]) -> _TimedCall:
    """Send a call behind a flush of the L2 cache: its events, and milliseconds of the host."""
    start = time.perf_counter()
    flush()
    begin, end = _calls_between_events(call, 1)
    return begin, end, (time.perf_counter() - start) * 1e3


def _calls_between_events(call: Callable[[], object], count: int) -> _Events:
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
