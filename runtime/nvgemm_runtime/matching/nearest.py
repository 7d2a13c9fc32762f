"""Search for the nearest declared sizes, among thousands, in microseconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..bundle.paging.tables import Sizes, row_sizes
from ..gemm.problem import Problem

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Around(Generic[T]):
    """Items for the declared problems around a problem.

    Attributes:
        nearest: Item for the nearest m.
        below: Item for the next smaller m.
        above: Item for the next larger m. All three are equal if m is declared, or outside the
            declared range.
    """

    nearest: T
    below: T
    above: T


class NearestSizes(Generic[T]):
    """Items for one signature's declared problems, searchable by size.

    Distance is the ratio between sizes: n, k and batch or groups first, then m. m comes last
    because it varies at run time, while n and k are a model's weights. Ties go to the smaller size,
    so that insertion order never matters.
    """

    def __init__(self, entries: Iterable[tuple[Problem, T]]) -> None:
        rows: dict[Sizes, list[tuple[int, T]]] = {}
        for problem, item in entries:
            rows.setdefault(row_sizes(problem), []).append((problem.m, item))
        self._ms: dict[Sizes, list[int]] = {}
        self._items: dict[Sizes, list[T]] = {}
        for sizes, row in rows.items():
            row.sort(key=lambda entry: entry[0])
            self._ms[sizes] = [m for m, _ in row]
            self._items[sizes] = [item for _, item in row]
        self._points = sorted(
            (math.log2(n), math.log2(k), math.log2(count), (n, k, count)) for n, k, count in rows
        )
        self._logs_of_n = [point[0] for point in self._points]

    def around(self, problem: Problem) -> Around[T]:
        """Returns the items around this m, for the nearest declared n, k and batch or groups."""
        sizes = row_sizes(problem)
        if sizes not in self._ms:
            sizes = self._nearest(sizes)
        ms, items = self._ms[sizes], self._items[sizes]
        below, above = _around(ms, problem.m)
        # Compares m / ms[below] with ms[above] / m without rounding; ties go to the smaller m.
        is_below = problem.m * problem.m <= ms[below] * ms[above]
        return Around(
            nearest=items[below if is_below else above], below=items[below], above=items[above]
        )

    def _nearest(self, requested: Sizes) -> Sizes:
        """Returns the declared sizes with the least sum over logarithm differences.

        The search goes from n to both sides, until n alone is farther than the best result.
        """
        log_n, log_k, log_count = map(math.log2, requested)
        begin = bisect_left(self._logs_of_n, log_n)
        least, nearest = math.inf, requested
        for points in (self._points[begin:], reversed(self._points[:begin])):
            for n, k, count, sizes in points:
                distance = abs(n - log_n)
                if distance > least:
                    break
                distance += abs(k - log_k) + abs(count - log_count)
                if distance <= least and (distance < least or sizes < nearest):
                    least, nearest = distance, sizes
        return nearest


def _around(ms: list[int], m: int) -> tuple[int, int]:
    """Returns the indices in sorted ``ms`` around m."""
    above = bisect_left(ms, m)
    if above == len(ms):
        return above - 1, above - 1
    return (above, above) if above == 0 or ms[above] == m else (above - 1, above)
