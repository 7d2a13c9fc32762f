"""How much evidence a measured ranking needs where its kernels are called and nothing is timed.

The verdict depends on the ranking alone, never on this process's GPU: compiled graphs move between
GPUs of a product, and the ranks of one job must choose alike.
"""

from __future__ import annotations

import enum

from ..bundle.format import Measured
from .thresholds import MIN_GAIN

REPEATED_GAIN = 0.08
"""The least gain on ATen from which a ranking counts that one GPU measured twice.

Each problem's winner on one GPU was compared with ATen on another of the product, in measurements
of several GPUs (`benchmarks.repeated`). It was over 1 % slower there in 6 of 782 pairs where it
gained 2 to 3 %, 11 of 1106 at 3 to 5 %, 12 of 1090 at 5 to 8 % (at worst 1.111 times as long), and
none of 1000 from 8 % on. Repeating does not remove these: they are differences between GPUs."""


class Evidence(enum.Enum):
    """What a measured ranking needs to count."""

    DEFAULT = "default"
    """Default mode: two GPUs confirm it, or one repeated it and it gains `REPEATED_GAIN`."""
    REPEATED = "repeated"
    """Default mode where the user lets repeated rankings count as confirmed ones do."""
    ONCE = "once"
    """One measurement without doubts: enough where kernels are timed again."""

    def least_gain(self, measured: Measured) -> float | None:
        """The part by which a kernel must be faster than ATen to be used.

        Returns:
            None if the ranking does not count at all.
        """
        if self is Evidence.ONCE or measured.is_confirmed:
            return MIN_GAIN
        if measured.is_repeated:
            return MIN_GAIN if self is Evidence.REPEATED else REPEATED_GAIN
        return None
