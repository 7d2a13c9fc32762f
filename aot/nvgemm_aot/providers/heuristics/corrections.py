"""Corrections for estimated runtimes, fitted on measurements.

A runtime model knows tiles and clusters. It does not know that one kernel family beats another at
small m, or how a kernel feeds its tensor cores. `benchmarks.estimates` measures kernels and fits a
weight for each feature below; ``corrections.json`` holds the weights with their sources. A
corrected time is the model's time multiplied by ``exp(sum of weights x features)``.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from nvgemm_runtime.gemm.problem import Problem

from ...targets import BuildTarget
from ..base import DYNAMIC_PERSISTENT, Candidate

DATA = "corrections.json"
"""Data file in this package."""

KNOTS = (16, 128, 1024)
"""Row counts m between which weights are interpolated. Each feature has a weight at each knot."""

_MOST_FACTOR = 20.0
"""Limit for the factor on all of a problem's estimates, and for one estimate's factor relative to
the others. Fitted weights do not hold far from measured problems."""

Times = Sequence["int | None"]
"""Estimated runtimes in nanoseconds; None if there is no estimate."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights for one architecture and runtime model.

    Attributes:
        arch: Measured architecture, e.g. ``sm_90a``.
        model: Name and version of the corrected model.
        providers: Providers to which the correction applies; one of a problem's candidates must
            come from them.
        source: Origin: GPU, dates, number of problems and kernels.
        weights: Weights by feature; a missing one is 0.
    """

    arch: str
    model: str
    providers: tuple[str, ...]
    source: str
    weights: Mapping[str, float]

    @property
    def name(self) -> str:
        """Model and correction, as rankings state them."""
        return f"{self.model}, corrected by {self.source}"

    def applies_to(self, problem: Problem, candidates: Iterable[Candidate]) -> bool:
        """Returns True if the estimates for a problem's candidates are corrected."""
        return any(candidate.provider in self.providers for candidate in candidates)

    def corrected(
        self, problem: Problem, candidates: Sequence[Candidate], times: Times, sm_count: int
    ) -> list[int | None]:
        """Returns corrected ``times``, or the model's own if no correction applies.

        Args:
            problem: The problem.
            candidates: Its candidates.
            times: The model's estimates, in nanoseconds.
            sm_count: Number of streaming multiprocessors on the device.
        """
        if not self.applies_to(problem, candidates):
            return list(times)
        rows = feature_rows(problem, candidates, times, sm_count)
        if rows is None:
            return list(times)
        changes = [
            sum(self.weights.get(name, 0.0) * value for name, value in row.features) for row in rows
        ]
        # The common change has its own bound: it must not hide the differences.
        common = statistics.median(changes)
        return [
            max(
                1,
                round(
                    math.exp(
                        row.log_estimate
                        + _bounded_change(common)
                        + _bounded_change(change - common)
                    )
                ),
            )
            for row, change in zip(rows, changes)
        ]


def _bounded_change(change: float) -> float:
    most = math.log(_MOST_FACTOR)
    return max(-most, min(most, change))


@dataclass(frozen=True, kw_only=True)
class FeatureRow:
    """Inputs to a correction for one candidate and problem.

    Attributes:
        log_estimate: Natural logarithm of the model's nanoseconds, or a substitute if the model has
            no answer.
        features: Nonzero features by name.
    """

    log_estimate: float
    features: tuple[tuple[str, float], ...]


def load_correction(arch: str, model: str) -> Correction | None:
    """Loads the correction for a model and architecture, or returns None if there is none."""
    for correction in _corrections():
        if (correction.arch, correction.model) == (arch, model):
            return correction
    return None


def find_correction(target: BuildTarget, model: str) -> Correction | None:
    """Loads a target's correction; see `load_correction`."""
    return load_correction(target.target.arch, model)


@functools.cache
def _corrections() -> tuple[Correction, ...]:
    text = (files(__package__) / DATA).read_text(encoding="utf-8")
    return tuple(map(read_correction, json.loads(text)["corrections"]))


def read_correction(value: Mapping[str, Any]) -> Correction:
    """Reads a correction from its JSON object."""
    return Correction(
        arch=value["arch"],
        model=value["model"],
        providers=tuple(value["providers"]),
        source=value["source"],
        weights=value["weights"],
    )


def feature_rows(
    problem: Problem, candidates: Sequence[Candidate], times: Times, sm_count: int
) -> list[FeatureRow] | None:
    """Computes a correction's inputs for all candidates, or None without any model answer.

    A missing answer is replaced by a count of multiply-adds on the busiest multiprocessor, in the
    unit that the answered candidates suggest.
    """
    counts = [_log_busiest_work(problem, candidate, sm_count) for candidate in candidates]
    answered = [math.log(time) - count for time, count in zip(times, counts) if time is not None]
    if not answered:
        return None
    unit = sum(answered) / len(answered)
    shares = list(_knot_shares(problem))
    rows = []
    for candidate, time, count in zip(candidates, times, counts):
        estimate = math.log(time) if time is not None else count + unit
        named = dict(_features(problem, candidate, sm_count))
        named["estimate"] = estimate - count - unit
        named["no answer"] = float(time is None)
        rows.append(
            FeatureRow(
                log_estimate=estimate,
                features=tuple(
                    (f"{name}, m {knot}", share * value)
                    for name, value in named.items()
                    if value
                    for knot, share in shares
                ),
            )
        )
    return rows


def _knot_shares(problem: Problem) -> Iterator[tuple[int, float]]:
    """Yields the knots around a problem's m with their shares, linear in log m."""
    rows = math.log(min(max(-(-problem.m // problem.groups), KNOTS[0]), KNOTS[-1]))
    for below, above in itertools.pairwise(KNOTS):
        low, high = math.log(below), math.log(above)
        if low <= rows <= high:
            share = (rows - low) / (high - low)
            yield from ((knot, part) for knot, part in ((below, 1 - share), (above, share)) if part)
            return


def _extents(problem: Problem, candidate: Candidate) -> tuple[int, int, int]:
    """Returns a problem's m and n in the kernel's orientation, and the number of GEMMs."""
    m = -(-problem.m // problem.groups)
    count = problem.batch * problem.groups
    return (problem.n, m, count) if candidate.block_shape.swapped else (m, problem.n, count)


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Thread block coverage for one candidate and problem.

    Attributes:
        blocks: Tiles times splits of k, in whole clusters.
        needed: The same, without those that only fill clusters.
        waves: Consecutive blocks on the busiest multiprocessor.
        work: Multiply-adds on the busiest multiprocessor, relative to an even share.
        loads: A and B elements that clusters load from L2 per 64 result elements.
    """

    blocks: int
    needed: int
    waves: int
    work: float
    loads: float


def _grid(problem: Problem, candidate: Candidate, sm_count: int) -> _Grid:
    shape = candidate.block_shape
    m, n, count = _extents(problem, candidate)
    (tile_m, tile_n, _), (cluster_m, cluster_n) = shape.tile, shape.cluster
    tiles_m, tiles_n = -(-m // tile_m), -(-n // tile_n)
    needed = tiles_m * tiles_n * count * shape.splits
    whole_m, whole_n = (
        -(-tiles // extent) * extent for tiles, extent in zip((tiles_m, tiles_n), shape.cluster)
    )
    waves = -(-needed // sm_count)
    results = m * n * count
    return _Grid(
        blocks=whole_m * whole_n * count * shape.splits,
        needed=needed,
        waves=waves,
        work=waves * tile_m * tile_n / shape.splits * sm_count / results,
        # Blocks in a cluster share A along n and B along m.
        loads=64 * needed * (tile_m / cluster_n + tile_n / cluster_m) / shape.splits / results,
    )


def _log_busiest_work(problem: Problem, candidate: Candidate, sm_count: int) -> float:
    """Returns the logarithm of the multiply-adds on the busiest multiprocessor."""
    m, n, count = _extents(problem, candidate)
    share = m * n * count * problem.k / sm_count
    return math.log(_grid(problem, candidate, sm_count).work * share)


def _features(problem: Problem, candidate: Candidate, sm_count: int) -> Iterator[tuple[str, float]]:
    """Yields a candidate's features, mostly 0 to 4; tile and family features are 1 or absent.

    For a split of k, "split k" is negative if k is below 4096.
    """
    grid = _grid(problem, candidate, sm_count)
    shape = candidate.block_shape
    tile_m, tile_n, tile_k = shape.tile
    yield "constant", 1.0
    yield "work", math.log(grid.work)
    yield "waves", math.log(grid.waves)
    yield "idle", max(0.0, math.log(sm_count / grid.needed))
    if grid.needed > sm_count:
        yield "tail", math.log(grid.waves * sm_count / grid.needed)
    yield "cluster padding", math.log(grid.blocks / grid.needed)
    yield "loads", math.log(grid.loads)
    yield "fill", math.log(grid.waves * (tile_m + tile_n) / 128)
    yield "tile m", math.log(tile_m / 64)
    yield "tile n", math.log(tile_n / 16)
    yield "tile k", math.log(tile_k * problem.signature.a.bits / 1024)
    yield f"tile {tile_m}x{tile_n}", 1.0
    # Blocks in a cluster load A once along the kernel's n, and B once along its m.
    loaded_once = "ba" if shape.swapped else "ab"
    for operand, extent in zip(loaded_once, shape.cluster[::-1]):
        yield f"shared {operand}", math.log(extent)
    if candidate.design.scheduler == DYNAMIC_PERSISTENT:
        yield "dynamic", 1.0
    if shape.splits > 1:
        # Partial sums wait for each other, and go through memory in fp32.
        m, n, _ = _extents(problem, candidate)
        moved = 8 * m * n * shape.splits / (problem.signature.a.bytes_of((m + n) * problem.k))
        yield "split", 1.0
        yield "splits", math.log(shape.splits)
        yield "split k", math.log(problem.k / 4096)
        yield "split results", math.log1p(moved)
        if not candidate.is_deterministic:
            # All parts add to memory at once: none waits, and each element moves once more.
            yield "any order", 1.0
            yield "any order, splits", math.log(shape.splits)
            yield "any order, results", math.log1p(moved)
    yield (
        " ".join(["family", candidate.provider, *candidate.traits, *["swapped"] * shape.swapped]),
        1.0,
    )
