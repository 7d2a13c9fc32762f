"""Index over installed bundles and the JIT cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...gemm.problem import Problem
from ..index import Index
from ..matches import Match, Miss
from ..usable_rankings import UsableRanking
from .paged_index import PagedIndex


class LayeredIndex:
    """Two indexes, matched as one.

    A problem that either index ranks takes precedence over a signature match; at equal rank,
    installed bundles come first.
    """

    def __init__(self, shipped: Index | PagedIndex, cached: Index | PagedIndex) -> None:
        self._layers = (shipped, cached)

    def match(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Finds the kernels for a problem; see `Index.match`."""
        arguments = problem, alignment_bytes, is_compact
        shipped, cached = self._layers
        ranked = shipped.match_ranked(*arguments) or cached.match_ranked(*arguments)
        if ranked is not None:
            return ranked
        shipped_match = shipped.match_signature(*arguments)
        if isinstance(shipped_match, Match):
            return shipped_match
        cached_match = cached.match_signature(*arguments)
        if isinstance(cached_match, Match):
            return cached_match
        return Miss(reasons=(*shipped_match.reasons, *cached.refusals))

    def ranked_sizes(self, problem: Problem) -> Mapping[int, Sequence[UsableRanking]]:
        """Returns `Index.ranked_sizes` from installed bundles; JIT rankings are estimates."""
        return self._layers[0].ranked_sizes(problem)

    def missing_sizes(self, problem: Problem) -> Mapping[int, str]:
        """Returns `Index.missing_sizes` from installed bundles."""
        return self._layers[0].missing_sizes(problem)
