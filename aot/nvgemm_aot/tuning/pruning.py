"""Dropping kernels that are never among the fastest, and what that costs."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from nvgemm_runtime.problem import Signature

from ..bundle import BundleContent, ProblemRanking

KEPT_PLACES = 2
"""A kernel stays that is among so many first of any problem."""


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
    """

    dropped: tuple[str, ...]
    declared_loss: float
    undeclared_loss: float | None


def prune(content: BundleContent) -> tuple[BundleContent, Pruned]:
    """Drop what is not among the first `KEPT_PLACES` of any measured problem.

    Kernels that an estimate ranks stay: an estimate is no reason to drop any. Rankings keep their
    order.
    """
    kept = _kept(content.rankings)
    rankings = tuple(
        _only(ranking, kept) if ranking.measured is not None else ranking
        for ranking in content.rankings
    )
    kernels = tuple(kernel for kernel in content.kernels if kernel.id in kept)
    measured = [ranking for ranking in content.rankings if ranking.measured is not None]
    return replace(content, kernels=kernels, rankings=rankings), Pruned(
        dropped=tuple(sorted(kernel.id for kernel in content.kernels if kernel.id not in kept)),
        declared_loss=_mean([_loss(ranking, kept) for ranking in measured]),
        undeclared_loss=_held_back_loss(measured),
    )


def _kept(rankings: Sequence[ProblemRanking]) -> set[str]:
    return {
        id_
        for ranking in rankings
        for id_, _ in ranking.kernels[: None if ranking.measured is None else KEPT_PLACES]
    }


def _only(ranking: ProblemRanking, kept: Collection[str]) -> ProblemRanking:
    assert ranking.measured is not None
    places = [place for place, (id_, _) in enumerate(ranking.kernels) if id_ in kept]
    spreads = tuple(ranking.measured.spreads_ns[place] for place in places)
    return replace(
        ranking,
        kernels=tuple(ranking.kernels[place] for place in places),
        measured=replace(ranking.measured, spreads_ns=spreads),
    )


def _loss(ranking: ProblemRanking, kept: Collection[str]) -> float:
    times: Mapping[str, int] = {id_: time for id_, time in ranking.kernels if time is not None}
    return min(time for id_, time in times.items() if id_ in kept) / min(times.values())


def _held_back_loss(measured: Sequence[ProblemRanking]) -> float | None:
    of_signature: dict[Signature, list[ProblemRanking]] = {}
    for ranking in measured:
        of_signature.setdefault(ranking.problem.signature, []).append(ranking)
    losses = []
    for rankings in of_signature.values():
        for ranking in rankings:
            kept = _kept([other for other in rankings if other is not ranking])
            if any(id_ in kept for id_, _ in ranking.kernels):
                losses.append(_loss(ranking, kept))
    return _mean(losses) if losses else None


def _mean(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios) if ratios else 1.0
