"""GPU time of kernels, from the profiler's events."""

from __future__ import annotations

import pytest
from torch.autograd import DeviceType

from benchmarks.shared.kernel_intervals import Interval, device_intervals, union_ns


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0),
        ([(5, 9)], 4),
        ([(0, 10), (20, 25)], 15),
        ([(20, 25), (0, 10)], 15),  # in whatever order
        ([(0, 10), (10, 12)], 12),
        ([(0, 10), (8, 14)], 14),  # of dependent launch
        ([(0, 30), (5, 10), (12, 40)], 40),  # one within another
        ([(0, 10), (0, 10)], 10),
    ],
)
def test_the_time_of_kernels_is_that_of_the_union_of_their_intervals(
    intervals: list[tuple[int, int]], expected: int
) -> None:
    found = [Interval(begin_ns=begin, end_ns=end) for begin, end in intervals]
    assert union_ns(found) == expected


class Event:
    """Profiler event."""

    def __init__(self, device: DeviceType, start_ns: int, duration_ns: int) -> None:
        self.name = lambda: "kernel"
        self.device_type = lambda: device
        self.start_ns = lambda: start_ns
        self.duration_ns = lambda: duration_ns


def test_of_a_profile_what_ran_on_the_gpu_counts() -> None:
    events = [
        Event(DeviceType.CPU, 0, 1000),  # a launch
        Event(DeviceType.CUDA, 100, 50),
        Event(DeviceType.CUDA, 120, 0),  # a mark
        Event(DeviceType.CUDA, 140, 60),
    ]
    found = device_intervals(events)
    assert [(one.begin_ns, one.end_ns, one.name) for one in found] == [
        (100, 150, "kernel"),
        (140, 200, "kernel"),
    ]
    assert union_ns(found) == 100
