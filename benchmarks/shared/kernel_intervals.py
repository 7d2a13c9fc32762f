"""GPU time by the profiler: intervals in which kernels ran.

On some machines a CUDA graph's replays take up to a third longer for a whole process, with bundled
kernels or without, while its kernels take as long as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NO_KERNEL = "the profiler saw no kernel: may this process trace the GPU (CUPTI)?"
"""Error for a profile without GPU events."""


@dataclass(frozen=True, kw_only=True, order=True)
class Interval:
    """One kernel's run on the GPU.

    Attributes:
        begin_ns: First nanosecond.
        end_ns: First nanosecond after it.
        name: Kernel name.
    """

    begin_ns: int
    end_ns: int
    name: str = ""


def union_ns(intervals: Iterable[Interval]) -> int:
    """Returns nanoseconds covered by at least one interval.

    Kernels of programmatic dependent launch, and those of several streams, run at the same time.
    """
    total = 0
    reached: int | None = None
    for interval in sorted(intervals):
        begin, end = interval.begin_ns, interval.end_ns
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


def device_intervals(events: Iterable[Any]) -> list[Interval]:
    """Returns the runs in a profile's GPU events (``kineto_results.events()``)."""
    from torch.autograd import DeviceType

    return [
        Interval(
            begin_ns=event.start_ns(),
            end_ns=event.start_ns() + event.duration_ns(),
            name=event.name(),
        )
        for event in events
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]
