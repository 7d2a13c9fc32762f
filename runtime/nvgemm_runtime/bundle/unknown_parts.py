"""Removes entries from a header that this release does not understand, and their dependents.

An unknown kernel leaves every ranking. A measurement that lost kernels is in doubt: the order of
the others holds, but a lost one may be the fastest. A source with an unknown kind counts as an
estimate, and so do its rankings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import count_text
from .format import Header, Kernel, UnknownKernel
from .header_rules import Parts
from .ranking_entries import ESTIMATE, MEASUREMENT, Ranking, RankingSource, UnknownEntry


def separate_unknown_entries(header: Header, parts: Parts) -> Header:
    """Splits valid header entries into known and unknown ones."""
    kernels = tuple(entry for entry in parts.kernels if isinstance(entry, Kernel))
    sources = tuple(entry for entry in parts.sources if isinstance(entry, RankingSource))
    unknown_sources = [why for source in parts.sources if (why := _unknown_reason(source))]
    rankings: Sequence[Ranking | UnknownEntry] = parts.rankings
    if len(kernels) < len(parts.kernels) or unknown_sources:
        new_kernels = _new_positions(parts.kernels, Kernel)
        new_sources = _new_positions(parts.sources, RankingSource)
        rankings = [
            entry
            if isinstance(entry, UnknownEntry)
            else _drop_unknown_kernels(entry, parts, new_kernels, new_sources)
            for entry in rankings
        ]
    return replace(
        header,
        kernels=kernels,
        sources=tuple(
            source if _is_known_kind(source) else replace(source, kind=ESTIMATE, conditions=None)
            for source in sources
        ),
        rankings=tuple(entry for entry in rankings if isinstance(entry, Ranking)),
        unknown_kernels=tuple(entry for entry in parts.kernels if isinstance(entry, UnknownKernel)),
        unknown_rankings=tuple(entry for entry in rankings if isinstance(entry, UnknownEntry)),
        unserved=dict(entry for entry in parts.unserved if isinstance(entry, tuple)),
        unknown_sources=tuple(unknown_sources),
        unknown_unserved=tuple(
            entry for entry in parts.unserved if isinstance(entry, UnknownEntry)
        ),
    )


def _is_known_kind(source: RankingSource) -> bool:
    return source.kind in (ESTIMATE, MEASUREMENT)


def _unknown_reason(source: RankingSource | str) -> str | None:
    if isinstance(source, str):
        return source
    if _is_known_kind(source):
        return None
    return f"is of the kind {source.kind!r}, unknown to this release, and counts as an estimate"


def doubt_about(gone: int, total: int, why: str) -> str:
    """Describes the doubt about a measured ranking that lost kernels."""
    return f"{gone} of {total} measured kernels {why}"


def _new_positions(items: Sequence[object], kind: type) -> dict[int, int]:
    """Maps the positions of items with a type to their positions among themselves."""
    kept_positions = [position for position, item in enumerate(items) if isinstance(item, kind)]
    return {position: new for new, position in enumerate(kept_positions)}


def _drop_unknown_kernels(
    ranking: Ranking,
    parts: Parts,
    new_kernels: Mapping[int, int],
    new_sources: Mapping[int, int],
) -> Ranking | UnknownEntry:
    source = parts.sources[ranking.source]
    if not isinstance(source, RankingSource):
        return UnknownEntry(problem=ranking.name, why=f"its source {source}")
    known_kernels = [
        (rank, replace(ranked, kernel=new_kernels[ranked.kernel]))
        for rank, ranked in enumerate(ranking.kernels)
        if ranked.kernel in new_kernels
    ]
    if not known_kernels:
        return UnknownEntry(
            problem=ranking.name,
            why=f"none of its {count_text(len(ranking.kernels), 'kernel')} is understood",
        )
    measured = ranking.measured if _is_known_kind(source) else None
    lost_count = len(ranking.kernels) - len(known_kernels)
    if measured is not None and lost_count:
        doubt = doubt_about(lost_count, len(ranking.kernels), "need a newer nvgemm-aot")
        measured = replace(
            measured,
            spreads_ns=tuple(measured.spreads_ns[rank] for rank, _ in known_kernels),
            doubts=(*measured.doubts, doubt),
        )
    return replace(
        ranking,
        source=new_sources[ranking.source],
        kernels=tuple(ranked for _, ranked in known_kernels),
        measured=measured,
    )
