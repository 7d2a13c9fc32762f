"""Summaries for repeated timings, and unbiased choices.

The least of several noisy medians reports luck as speed. Timings are therefore split: even rounds
choose, odd rounds are reported, and a best-of can lose. Clocks that change from round to round, as
they do under a power cap, do not tell kernels apart, so the pace that all share in a round is
divided out first.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Entry = TypeVar("Entry")

MIN_ROUNDS = 4
"""Least rounds: two choose, two are reported."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One kernel's timings at one size, in nanoseconds.

    Attributes:
        choice_ns: Median over even rounds, which choose kernels.
        report_ns: Median over odd rounds, which tables print.
        least_ns, most_ns: Least and most over all rounds.
    """

    choice_ns: int
    report_ns: int
    least_ns: int
    most_ns: int

    @classmethod
    def of(cls, times_ns: Sequence[float]) -> Summary:
        """Summarizes rounds, in the order they were run.

        Raises:
            ValueError: If they are fewer than `MIN_ROUNDS`.
        """
        if len(times_ns) < MIN_ROUNDS:
            raise ValueError(f"must be {MIN_ROUNDS} rounds or more (got {len(times_ns)})")
        return cls(
            choice_ns=round(statistics.median(times_ns[::2])),
            report_ns=round(statistics.median(times_ns[1::2])),
            least_ns=round(min(times_ns)),
            most_ns=round(max(times_ns)),
        )

    def to_json(self) -> list[int]:
        """Returns four numbers, in the attributes' order."""
        return [self.choice_ns, self.report_ns, self.least_ns, self.most_ns]

    @classmethod
    def from_json(cls, numbers: Sequence[int]) -> Summary:
        """Reads `to_json`'s numbers."""
        choice, report, least, most = numbers
        return cls(choice_ns=choice, report_ns=report, least_ns=least, most_ns=most)


def summarized(times_ns: Mapping[str, Sequence[float]]) -> dict[str, Summary]:
    """Summarizes contenders that took turns.

    Rounds that choose and those that are reported are leveled apart; shared paces would couple
    the two.
    """
    choosing = leveled({name: times[::2] for name, times in times_ns.items()})
    reported = leveled({name: times[1::2] for name, times in times_ns.items()})
    return {
        name: Summary.of(list(itertools.chain(*zip(choosing[name], reported[name]))))
        for name in times_ns
    }


def leveled(times_ns: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Scales timings to one GPU pace in all rounds.

    A round's pace is the median over contenders of time over the contender's median time.
    """
    middles = {name: statistics.median(times) for name, times in times_ns.items()}
    paces = [
        statistics.median(time / middles[name] for name, time in zip(times_ns, of_round))
        for of_round in zip(*times_ns.values(), strict=True)
    ]
    return {
        name: [time / pace for time, pace in zip(times, paces)] for name, times in times_ns.items()
    }


def chosen(summaries: Mapping[str, Summary]) -> str:
    """Returns the fastest's name, by the rounds that choose; the first among equals."""
    return min(summaries, key=lambda name: summaries[name].choice_ns)


def fastest(summaries: Iterable[Summary]) -> Summary:
    """Returns the fastest, by the rounds that choose; the first among equals."""
    return min(summaries, key=lambda summary: summary.choice_ns)


def ratio(reference: Summary, own: Summary) -> float:
    """Returns the speed-up over the reference."""
    return reference.report_ns / own.report_ns


def geomean(ratios: Sequence[float]) -> float:
    """Returns the geometric mean; NaN for an empty sequence."""
    return statistics.geometric_mean(ratios) if ratios else math.nan


def mean(values: Sequence[float]) -> float:
    """Returns the mean; NaN for an empty sequence."""
    return statistics.fmean(values) if values else math.nan


def standard_error(values: Sequence[float], population: int) -> float:
    """Returns the standard error of a sample's mean; NaN for less than two values.

    Args:
        values: Sample, drawn without replacement.
        population: Population size.
    """
    if len(values) < 2:
        return math.nan
    left = 1 - len(values) / population
    return statistics.stdev(values) * math.sqrt(left / len(values))


def median(values: Sequence[float]) -> float:
    """Returns the median; NaN for an empty sequence."""
    return statistics.median(values) if values else math.nan


def share(values: Iterable[bool]) -> float:
    """Returns the true values' share; NaN for an empty sequence."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def grouped(
    entries: Iterable[Entry], bounds: Sequence[int], value: Callable[[Entry], int]
) -> list[tuple[str, list[Entry]]]:
    """Groups entries into ranges of a number, without empty ranges.

    Args:
        entries: Entries to group.
        bounds: Lower bounds, ascending; each ends before the next, the last nowhere.
        value: Returns an entry's number.

    Returns:
        Each range's label and entries, e.g. ``16-127``.

    Raises:
        ValueError: If an entry lies below the first bound.
    """
    groups: list[list[Entry]] = [[] for _ in bounds]
    for entry in entries:
        number = value(entry)
        below = sum(bound <= number for bound in bounds)
        if below == 0:
            raise ValueError(f"{number} lies below the least bound {bounds[0]}")
        groups[below - 1].append(entry)
    labels = [
        str(bound) if bound + 1 == following else f"{bound}-{following - 1}"
        for bound, following in itertools.pairwise(bounds)
    ]
    return [pair for pair in zip([*labels, f"{bounds[-1]}-"], groups) if pair[1]]
