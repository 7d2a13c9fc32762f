"""Dropping kernels that are never among the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import cpu_provider
from nvgemm_aot.bundle.content import BundleContent, ProblemRanking, read_content
from nvgemm_aot.storage.cache import Cache
from nvgemm_aot.tuning.pruning import prune
from nvgemm_runtime.bundle.format import Conditions, Measured, RankingSource
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.matching.device import device_facts
from nvgemm_runtime.matching.index import BundleView, Index, Match
from tuning_bench import (
    PROBLEMS,
    DictatedTimer,
    bench,
    build,
    header_of,
    operators,
    run,
)


def test_pruning_drops_nothing_that_an_estimate_ranks(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    ticks = iter([0.0, 1.0, 61.0, 61.0])
    run(tunable, tuned_path, bench(dictated), prunes=True, budget_s=60.0, clock=lambda: next(ticks))
    header = header_of(tuned_path)
    assert len(header.kernels) == 3
    assert [len(ranking.kernels) for ranking in header.rankings] == [3, 3, 3]


SMALLEST_FIRST = {"": [200.0], "Cpu_8x32": [300.0], "Cpu_16x16": [500.0], "aten": [250.0]}
"""The kernel that takes operands of any alignment, ``Cpu_1x1``, is the fastest."""


def test_the_first_two_of_each_problem_stay(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    dictated.times = SMALLEST_FIRST
    tuned = run(tunable, tuned_path, bench(dictated), prunes=True)
    header = header_of(tuned_path)
    assert {kernel.operator for kernel in header.kernels} == {"Cpu_1x1", "Cpu_8x32"}
    for ranking in header.rankings:
        assert operators(header, ranking) == ["Cpu_1x1", "Cpu_8x32"]
        assert ranking.measured is not None
        assert len(ranking.measured.spreads_ns) == 2
    assert tuned.pruned is not None
    assert len(tuned.pruned.dropped) == 1
    assert tuned.pruned.declared_loss == 1.0
    assert tuned.pruned.undeclared_loss == 1.0
    assert tuned.pruned.unknown_losses == 0
    (dropped,) = tuned.pruned.dropped
    sizes = {kernel.id: kernel.span.stored_bytes for kernel in header_of(tunable).kernels}
    assert tuned.pruned_bytes == sizes[dropped]
    assert tuned.file_bytes == tuned_path.stat().st_size


def test_what_is_measured_can_be_pruned_later(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    dictated.times = SMALLEST_FIRST
    run(tunable, tuned_path, bench(dictated))
    tuned = run(tunable, tuned_path, bench(dictated), prunes=True)
    assert tuned.measured_now == 0
    assert len(header_of(tuned_path).kernels) == 2


def test_operands_that_were_served_still_are(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    dictated.times = {"": [5000.0], "Cpu_16x16": [300.0], "Cpu_8x32": [200.0], "aten": [250.0]}
    tunable = build(PROBLEMS, tmp_path / "b", kernel_cache)
    run(tunable, tuned_path, bench(dictated), prunes=True)
    index = Index([BundleView(name="b", header=header_of(tuned_path))], device_facts("cpu", 0))
    for problem in (PROBLEMS[0], cpu_provider.problem(sizes=(8, 33, 64))):
        found = index.match(problem, 4)
        assert isinstance(found, Match)
        assert [served.kernel.operator for served in found.kernels] == ["Cpu_1x1"]


@pytest.fixture
def content(tunable: Path) -> BundleContent:
    with Bundle(tunable) as bundle:
        return read_content(bundle)


def measured(
    ranking: ProblemRanking, times: Mapping[str, tuple[int, int]], *doubts: str
) -> ProblemRanking:
    """A ranking with such times and spreads by kernel."""
    conditions = Conditions(driver="1", torch="2", cuda="13.0", date="2026-11-21")
    return replace(
        ranking,
        source=RankingSource(kind="measurement", by="x", gpu="cpu", conditions=conditions),
        kernels=tuple((id_, time) for id_, (time, _) in times.items()),
        measured=Measured(
            spreads_ns=tuple(spread for _, spread in times.values()),
            aten=None,
            triton=None,
            doubts=doubts,
        ),
    )


def by_operator(content: BundleContent) -> dict[str, str]:
    return {kernel.operator: kernel.id for kernel in content.kernels}


def test_a_kernel_that_takes_gaps_stays(content: BundleContent) -> None:
    kernels = tuple(
        kernel
        if kernel.operator == "Cpu_16x16"
        else replace(kernel, calling_convention="tvm_ffi:gemm(a*,b*,out*,mnkl,stream)")
        for kernel in content.kernels
    )
    ids = by_operator(content)
    times = {ids["Cpu_1x1"]: (100, 0), ids["Cpu_8x32"]: (200, 0), ids["Cpu_16x16"]: (300, 0)}
    rankings = tuple(measured(ranking, times) for ranking in content.rankings)
    _, without = prune(replace(content, rankings=rankings))
    assert without.dropped == (ids["Cpu_16x16"],)
    _, pruned = prune(replace(content, kernels=kernels, rankings=rankings))
    assert pruned.dropped == ()


@pytest.mark.parametrize(
    ("third", "doubts", "stays"),
    [((300, 0), (), False), ((230, 20), (), True), ((300, 0), ("busy",), True)],
)
def test_what_is_not_told_apart_from_the_second_stays(
    content: BundleContent, third: tuple[int, int], doubts: tuple[str, ...], stays: bool
) -> None:
    ids = by_operator(content)
    times = {ids["Cpu_1x1"]: (100, 0), ids["Cpu_8x32"]: (200, 10), ids["Cpu_16x16"]: third}
    rankings = (measured(content.rankings[0], times, *doubts),)
    made, _ = prune(replace(content, rankings=rankings))
    assert (ids["Cpu_16x16"] in {kernel.id for kernel in made.kernels}) == stays


def test_losses_that_nobody_knows_are_counted(content: BundleContent) -> None:
    ids = by_operator(content).values()
    rankings = tuple(
        measured(ranking, {id_: (100, 0)}) for ranking, id_ in zip(content.rankings, ids)
    )
    _, pruned = prune(replace(content, rankings=rankings))
    assert (pruned.undeclared_loss, pruned.unknown_losses) == (None, 3)
