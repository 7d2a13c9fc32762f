from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tuner import Tuner, by_operator, measured

import cpu_provider
from nvgemm_aot.bundle.content import BundleContent
from nvgemm_aot.rankings.prune_kernels import prune
from nvgemm_aot.rankings.pruning import keep_winners
from nvgemm_runtime.matching.device import device_facts
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView, Match
from tuning_bench import PROBLEMS, header_of


def test_pruning_drops_nothing_that_an_estimate_ranks(tuner: Tuner) -> None:
    tuner(prunes=True, budget_s=60.0, ticks=[0.0, 1.0, 61.0, 61.0])
    assert len(tuner.kernels) == 3
    assert list(map(len, tuner.orders)) == [3, 3, 3]


SMALLEST_FIRST = {"": [200.0], "Cpu_8x32": [300.0], "Cpu_16x16": [500.0], "aten": [250.0]}
"""The kernel that takes operands of any alignment, ``Cpu_1x1``, is the fastest."""


def test_the_first_two_of_each_problem_stay(tuner: Tuner) -> None:
    tuner.timer.times = SMALLEST_FIRST
    tuner()
    assert len(tuner.kernels) == 3
    tuned = tuner(prunes=True)
    assert tuned.measured_now == 0, "what is measured can be pruned later"
    assert tuner.kernels == {"Cpu_1x1", "Cpu_8x32"}
    assert tuner.orders == [["Cpu_1x1", "Cpu_8x32"]] * 3
    for ranking in tuner.header.rankings:
        assert ranking.measured is not None
        assert len(ranking.measured.spreads_ns) == 2
    pruned = tuned.pruned
    assert pruned is not None
    assert (pruned.declared_loss, pruned.undeclared_loss, pruned.unknown_losses) == (1.0, 1.0, 0)
    (dropped,) = pruned.dropped
    sizes = {kernel.id: kernel.span.stored_bytes for kernel in header_of(tuner.tunable).kernels}
    assert tuned.pruned_bytes == sizes[dropped]
    assert tuned.file_bytes == tuner.path.stat().st_size


def test_operands_that_were_served_still_are(tuner: Tuner) -> None:
    tuner.timer.times = {"": [5000.0], "Cpu_16x16": [300.0], "Cpu_8x32": [200.0], "aten": [250.0]}
    tuner(prunes=True)
    index = Index([BundleView(name="b", header=tuner.header)], device_facts("cpu", 0))
    for problem in (PROBLEMS[0], cpu_provider.problem(sizes=(8, 33, 64))):
        found = index.match(problem, 4)
        assert isinstance(found, Match)
        assert [served.kernel.operator for served in found.kernels] == ["Cpu_1x1"]


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


@pytest.mark.parametrize("how", [lambda content: prune(content)[0], keep_winners])
def test_a_kernel_for_programs_that_want_determinism_stays(
    content: BundleContent, how: Callable[[BundleContent], BundleContent]
) -> None:
    ids = by_operator(content)
    times = {ids["Cpu_1x1"]: (100, 0), ids["Cpu_8x32"]: (200, 0), ids["Cpu_16x16"]: (300, 0)}
    rankings = tuple(measured(ranking, times) for ranking in content.rankings)
    kernels = tuple(
        replace(kernel, is_deterministic=kernel.operator == "Cpu_16x16")
        for kernel in content.kernels
    )
    made = how(replace(content, rankings=rankings))
    assert "Cpu_16x16" not in by_operator(made), "all are deterministic"
    made = how(replace(content, rankings=rankings, kernels=kernels))
    assert {"Cpu_1x1", "Cpu_16x16"} <= by_operator(made).keys()


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
