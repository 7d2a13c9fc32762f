"""Timing contenders in turn until they are told apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .separation import LEAST_SAMPLES, Interval, contending, is_decided, median_interval

MORE_ROUNDS = 3
"""Rounds that are added at a time, for those that may still be the fastest."""

MOST_ROUNDS = 30
"""What 30 samples do not tell apart, noise of another kind keeps together."""

Sample = Callable[[], float]
"""Takes one sample of a contender's runtime, in nanoseconds a call."""


class Timer(Protocol):
    """Times calls on one device."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Sample:
        """Get calls of one contender ready to be timed.

        Args:
            calls: The same computation on buffers of their own, at least one. They are made in
                turn, so that what one left in a cache is gone when it comes round again.
        """

    def check(self) -> None:
        """Raise whatever the device answers with if it is unusable."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a race went.

    Attributes:
        intervals: By contender. Those that were left behind have fewer samples.
        is_decided: Whether the fastest is told apart from the others, or known to be their equal.
    """

    intervals: dict[str, Interval]
    is_decided: bool


def race(
    contenders: Mapping[str, Sample],
    source: random.Random,
    after_round: Callable[[], None] = lambda: None,
) -> Result:
    """Time contenders, in each round all in a new order, so that no one always follows another.

    Whoever cannot be the fastest any more is not timed further. The race ends when the fastest is
    told apart or after `MOST_ROUNDS` rounds.

    Args:
        contenders: By name; at least one.
        source: What the orders are drawn from.
        after_round: Called when a round has ended.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    intervals: dict[str, Interval] = {}
    running, rounds = list(contenders), LEAST_SAMPLES
    while True:
        for _ in range(rounds):
            source.shuffle(running)
            for name in running:
                samples[name].append(contenders[name]())
            after_round()
        intervals |= {name: median_interval(samples[name]) for name in running}
        if is_decided(intervals):
            return Result(intervals=intervals, is_decided=True)
        # One that was left behind comes back where the leader turns out to be slower.
        running, rounds = contending(intervals), MORE_ROUNDS
        if max(len(samples[name]) for name in running) + rounds > MOST_ROUNDS:
            return Result(intervals=intervals, is_decided=False)
