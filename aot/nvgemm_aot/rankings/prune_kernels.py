"""Drops kernels that measured rankings do not need."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..bundle.content import BuiltKernel, BundleContent, ProblemRanking
from .pruning import by_signature, keep_ranked, needed_for_service
from .table_kernels import DispatchTables

KERNELS_PER_PROBLEM = 2
"""Top-ranked kernels kept per problem, in addition to those whose intervals overlap theirs."""


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Pruning result.

    Attributes:
        dropped: Dropped kernel ids.
        declared_loss: Geometric mean over measured problems: the fastest kernel's time after
            pruning divided by the time before; 1, as each problem's fastest stays.
        undeclared_loss: Estimate for undeclared sizes: each problem's loss if only the others
            decided which kernels stay. None if no signature has two measured problems.
        unknown_losses: Number of problems missing from ``undeclared_loss``: none of the kernels
            that the others keep was measured for them.
    """

    dropped: tuple[str, ...]
    declared_loss: float
    undeclared_loss: float | None
    unknown_losses: int


def prune(content: BundleContent) -> tuple[BundleContent, Pruned]:
    """Drops kernels that are not among the first `KERNELS_PER_PROBLEM` for any measured problem.

    Kernels ranked by an estimate or an uncertain measurement all stay, and so do those in dispatch
    tables; see `DispatchTables`. To serve the same operands and programs as before, each signature
    also keeps the kernels in `needed_for_service`. Rankings keep their order.
    """
    kernels = {kernel.id: kernel for kernel in content.kernels}
    tables = DispatchTables(content)
    kept_ids = _ids_to_keep(content.rankings, kernels, tables.needed())
    measured = [ranking for ranking in content.rankings if ranking.measured is not None]
    known_losses, unknown_losses = _undeclared_losses(measured, kernels, tables)
    pruned = replace(
        content,
        kernels=tuple(kernel for kernel in content.kernels if kernel.id in kept_ids),
        rankings=tuple(keep_ranked(ranking, kept_ids) for ranking in content.rankings),
    )
    return pruned, Pruned(
        dropped=tuple(sorted(kernels.keys() - kept_ids)),
        declared_loss=_geometric_mean([_loss(ranking, kept_ids) for ranking in measured]),
        undeclared_loss=_geometric_mean(known_losses) if known_losses else None,
        unknown_losses=unknown_losses,
    )


def _ids_to_keep(
    rankings: Iterable[ProblemRanking],
    kernels: Mapping[str, BuiltKernel],
    dispatched: Collection[str],
) -> set[str]:
    kept_ids = set(dispatched)
    for signature_rankings in by_signature(rankings).values():
        kept_ids |= {
            id_ for ranking in signature_rankings for id_ in _first_and_overlapping(ranking)
        }
        kept_ids |= needed_for_service(signature_rankings, kernels, kept_ids)
    return kept_ids


def _first_and_overlapping(ranking: ProblemRanking) -> list[str]:
    """Returns a problem's first kernels and those whose intervals overlap theirs."""
    ids, measured = [id_ for id_, _ in ranking.kernels], ranking.measured
    if measured is None or measured.doubts:
        return ids
    timings = [
        (time or 0, spread) for (_, time), spread in zip(ranking.kernels, measured.spreads_ns)
    ]
    reach = max((time + spread for time, spread in timings[:KERNELS_PER_PROBLEM]), default=0)
    return [id_ for id_, (time, spread) in zip(ids, timings) if time - spread <= reach]


def _loss(ranking: ProblemRanking, kept_ids: Collection[str]) -> float:
    times: Mapping[str, int] = {id_: time for id_, time in ranking.kernels if time is not None}
    return min(time for id_, time in times.items() if id_ in kept_ids) / min(times.values())


def _undeclared_losses(
    measured: Sequence[ProblemRanking],
    kernels: Mapping[str, BuiltKernel],
    tables: DispatchTables,
) -> tuple[list[float], int]:
    """Returns each problem's loss if only the others decided, and the number without a loss."""
    losses, unknown = [], 0
    for rankings in by_signature(measured).values():
        for ranking in rankings:
            others = [other for other in rankings if other is not ranking]
            kept_ids = _ids_to_keep(others, kernels, tables.needed(without=ranking))
            if any(id_ in kept_ids for id_, _ in ranking.kernels):
                losses.append(_loss(ranking, kept_ids))
            elif others:
                unknown += 1
    return losses, unknown


def _geometric_mean(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios) if ratios else 1.0
