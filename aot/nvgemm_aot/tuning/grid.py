"""Which m to measure besides those declared, so that a kernel can be chosen at every m.

Within what is declared of one n and k, m goes through the powers of two and what lies half-way
between two of them (`STEPS`). Where the fastest changes from one m to the next, the m between them
is measured too, until they are closer than `CLOSEST`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from nvgemm_runtime.gemm.problem import Problem

from ..bundle.content import ProblemRanking
from ..rankings.agreement import ATEN
from ..rankings.intervals import contending, interval_of
from .outcome import TuningOutcome

STEPS = tuple(
    sorted(
        {1 << power for power in range(31)} | {3 << power for power in range(3, 29)},
    )
)
"""1, 2, 4, 8, 16, 24, 32, 48, 64, 96, … up to the largest extent: neighbours are a factor of 1.33
to 2 apart. Tiles are 16 rows or more, so below 16 fewer do."""

CLOSEST = 1.1
"""Factor between two m from which on none is measured between them. It is a choice: what a kernel
loses between two m was not measured at m that close to each other."""

WHOLE_ROWS = 8
"""What an m between two others is rounded to where both are larger than 16."""


def between_declared(rankings: Sequence[ProblemRanking]) -> list[ProblemRanking]:
    """The `STEPS` between the least and the largest m of each n and k that are not declared."""
    return [
        _at(m, below, above)
        for below, above in _neighbours(rankings)
        for m in STEPS
        if below.problem.m < m < above.problem.m
    ]


def where_winners_change(
    rankings: Sequence[ProblemRanking], outcomes: Mapping[str, TuningOutcome]
) -> list[ProblemRanking]:
    """An m between each two neighbours that were measured and have another fastest each.

    Contenders whose times overlap with the least are all the fastest.
    """
    found = []
    for below, above in _neighbours(rankings):
        pair = [outcomes.get(one.problem.key) for one in (below, above)]
        found_fastest = [_fastest(outcome) for outcome in pair if outcome is not None]
        fastest = [names for names in found_fastest if names]  # nothing is known of the others
        m = _middle(below.problem.m, above.problem.m)
        if m is not None and len(fastest) == 2 and fastest[0].isdisjoint(fastest[1]):
            found.append(_at(m, below, above))
    return found


def measured_before(
    rankings: Sequence[ProblemRanking], outcomes: Mapping[str, TuningOutcome]
) -> list[ProblemRanking]:
    """What an earlier run of the same tuning measured between these rankings, besides them."""
    known = {one.problem.key for one in rankings}
    problems = [Problem.parse(key) for key in outcomes if key not in known]
    return [
        _at(problem.m, below, above)
        for below, above in _neighbours(rankings)
        for problem in problems
        if replace(problem, m=1) == replace(below.problem, m=1)
        and below.problem.m < problem.m < above.problem.m
    ]


def _neighbours(
    rankings: Iterable[ProblemRanking],
) -> Iterator[tuple[ProblemRanking, ProblemRanking]]:
    """Rankings of problems that differ in m alone, and of which no other lies between."""
    lines: dict[Problem, list[ProblemRanking]] = {}
    for ranking in rankings:
        lines.setdefault(replace(ranking.problem, m=1), []).append(ranking)
    for line in lines.values():
        yield from itertools.pairwise(sorted(line, key=lambda ranking: ranking.problem.m))


def _middle(below: int, above: int) -> int | None:
    """The m between two others, by their ratio; None where they are close enough."""
    if above <= below * CLOSEST:
        return None
    m = round(math.sqrt(below * above))
    if below > 2 * WHOLE_ROWS:
        m = round(m / WHOLE_ROWS) * WHOLE_ROWS
    return m if below < m < above else None


def _at(m: int, below: ProblemRanking, above: ProblemRanking) -> ProblemRanking:
    """A ranking to measure, of the kernels of its neighbours in turn."""
    ranked = itertools.zip_longest(*([id_ for id_, _ in one.kernels] for one in (below, above)))
    ids = dict.fromkeys(id_ for pair in ranked for id_ in pair if id_ is not None)
    return ProblemRanking(
        problem=replace(below.problem, m=m),
        source=below.source,
        kernels=tuple((id_, None) for id_ in ids),
        is_declared=False,
        is_further=below.is_further,
    )


def _fastest(outcome: TuningOutcome) -> set[str]:
    """Names of the kernels, or ATen, that may be the fastest; none where nothing was timed."""
    timings = dict(outcome.kernels)
    if outcome.aten is not None:
        timings[ATEN] = outcome.aten
    intervals = {name: interval_of(one) for name, one in timings.items()}
    return set(contending(intervals)) if intervals else set()
