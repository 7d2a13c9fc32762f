"""Chooses the m to measure besides the declared ones, so that dispatch covers every m.

Within the declared range for an n and k, m takes a grid's values: `STEPS` or `SERVING`. With steps,
if the fastest kernel changes between two m, an m between them is measured too, until they are
closer than `CLOSEST`.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from nvgemm_runtime.gemm.problem import Problem

from ...bundle.content import ProblemRanking
from ...rankings.agreement import ATEN
from ...rankings.intervals import contending, interval_of
from ..outcome import TuningOutcome

STEPS = tuple(
    sorted(
        {1 << power for power in range(31)} | {3 << power for power in range(3, 29)},
    )
)
"""1, 2, 4, 8, 16, 24, 32, 48, 64, 96, … up to the largest extent: neighbours differ by a factor
from 1.33 to 2. Tiles have 16 rows or more, so fewer steps suffice below 16."""

CAPTURED = (1, 2, 4, 8, 12, *range(16, 256, 8), *range(256, 513, 16))
"""Batch sizes for which serving engines capture CUDA graphs by default: vLLM (all but 12,
``_set_cudagraph_sizes`` in vllm/config/vllm.py at 0.24 to 0.33, where Blackwell goes on to 1,024)
and SGLang (``generate_decode_cuda_graph_batch_sizes`` at 0.5.23). Decoding pads to the next of
them, so it calls no m between."""

SERVING = (*CAPTURED, *(m for m in STEPS if m > CAPTURED[-1]))
"""`CAPTURED`, and `STEPS` above for prefill, whose token count can be any number."""


class Grid(enum.Enum):
    """Grid of m; the value describes it in messages."""

    STEPS = "a grid of m"
    SERVING = "the sizes that serving engines use"


CLOSEST = 1.1
"""Factor between two m up to which no m between them is measured. Chosen, not measured: the loss
between m that close is unknown."""

WHOLE_ROWS = 8
"""Rounding step for an m between two others that are both larger than 16."""


def between_declared(rankings: Sequence[ProblemRanking]) -> list[ProblemRanking]:
    """Returns the undeclared `STEPS` between the least and the largest m for each n and k."""
    return [
        _ranking_between(m, below, above)
        for below, above in _neighbours(rankings)
        for m in STEPS
        if below.problem.m < m < above.problem.m
    ]


def serving_between(problems: Iterable[Problem]) -> list[Problem]:
    """Returns the `SERVING` sizes that `between_measured` adds to problems."""
    lines: dict[Problem, set[int]] = {}
    for problem in problems:
        lines.setdefault(replace(problem, m=1), set()).add(problem.m)
    return [
        replace(line, m=m)
        for line, sizes in lines.items()
        for m in SERVING
        if min(sizes) < m < max(sizes) and m not in sizes
    ]


def between_measured(
    rankings: Sequence[ProblemRanking], outcomes: Mapping[str, TuningOutcome]
) -> list[ProblemRanking]:
    """Returns the undeclared `SERVING` sizes between the least and the largest m for each n and k.

    These are many and close, so each takes only kernels that may win there: those that may be the
    fastest kernel at the two measured neighbours, at most `MOST_AT_NEIGHBOUR` from each. A
    neighbour without an outcome gives the first in its ranking.
    """
    return [
        _ranking_between(m, _with_fastest(below, outcomes), _with_fastest(above, outcomes))
        for below, above in _neighbours(rankings)
        for m in SERVING
        if below.problem.m < m < above.problem.m
    ]


MOST_AT_NEIGHBOUR = 2
"""Most kernels that a size between takes from each neighbour. Chosen: more contenders take longer
to tell apart, and equals at the neighbour are mostly near equals beside it."""


def _with_fastest(ranking: ProblemRanking, outcomes: Mapping[str, TuningOutcome]) -> ProblemRanking:
    """Returns a ranking with only the kernels that may be its fastest, fastest first."""
    outcome = outcomes.get(ranking.problem.key)
    ids = [id_ for id_, _ in ranking.kernels]
    if outcome is not None and outcome.kernels:
        intervals = {id_: interval_of(timing) for id_, timing in outcome.kernels.items()}
        ids = sorted(contending(intervals), key=lambda id_: intervals[id_].median)
    return replace(ranking, kernels=tuple((id_, None) for id_ in ids[:MOST_AT_NEIGHBOUR]))


def where_winners_change(
    rankings: Sequence[ProblemRanking], outcomes: Mapping[str, TuningOutcome]
) -> list[ProblemRanking]:
    """Returns an m between each two measured neighbours with different fastest contenders.

    Contenders whose times overlap with the least time all count as fastest.
    """
    refinements = []
    for below, above in _neighbours(rankings):
        pair = [outcomes.get(ranking.problem.key) for ranking in (below, above)]
        found_fastest = [_fastest(outcome) for outcome in pair if outcome is not None]
        fastest = [names for names in found_fastest if names]  # skips those without times
        m = _middle_m(below.problem.m, above.problem.m)
        if m is not None and len(fastest) == 2 and fastest[0].isdisjoint(fastest[1]):
            refinements.append(_ranking_between(m, below, above))
    return refinements


def measured_earlier(
    rankings: Sequence[ProblemRanking], outcomes: Mapping[str, TuningOutcome]
) -> list[ProblemRanking]:
    """Returns problems that the same tuning's earlier run measured between these rankings."""
    known_keys = {ranking.problem.key for ranking in rankings}
    problems = [Problem.parse(key) for key in outcomes if key not in known_keys]
    return [
        _ranking_between(problem.m, below, above)
        for below, above in _neighbours(rankings)
        for problem in problems
        if replace(problem, m=1) == replace(below.problem, m=1)
        and below.problem.m < problem.m < above.problem.m
    ]


def _neighbours(
    rankings: Iterable[ProblemRanking],
) -> Iterator[tuple[ProblemRanking, ProblemRanking]]:
    """Yields neighbouring rankings: their problems differ in m alone, with no other m between."""
    lines: dict[Problem, list[ProblemRanking]] = {}
    for ranking in rankings:
        lines.setdefault(replace(ranking.problem, m=1), []).append(ranking)
    for line in lines.values():
        yield from itertools.pairwise(sorted(line, key=lambda ranking: ranking.problem.m))


def _middle_m(below: int, above: int) -> int | None:
    """Returns the geometric mean of two m, rounded, or None if they are close enough."""
    if above <= below * CLOSEST:
        return None
    m = round(math.sqrt(below * above))
    if below > 2 * WHOLE_ROWS:
        m = round(m / WHOLE_ROWS) * WHOLE_ROWS
    return m if below < m < above else None


def _ranking_between(m: int, below: ProblemRanking, above: ProblemRanking) -> ProblemRanking:
    """Returns a ranking to measure, with both neighbours' kernels in turn."""
    ranked = itertools.zip_longest(
        *([id_ for id_, _ in ranking.kernels] for ranking in (below, above))
    )
    ids = dict.fromkeys(id_ for pair in ranked for id_ in pair if id_ is not None)
    return ProblemRanking(
        problem=replace(below.problem, m=m),
        source=below.source,
        kernels=tuple((id_, None) for id_ in ids),
        is_declared=False,
        is_further=below.is_further,
    )


def _fastest(outcome: TuningOutcome) -> set[str]:
    """Returns kernel names, or ATen, that may be the fastest; empty if nothing was timed."""
    timings = dict(outcome.kernels)
    if outcome.aten is not None:
        timings[ATEN] = outcome.aten
    intervals = {name: interval_of(timing) for name, timing in timings.items()}
    return set(contending(intervals)) if intervals else set()
