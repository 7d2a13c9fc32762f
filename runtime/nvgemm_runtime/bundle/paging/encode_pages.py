"""Writes a header in pages; `paged_header` reads it back."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import zstandard

from ...gemm.problem import Problem, Signature
from ..encode import facts_json, kernel_json, ranking_json, unserved_json
from ..format import MAX_PAGE_BYTES, Header, canonical_json
from .grouped_header import takes_gaps
from .tables import FAILURES, KERNELS, RANKINGS, ROWS, UNSERVED, Sizes, row_sizes

ENTRIES = {KERNELS: 32, RANKINGS: 32, UNSERVED: 64, FAILURES: 32, ROWS: 128}
"""Entries in a page, by list. Smaller pages lengthen the root, which every process reads; larger
ones cost more for each kernel. benchmarks/large_bundles measures both."""

LEVEL = 9


def encode_paged(header: Header) -> tuple[bytes, bytes]:
    """Returns the root and the pages behind it.

    Args:
        header: Header whose spans count from the body's first byte.
    """
    rows = _rows(header)
    unserved = unserved_json(header.unserved)
    lists: dict[str, list[Any]] = {
        KERNELS: [kernel_json(kernel) for kernel in header.kernels],
        RANKINGS: [ranking_json(ranking) for ranking in header.rankings],
        UNSERVED: list(unserved),
        FAILURES: [asdict(failure) for failure in header.failures],
        ROWS: [row for of_signature in rows.values() for row in of_signature],
    }
    tables: dict[str, dict[str, Any]] = {}
    frames: list[bytes] = []
    for name, entries in lists.items():
        tables[name], pages = _pages(entries, ENTRIES[name])
        frames += pages
    first_kernels = header.kernels[:: tables[KERNELS]["entries"]]
    tables[KERNELS]["first"] = "".join(kernel.id for kernel in first_kernels)
    first_rows = lists[ROWS][:: tables[ROWS]["entries"]]
    tables[ROWS]["first"] = [size for row in first_rows for size in row[:3]]
    root = facts_json(header)
    root["pages"] = tables
    alignments = _least_alignments(header)
    root["signatures"] = [
        [signature.key, len(of_signature), *alignments.get(signature, (None, None))]
        for signature, of_signature in rows.items()
    ]
    if any(ranking.is_further for ranking in header.rankings):
        root["products"] = sorted(set(map(header.gpu_of, header.rankings)))
    return canonical_json(root), b"".join(frames)


def estimate_root_bytes(header: Header) -> int:
    """Returns the approximate length of a header's root, without encoding its entries.

    A page takes a digest of 64 digits and about 12 digits for its sizes, and its first id or sizes.
    """
    rows = {
        (problem.signature, row_sizes(problem))
        for problem in (*(ranking.problem for ranking in header.rankings), *header.unserved)
    }
    counts = {
        KERNELS: len(header.kernels),
        RANKINGS: len(header.rankings),
        UNSERVED: len(header.unserved),
        FAILURES: len(header.failures),
        ROWS: len(rows),
    }
    first_bytes = {KERNELS: 64, ROWS: 16}
    return (
        len(canonical_json(facts_json(header)))
        + sum(
            60 + -(-count // ENTRIES[name]) * (76 + first_bytes.get(name, 0))
            for name, count in counts.items()
        )
        + sum(len(signature.key) + 14 for signature in {signature for signature, _ in rows})
    )


def _pages(entries: Sequence[Any], per_page: int) -> tuple[dict[str, Any], list[bytes]]:
    """Returns a list's table and its pages; pages that are too long get fewer entries."""
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    contents = [
        b"\n".join(map(canonical_json, entries[first : first + per_page]))
        for first in range(0, len(entries), per_page)
    ]
    if per_page > 1 and max(map(len, contents), default=0) > MAX_PAGE_BYTES:
        return _pages(entries, per_page // 2)
    frames = [compressor.compress(content) for content in contents]
    return {
        "count": len(entries),
        "entries": per_page,
        "sha256": "".join(hashlib.sha256(frame).hexdigest() for frame in frames),
        "stored": [len(frame) for frame in frames],
        "content": [len(content) for content in contents],
    }, frames


def _rows(header: Header) -> dict[Signature, list[list[int]]]:
    """Returns the rows by signature, both sorted; see FORMAT.md for a row's members."""
    rankings = _ranges([ranking.problem for ranking in header.rankings])
    unserved = _ranges(sorted(header.unserved))
    rows: dict[Signature, list[list[int]]] = {}
    next_ranking = next_unserved = 0
    for signature, sizes in sorted({**rankings, **unserved}, key=lambda key: (key[0].key, key[1])):
        ranked = rankings.get((signature, sizes), 0)
        left_out = unserved.get((signature, sizes), 0)
        row = [*sizes, next_ranking, ranked, next_unserved, left_out]
        rows.setdefault(signature, []).append(row)
        next_ranking += ranked
        next_unserved += left_out
    return rows


def _ranges(problems: Sequence[Problem]) -> dict[tuple[Signature, Sizes], int]:
    """Returns how many of the sorted problems are in each row."""
    groups = itertools.groupby(
        problems, key=lambda problem: (problem.signature, row_sizes(problem))
    )
    return {row: sum(1 for _ in group) for row, group in groups}


def _least_alignments(header: Header) -> dict[Signature, tuple[int, int | None]]:
    """Returns ranked kernels' least alignments by signature: of all, and of those for gaps."""
    kernels: dict[Signature, dict[int, bool]] = {}
    for ranking in header.rankings:
        of_signature = kernels.setdefault(ranking.problem.signature, {})
        of_signature.update((ranked.kernel, True) for ranked in ranking.kernels)
    return {
        signature: (
            min(header.kernels[position].alignment_bytes for position in positions),
            min(
                (
                    header.kernels[position].alignment_bytes
                    for position in positions
                    if takes_gaps(header.kernels[position].calling_convention)
                ),
                default=None,
            ),
        )
        for signature, positions in kernels.items()
    }
