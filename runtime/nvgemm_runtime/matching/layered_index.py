"""What was shipped and what the JIT cache keeps, asked as one index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..gemm.problem import Problem
from .index import Index, Match, Miss
from .usable_rankings import UsableRanking


class LayeredIndex:
    """Two indexes that are asked as one.

    A problem that either ranks comes before one of which only the signature is known; among
    equals, what was shipped comes first.
    """

    def __init__(self, shipped: Index, kept: Index) -> None:
        self._layers = (shipped, kept)

    def match(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Find the kernels for a problem; see `Index.match`."""
        asked = problem, alignment_bytes, is_compact
        shipped, kept = self._layers
        ranked = shipped.match_ranked(*asked) or kept.match_ranked(*asked)
        if ranked is not None:
            return ranked
        found = shipped.match_signature(*asked)
        if isinstance(found, Match):
            return found
        found_in_cache = kept.match_signature(*asked)
        if isinstance(found_in_cache, Match):
            return found_in_cache
        return Miss(reasons=(*found.reasons, *kept.refusals))

    def ranked_sizes(self, problem: Problem) -> Mapping[int, Sequence[UsableRanking]]:
        """As `Index.ranked_sizes`, of what was shipped: what a JIT keeps is estimated."""
        return self._layers[0].ranked_sizes(problem)

    def left_out_sizes(self, problem: Problem) -> Mapping[int, str]:
        """As `Index.left_out_sizes`, of what was shipped."""
        return self._layers[0].left_out_sizes(problem)
