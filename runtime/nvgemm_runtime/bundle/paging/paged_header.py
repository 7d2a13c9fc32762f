"""Look-ups in a header in pages, which read and check only the entries that they need."""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zstandard

from ...gemm.problem import Problem, Signature
from ..format import Header, Kernel, UnknownKernel
from ..header_rules import Parts, check_entries
from ..ranking_entries import Ranking, UnknownEntry, UnservedReason
from ..unknown_parts import separate_unknown_entries
from .root import Root, require_in_file
from .tables import (
    FAILURES,
    KERNELS,
    RANKINGS,
    ROWS,
    UNSERVED,
    SignatureRows,
    Sizes,
    Table,
    pages_of,
    row_sizes,
)

Read = Callable[[int, int], bytes]
"""Reads bytes from a file, at an offset."""

_ROW_MEMBERS = 7


@dataclass(frozen=True, kw_only=True)
class Row:
    """Problems that differ in m alone.

    Attributes:
        position: Position among all rows.
        sizes: Sizes that they share.
        rankings: Positions of their rankings.
        unserved: Positions of their entries in ``unserved``.
    """

    position: int
    sizes: Sizes
    rankings: range
    unserved: range


class PagedHeader:
    """Look-ups in a header in pages. Safe to use from several threads.

    Every method raises `BundleFormatError` if a page breaks a rule, and `StorageError` if it cannot
    be read.

    Attributes:
        facts: Header without entries.
    """

    def __init__(self, read: Read, root: Root) -> None:
        self.facts = root.facts
        self._read = read
        self._root = root
        self._tables = root.tables
        self._decoder = root.decoder
        self._kernels: dict[int, Kernel | UnknownKernel] = {}
        self._row_values: dict[int, list[list[int]]] = {}

    def signatures(self) -> tuple[Signature, ...]:
        """Returns the ranked signatures that this release knows."""
        return tuple(
            known
            for text, rows in self._tables.signatures.items()
            if rows.alignment_bytes is not None and (known := _parse_signature(text))
        )

    def least_alignment(self, signature: Signature, is_compact: bool) -> int | None:
        """Returns an alignment in bytes that every ranked kernel with a signature needs.

        None if no ranked kernel has the signature, or takes operands with gaps if
        ``is_compact`` is False.
        """
        rows = self._tables.rows_of(signature)
        return None if rows is None else rows.alignment(is_compact)

    def rows_below(self, signature: Signature, n: int) -> Iterator[Sizes]:
        """Yields the sizes of a signature's ranked rows with smaller n, the largest first."""
        rows = self._tables.rows_of(signature)
        if rows is None:
            return
        first, _ = self._row_pages(rows)
        for page in range(self._tables.row_page(rows, (n, 0, 0)), first - 1, -1):
            values = self._rows_in(page, rows)
            yield from (_sizes(value) for _, value in reversed(values) if value[0] < n and value[4])

    def rows_above(self, signature: Signature, n: int) -> Iterator[Sizes]:
        """Yields the sizes of a signature's ranked rows with n or more, the smallest first."""
        rows = self._tables.rows_of(signature)
        if rows is None:
            return
        _, last = self._row_pages(rows)
        for page in range(self._tables.row_page(rows, (n, 0, 0)), last + 1):
            values = self._rows_in(page, rows)
            yield from (_sizes(value) for _, value in values if value[0] >= n and value[4])

    def row(self, signature: Signature, sizes: Sizes, kernel_ids: Iterable[str] = ()) -> Header:
        """Returns the part of the header for a signature's problems with these sizes and any m.

        The part also has the known kernels among ``kernel_ids``.
        """
        row = self._find_row(signature, sizes)
        return self._part([] if row is None else [row], signature, kernel_ids)

    def signature(self, signature: Signature, kernel_ids: Iterable[str] = ()) -> Header:
        """Returns the part of the header for a signature's problems; see `row`."""
        return self._part(self._signature_rows(signature), signature, kernel_ids)

    def unserved(self, signature: Signature) -> Header:
        """Returns the part of the header for a signature's problems without a kernel."""
        rows = self._signature_rows(signature)
        return self._part([replace(row, rankings=range(0)) for row in rows], signature, ())

    def kernel(self, kernel_id: str) -> Kernel | None:
        """Returns a kernel by id; None if the bundle has none that this release knows."""
        position = self._position(kernel_id)
        if position is None:
            return None
        kernel = self._kernels_at([position])[0]
        return kernel if isinstance(kernel, Kernel) else None

    def kernels(self) -> Iterator[Kernel]:
        """Yields the known kernels, one page after the other."""
        table = self._tables.tables[KERNELS]
        for first in range(0, table.count, table.entries):
            of_page = range(first, min(first + table.entries, table.count))
            yield from (one for one in self._kernels_at(of_page) if isinstance(one, Kernel))

    def entries(self, name: str) -> list[Any]:
        """Returns all entries of a list, as JSON values."""
        table = self._tables.tables[name]
        pages = range(len(table.content_bytes))
        return [entry for page in pages for entry in self._values(self._lines(table, page), name)]

    def check_pages(self) -> None:
        """Checks every page's digest and frame."""
        for table in self._tables.tables.values():
            for page in range(len(table.content_bytes)):
                self._lines(table, page)

    def read_rows(self) -> list[Row]:
        """Returns all rows, in file order."""
        signatures = self._tables.signatures.values()
        return [_row(*value) for rows in signatures for value in self._all_rows(rows)]

    def _find_row(self, signature: Signature, sizes: Sizes) -> Row | None:
        rows = self._tables.rows_of(signature)
        if rows is None:
            return None
        values = self._rows_in(self._tables.row_page(rows, sizes), rows)
        index = bisect_left(values, list(sizes), key=lambda value: value[1][:3])
        is_found = index < len(values) and values[index][1][:3] == list(sizes)
        return _row(*values[index]) if is_found else None

    def _signature_rows(self, signature: Signature) -> list[Row]:
        return [_row(*value) for value in self._all_rows(self._tables.rows_of(signature))]

    def _all_rows(self, rows: SignatureRows | None) -> list[tuple[int, list[int]]]:
        """Returns the positions and values of a signature's rows."""
        if rows is None:
            return []
        first, last = self._row_pages(rows)
        found = [row for page in range(first, last + 1) for row in self._rows_in(page, rows)]
        values = [value for _, value in found]
        name = f"pages {first} to {last} of rows"
        self._require_sorted(values, name)
        self._require_adjacent(values, name)
        return found

    def _row_pages(self, rows: SignatureRows) -> tuple[int, int]:
        """Returns the first and the last page of a signature's rows."""
        entries = self._tables.tables[ROWS].entries
        return rows.first // entries, (rows.end - 1) // entries

    def _rows_in(self, page: int, rows: SignatureRows) -> list[tuple[int, list[int]]]:
        """Returns the positions and values of a signature's rows in a page."""
        values = self._row_values.get(page)
        if values is None:
            values = self._row_values[page] = self._read_row_values(page)
        page_begin = page * self._tables.tables[ROWS].entries
        begin = max(rows.first - page_begin, 0)
        own = values[begin : rows.end - page_begin]
        self._require_sorted(own, f"page {page} of rows")
        return list(enumerate(own, page_begin + begin))

    def _require_sorted(self, values: Sequence[list[int]], name: str) -> None:
        """Checks the order of one signature's rows."""
        if any(a[:3] >= b[:3] for a, b in itertools.pairwise(values)):
            self._decoder.fail("page-order", f"{name} must be sorted within a signature")

    def _require_adjacent(self, values: Sequence[list[int]], name: str) -> None:
        """Checks that each row begins where the one before it ends."""
        for before, row in itertools.pairwise(values):
            begins, ends = (row[3], row[5]), (before[3] + before[4], before[5] + before[6])
            if begins != ends:
                self._decoder.fail(
                    "page-rows",
                    f"{name}: row {row[:3]} begins with ranking {begins[0]} and unserved entry "
                    f"{begins[1]}, must be {ends[0]} and {ends[1]}",
                )

    def _read_row_values(self, page: int) -> list[list[int]]:
        table = self._tables.tables[ROWS]
        name = f"page {page} of rows"
        values = self._values(self._lines(table, page), name)
        if not all(type(value) is list and len(value) == _ROW_MEMBERS for value in values):
            self._decoder.fail("header-field", f"{name} must have lists of {_ROW_MEMBERS}")
        numbers = list(itertools.chain.from_iterable(values))
        if set(map(type, numbers)) != {int} or min(numbers) < 0:
            self._decoder.fail("header-field", f"{name} must have integers of at least 0")
        if min(size for value in values for size in value[:3]) < 1:
            self._decoder.fail("header-field", f"{name} must have n, k and count of at least 1")
        self._require_adjacent(values, name)
        ends = (
            (RANKINGS, max(value[3] + value[4] for value in values)),
            (UNSERVED, max(value[5] + value[6] for value in values)),
        )
        for entries, end in ends:
            if end > (there := self._tables.tables[entries].count):
                self._decoder.fail(
                    "page-rows", f"{name} has {entries} up to {end}, there are {there}"
                )
        first_sizes = list(self._tables.first_sizes[page])
        if values[0][:3] != first_sizes:
            self._decoder.fail(
                "page-order", f"{name} begins with {values[0][:3]}, must be {first_sizes}"
            )
        return values

    def _part(self, rows: Sequence[Row], signature: Signature, kernel_ids: Iterable[str]) -> Header:
        decoder = self._decoder
        rankings = [ranking for row in rows for ranking in self._rankings_in(row, signature)]
        unserved = [entry for row in rows for entry in self._unserved_in(row, signature)]
        known = [ranking for ranking in rankings if isinstance(ranking, Ranking)]
        ranked = {entry.kernel: ranking.name for ranking in known for entry in ranking.kernels}
        missing = {failure: ranking.name for ranking in known for failure in ranking.missing}
        self._require_within("ranking-kernels", "kernel", ranked, KERNELS)
        self._require_within("ranking-missing", "failure", missing, FAILURES)
        positions = (self._position(kernel_id) for kernel_id in kernel_ids)
        kernels = sorted({*ranked, *(one for one in positions if one is not None)})
        failures = sorted(missing)
        kernel_places, failure_places = _places(kernels), _places(failures)
        parts = Parts(
            dictionary=self._root.parts.dictionary,
            kernels=tuple(self._kernels_at(kernels)),
            sources=self._root.parts.sources,
            rankings=tuple(
                _renumbered(ranking, kernel_places, failure_places) for ranking in rankings
            ),
            unserved=tuple(unserved),
            failures=tuple(
                decoder.failure(value, f"failures[{position}]")
                for position, value in self._entries(FAILURES, failures)
            ),
        )
        check_entries(parts, decoder.fail)
        facts = replace(self.facts, failures=parts.failures)
        return replace(
            separate_unknown_entries(facts, parts), ranked_products=self.facts.ranked_products
        )

    def _rankings_in(self, row: Row, signature: Signature) -> Iterator[Ranking | UnknownEntry]:
        """Yields a row's rankings, each checked before the next is read."""
        for position, value in self._entries(RANKINGS, row.rankings):
            ranking = self._decoder.ranking(value, f"rankings[{position}]")
            if isinstance(ranking, Ranking):
                self._require_row(ranking.problem, row, signature, ranking.name)
            yield ranking

    def _unserved_in(
        self, row: Row, signature: Signature
    ) -> Iterator[tuple[Problem, UnservedReason] | UnknownEntry]:
        """Yields a row's unserved problems, each checked before the next is read."""
        for position, value in self._entries(UNSERVED, row.unserved):
            entry = self._decoder.unserved_entry(value, f"unserved[{position}]")
            if isinstance(entry, tuple):
                self._require_row(entry[0], row, signature, entry[0].key)
            yield entry

    def _require_row(self, problem: Problem, row: Row, signature: Signature, name: str) -> None:
        if problem.signature != signature or row_sizes(problem) != row.sizes:
            self._decoder.fail(
                "page-rows",
                f"{name} is in row {row.position}, of {signature.key} with n, k and count "
                f"{row.sizes}",
            )

    def _require_within(self, rule: str, kind: str, named: dict[int, str], table: str) -> None:
        count = self._tables.tables[table].count
        for position, name in named.items():
            if position >= count:
                self._decoder.fail(rule, f"{name} names {kind} {position}, there are {count}")

    def _position(self, kernel_id: str) -> int | None:
        """Returns a kernel's position, or None."""
        table = self._tables.tables[KERNELS]
        try:
            id_ = bytes.fromhex(kernel_id)
        except ValueError:
            return None
        pages = range(len(table.content_bytes))
        page = bisect_left(pages, id_, key=self._tables.first_id)
        if page == len(pages) or self._tables.first_id(page) != id_:
            page -= 1
        if page < 0:
            return None
        member = b'"id":"%s"' % kernel_id.encode()
        for index, line in enumerate(self._lines(table, page)):
            if member not in line:
                continue
            (entry,) = self._values([line], f"page {page} of {KERNELS}")
            # An unknown member may have such a text too.
            if isinstance(entry, dict) and entry.get("id") == kernel_id:
                return page * table.entries + index
        return None

    def _kernels_at(self, positions: Sequence[int]) -> list[Kernel | UnknownKernel]:
        missing = [position for position in positions if position not in self._kernels]
        for position, value in self._entries(KERNELS, missing):
            kernel = self._decoder.kernel(value, f"kernels[{position}]")
            require_in_file(
                self._decoder, f"kernels[{position}]", kernel.span, self._root.file_bytes
            )
            self._kernels[position] = kernel
        return [self._kernels[position] for position in positions]

    def _entries(self, name: str, positions: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yields a list's entries as JSON values; positions ascend."""
        table = self._tables.tables[name]
        for page, wanted in pages_of(positions, table).items():
            lines = self._lines(table, page)
            own = [lines[position % table.entries] for position in wanted]
            yield from zip(wanted, self._values(own, f"page {page} of {name}"))

    def _values(self, lines: Sequence[bytes], name: str) -> list[Any]:
        """Parses entries, each in canonical form on a line of its own."""
        return [self._decoder.canonical(line, name) for line in lines]

    def _lines(self, table: Table, page: int) -> list[bytes]:
        """Returns a page's entries, after checking its digest, frame and number of entries."""
        name = f"page {page} of {table.name}"
        offset, end = table.offsets[page : page + 2]
        stored = self._read(offset, end - offset)
        observed = hashlib.sha256(stored)
        if observed.digest() != table.digest(page):
            self._decoder.fail(
                "page-digest",
                f"{name}, at byte {offset}, has the sha256 {observed.hexdigest()}, must be "
                f"{table.digest(page).hex()}",
            )
        expected = table.content_bytes[page]
        try:
            declared = zstandard.frame_content_size(stored)
            if declared != expected:
                self._decoder.fail(
                    "frame-size", f"{name} declares {declared} bytes, its table {expected}"
                )
            content = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            self._decoder.fail("frame", f"{name} does not decompress: {error}")
        lines: list[bytes] = content.split(b"\n")
        if len(lines) != table.count_in(page):
            self._decoder.fail(
                "page-entries",
                f"{name} has {len(lines)} entries, must have {table.count_in(page)}",
            )
        return lines


def _sizes(value: Sequence[int]) -> Sizes:
    return value[0], value[1], value[2]


def _row(position: int, value: Sequence[int]) -> Row:
    n, k, count, first, rankings, first_unserved, unserved = value
    return Row(
        position=position,
        sizes=(n, k, count),
        rankings=range(first, first + rankings),
        unserved=range(first_unserved, first_unserved + unserved),
    )


def _parse_signature(text: str) -> Signature | None:
    try:
        return Signature.parse(text)
    except ValueError:
        return None


def _places(positions: Sequence[int]) -> dict[int, int]:
    return {position: place for place, position in enumerate(positions)}


def _renumbered(
    ranking: Ranking | UnknownEntry, kernels: dict[int, int], failures: dict[int, int]
) -> Ranking | UnknownEntry:
    """Returns a ranking that names kernels and failures by their places in a part."""
    if isinstance(ranking, UnknownEntry):
        return ranking
    return replace(
        ranking,
        kernels=tuple(replace(one, kernel=kernels[one.kernel]) for one in ranking.kernels),
        missing=tuple(failures[failure] for failure in ranking.missing),
    )
