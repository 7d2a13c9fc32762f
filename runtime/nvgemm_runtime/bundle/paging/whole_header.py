"""Reads a whole header from its pages, and checks every rule between them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from ...gemm.problem import Problem, Signature
from ..format import Header, Kernel
from ..header_rules import Parts, check_header
from ..ranking_entries import Ranking
from ..unknown_parts import separate_unknown_entries
from .grouped_header import takes_gaps
from .paged_header import PagedHeader, Row
from .root import Root
from .tables import FAILURES, KERNELS, RANKINGS, UNSERVED, row_sizes


def read_whole(root: Root, pages: PagedHeader) -> Header:
    """Returns the header, as a bundle of version 2 would have it.

    Raises:
        BundleFormatError: If a page, or the root's description of the pages, breaks a rule.
        StorageError: If the file cannot be read.
    """
    decoder = root.decoder
    lists: dict[str, Any] = {
        name: pages.entries(name) for name in (KERNELS, RANKINGS, UNSERVED, FAILURES)
    }
    parts = Parts(
        dictionary=root.parts.dictionary,
        sources=root.parts.sources,
        kernels=decoder.each(lists[KERNELS], KERNELS, decoder.kernel),
        rankings=decoder.each(lists[RANKINGS], RANKINGS, decoder.ranking),
        unserved=decoder.unserved(lists[UNSERVED]),
        failures=decoder.each(lists[FAILURES], FAILURES, decoder.failure),
    )
    check_header(parts, decoder.fail, body_offset=root.body_offset, file_bytes=root.file_bytes)
    _check_first_ids(root, parts)
    _check_rows(root, pages.read_rows(), parts)
    _check_signatures(root, parts)
    facts = replace(pages.facts, failures=parts.failures, ranked_products=None)
    whole = separate_unknown_entries(facts, parts)
    _check_products(root, whole)
    return whole


def _check_products(root: Root, whole: Header) -> None:
    """Checks that the root states the products with rankings, if a ranking is for a further one.

    It may state others if there are rankings that this release does not know.
    """
    stated = root.tables.products or frozenset()
    products: set[str] = set()
    if any(ranking.is_further for ranking in whole.rankings):
        products = {whole.gpu_of(ranking) for ranking in whole.rankings}
    if not products <= stated or (stated != products and not whole.unknown_rankings):
        root.decoder.fail(
            "page-rows",
            f"products are {', '.join(sorted(stated)) or 'none'}, must be "
            f"{', '.join(sorted(products)) or 'none'}",
        )


def _check_first_ids(root: Root, parts: Parts) -> None:
    table = root.tables.tables[KERNELS]
    for page in range(len(table.content_bytes)):
        stated, first = root.tables.first_id(page).hex(), parts.kernels[page * table.entries].id
        if stated != first:
            root.decoder.fail(
                "page-order", f"page {page} of kernels begins with {first}, must be {stated}"
            )


def _check_rows(root: Root, rows: list[Row], parts: Parts) -> None:
    """Checks that rows divide rankings and unserved problems, and that each is in its row."""
    fail = root.decoder.fail
    texts = [
        text
        for text, of_signature in root.tables.signatures.items()
        for _ in range(of_signature.first, of_signature.end)
    ]
    next_ranking = next_unserved = 0
    keys = [(text, row.sizes) for text, row in zip(texts, rows)]
    if any(a >= b for a, b in itertools.pairwise(keys)):
        fail("page-order", "rows must be sorted by signature, n, k and count, each once")
    for (text, _), row in zip(keys, rows):
        if (row.rankings.start, row.unserved.start) != (next_ranking, next_unserved):
            fail(
                "page-rows",
                f"row {row.position} begins with ranking {row.rankings.start} and unserved entry "
                f"{row.unserved.start}, must be {next_ranking} and {next_unserved}",
            )
        if not row.rankings and not row.unserved:
            fail("page-rows", f"row {row.position} must have a ranking or an unserved entry")
        next_ranking, next_unserved = row.rankings.stop, row.unserved.stop
        for problem in _problems(row, parts):
            if problem.signature.key != text or row_sizes(problem) != row.sizes:
                fail("page-rows", f"{problem.key} is in row {row.position}, of {text}, {row.sizes}")
    if (next_ranking, next_unserved) != (len(parts.rankings), len(parts.unserved)):
        fail(
            "page-rows",
            f"rows have {next_ranking} rankings and {next_unserved} unserved entries, there are "
            f"{len(parts.rankings)} and {len(parts.unserved)}",
        )


def _problems(row: Row, parts: Parts) -> list[Problem]:
    """Returns the known problems in a row."""
    rankings = (parts.rankings[position] for position in row.rankings)
    unserved = (parts.unserved[position] for position in row.unserved)
    return [
        *(ranking.problem for ranking in rankings if isinstance(ranking, Ranking)),
        *(entry[0] for entry in unserved if isinstance(entry, tuple)),
    ]


def _check_signatures(root: Root, parts: Parts) -> None:
    """Checks that no ranked kernel needs less than its signature's stated alignment."""
    checked: set[tuple[Signature, int]] = set()
    for ranking in parts.rankings:
        if not isinstance(ranking, Ranking):
            continue
        signature = ranking.problem.signature
        rows = root.tables.rows_of(signature)
        for position in (ranked.kernel for ranked in ranking.kernels):
            kernel = parts.kernels[position]
            if (signature, position) in checked or not isinstance(kernel, Kernel):
                continue
            checked.add((signature, position))
            ways = [True, False] if takes_gaps(kernel.calling_convention) else [True]
            stated = [None if rows is None else rows.alignment(is_compact) for is_compact in ways]
            if any(one is None or one > kernel.alignment_bytes for one in stated):
                root.decoder.fail(
                    "page-rows",
                    f"signatures: {signature.key} has alignments {stated}, kernel "
                    f"{kernel.id[:12]} needs {kernel.alignment_bytes}",
                )
