"""Finding the declared sizes that are nearest to given ones, among thousands, in microseconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar, Union

from ..gemm.problem import Problem

T = TypeVar("T")

_Point = tuple[float, float, float]
_Sizes = tuple[int, int, int]
_Leaf = list[tuple[_Point, _Sizes]]
_Node = Union[_Leaf, "tuple[int, float, _Node, _Node]"]
"""A k-d tree: a leaf's points, or an axis, where it is split, and what lies below and above."""

_LEAF_POINTS = 8
"""Points that are compared one by one: about what a few levels of the tree would cost."""


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

    Args:
        entries: Problems, each once, with what belongs to it; at least one.
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
        self._tree = _make_tree([(_point(sizes), sizes) for sizes in sorted(rows)])

    def find(self, problem: Problem) -> T:
        """What belongs to the declared problem nearest to this one."""
        return self.around(problem).nearest

    def around(self, problem: Problem) -> Around[T]:
        """What belongs to the m around this one that are declared for the nearest other sizes."""
        sizes = _weights(problem)
        if sizes not in self._ms:
            _, sizes = _nearest(self._tree, _point(sizes), (math.inf, sizes))
        ms, items = self._ms[sizes], self._items[sizes]
        below, above = _around(ms, problem.m)
        # m / ms[below] against ms[above] / m, without rounding; of equal ratios the smaller m.
        is_below = problem.m * problem.m <= ms[below] * ms[above]
        return Around(
            nearest=items[below if is_below else above], below=items[below], above=items[above]
        )


def _around(ms: list[int], m: int) -> tuple[int, int]:
    """Positions of the values around m, which are sorted."""
    above = bisect_left(ms, m)
    if above == len(ms):
        return above - 1, above - 1
    return (above, above) if above == 0 or ms[above] == m else (above - 1, above)


def _weights(problem: Problem) -> _Sizes:
    """All but m. Either a batch or groups may be more than 1."""
    return problem.n, problem.k, problem.batch * problem.groups


def _point(sizes: _Sizes) -> _Point:
    n, k, count = sizes
    return math.log2(n), math.log2(k), math.log2(count)


def _make_tree(points: _Leaf) -> _Node:
    if len(points) <= _LEAF_POINTS:
        return points
    spreads = [max(axis) - min(axis) for axis in zip(*(point for point, _ in points))]
    axis = spreads.index(max(spreads))
    ordered = sorted(points, key=lambda entry: entry[0][axis])
    middle = len(ordered) // 2
    return (
        axis,
        ordered[middle][0][axis],
        _make_tree(ordered[:middle]),
        _make_tree(ordered[middle:]),
    )


def _nearest(node: _Node, wanted: _Point, best: tuple[float, _Sizes]) -> tuple[float, _Sizes]:
    if isinstance(node, list):
        n, k, count = wanted
        for point, sizes in node:
            distance = abs(point[0] - n) + abs(point[1] - k) + abs(point[2] - count)
            if distance < best[0] or (distance == best[0] and sizes < best[1]):
                best = distance, sizes
        return best
    axis, split, below, above = node
    beyond = wanted[axis] - split
    near, far = (below, above) if beyond < 0 else (above, below)
    best = _nearest(near, wanted, best)
    # Points on the split itself may lie on either side: an equal distance must be looked at.
    return _nearest(far, wanted, best) if abs(beyond) <= best[0] else best
