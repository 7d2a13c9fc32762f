"""Index over installed bundles and the JIT cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..gemm.problem import Problem
from .index import Index, Match, Miss
from .usable_rankings import UsableRanking


class LayeredIndex:
    """Two indexes, matched as one.

    A problem that either index ranks takes precedence over a signature match; at equal rank,
    installed bundles come first.
    """

    def __init__(self, shipped: Index, kept: Index) -> None:
        self._layers = (shipped, kept)

    def match(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Finds the kernels for a problem; see `Index.match`."""
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
        """Returns `Index.ranked_sizes` from installed bundles; JIT rankings are estimates."""
        return self._layers[0].ranked_sizes(problem)

    def left_out_sizes(self, problem: Problem) -> Mapping[int, str]:
        """Returns `Index.left_out_sizes` from installed bundles."""
        return self._layers[0].left_out_sizes(problem)
