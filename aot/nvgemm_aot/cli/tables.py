"""Plain-text tables and sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Lay out rows in columns; columns whose cells are all numbers are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def count_text(count: int, noun: str) -> str:
    """A number of things: ``1 problem``, ``2 problems``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(size_bytes: int) -> str:
    """A size as people read it."""
    if size_bytes < 10_000:
        return f"{size_bytes} B"
    if size_bytes < 10_000_000:
        return f"{size_bytes / 1e3:.1f} kB"
    return f"{size_bytes / 1e6:.1f} MB"


def percent_text(percent: Fraction | float) -> str:
    """A percentage as people read it; rounded down, so that 100.0 % means all."""
    return f"{math.floor(percent * 10) / 10:.1f} %"
