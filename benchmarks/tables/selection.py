"""Records by benchmark, case and product."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import geometric_mean

from benchmarks.record import Record, product

PRODUCTS = ("h100", "h200", "cpu")
"""Product order in tables."""
TIMES, NONE = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
NAMES = {"h100": "H100", "h200": "H200", "cpu": "CPU"}


class Selection:
    """Records that match a benchmark, case, contender and product.

    Iterating yields the records in file order.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = tuple(records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def where(
        self,
        benchmark: str | None = None,
        case: str = "",
        *,
        baseline: str | None = None,
        on: str | None = None,
    ) -> Selection:
        """Narrows the selection.

        Args:
            benchmark: Module under ``benchmarks``.
            case: Regular expression that the whole case must match; empty matches all.
            baseline: Contender.
            on: Short product name.
        """
        return Selection(
            record
            for record in self._records
            if (benchmark is None or record.run.benchmark == benchmark)
            and (not case or re.fullmatch(case, record.case.name))
            and (baseline is None or record.key[2] == baseline)
            and (on is None or product(record.run.gpu) == on)
        )

    def only(self) -> Record:
        """Returns the selection's one record.

        Raises:
            LookupError: If it has none or several.
        """
        if len(self) != 1:
            raise LookupError(f"must be one record (got {[one.key for one in self]})")
        return self._records[0]

    @property
    def products(self) -> list[str]:
        """Short product names, in table order."""
        present = {product(record.run.gpu) for record in self}
        return [*filter(present.__contains__, PRODUCTS), *sorted(present - {*PRODUCTS})]

    @property
    def date(self) -> str:
        """Newest date."""
        return max(record.run.date or NONE for record in self)

    def speedup(self) -> float:
        """Geometric mean speed-up over the baseline."""
        return geometric_mean([record.speedup for record in self])

    def least_speedup(self) -> float:
        """The worst case's speed-up."""
        return min(record.speedup for record in self)

    def over_baseline(self) -> float:
        """Geometric mean figure over baseline."""
        return geometric_mean([record.over_baseline for record in self])


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gpu(name: str) -> str:
    """Product name as tables print it."""
    return NAMES.get(name, name)


def times(value: float, digits: int = 2) -> str:
    """A ratio and the multiplication sign."""
    return f"{value:.{digits}f}{TIMES}"
