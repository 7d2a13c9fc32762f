"""Telling runtimes apart, and the races that do so."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

import pytest

from nvgemm_aot.tuning.measuring.race import (
    LEAST_SAMPLES,
    MOST_ROUNDS,
    TimeInterval,
    contending,
    is_decided,
    median_interval,
    race,
)


@pytest.mark.parametrize("count", [LEAST_SAMPLES, 9, 12, 30])
def test_intervals_hold_the_true_median_as_often_as_they_say(count: int) -> None:
    source = random.Random(count)
    trials = 4000
    held = 0
    for _ in range(trials):
        samples = [source.expovariate(1.0) for _ in range(count)]  # skewed, as runtimes are
        interval = median_interval(samples)
        held += interval.low <= 0.6931 <= interval.high
    assert held / trials >= 0.94


def test_more_samples_narrow_an_interval() -> None:
    source = random.Random(1)
    samples = [source.gauss(100, 5) for _ in range(30)]
    few, many = median_interval(samples[:6]), median_interval(samples)
    assert many.high - many.low < few.high - few.low
    assert few.low == min(samples[:6])
    assert few.high == max(samples[:6])


def interval(low: float, median: float, high: float) -> TimeInterval:
    return TimeInterval(median=median, low=low, high=high)


def test_who_reaches_into_the_leaders_interval_may_be_fastest() -> None:
    intervals = {
        "leader": interval(95, 100, 108),
        "touches": interval(108, 120, 130),
        "behind": interval(109, 110, 111),
    }
    assert contending(intervals) == ["leader", "touches"]
    assert not is_decided(intervals)
    del intervals["touches"]
    assert is_decided(intervals)


def test_equals_are_decided_where_both_are_known_well() -> None:
    assert is_decided({"a": interval(99.5, 100, 100.5), "b": interval(100, 100.5, 101)})
    assert not is_decided({"a": interval(99.5, 100, 100.5), "b": interval(100, 102, 104)})


def test_a_timing_never_claims_more_than_its_interval() -> None:
    timing = interval(99.2, 100.4, 103.1).timing
    assert timing.time_ns == 100
    assert timing.time_ns + timing.spread_ns >= 103.1
    assert interval(0.1, 0.2, 0.3).timing.time_ns == 1


class Runner:
    """A contender that keeps count."""

    def __init__(self, log: list[str], name: str, times: Iterable[float]) -> None:
        self.log, self.name, self.times = log, name, itertools.cycle(times)

    def __call__(self) -> float:
        self.log.append(self.name)
        return next(self.times)


def runners(log: list[str], **times: Iterable[float]) -> dict[str, Callable[[], float]]:
    return {name: Runner(log, name, values) for name, values in times.items()}


def test_contenders_take_turns_in_changing_order() -> None:
    log: list[str] = []
    race(runners(log, a=[1.0], b=[2.0], c=[3.0], d=[4.0]), random.Random(0))
    rounds = [tuple(log[at : at + 4]) for at in range(0, len(log), 4)]
    assert len(rounds) == LEAST_SAMPLES
    assert all(sorted(one) == ["a", "b", "c", "d"] for one in rounds)
    assert len(set(rounds)) > 1


def test_who_is_left_behind_is_not_timed_further() -> None:
    log: list[str] = []
    noisy = [100.0, 110.0, 104.0, 96.0, 107.0, 93.0, 101.0]
    contenders = runners(log, a=noisy, b=[t + 1 for t in noisy], slow=[500.0])
    result = race(contenders, random.Random(0))
    assert log.count("slow") == LEAST_SAMPLES
    assert log.count("a") > LEAST_SAMPLES
    assert result.intervals["slow"].median == 500.0


def test_what_cannot_be_told_apart_ends_undecided() -> None:
    log: list[str] = []
    noisy = [100.0, 140.0, 60.0, 120.0, 80.0, 130.0, 70.0]
    result = race(runners(log, a=noisy, b=[*reversed(noisy)]), random.Random(0))
    assert not result.is_decided
    assert log.count("a") == log.count("b") == MOST_ROUNDS


def test_one_that_was_left_behind_comes_back_when_the_leader_slows_down() -> None:
    log: list[str] = []
    slowing = [*[100.0, 90.0] * 3, *[300.0] * 24]
    near = [*[100.0, 91.0] * 3, *[310.0] * 24]
    result = race(runners(log, a=slowing, b=near, c=[150.0]), random.Random(0))
    assert log.count("c") > LEAST_SAMPLES
    assert min(result.intervals, key=lambda name: result.intervals[name].median) == "c"


def test_a_single_contender_is_decided_at_once() -> None:
    log: list[str] = []
    result = race(runners(log, a=[100.0, 200.0]), random.Random(0))
    assert result.is_decided
    assert len(log) == LEAST_SAMPLES
