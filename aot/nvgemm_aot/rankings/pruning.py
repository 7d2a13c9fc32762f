"""Keeps the kernels of a bundle that win somewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.matching.refusals import needs_compact

from ..bundle.content import BuiltKernel, BundleContent, ProblemRanking


def keep_winners(content: BundleContent) -> BundleContent:
    """Drop the kernels that win no problem.

    A kernel wins a problem if it is the fastest of a certain measurement, ATen included. Kernels
    that an estimate or an uncertain measurement ranks all stay. A problem that ATen wins keeps the
    kernels that stay for others, or its fastest if there are none: its ranking records that ATen
    wins. Each signature keeps a kernel of the least alignment, and one for operands with gaps if it
    had any.
    """
    kernels = {kernel.id: kernel for kernel in content.kernels}
    kept = {id_ for ranking in content.rankings for id_ in _winners(ranking)}
    for ranking in content.rankings:
        if kept.isdisjoint(id_ for id_, _ in ranking.kernels):
            kept.add(ranking.kernels[0][0])
    for rankings in _by_signature(content.rankings).values():
        kept |= _needed_for_operands(rankings, kernels, kept)
    return replace(
        content,
        kernels=tuple(kernel for kernel in content.kernels if kernel.id in kept),
        rankings=tuple(_keep(ranking, kept) for ranking in content.rankings),
    )


def _winners(ranking: ProblemRanking) -> list[str]:
    measured = ranking.measured
    if measured is None or measured.doubts:
        return [id_ for id_, _ in ranking.kernels]
    id_, time_ns = ranking.kernels[0]
    assert time_ns is not None  # of a measured ranking
    is_fastest = measured.aten is None or time_ns < measured.aten.time_ns
    return [id_] if is_fastest else []


def _by_signature(rankings: Iterable[ProblemRanking]) -> dict[Signature, list[ProblemRanking]]:
    found: dict[Signature, list[ProblemRanking]] = {}
    for ranking in rankings:
        found.setdefault(ranking.problem.signature, []).append(ranking)
    return found


def _needed_for_operands(
    rankings: Iterable[ProblemRanking], kernels: Mapping[str, BuiltKernel], kept: set[str]
) -> set[str]:
    """Kernels without which a signature would serve fewer operands than before."""
    ranked = list(dict.fromkeys(id_ for ranking in rankings for id_, _ in ranking.kernels))
    needed = set()
    for group in (
        ranked,
        [id_ for id_ in ranked if not needs_compact(kernels[id_].calling_convention)],
    ):
        least = min((kernels[id_].alignment_bytes for id_ in group), default=None)
        able = [id_ for id_ in group if kernels[id_].alignment_bytes == least]
        if able and kept.isdisjoint(able):
            needed.add(able[0])
    return needed


def _keep(ranking: ProblemRanking, kept: set[str]) -> ProblemRanking:
    places = [place for place, (id_, _) in enumerate(ranking.kernels) if id_ in kept]
    measured = ranking.measured
    if measured is not None:
        spreads_ns = tuple(measured.spreads_ns[place] for place in places)
        measured = replace(measured, spreads_ns=spreads_ns)
    return replace(
        ranking, kernels=tuple(ranking.kernels[place] for place in places), measured=measured
    )
