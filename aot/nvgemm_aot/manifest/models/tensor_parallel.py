"""Divides model GEMMs among tensor-parallel and expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .gemm import Fusible, Heads, ModelGemm, Projection


def undivided_heads(projections: Iterable[Projection], ranks: int) -> list[Heads]:
    """Finds heads that ranks can share neither evenly nor as copies."""
    heads = {
        gemm.split.heads: None
        for projection in projections
        for gemm in _parts(projection)
        if gemm.split is not None and gemm.split.heads is not None and not gemm.split.is_optional
    }
    undivided = [head for head in heads if not _can_share(head, ranks)]
    return [
        # Only queries can be shared here, so the keys and values in the same weight cannot.
        replace(head, key="key-value heads", count=head.keys, copied=True, keys=0)
        if head.keys and head.count % ranks == 0
        else replace(head, keys=0)
        for head in undivided
    ]


def _can_share(heads: Heads, ranks: int) -> bool:
    keys = heads.keys
    if keys and keys % ranks and ranks % keys:
        return False
    return heads.count % ranks == 0 or (heads.copied and ranks % heads.count == 0)


def share(
    projections: Iterable[Projection], ranks: int, *, fused: bool, expert_ranks: int = 1
) -> Iterator[ModelGemm]:
    """Yields one rank's GEMMs with its n and k; ``fused`` joins fusible projections.

    ``expert_ranks`` above 1 must be a multiple of ``ranks`` and divide the number of experts: each
    rank then holds whole experts. Otherwise experts are divided like other weights.

    A GEMM that ranks cannot share evenly has the model's sizes, and is `unserved`.

    `undivided_heads` must return nothing for these projections.
    """
    for projection in projections:
        parts = [_share_one(gemm, ranks, expert_ranks) for gemm in _parts(projection)]
        if fused and isinstance(projection, Fusible):
            yield _fuse(projection, parts)
        else:
            yield from parts


def _parts(projection: Projection) -> tuple[ModelGemm, ...]:
    return projection.parts if isinstance(projection, Fusible) else (projection,)


def _share_one(gemm: ModelGemm, ranks: int, expert_ranks: int) -> ModelGemm:
    if gemm.routing is not None and expert_ranks > 1:
        experts = gemm.routing.experts // expert_ranks
        routing = replace(gemm.routing, experts=experts, sharing_ranks=ranks)
        return replace(gemm, routing=routing, calls=gemm.calls // expert_ranks)
    if gemm.batch > 1 and expert_ranks > 1:
        return replace(gemm, batch=gemm.batch // expert_ranks)
    if gemm.split is None:
        return gemm
    heads = gemm.split.heads
    shares = min(ranks, heads.count) if heads is not None and heads.copied else ranks
    sizes = {"n": gemm.n, "k": gemm.k}
    size = sizes[gemm.split.extent]
    cannot = not _can_share(heads, ranks) if heads is not None else size % shares
    if cannot and gemm.split.is_optional:
        return gemm
    if cannot:
        reason = f"{gemm.split.extent} = {size} cannot be divided by {ranks} ranks"
        return replace(gemm, unserved=reason)
    if heads is not None and heads.keys:
        per_head = size // (heads.count + 2 * heads.keys)
        sizes["n"] = per_head * (heads.count // ranks + 2 * max(1, heads.keys // ranks))
    else:
        sizes[gemm.split.extent] = size // shares
    return replace(gemm, n=sizes["n"], k=sizes["k"])


def _fuse(projection: Fusible, parts: Sequence[ModelGemm]) -> ModelGemm:
    return replace(
        parts[0],
        role=projection.role,
        gated=projection.gated,
        n=sum(part.n for part in parts),
        biased=any(part.biased for part in parts),
        unserved=next((part.unserved for part in parts if part.unserved), ""),
    )
