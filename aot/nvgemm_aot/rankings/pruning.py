"""Prunes a bundle to kernels that win somewhere or that dispatch tables use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.matching.refusals import needs_compact

from ..bundle.content import BuiltKernel, BundleContent, ProblemRanking
from .table_kernels import DispatchTables


def keep_winners(content: BundleContent) -> BundleContent:
    """Drops the kernels that win no problem.

    A kernel wins a problem if it is the fastest in a certain measurement, ATen included. Kernels
    that an estimate or an uncertain measurement ranks all stay. A problem that ATen wins keeps the
    kernels that stay for other problems, or else its fastest: its ranking records that ATen wins.
    Kernels in dispatch tables stay even if they win nowhere; see `DispatchTables`. On each product,
    each signature also keeps the kernels that `needed_for_service` returns.
    """
    kernels = {kernel.id: kernel for kernel in content.kernels}
    kept = {id_ for ranking in content.rankings for id_ in _winners(ranking)}
    kept |= DispatchTables(content).needed()
    for ranking in content.rankings:
        if kept.isdisjoint(id_ for id_, _ in ranking.kernels):
            kept.add(ranking.kernels[0][0])
    for rankings in by_signature(content.rankings).values():
        kept |= needed_for_service(rankings, kernels, kept)
    return replace(
        content,
        kernels=tuple(kernel for kernel in content.kernels if kernel.id in kept),
        rankings=tuple(keep_ranked(ranking, kept) for ranking in content.rankings),
    )


def _winners(ranking: ProblemRanking) -> list[str]:
    measured = ranking.measured
    if measured is None or measured.doubts:
        return [id_ for id_, _ in ranking.kernels]
    id_, time_ns = ranking.kernels[0]
    assert time_ns is not None  # of a measured ranking
    is_fastest = measured.aten is None or time_ns < measured.aten.time_ns
    return [id_] if is_fastest else []


def by_signature(
    rankings: Iterable[ProblemRanking],
) -> dict[tuple[Signature, str], list[ProblemRanking]]:
    """Groups rankings by signature and GPU product."""
    found: dict[tuple[Signature, str], list[ProblemRanking]] = {}
    for ranking in rankings:
        found.setdefault((ranking.problem.signature, ranking.gpu), []).append(ranking)
    return found


def needed_for_service(
    rankings: Iterable[ProblemRanking], kernels: Mapping[str, BuiltKernel], kept: Collection[str]
) -> set[str]:
    """Returns kernels without which a signature would serve fewer operands or programs than before.

    Considers all kernels, those that take operands with gaps, those with deterministic results
    (programs that want deterministic algorithms get no others), and those with both properties. In
    each group, a kernel with the least alignment must stay. If no kept kernel has it, adds the best
    ranked one.
    """
    places: dict[str, int] = {}
    for ranking in rankings:
        for place, (id_, _) in enumerate(ranking.kernels):
            places[id_] = min(place, places.get(id_, place))
    gaps = {id_ for id_ in places if not needs_compact(kernels[id_].calling_convention)}
    deterministic = {id_ for id_ in places if kernels[id_].is_deterministic}
    staying = set(kept)
    for group in (gaps & deterministic, deterministic, gaps, places.keys()):
        least = min((kernels[id_].alignment_bytes for id_ in group), default=None)
        able = [id_ for id_ in group if kernels[id_].alignment_bytes == least]
        if able and staying.isdisjoint(able):
            staying.add(min(able, key=lambda id_: (places[id_], id_)))
    return staying.difference(kept)


def keep_ranked(ranking: ProblemRanking, kept: Collection[str]) -> ProblemRanking:
    """Returns a ranking with only the kept kernels, in the same order."""
    places = [place for place, (id_, _) in enumerate(ranking.kernels) if id_ in kept]
    measured = ranking.measured
    if measured is not None:
        spreads_ns = tuple(measured.spreads_ns[place] for place in places)
        measured = replace(measured, spreads_ns=spreads_ns)
    return replace(
        ranking, kernels=tuple(ranking.kernels[place] for place in places), measured=measured
    )
