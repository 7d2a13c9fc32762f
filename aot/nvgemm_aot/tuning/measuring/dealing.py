"""Deals problems out to shards of a tuning, by how long they take."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from nvgemm_runtime.gemm.problem import Problem

from ...bundle.content import ProblemRanking
from ...pipeline.shard import Shard


def deal(rankings: Sequence[ProblemRanking], shard: Shard) -> list[ProblemRanking]:
    """Returns a shard's problems, in their order.

    Problems that differ only in m stay together, since neighbours and grids of m need each other's
    winners. The rest is dealt out so that shards have about as many kernels to time: timing takes
    about as long for a large problem as for a small one, which runs more often.
    """
    lines: dict[Problem, int] = {}
    for ranking in rankings:
        line = replace(ranking.problem, m=1)
        lines[line] = lines.get(line, 0) + len(ranking.kernels) + 1  # and ATen
    loads = [(0, number) for number in range(1, shard.count + 1)]
    mine = set()
    for line, cost in sorted(lines.items(), key=lambda item: (-item[1], item[0])):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + cost, number))
        if number == shard.number:
            mine.add(line)
    return [ranking for ranking in rankings if replace(ranking.problem, m=1) in mine]
