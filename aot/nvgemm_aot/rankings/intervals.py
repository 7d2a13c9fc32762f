"""Confidence intervals for times, and the contenders that may be the fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nvgemm_runtime.bundle.ranking_entries import Timing

RESOLUTION = 0.01
"""Relative half-width at which an interval is narrow enough. Narrow intervals that still overlap
count as equal times."""


@dataclass(frozen=True, kw_only=True)
class TimeInterval:
    """Sample median with the true median's confidence interval, in nanoseconds."""

    median: float
    low: float
    high: float

    @property
    def is_narrow(self) -> bool:
        """True if the median is known to within `RESOLUTION`."""
        return max(self.high - self.median, self.median - self.low) <= RESOLUTION * self.median

    @property
    def timing(self) -> Timing:
        """Timing in a bundle's form, in whole nanoseconds; the spread is rounded up."""
        time_ns = max(1, round(self.median))
        spread = max(self.high - time_ns, time_ns - self.low, 0.0)
        return Timing(time_ns=time_ns, spread_ns=math.ceil(spread))


def contending(intervals: Mapping[str, TimeInterval]) -> list[str]:
    """Returns the contenders that may be the fastest: their intervals overlap the leader's."""
    leader = min(intervals.values(), key=lambda interval: interval.median)
    return [name for name, interval in intervals.items() if interval.low <= leader.high]


def is_decided(intervals: Mapping[str, TimeInterval]) -> bool:
    """Returns True if more samples would change nothing: one is fastest, or several are equal."""
    names = contending(intervals)
    return len(names) == 1 or all(intervals[name].is_narrow for name in names)


def interval_of(timing: Timing) -> TimeInterval:
    """Returns a timing's 95 % interval."""
    return TimeInterval(
        median=timing.time_ns,
        low=timing.time_ns - timing.spread_ns,
        high=timing.time_ns + timing.spread_ns,
    )
