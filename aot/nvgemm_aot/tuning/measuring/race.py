"""Times contenders in turn until the fastest is told apart from the others."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nvgemm_runtime.bundle.ranking_entries import APART

from ...rankings.intervals import TimeInterval, contending, is_decided

CONFIDENCE = 0.95
"""Confidence for each median's interval alone. The fastest contender is partly so by luck, and its
interval contains its true median less often."""

LEAST_SAMPLES = 6
"""Fewest samples whose range contains the true median with that confidence: 1 - 2 / 2**6."""


def median_interval(samples: Sequence[float]) -> TimeInterval:
    """Returns the median of at least `LEAST_SAMPLES` samples and the true median's interval.

    No distribution is assumed: the true median lies between the j-th smallest and the j-th largest
    of n independent samples with probability 1 - 2 P(Binomial(n, 1/2) < j).
    """
    count, ordered = len(samples), sorted(samples)
    outside, skipped = 2 / 2**count, 0
    while True:
        outside += 2 * math.comb(count, skipped + 1) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        skipped += 1
    return TimeInterval(
        median=statistics.median(ordered), low=ordered[skipped], high=ordered[-1 - skipped]
    )


MORE_ROUNDS = 3
"""Rounds added at a time for contenders that may still be the fastest."""

MOST_ROUNDS = 30
"""Limit for rounds: contenders that 30 samples do not tell apart differ by less than the noise."""

Sample = Callable[[], float]
"""Samples a contender's runtime, in nanoseconds per call."""


class Timer(Protocol):
    """Times calls on a device."""

    def prepare(self, calls: Sequence[Callable[[], object]], *, launches: str = APART) -> Sample:
        """Prepares a contender's calls for timing.

        The calls compute the same on different buffers, in turn, so that no call finds its buffers
        in a cache. ``launches`` is `APART` or `BACK_TO_BACK`; a sample is a single call's time in
        both.
        """

    def check(self) -> None:
        """Raises the device's error if it has become unusable."""


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """Race result.

    Attributes:
        intervals: Intervals by contender; contenders that fell behind early have fewer samples.
        is_decided: True if the fastest is told apart from the others or known to equal them.
    """

    intervals: dict[str, TimeInterval]
    is_decided: bool


def race(
    contenders: Mapping[str, Sample],
    source: random.Random,
    after_round: Callable[[], None] = lambda: None,
    most_rounds: int = MOST_ROUNDS,
) -> RaceResult:
    """Times contenders in rounds, each in a new order, so that none always follows another.

    Contenders that can no longer be the fastest are dropped. The race ends when the fastest is told
    apart or after ``most_rounds`` rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    intervals: dict[str, TimeInterval] = {}
    running, rounds = list(contenders), LEAST_SAMPLES
    while True:
        for _ in range(rounds):
            source.shuffle(running)
            for name in running:
                samples[name].append(contenders[name]())
            after_round()
        intervals |= {name: median_interval(samples[name]) for name in running}
        if is_decided(intervals):
            return RaceResult(intervals=intervals, is_decided=True)
        # A dropped contender comes back if the leader turns out to be slower.
        running, rounds = contending(intervals), MORE_ROUNDS
        if max(len(samples[name]) for name in running) + rounds > most_rounds:
            return RaceResult(intervals=intervals, is_decided=False)
