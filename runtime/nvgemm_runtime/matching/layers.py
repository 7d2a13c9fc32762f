"""Matching in two layers: kernels of wheels first, behind them those of the JIT cache."""

from __future__ import annotations

from ..gemm.problem import Problem
from .index import Index, Match, Miss


class LayeredIndex:
    """Two indexes that are asked as one.

    A problem that either declares comes before one of which only the signature is known; among
    equals, what was shipped comes first.

    Args:
        shipped: Kernels of wheels, and of bundles that the user names.
        kept: Kernels of the JIT cache; its positions continue those of ``shipped``.
    """

    def __init__(self, shipped: Index, kept: Index) -> None:
        self._layers = (shipped, kept)

    def match(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Find the kernels for a problem; see `Index.match`."""
        for layer in self._layers:
            declared = layer.match_declared(problem, alignment_bytes, is_compact)
            if declared is not None:
                return declared
        shipped, kept = self._layers
        found = shipped.match_signature(problem, alignment_bytes, is_compact)
        if isinstance(found, Match):
            return found
        found_in_cache = kept.match_signature(problem, alignment_bytes, is_compact)
        if isinstance(found_in_cache, Match):
            return found_in_cache
        return Miss(reasons=(*found.reasons, *kept.refusals))
