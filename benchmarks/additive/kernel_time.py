"""Times kernels by the profiler, as their intervals' union.

Kernels decide if a model is slower (see `benchmarks.shared.kernel_intervals`); replays are reported
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.shared.kernel_intervals import NO_KERNEL, device_intervals, union_ns

REPLAYS = 3
"""Calls in one profile; each launches many kernels."""


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
        raise RuntimeError(NO_KERNEL)
    return union_ns(intervals) / REPLAYS / 1e3
