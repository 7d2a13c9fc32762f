"""Dropping kernels that are never among the fastest, and what that costs."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.matching.refusals import needs_compact

from ..bundle.content import BuiltKernel, BundleContent, ProblemRanking

KEPT_PLACES = 2
"""A kernel stays that is among so many first of any problem, or not told apart from these."""


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What pruning came to.

    Attributes:
        dropped: Ids of the kernels that are gone.
        declared_loss: Geometric mean over measured problems, the fastest kernel after over the one
            before. Each problem's fastest stays, so that this is 1.
        undeclared_loss: Likewise for sizes that are not declared, as far as the measured ones tell:
            each problem in turn is looked at as if it had no say in what stays. None where no
            signature has two measured problems.
        unknown_losses: Problems that are not in ``undeclared_loss``, for none of the kernels that
            the others keep was measured for them.
    """

    dropped: tuple[str, ...]
    declared_loss: float
    undeclared_loss: float | None
    unknown_losses: int


def prune(content: BundleContent) -> tuple[BundleContent, Pruned]:
    """Drop what is not among the first `KEPT_PLACES` of any measured problem.

    Kernels that an estimate or an uncertain measurement ranks stay, for these are no reason to drop
    any. So does, for each signature, one of those that need the least alignment, and one of those
    among the ones that take operands with gaps: whatever operands were served before still are.
    Rankings keep their order.
    """
    kernels = {kernel.id: kernel for kernel in content.kernels}
    kept = _kept(content.rankings, kernels)
    measured = [ranking for ranking in content.rankings if ranking.measured is not None]
    known, unknown = _held_back_losses(measured, kernels)
    pruned = replace(
        content,
        kernels=tuple(kernel for kernel in content.kernels if kernel.id in kept),
        rankings=tuple(_only(ranking, kept) for ranking in content.rankings),
    )
    return pruned, Pruned(
        dropped=tuple(sorted(kernels.keys() - kept)),
        declared_loss=_mean([_loss(ranking, kept) for ranking in measured]),
        undeclared_loss=_mean(known) if known else None,
        unknown_losses=unknown,
    )


def _kept(rankings: Iterable[ProblemRanking], kernels: Mapping[str, BuiltKernel]) -> set[str]:
    kept = set()
    for one in _by_signature(rankings).values():
        kept |= {id_ for ranking in one for id_ in _foremost(ranking)}
        kept |= _serving_most(one, kernels)
    return kept


def _by_signature(rankings: Iterable[ProblemRanking]) -> dict[Signature, list[ProblemRanking]]:
    found: dict[Signature, list[ProblemRanking]] = {}
    for ranking in rankings:
        found.setdefault(ranking.problem.signature, []).append(ranking)
    return found


def _foremost(ranking: ProblemRanking) -> list[str]:
    """Kernels that a problem keeps: the first, and those whose intervals reach into theirs."""
    ids, measured = [id_ for id_, _ in ranking.kernels], ranking.measured
    if measured is None or measured.doubts:
        return ids
    places = [
        (time or 0, spread) for (_, time), spread in zip(ranking.kernels, measured.spreads_ns)
    ]
    reach = max((time + spread for time, spread in places[:KEPT_PLACES]), default=0)
    return [id_ for id_, (time, spread) in zip(ids, places) if time - spread <= reach]


def _serving_most(
    rankings: Sequence[ProblemRanking], kernels: Mapping[str, BuiltKernel]
) -> set[str]:
    """One kernel of the least alignment, of all of a signature and of those that take gaps."""
    places: dict[str, int] = {}
    for ranking in rankings:
        for place, (id_, _) in enumerate(ranking.kernels):
            places[id_] = min(place, places.get(id_, place))
    groups = (places, [id_ for id_ in places if not needs_compact(kernels[id_].calling_convention)])
    return {
        min(group, key=lambda id_: (kernels[id_].alignment_bytes, places[id_], id_))
        for group in groups
        if group
    }


def _only(ranking: ProblemRanking, kept: Collection[str]) -> ProblemRanking:
    places = [place for place, (id_, _) in enumerate(ranking.kernels) if id_ in kept]
    measured = ranking.measured
    if measured is not None:
        spreads = tuple(measured.spreads_ns[place] for place in places)
        measured = replace(measured, spreads_ns=spreads)
    return replace(
        ranking, kernels=tuple(ranking.kernels[place] for place in places), measured=measured
    )


def _loss(ranking: ProblemRanking, kept: Collection[str]) -> float:
    times: Mapping[str, int] = {id_: time for id_, time in ranking.kernels if time is not None}
    return min(time for id_, time in times.items() if id_ in kept) / min(times.values())


def _held_back_losses(
    measured: Sequence[ProblemRanking], kernels: Mapping[str, BuiltKernel]
) -> tuple[list[float], int]:
    """Losses of problems that have no say in what stays, and how many problems tell none."""
    losses, unknown = [], 0
    for rankings in _by_signature(measured).values():
        for ranking in rankings:
            others = [other for other in rankings if other is not ranking]
            kept = _kept(others, kernels)
            if any(id_ in kept for id_, _ in ranking.kernels):
                losses.append(_loss(ranking, kept))
            elif others:
                unknown += 1
    return losses, unknown


def _mean(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios) if ratios else 1.0
