"""Estimated runtimes of products of groups, the experts of a mixture, from the rows of each group.

NvMatmulHeuristics knows no groups. A kernel for groups is simple enough to be counted, though: a
fixed number of thread blocks takes tile after tile, group by group, and each tile costs its steps
along k and a fixed rest. `benchmarks.group_estimates` times kernels on a GPU and fits these costs;
``group_times.json`` holds them with where they come from.

How many rows each group will have is not known when kernels are built, so an estimate is the mean
of those for two routings: rows spread evenly, and with skew.
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

from ..targets import BuildTarget
from .base import DYNAMIC_PERSISTENT, Candidate

DATA = "group_times.json"
"""The file, beside this module."""

EVEN, SKEWED, FEW = "even", "skewed", "few"
ROUTINGS = (EVEN, SKEWED, FEW)
"""How rows are spread over groups: evenly; the k-th of n groups, counted in an order without
pattern, has a share of 1 / (k + 3); evenly over every fourth group."""

ESTIMATED_ROUTINGS = (EVEN, SKEWED)
"""Those of which an estimate, and a measured time, is the mean."""

_P = 8
_FEW_OF = 4
_SKEW = 3.0
SHARPNESS = 4
"""Of `slower`: of 2, 3, 4 and 8, what estimated the experts best that costs are fitted on."""
_STRIDE = 7
"""Groups in the order of their shares are about so many places apart."""


def rows_of_groups(rows: int, groups: int, routing: str) -> list[int]:
    """Spread ``rows`` over groups, by the name of a routing."""
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
    ends = [round(rows * so_far / total) for so_far in itertools.accumulate(shares)]
    return [end - begin for begin, end in zip([0, *ends], ends)]


@dataclass(frozen=True, kw_only=True)
class TileCost:
    """What a tile costs a thread block, in nanoseconds.

    Attributes:
        step: A step along k, of the tile's own extent.
        rest: All else: filling the pipeline, storing the result, going to the next tile.
    """

    step: float
    rest: float


@dataclass(frozen=True, kw_only=True)
class GroupTimes:
    """Costs of kernels for groups on one architecture.

    Attributes:
        arch: The architecture that was measured, e.g. ``sm_90a``.
        source: Where costs come from: GPU, date, how many cases.
        providers: A problem's times are estimated if one of these offers a candidate for it.
        launch_ns: What a launch costs besides its tiles.
        bytes_per_ns: Bandwidth of memory, which bounds products of few rows.
        costs: By `design_name`.
        unknown: By operation, for designs without costs of their own: nanoseconds for each
            128 x 128 x 64 multiply-adds, and for each 128 x 128 results.
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
        """What estimates come from, as rankings state it."""
        return f"costs of tiles fitted on {self.source}"

    def applies_to(self, problem: Problem, candidates: Iterable[Candidate]) -> bool:
        """Whether a problem's times are estimated by these costs."""
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
        """Estimated nanoseconds of each candidate for a problem of groups.

        Args:
            problem: The problem.
            candidates: Its candidates.
            times: What a model of plain GEMMs says, of no effect.
            sm_count: Streaming multiprocessors of the device.
        """
        found: list[int | None] = []
        for candidate in candidates:
            of_routings = [
                self.time_ns(problem, candidate, routed(problem, routing), sm_count)
                for routing in ESTIMATED_ROUTINGS
            ]
            found.append(max(1, round(statistics.geometric_mean(of_routings))))
        return found

    def time_ns(
        self, problem: Problem, candidate: Candidate, counts: Sequence[int], sm_count: int
    ) -> float:
        """Estimated nanoseconds with these numbers of rows, or of terms, of each group."""
        cost = self.cost_of(candidate)
        work = work_of(problem, candidate, counts, sm_count)
        computing = work.steps * cost.step + work.tiles * cost.rest
        return self.launch_ns + slower(computing, work.moved_bytes / self.bytes_per_ns)

    def cost_of(self, candidate: Candidate) -> TileCost:
        """What a tile of a candidate costs; by its area if it was not measured."""
        known = self.costs.get(design_name(candidate))
        if known is not None:
            return known
        unit = self.unknown[_counted_as(candidate)]
        m, n, k = candidate.block_shape.tile
        area = m * n / 128**2
        return TileCost(step=unit.step * area * k / 64, rest=unit.rest * area)


def slower(computing_ns: float, moving_ns: float) -> float:
    """Time of both at once: nearly that of the slower, but where they are alike both count."""
    return float((computing_ns**SHARPNESS + moving_ns**SHARPNESS) ** (1 / SHARPNESS))


@dataclass(frozen=True, kw_only=True)
class Work:
    """What falls to the busiest multiprocessor, and to memory.

    Attributes:
        tiles: Tiles one after the other.
        steps: Steps along k in all of them.
        moved_bytes: What must be read and written by all, once each.
    """

    tiles: float
    steps: float
    moved_bytes: float


def routed(problem: Problem, routing: str) -> list[int]:
    """The rows of each group of a problem; of groups along k, the terms."""
    along_k = problem.signature.op is Op.K_GROUPED_MM
    return rows_of_groups(problem.k if along_k else problem.m, problem.groups, routing)


def work_of(problem: Problem, candidate: Candidate, counts: Sequence[int], sm_count: int) -> Work:
    """Count a candidate's tiles and steps for these numbers of rows, or of terms, of each group."""
    signature, shape = problem.signature, candidate.block_shape
    (tile_m, tile_n, tile_k), (cluster_m, cluster_n) = shape.tile, shape.cluster
    blocks = sm_count // (cluster_m * cluster_n) * cluster_m * cluster_n
    tiles_n = _in_clusters(problem.n, tile_n, cluster_n)
    used = [count for count in counts if count]
    out_bits, in_bits = signature.out.bits, signature.a.bits
    if signature.op is Op.K_GROUPED_MM:
        tiles = _in_clusters(problem.m, tile_m, cluster_m) * tiles_n
        steps = [-(-count // tile_k) for count in counts]
        moved = (problem.m + problem.n) * sum(used) * in_bits
        moved += len(counts) * problem.m * problem.n * out_bits
        clusters = blocks // (cluster_m * cluster_n)
        of_cluster = tiles // (cluster_m * cluster_n)
        if candidate.design.scheduler == DYNAMIC_PERSISTENT:
            # Tiles of unlike length even out, but for one of the longest at the end.
            busiest = max(of_cluster * sum(steps) / clusters, max(steps, default=0))
        else:
            busiest = most_steps(steps, of_cluster, clusters)
        return Work(
            tiles=_busiest(tiles * len(counts), blocks), steps=busiest, moved_bytes=moved / 8
        )
    tiles = sum(_in_clusters(count, tile_m, cluster_m) for count in used) * tiles_n
    waves = _busiest(tiles, blocks)
    moved = (sum(used) + len(used) * problem.n) * problem.k * in_bits
    moved += sum(used) * (problem.out_n + _columns_read(problem)) * out_bits
    return Work(tiles=waves, steps=waves * -(-problem.k // tile_k), moved_bytes=moved / 8)


def most_steps(steps: Sequence[int], tiles: int, clusters: int) -> int:
    """Steps of the busiest cluster, where the n-th takes every tile that leaves the rest n.

    Args:
        steps: Steps of a tile, by group.
        tiles: Tiles of each group, counted in clusters.
        clusters: How many there are.
    """
    whole, begin = 0, 0
    change = [0] * clusters  # from one to the next, in steps of tiles that not all have
    for of_tile in steps:
        each, rest = divmod(tiles, clusters)
        whole += of_tile * each
        end = (begin + rest) % clusters
        change[begin] += of_tile
        change[end] -= of_tile
        if end < begin:
            change[0] += of_tile
        begin = end
    return whole + max(itertools.accumulate(change))


def _columns_read(problem: Problem) -> int:
    """Columns of what lies in the addend's place, where that has a row for each of the result."""
    epilogue = problem.signature.epilogue
    if epilogue is None or not epilogue.addend_has_rows:
        return 0
    return role_shape(problem, Role.ADDEND)[-1]


def _in_clusters(extent: int, tile: int, cluster: int) -> int:
    return -(-extent // (tile * cluster)) * cluster


def _busiest(tiles: int, blocks: int) -> int:
    return -(-tiles // blocks)


def design_name(candidate: Candidate) -> str:
    """What costs are known by: operation, layout, tile, cluster and schedules of warps and tiles.

    Types and epilogues are left out: kernels that differ in these alone cost nearly the same, and
    are not compared with each other. So is whether rows are gathered.
    """
    shape = candidate.block_shape
    signature = candidate.signature
    tile = "x".join(map(str, shape.tile))
    schedule = ("dynamic",) if candidate.design.scheduler == DYNAMIC_PERSISTENT else ()
    words = (
        _counted_as(candidate), signature.layout.value, tile, "x".join(map(str, shape.cluster)),
        *candidate.traits, *schedule,
    )  # fmt: skip
    return " ".join(words)


def _counted_as(candidate: Candidate) -> str:
    """The operation whose costs a candidate's tiles have."""
    op = candidate.signature.op
    return (Op.GROUPED_MM if op.groups_rows else op).value


def find_group_times(target: BuildTarget) -> GroupTimes | None:
    """As `load_group_times`, for a target."""
    return load_group_times(target.target.arch)


@functools.cache
def load_group_times(arch: str) -> GroupTimes | None:
    """The costs for an architecture, or None if none were measured."""
    text = (files(__package__) / DATA).read_text(encoding="utf-8")
    for value in json.loads(text)["architectures"]:
        if value["arch"] == arch:
            return read_group_times(value)
    return None


def read_group_times(value: Mapping[str, Any]) -> GroupTimes:
    """Costs from their JSON object."""

    def costs(of: Mapping[str, Mapping[str, float]]) -> dict[str, TileCost]:
        return {name: TileCost(**one) for name, one in of.items()}

    return GroupTimes(
        arch=value["arch"],
        source=value["source"],
        providers=tuple(value["providers"]),
        launch_ns=value["launch_ns"],
        bytes_per_ns=value["bytes_per_ns"],
        costs=costs(value["costs"]),
        unknown=costs(value["unknown"]),
    )
