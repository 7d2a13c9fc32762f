"""Rows in the order of their distance from a problem, by `NearestSizes`' measure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from ...bundle.paging.tables import Sizes


def nearest_rows(
    sizes: Sizes, *, below: Iterator[Sizes], above: Iterator[Sizes]
) -> Iterator[Sizes]:
    """Yields rows by distance from ``sizes``, then by size.

    Args:
        sizes: Requested n, k, and batch or group count.
        below: Rows with smaller n, the largest first. Read only as far as needed.
        above: Rows with this n or more, the smallest first.
    """
    log_n, log_k, log_count = map(math.log2, sizes)
    found: list[tuple[float, Sizes]] = []
    ahead: list[tuple[float, int, Sizes]] = []
    """The next row on each side: its distance along n alone, which later ones exceed."""
    sides = (below, above)

    def advance(side: int) -> None:
        row = next(sides[side], None)
        if row is not None:
            heapq.heappush(ahead, (abs(math.log2(row[0]) - log_n), side, row))

    advance(0)
    advance(1)
    while ahead or found:
        while ahead and (not found or ahead[0][0] <= found[0][0]):
            along_n, side, row = heapq.heappop(ahead)
            rest = abs(math.log2(row[1]) - log_k) + abs(math.log2(row[2]) - log_count)
            heapq.heappush(found, (along_n + rest, row))
            advance(side)
        yield heapq.heappop(found)[1]
