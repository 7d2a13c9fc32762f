"""Tables in a version 3 root: where each list's pages lie, and which rows each signature has."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...gemm.problem import Problem, Signature
from ..format import (
    MAX_KERNEL_ALIGNMENT_BYTES,
    MAX_PAGE_BYTES,
    MAX_PAGE_ENTRIES,
    MAX_PAGES_BYTES,
)
from ..header_values import HeaderValues

LISTS = KERNELS, RANKINGS, UNSERVED, FAILURES, ROWS = (
    "kernels",
    "rankings",
    "unserved",
    "failures",
    "rows",
)
"""Lists in pages, in file order."""

DIGEST_BYTES = 32

_TABLE = frozenset({"count", "entries", "sha256", "stored", "content"})

Sizes = tuple[int, int, int]
"""Sizes that a row's problems share: n, k, and the batch or group count."""


def row_sizes(problem: Problem) -> Sizes:
    """Returns the sizes that a problem shares with its row."""
    return problem.n, problem.k, problem.batch * problem.groups


@dataclass(frozen=True, kw_only=True)
class Table:
    """Pages of one list.

    Attributes:
        name: List.
        count: Entries in all pages.
        entries: Entries in each page but the last, which may have fewer.
        digests: Each page's sha256, joined.
        offsets: Each page's first byte in the file, then the byte behind the last page.
        content_bytes: Each page's size after decompression.
    """

    name: str
    count: int
    entries: int
    digests: bytes
    offsets: tuple[int, ...]
    content_bytes: tuple[int, ...]

    def digest(self, page: int) -> bytes:
        """Returns a page's sha256."""
        return self.digests[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES]

    def count_in(self, page: int) -> int:
        """Returns a page's number of entries."""
        return min(self.entries, self.count - page * self.entries)


@dataclass(frozen=True, kw_only=True)
class SignatureRows:
    """A signature's part of the rows.

    Attributes:
        first, end: Positions of its first row, and behind its last one.
        alignment_bytes: No ranked kernel with the signature needs less; None if none is ranked.
        alignment_for_gaps_bytes: The same for kernels that take operands with gaps.
    """

    first: int
    end: int
    alignment_bytes: int | None
    alignment_for_gaps_bytes: int | None

    def alignment(self, is_compact: bool) -> int | None:
        """Returns the least alignment for compact operands, or for operands with gaps."""
        return self.alignment_bytes if is_compact else self.alignment_for_gaps_bytes


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All tables in a root.

    Attributes:
        tables: Pages by list.
        first_ids: Each kernel page's first id, as raw bytes, joined.
        first_sizes: Each row page's first sizes.
        signatures: Rows by signature text, sorted.
        products: GPU products with rankings; None unless a ranking is for a further product.
    """

    tables: dict[str, Table]
    first_ids: bytes
    first_sizes: tuple[Sizes, ...]
    signatures: dict[str, SignatureRows]
    products: frozenset[str] | None

    def first_id(self, page: int) -> bytes:
        """Returns a kernel page's first id."""
        return self.first_ids[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES]

    def rows_of(self, signature: Signature) -> SignatureRows | None:
        """Returns a signature's rows, or None."""
        return self.signatures.get(signature.key)

    def row_page(self, rows: SignatureRows, sizes: Sizes) -> int:
        """Returns the page that holds a signature's row, if there is one with these sizes."""
        entries = self.tables[ROWS].entries
        first, last = rows.first // entries, (rows.end - 1) // entries
        page = bisect_left(self.first_sizes, sizes, first + 1, last + 1)
        is_first = page <= last and self.first_sizes[page] == sizes
        return page if is_first else page - 1


class TablesDecoder(HeaderValues):
    """Reads a root's tables, and checks all that needs no page."""

    def tables(self, top: dict[str, Any], offset: int) -> Tables:
        """Reads the tables; ``offset`` is the first byte behind the root."""
        pages = self.fields(top["pages"], "pages", frozenset(LISTS))
        tables: dict[str, Table] = {}
        for name in LISTS:
            tables[name] = self.table(pages[name], name, offset)
            offset = tables[name].offsets[-1]
        content_bytes = sum(sum(table.content_bytes) for table in tables.values())
        if content_bytes > MAX_PAGES_BYTES:
            self.fail(
                "header-size",
                f"pages of {content_bytes} decompressed bytes (at most {MAX_PAGES_BYTES})",
            )
        if not tables[KERNELS].count:
            self.fail("no-kernels", "a bundle must hold at least one kernel (got 0)")
        first_ids = self.hex(pages[KERNELS].get("first"), "pages.kernels.first", tables[KERNELS])
        starts = range(0, len(first_ids), DIGEST_BYTES)
        ids = [first_ids[start : start + DIGEST_BYTES] for start in starts]
        if any(a >= b for a, b in itertools.pairwise(ids)):
            self.fail("page-order", "pages.kernels.first must be sorted, each id once")
        numbers = self.numbers(
            pages[ROWS].get("first"), "pages.rows.first", 3 * _pages(tables[ROWS]), 2**63 - 1
        )
        first_sizes = tuple(zip(numbers[::3], numbers[1::3], numbers[2::3]))
        products = None
        if "products" in top:
            products = frozenset(self.each(top["products"], "products", self.text))
        return Tables(
            tables=tables,
            first_ids=first_ids,
            first_sizes=first_sizes,
            signatures=self.signatures(top["signatures"], tables[ROWS], first_sizes),
            products=products,
        )

    def table(self, value: Any, name: str, offset: int) -> Table:
        """Reads a list's table; ``offset`` is its first page's."""
        path = f"pages.{name}"
        fields = self.fields(value, path, _TABLE)
        count = self.number(fields["count"], f"{path}.count")
        entries = self.number(fields["entries"], f"{path}.entries", 1, MAX_PAGE_ENTRIES)
        pages = -(-count // entries)
        stored = self.numbers(fields["stored"], f"{path}.stored", pages, MAX_PAGE_BYTES)
        content = self.numbers(fields["content"], f"{path}.content", pages, MAX_PAGE_BYTES)
        table = Table(
            name=name,
            count=count,
            entries=entries,
            digests=b"",
            offsets=tuple(itertools.accumulate(stored, initial=offset)),
            content_bytes=tuple(content),
        )
        digests = self.hex(fields["sha256"], f"{path}.sha256", table)
        return replace(table, digests=digests)

    def numbers(self, value: Any, path: str, length: int, most: int) -> list[int]:
        """Reads a list of integers in ``1..most``, as fast as thousands need."""
        numbers = self.items(value, path, length)
        if numbers and (
            set(map(type, numbers)) != {int} or min(numbers) < 1 or max(numbers) > most
        ):
            self.refuse(path, f"integers in 1..{most}", numbers)
        return numbers

    def hex(self, value: Any, path: str, table: Table) -> bytes:
        """Reads a digest for each page of a table, joined to one text."""
        pages = _pages(table)
        try:
            digests = bytes.fromhex(value)
        except (TypeError, ValueError):
            digests = b""
        if digests.hex() != value or len(digests) != pages * DIGEST_BYTES:
            self.refuse(path, f"{pages * 64} lower-case hex digits", value)
        return digests

    def signatures(
        self, value: Any, table: Table, first_sizes: tuple[Sizes, ...]
    ) -> dict[str, SignatureRows]:
        """Reads the rows by signature."""
        signatures: dict[str, SignatureRows] = {}
        first = 0
        previous = ""
        for index, item in enumerate(self.items(value, "signatures")):
            path = f"signatures[{index}]"
            text, rows, alignment, for_gaps = self.items(item, path, 4)
            if self.text(text, f"{path}[0]") <= previous:
                self.fail("page-order", f"{path} has {text!r:.80} after {previous!r:.80}")
            end = first + self.number(rows, f"{path}[1]", least=1)
            signatures[text] = SignatureRows(
                first=first,
                end=end,
                alignment_bytes=self.alignment(alignment, f"{path}[2]"),
                alignment_for_gaps_bytes=self.alignment(for_gaps, f"{path}[3]"),
            )
            pages = first_sizes[first // table.entries + 1 : (end - 1) // table.entries + 1]
            if any(a >= b for a, b in itertools.pairwise(pages)):
                self.fail("page-order", f"{path}: pages.rows.first must be sorted")
            first, previous = end, text
        if first != table.count:
            self.fail("page-rows", f"signatures have {first} rows, pages.rows {table.count}")
        return signatures

    def alignment(self, value: Any, path: str) -> int | None:
        """Reads an alignment in bytes, or None."""
        if value is None:
            return None
        return self.number(value, path, 1, MAX_KERNEL_ALIGNMENT_BYTES)


def _pages(table: Table) -> int:
    return len(table.content_bytes)


def pages_of(positions: Iterable[int], table: Table) -> dict[int, list[int]]:
    """Groups positions of entries by page."""
    pages: dict[int, list[int]] = {}
    for position in positions:
        pages.setdefault(position // table.entries, []).append(position)
    return pages
