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
    kept_ids = {id_ for ranking in content.rankings for id_ in _winners(ranking)}
    kept_ids |= DispatchTables(content).needed()
    for ranking in content.rankings:
        if kept_ids.isdisjoint(id_ for id_, _ in ranking.kernels):
            kept_ids.add(ranking.kernels[0][0])
    for rankings in by_signature(content.rankings).values():
        kept_ids |= needed_for_service(rankings, kernels, kept_ids)
    return replace(
        content,
        kernels=tuple(kernel for kernel in content.kernels if kernel.id in kept_ids),
        rankings=tuple(keep_ranked(ranking, kept_ids) for ranking in content.rankings),
    )


def _winners(ranking: ProblemRanking) -> list[str]:
    measured = ranking.measured
    if measured is None or measured.doubts:
        return [id_ for id_, _ in ranking.kernels]
    id_, time_ns = ranking.kernels[0]
    assert time_ns is not None  # a measured ranking has times
    is_fastest = measured.aten is None or time_ns < measured.aten.time_ns
    return [id_] if is_fastest else []


def by_signature(
    rankings: Iterable[ProblemRanking],
) -> dict[tuple[Signature, str], list[ProblemRanking]]:
    """Groups rankings by signature and GPU product."""
    groups: dict[tuple[Signature, str], list[ProblemRanking]] = {}
    for ranking in rankings:
        groups.setdefault((ranking.problem.signature, ranking.gpu), []).append(ranking)
    return groups


def needed_for_service(
    rankings: Iterable[ProblemRanking],
    kernels: Mapping[str, BuiltKernel],
    kept_ids: Collection[str],
) -> set[str]:
    """Returns kernels without which a signature would serve fewer operands or programs than before.

    Considers all kernels, those that take operands with gaps, those with deterministic results
    (programs that want deterministic algorithms get no others), and those with both properties. In
    each group, a kernel with the least alignment must stay. If no kept kernel has it, adds the best
    ranked one.
    """
    ranks: dict[str, int] = {}
    for ranking in rankings:
        for rank, (id_, _) in enumerate(ranking.kernels):
            ranks[id_] = min(rank, ranks.get(id_, rank))
    gaps = {id_ for id_ in ranks if not needs_compact(kernels[id_].calling_convention)}
    deterministic = {id_ for id_ in ranks if kernels[id_].is_deterministic}
    staying = set(kept_ids)
    for group in (gaps & deterministic, deterministic, gaps, ranks.keys()):
        least = min((kernels[id_].alignment_bytes for id_ in group), default=None)
        able = [id_ for id_ in group if kernels[id_].alignment_bytes == least]
        if able and staying.isdisjoint(able):
            staying.add(min(able, key=lambda id_: (ranks[id_], id_)))
    return staying.difference(kept_ids)


def lost_service(before: Iterable[BundleContent], after: BundleContent) -> list[BuiltKernel]:
    """Returns kernels without which contents serve fewer operands or programs than before.

    They are sorted by signature and id; see `needed_for_service`.
    """
    contents = list(before)
    kernels = {kernel.id: kernel for content in contents for kernel in content.kernels}
    groups = by_signature(ranking for content in contents for ranking in content.rankings)
    kept = {
        key: {id_ for ranking in rankings for id_, _ in ranking.kernels}
        for key, rankings in by_signature(after.rankings).items()
    }
    lost = {
        id_
        for key, rankings in groups.items()
        for id_ in needed_for_service(rankings, kernels, kept.get(key, set()))
    }
    return sorted((kernels[id_] for id_ in lost), key=lambda kernel: (kernel.signature, kernel.id))


def keep_ranked(ranking: ProblemRanking, kept_ids: Collection[str]) -> ProblemRanking:
    """Returns a ranking with only the kept kernels, in the same order."""
    indices = [index for index, (id_, _) in enumerate(ranking.kernels) if id_ in kept_ids]
    measured = ranking.measured
    if measured is not None:
        spreads_ns = tuple(measured.spreads_ns[index] for index in indices)
        measured = replace(measured, spreads_ns=spreads_ns)
    return replace(
        ranking, kernels=tuple(ranking.kernels[index] for index in indices), measured=measured
    )
