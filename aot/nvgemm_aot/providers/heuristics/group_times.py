"""Runtime estimates for grouped GEMMs, computed from each group's rows.

NvMatmulHeuristics has no model for groups. A grouped kernel is regular enough to count its work: a
fixed number of thread blocks takes one tile after another, group by group. Each tile costs its
steps along k plus a fixed rest. `benchmarks.group_estimates` times kernels on a GPU and fits these
costs; ``group_times.json`` holds them with their sources.

Group sizes are unknown at build time, so an estimate is the mean for two routings: rows spread
evenly and rows with skew.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from nvgemm_runtime.gemm.problem import Op, Problem
from nvgemm_runtime.gemm.roles import Role, role_shape

from ...targets import BuildTarget
from ..base import DYNAMIC_PERSISTENT, Candidate

DATA = "group_times.json"
"""Data file in this package."""

EVEN, SKEWED, FEW = "even", "skewed", "few"
ROUTINGS = (EVEN, SKEWED, FEW)
"""Row distributions over groups. Even: equal shares. Skewed: the k-th of n groups, in an order
without a pattern, has a share of 1 / (k + 3). Few: equal shares for every fourth group."""

ESTIMATED_ROUTINGS = (EVEN, SKEWED)
"""Routings whose mean makes an estimate or a measured time."""

_FEW_OF = 4
_SKEW = 3.0
SHARPNESS = 4
"""Exponent in `overlapped_ns`. Among 2, 3, 4 and 8, it gave the best estimates for the experts that
costs are fitted on."""
_STRIDE = 7
"""Distance, in group indices, between groups with consecutive shares."""


def spread_rows(rows: int, groups: int, routing: str) -> list[int]:
    """Distributes ``rows`` over groups for a named routing."""
    if routing == FEW:
        shares = [float(group % _FEW_OF == 0) for group in range(groups)]
    elif routing == SKEWED:
        stride = next(
            step for step in range(_STRIDE, 2 * groups + 9) if math.gcd(step, groups) == 1
        )
        shares = [1 / (group * stride % groups + _SKEW) for group in range(groups)]
    else:
        shares = [1.0] * groups
    total = sum(shares)
    ends = [round(rows * cumulative / total) for cumulative in itertools.accumulate(shares)]
    return [end - begin for begin, end in zip([0, *ends], ends)]


@dataclass(frozen=True, kw_only=True)
class TileCost:
    """Cost for one tile on a thread block, in nanoseconds.

    Attributes:
        step: Cost per step along k, each as long as the tile's k.
        rest: Remaining cost: filling the pipeline, storing the result, advancing to the next tile.
    """

    step: float
    rest: float


@dataclass(frozen=True, kw_only=True)
class GroupTimes:
    """Grouped kernel costs on one architecture.

    Attributes:
        arch: Measured architecture, e.g. ``sm_90a``.
        source: Origin: GPU, date and number of cases.
        providers: Providers for which these costs apply; one of a problem's candidates must come
            from them.
        launch_ns: Launch cost besides tiles, in nanoseconds.
        bytes_per_ns: Memory bandwidth, which bounds GEMMs with few rows.
        costs: Tile costs by `design_name`.
        unknown: By operation, costs for designs without their own: nanoseconds per 128 x 128 x 64
            multiply-adds, and per 128 x 128 results.
    """

    arch: str
    source: str
    providers: tuple[str, ...]
    launch_ns: float
    bytes_per_ns: float
    costs: Mapping[str, TileCost]
    unknown: Mapping[str, TileCost]

    @property
    def name(self) -> str:
        """Estimate source, as rankings state it."""
        return f"costs of tiles fitted on {self.source}"

    def applies_to(self, problem: Problem, candidates: Iterable[Candidate]) -> bool:
        """Returns True if these costs estimate the problem's times."""
        return problem.signature.op.has_groups and any(
            candidate.provider in self.providers for candidate in candidates
        )

    def corrected(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        times: Sequence[int | None],
        sm_count: int,
    ) -> list[int | None]:
        """Estimates nanoseconds for each candidate on a grouped problem.

        Args:
            problem: The problem.
            candidates: Its candidates.
            times: A plain GEMM model's estimates, which are ignored.
            sm_count: Number of streaming multiprocessors on the device.
        """
        estimates: list[int | None] = []
        for candidate in candidates:
            routing_times = [
                self.time_ns(problem, candidate, routed_counts(problem, routing), sm_count)
                for routing in ESTIMATED_ROUTINGS
            ]
            estimates.append(max(1, round(statistics.geometric_mean(routing_times))))
        return estimates

    def time_ns(
        self, problem: Problem, candidate: Candidate, counts: Sequence[int], sm_count: int
    ) -> float:
        """Estimates nanoseconds for given rows per group, or k extents per group."""
        cost = self.cost_of(candidate)
        work = work_of(problem, candidate, counts, sm_count)
        computing = work.steps * cost.step + work.tiles * cost.rest
        return self.launch_ns + overlapped_ns(computing, work.moved_bytes / self.bytes_per_ns)

    def cost_of(self, candidate: Candidate) -> TileCost:
        """Returns a candidate's tile cost, scaled by tile area if it was not measured."""
        known = self.costs.get(design_name(candidate))
        if known is not None:
            return known
        unit = self.unknown[_costed_op(candidate)]
        m, n, k = candidate.block_shape.tile
        area = m * n / 128**2
        return TileCost(step=unit.step * area * k / 64, rest=unit.rest * area)


def overlapped_ns(computing_ns: float, moving_ns: float) -> float:
    """Combines overlapping times. The larger dominates; equal ones both count."""
    return float((computing_ns**SHARPNESS + moving_ns**SHARPNESS) ** (1 / SHARPNESS))


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work for the busiest multiprocessor and for memory.

    Attributes:
        tiles: Consecutive tiles.
        steps: Steps along k over all these tiles.
        moved_bytes: Bytes that all thread blocks together read and write, each once.
    """

    tiles: float
    steps: float
    moved_bytes: float


def routed_counts(problem: Problem, routing: str) -> list[int]:
    """Returns each group's rows, or its k extent if groups are along k."""
    along_k = problem.signature.op is Op.K_GROUPED_MM
    return spread_rows(problem.k if along_k else problem.m, problem.groups, routing)


def work_of(problem: Problem, candidate: Candidate, counts: Sequence[int], sm_count: int) -> Work:
    """Counts a candidate's tiles and steps for given rows, or k extents, per group."""
    signature, shape = problem.signature, candidate.block_shape
    (tile_m, tile_n, tile_k), (cluster_m, cluster_n) = shape.tile, shape.cluster
    blocks = sm_count // (cluster_m * cluster_n) * cluster_m * cluster_n
    tiles_n = _tiles_in_whole_clusters(problem.n, tile_n, cluster_n)
    used = [count for count in counts if count]
    out_bits, in_bits = signature.out.bits, signature.a.bits
    if signature.op is Op.K_GROUPED_MM:
        tiles = _tiles_in_whole_clusters(problem.m, tile_m, cluster_m) * tiles_n
        steps = [-(-count // tile_k) for count in counts]
        moved = (problem.m + problem.n) * sum(used) * in_bits
        moved += len(counts) * problem.m * problem.n * out_bits
        clusters = blocks // (cluster_m * cluster_n)
        cluster_tiles = tiles // (cluster_m * cluster_n)
        if candidate.design.scheduler == DYNAMIC_PERSISTENT:
            # Tiles with different lengths even out, except for one of the longest at the end.
            busiest = max(cluster_tiles * sum(steps) / clusters, max(steps, default=0))
        else:
            busiest = busiest_cluster_steps(steps, cluster_tiles, clusters)
        return Work(
            tiles=_tiles_of_busiest_block(tiles * len(counts), blocks),
            steps=busiest,
            moved_bytes=moved / 8,
        )
    tiles = sum(_tiles_in_whole_clusters(count, tile_m, cluster_m) for count in used) * tiles_n
    waves = _tiles_of_busiest_block(tiles, blocks)
    moved = (sum(used) + len(used) * problem.n) * problem.k * in_bits
    moved += sum(used) * (problem.out_n + _columns_read(problem)) * out_bits
    return Work(tiles=waves, steps=waves * -(-problem.k // tile_k), moved_bytes=moved / 8)


def busiest_cluster_steps(steps: Sequence[int], tiles: int, clusters: int) -> int:
    """Counts the busiest cluster's steps, if cluster c takes tiles c, c + clusters, and so on.

    Args:
        steps: Steps per tile, by group.
        tiles: Tiles per group, counted in clusters.
        clusters: Number of clusters.
    """
    full_steps, begin = 0, 0
    change = [0] * clusters  # differences between neighbours, for tiles that do not fill a round
    for tile_steps in steps:
        rounds, extra = divmod(tiles, clusters)
        full_steps += tile_steps * rounds
        end = (begin + extra) % clusters
        change[begin] += tile_steps
        change[end] -= tile_steps
        if end < begin:
            change[0] += tile_steps
        begin = end
    return full_steps + max(itertools.accumulate(change))


def _columns_read(problem: Problem) -> int:
    """Returns the width of an addend that has a row for each result row, else 0."""
    epilogue = problem.signature.epilogue
    if epilogue is None or not epilogue.addend_has_rows:
        return 0
    return role_shape(problem, Role.ADDEND)[-1]


def _tiles_in_whole_clusters(extent: int, tile: int, cluster: int) -> int:
    return -(-extent // (tile * cluster)) * cluster


def _tiles_of_busiest_block(tiles: int, blocks: int) -> int:
    return -(-tiles // blocks)


def design_name(candidate: Candidate) -> str:
    """Builds the key for costs: operation, layout, tile, cluster, and warp and tile schedules.

    Element types and epilogues are left out: kernels that differ only in these cost nearly the same
    and are not compared with each other. Row gathering is left out too.
    """
    shape = candidate.block_shape
    signature = candidate.signature
    tile = "x".join(map(str, shape.tile))
    schedule = ("dynamic",) if candidate.design.scheduler == DYNAMIC_PERSISTENT else ()
    words = (
        _costed_op(candidate), signature.layout.value, tile, "x".join(map(str, shape.cluster)),
        *candidate.traits, *schedule,
    )  # fmt: skip
    return " ".join(words)


def _costed_op(candidate: Candidate) -> str:
    """Returns the operation whose tile costs apply to a candidate."""
    op = candidate.signature.op
    return (Op.GROUPED_MM if op.groups_rows else op).value


def find_group_times(target: BuildTarget) -> GroupTimes | None:
    """Loads a target's costs; see `load_group_times`."""
    return load_group_times(target.target.arch)


@functools.cache
def load_group_times(arch: str) -> GroupTimes | None:
    """Loads an architecture's costs, or returns None if none were measured."""
    text = (files(__package__) / DATA).read_text(encoding="utf-8")
    for value in json.loads(text)["architectures"]:
        if value["arch"] == arch:
            return read_group_times(value)
    return None


def read_group_times(value: Mapping[str, Any]) -> GroupTimes:
    """Reads costs from their JSON object."""

    def costs(values: Mapping[str, Mapping[str, float]]) -> dict[str, TileCost]:
        return {name: TileCost(**cost) for name, cost in values.items()}

    return GroupTimes(
        arch=value["arch"],
        source=value["source"],
        providers=tuple(value["providers"]),
        launch_ns=value["launch_ns"],
        bytes_per_ns=value["bytes_per_ns"],
        costs=costs(value["costs"]),
        unknown=costs(value["unknown"]),
    )
