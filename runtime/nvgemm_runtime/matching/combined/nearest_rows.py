"""Rows in the order of their distance from a problem, by `NearestSizes`' measure."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from ...bundle.paging.tables import Sizes


def nearest_rows(rows: Sequence[Sizes], sizes: Sizes) -> Iterator[Sizes]:
    """Yields rows by distance from ``sizes``, then by size.

    The search goes from n to both sides, and only as far as the caller reads.

    Args:
        rows: Each row's n, k, and batch or group count; sorted.
        sizes: Requested n, k, and count.
    """
    log_n, log_k, log_count = map(math.log2, sizes)
    begin = bisect_left(rows, (sizes[0],))
    sides = [iter(range(begin, len(rows))), iter(range(begin - 1, -1, -1))]
    found: list[tuple[float, Sizes]] = []
    ahead: list[tuple[float, int, int]] = []
    """The next row on each side: its distance along n alone, which later ones exceed."""

    def advance(side: int) -> None:
        index = next(sides[side], None)
        if index is not None:
            heapq.heappush(ahead, (abs(math.log2(rows[index][0]) - log_n), side, index))

    advance(0)
    advance(1)
    while ahead or found:
        while ahead and (not found or ahead[0][0] <= found[0][0]):
            along_n, side, index = heapq.heappop(ahead)
            _, k, count = rows[index]
            rest = abs(math.log2(k) - log_k) + abs(math.log2(count) - log_count)
            heapq.heappush(found, (along_n + rest, rows[index]))
            advance(side)
        yield heapq.heappop(found)[1]
