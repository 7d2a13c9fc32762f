"""Extracts measured rankings from bundles."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import Ranking, Timing

from .entries import Entry, Operator, Origin, Rankings, merge

_LINK_TIME = re.compile(r"zstd|(.*\s)?(ld|gold|LLD|mold|linker)")
"""Linkers and compressors in a bundle's toolchain. They do not change GPU code, and they differ
between build machines."""


def export(headers: Iterable[Header]) -> Rankings:
    """Returns the measured rankings in bundles."""
    return merge(
        Rankings(
            entries=tuple(
                entry
                for ranking in header.rankings
                if (entry := _entry(header, ranking)) is not None
            )
        )
        for header in headers
    )


def _entry(header: Header, ranking: Ranking) -> Entry | None:
    source, measured = header.sources[ranking.source], ranking.measured
    if measured is None or source.conditions is None:
        return None
    kernels: dict[Operator, Timing] = {}
    for ranked, spread_ns in zip(ranking.kernels, measured.spreads_ns):
        kernel = header.kernels[ranked.kernel]
        assert ranked.time_ns is not None  # a measured ranking has times
        operator = Operator(provider=kernel.provider, operator=kernel.operator)
        kernels.setdefault(operator, Timing(time_ns=ranked.time_ns, spread_ns=spread_ns))
    return Entry(
        problem=ranking.problem,
        origin=Origin(
            arch=header.target.arch,
            toolchain={
                name: version
                for name, version in header.toolchain.items()
                if _LINK_TIME.fullmatch(name) is None
            },
            gpu=source.gpu,
            by=source.by,
            conditions=source.conditions,
        ),
        kernels=tuple(kernels.items()),
        aten=measured.aten,
        triton=measured.triton,
        doubts=measured.doubts,
        repeated=measured.repeated,
    )
