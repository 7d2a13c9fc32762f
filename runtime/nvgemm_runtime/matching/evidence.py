"""Evidence that a measured ranking needs if its kernels run without being timed.

Depends only on the ranking, never on this process's GPU: compiled graphs move between GPUs of one
product, and all ranks of a job must choose alike.
"""

from __future__ import annotations

import enum

from ..bundle.ranking_entries import Measured
from .thresholds import MIN_GAIN

REPEATED_GAIN = 0.08
"""Least gain on ATen for a ranking that only one GPU measured, twice.

Each problem's winner on one GPU was compared with ATen on another GPU of the product, over several
GPUs (`benchmarks.repeated`). It was over 1 % slower there in 6 of 782 pairs with a gain of 2 to 3
%, 11 of 1106 at 3 to 5 %, 12 of 1090 at 5 to 8 % (at worst 1.111 times as long), and none of 1000
from 8 % on. Repeating does not remove these cases: the GPUs differ."""


class Evidence(enum.Enum):
    """Evidence that a measured ranking needs to count."""

    DEFAULT = "default"
    """Default mode: two GPUs confirm it, or one repeated it and it gains `REPEATED_GAIN`."""
    REPEATED = "repeated"
    """Default mode if the user accepts repeated rankings like confirmed ones."""
    ONCE = "once"
    """One measurement without doubts: enough if kernels are timed again."""

    def least_gain(self, measured: Measured) -> float | None:
        """Returns the fraction by which a kernel must be faster than ATen to be used.

        Returns:
            None if the ranking does not count at all.
        """
        if self is Evidence.ONCE or measured.is_confirmed:
            return MIN_GAIN
        if measured.is_repeated:
            return MIN_GAIN if self is Evidence.REPEATED else REPEATED_GAIN
        return None
