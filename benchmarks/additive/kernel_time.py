"""Times kernels by the profiler, as their intervals' union.

On some machines a CUDA graph's replays take up to a third longer for a whole process, with bundled
kernels or without, while its kernels take as long as ever. Kernels therefore decide if a model is
slower; replays are reported as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

REPLAYS = 3
"""Calls in one profile; each launches many kernels."""


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Returns nanoseconds covered by at least one interval.

    Kernels of programmatic dependent launch, and those of several streams, run at the same time.
    """
    total = 0
    reached: int | None = None
    for begin, end in sorted(intervals):
        if reached is None or begin > reached:
            total, reached = total + end - begin, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def start_tracing() -> None:
    """Starts CUDA's tracing library, which then knows kernels of graphs captured later."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()


def kernel_times_us(
    calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Returns microseconds a call in which kernels ran, on each side, from alternating profiles.

    Raises:
        RuntimeError: If a profile holds no kernel.
    """
    for call in calls.values():
        _profiled_us(call)  # the first profile of a graph takes longer
    times: dict[str, list[float]] = {side: [] for side in calls}
    for number in range(rounds):
        for side in sorted(calls, reverse=number % 2 == 1):
            times[side].append(_profiled_us(calls[side]))
    return times


def _profiled_us(call: Callable[[], object]) -> float:
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPLAYS):
            call()
        torch.cuda.synchronize()
    intervals = device_intervals(profiled.profiler.kineto_results.events())
    if not intervals:
        raise RuntimeError("the profiler saw no kernel: may this process trace the GPU (CUPTI)?")
    return union_ns(intervals) / REPLAYS / 1e3


def device_intervals(events: Iterable[Any]) -> list[tuple[int, int]]:
    """Returns begin and end, in nanoseconds, of a profile's GPU events."""
    from torch.autograd import DeviceType

    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]
