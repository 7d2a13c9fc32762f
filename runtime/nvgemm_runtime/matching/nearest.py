"""Finding the declared sizes that are nearest to given ones, among thousands, in microseconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..gemm.problem import Problem

T = TypeVar("T")

_Sizes = tuple[int, int, int]
"""All of a problem's sizes but m: n, k, and the batch or groups."""


@dataclass(frozen=True, kw_only=True)
class Around(Generic[T]):
    """What belongs to declared problems around one.

    Attributes:
        nearest: That of the nearest m.
        below: That of the next smaller m.
        above: That of the next larger m. Where m is declared, or beyond all that are, all three
            are the same.
    """

    nearest: T
    below: T
    above: T


class NearestSizes(Generic[T]):
    """What belongs to each of some declared problems of one signature, found by sizes.

    Closeness is the ratio of sizes: by n, k and batch or groups first, then by m. m comes last
    because it varies at run time, while n and k are a model's weights. Equally near are told apart
    by size, smaller first, so that the answer never depends on an order of insertion.
    """

    def __init__(self, entries: Iterable[tuple[Problem, T]]) -> None:
        rows: dict[_Sizes, list[tuple[int, T]]] = {}
        for problem, item in entries:
            rows.setdefault(_weights(problem), []).append((problem.m, item))
        self._ms: dict[_Sizes, list[int]] = {}
        self._items: dict[_Sizes, list[T]] = {}
        for sizes, row in rows.items():
            row.sort(key=lambda entry: entry[0])
            self._ms[sizes] = [m for m, _ in row]
            self._items[sizes] = [item for _, item in row]
        self._points = sorted(
            (math.log2(n), math.log2(k), math.log2(count), (n, k, count)) for n, k, count in rows
        )
        self._logs_of_n = [point[0] for point in self._points]

    def around(self, problem: Problem) -> Around[T]:
        """What belongs to the m around this one that are declared for the nearest other sizes."""
        sizes = _weights(problem)
        if sizes not in self._ms:
            sizes = self._nearest(sizes)
        ms, items = self._ms[sizes], self._items[sizes]
        below, above = _around(ms, problem.m)
        # m / ms[below] against ms[above] / m, without rounding; of equal ratios the smaller m.
        is_below = problem.m * problem.m <= ms[below] * ms[above]
        return Around(
            nearest=items[below if is_below else above], below=items[below], above=items[above]
        )

    def _nearest(self, wanted: _Sizes) -> _Sizes:
        """The declared sizes at the least sum of differences of logarithms.

        The search goes from n to either side, until n alone is farther than the best so far.
        """
        log_n, log_k, log_count = map(math.log2, wanted)
        begin = bisect_left(self._logs_of_n, log_n)
        least, nearest = math.inf, wanted
        for points in (self._points[begin:], reversed(self._points[:begin])):
            for n, k, count, sizes in points:
                apart = abs(n - log_n)
                if apart > least:
                    break
                apart += abs(k - log_k) + abs(count - log_count)
                if apart <= least and (apart < least or sizes < nearest):
                    least, nearest = apart, sizes
        return nearest


def _around(ms: list[int], m: int) -> tuple[int, int]:
    """Positions of the values around m, which are sorted."""
    above = bisect_left(ms, m)
    if above == len(ms):
        return above - 1, above - 1
    return (above, above) if above == 0 or ms[above] == m else (above - 1, above)


def _weights(problem: Problem) -> _Sizes:
    """All but m. Either a batch or groups may be more than 1."""
    return problem.n, problem.k, problem.batch * problem.groups
