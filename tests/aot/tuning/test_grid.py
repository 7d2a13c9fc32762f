"""Measuring m between those that are declared."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuner import Tuner

import cpu_kernels
import cpu_provider
from nvgemm_aot.bundle.content import ProblemRanking
from nvgemm_aot.bundle.wheel_description import render_description
from nvgemm_aot.cli.rankings.tune import tuned_document, tuned_text
from nvgemm_aot.tuning.measuring import grid
from nvgemm_aot.tuning.outcome import TuningOutcome
from nvgemm_aot.tuning.tune_bundles import Tuned
from nvgemm_runtime.bundle.ranking_entries import Conditions, RankingSource, Timing
from nvgemm_runtime.gemm.problem import DType, Op, Problem
from tuning_bench import header_of, operators

ESTIMATE = RankingSource(kind="estimate", by="a model", gpu="a GPU")
CONDITIONS = Conditions(driver="1", torch="2", cuda="13.0", date="2026-11-22")


def at(m: int, *kernels: str, n: int = 32) -> ProblemRanking:
    problem = cpu_provider.problem(sizes=(m, n, 64))
    return ProblemRanking(
        problem=problem, source=ESTIMATE, kernels=tuple((one, 5) for one in kernels)
    )


def measured(aten: int | None = None, spread: int = 1, **times: int) -> TuningOutcome:
    return TuningOutcome(
        kernels={name: Timing(time_ns=time, spread_ns=spread) for name, time in times.items()},
        aten=None if aten is None else Timing(time_ns=aten, spread_ns=spread),
        triton=None,
        wrong={},
        doubts=(),
        conditions=CONDITIONS,
    )


def ms(rankings: list[ProblemRanking]) -> list[int]:
    return [one.problem.m for one in rankings]


def test_steps_lie_between_what_is_declared_of_the_same_n_and_k() -> None:
    found = grid.between_declared([at(3), at(100), at(17), at(5000, n=64)])
    assert ms(found) == [4, 8, 16, 24, 32, 48, 64, 96]
    assert {one.problem.n for one in found} == {32}


def test_what_is_declared_is_not_added_again() -> None:
    declared = [at(m) for m in (8, 16, 24, 64)]
    assert ms(grid.between_declared(declared)) == [32, 48]
    assert grid.between_declared([*declared, at(32), at(48)]) == []
    assert grid.between_declared([at(64)]) == grid.between_declared([]) == []


def test_steps_are_close_enough_for_three_rounds_to_end() -> None:
    for below, above in itertools.pairwise(grid.STEPS):
        assert above <= 2 * below


def test_contenders_are_those_of_both_neighbours_in_turn() -> None:
    (one,) = grid.between_declared([at(16, "a", "b"), at(32, "c", "b", "d")])
    assert one.kernels == (("a", None), ("c", None), ("b", None), ("d", None))
    assert (one.problem.m, one.measured) == (24, None)


@pytest.mark.parametrize(
    ("below", "above", "m"),
    [
        *((16, 32, 23), (17, 32, 24), (64, 96, 80), (64, 80, 72), (64, 72, None), (64, 70, None)),
        *((1, 2, None), (2, 4, 3), (1024, 1088, None), (1 << 29, 1 << 30, 759250128)),
    ],
)
def test_the_middle_is_by_ratio_and_of_whole_rows(below: int, above: int, m: int | None) -> None:
    outcomes = {at(below).problem.key: measured(a=10), at(above).problem.key: measured(b=10)}
    found = grid.where_winners_change([at(above, "b"), at(below, "a")], outcomes)
    assert ms(found) == ([] if m is None else [m])


def test_rounds_end_whatever_wins() -> None:
    """By a timer whose winner is another at every m."""
    rankings = [at(16), at(32)]
    rounds = 0
    while True:
        outcomes = {one.problem.key: measured(**{f"k{one.problem.m}": 10}) for one in rankings}
        finer = grid.where_winners_change(rankings, outcomes)
        if not finer:
            break
        rankings += finer
        rounds += 1
    assert rounds <= 3
    found = sorted(ms(rankings))
    assert len(found) == len(set(found))
    assert all(above <= below * 1.5 for below, above in itertools.pairwise(found))


def changes(below: TuningOutcome | None, above: TuningOutcome | None) -> bool:
    pair = {16: below, 64: above}
    outcomes = {at(m).problem.key: one for m, one in pair.items() if one is not None}
    return bool(grid.where_winners_change([at(m) for m in pair], outcomes))


def test_the_fastest_changes_where_no_contender_may_be_fastest_at_both() -> None:
    assert changes(measured(a=10, b=20), measured(a=20, b=10))
    assert changes(measured(a=10, aten=20), measured(a=20, aten=10))
    assert not changes(measured(a=10, b=20), measured(a=10, b=20))
    assert not changes(measured(a=100, b=101, spread=2), measured(a=200, b=100))
    assert not changes(measured(a=10), None)
    assert not changes(measured(a=10), measured())  # all were wrong, or hang
    assert not changes(None, None)


def crossing(rows: int, name: str) -> float:
    """Cpu_1x1 is the fastest up to 33 rows, and then Cpu_16x16."""
    return {"Cpu_1x1": 10.0 * rows, "Cpu_16x16": 300.0 + rows}.get(name, 5000.0)


@pytest.fixture
def wide(tuner: Tuner) -> Tuner:
    """A bundle of two m, far apart."""
    sizes = [(8, 32, 64), (128, 32, 64)]
    tuner.tunable = tuner.build([cpu_provider.problem(sizes=one) for one in sizes])
    tuner.timer.times_at = crossing
    return tuner


def winners(tuner: Tuner) -> dict[int, str]:
    header = tuner.header
    return {one.problem.m: operators(header, one)[0] for one in header.rankings}


def test_a_grid_is_measured_finer_where_another_kernel_wins(wide: Tuner) -> None:
    tuned = wide(grid=grid.Grid.STEPS)
    small, large = (8, 16, 24, 32), (40, 48, 64, 96, 128)
    expected = dict.fromkeys(small, "Cpu_1x1") | dict.fromkeys(large, "Cpu_16x16")
    assert winners(wide) == expected
    assert all(one.measured is not None for one in wide.header.rankings)
    assert [one.problem.m for one in wide.header.rankings if one.is_declared] == [8, 128]
    text = tuned_text(tuned_document(tuned))
    assert f"measured and not declared: {len(expected) - 2} problems" in text
    assert "| 8, 128 |" in render_description("some", [wide.header], "some")
    assert tuned.is_complete
    assert tuned.measured_now == len(expected)
    for one in wide.header.rankings:
        assert {"Cpu_1x1", "Cpu_16x16"} <= set(operators(wide.header, one))


@pytest.mark.slow
def test_a_grid_of_groups_counts_the_rows_of_all(tuner: Tuner) -> None:
    served = cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16)
    declared = [cpu_provider.problem_of(served, (m, 32, 64)) for m in (8, 128)]
    tuner.tunable = tuner.build(declared)
    tuner.timer.times_at = crossing
    assert tuner(grid=grid.Grid.STEPS).is_complete
    assert {m: name for m, name in winners(tuner).items() if m in (8, 24, 48, 128)} == {
        8: "Cpu_1x1", 24: "Cpu_1x1", 48: "Cpu_16x16", 128: "Cpu_16x16",
    }  # fmt: skip
    assert {one.problem.groups for one in tuner.header.rankings} == {4}


def test_the_same_command_has_nothing_left(wide: Tuner) -> None:
    wide(grid=grid.Grid.STEPS)
    content = wide.path.read_bytes()
    again = wide(grid=grid.Grid.STEPS)
    assert (again.measured_now, again.is_complete, wide.timer.prepared) == (0, True, [])
    assert wide.path.read_bytes() == content


def test_what_was_measured_stays_though_the_fastest_changed_since() -> None:
    """Passes with neighbours' winners may change which m are worth measuring."""
    declared = [at(16, "a"), at(64, "b"), at(16, "a", n=64)]
    outcomes = {at(m, n=n).problem.key: measured(a=1) for m, n in ((16, 32), (40, 32), (40, 64))}
    (kept,) = grid.measured_earlier(declared, outcomes)
    assert (kept.problem.m, kept.problem.n) == (40, 32)
    assert kept.kernels == (("a", None), ("b", None))
    assert grid.measured_earlier([*declared, kept], outcomes) == []


def test_a_grid_that_is_interrupted_goes_on(wide: Tuner) -> None:
    """At another place each time; what was measured is not measured again."""
    other = wide.beside("whole.nvgemm")
    whole = wide(output=other, grid=grid.Grid.STEPS)
    for after in (1, 4, 9):
        wide.interrupt(after, grid=grid.Grid.STEPS)
    wide(grid=grid.Grid.STEPS)
    assert winners(wide) == {
        one.problem.m: operators(header_of(other), one)[0] for one in header_of(other).rankings
    }
    assert len(whole.outcomes) == len(wide.header.rankings)


def test_what_was_not_measured_is_not_written(wide: Tuner) -> None:
    """The budget ends behind three problems: the declared ones come first."""
    tuned = wide(
        grid=grid.Grid.STEPS, budget_s=10.0, ticks=[0.0, 0.0, 0.0, 0.0, *itertools.repeat(99.0, 50)]
    )
    assert not tuned.is_complete
    assert sorted(winners(wide)) == [8, 16, 128]
    assert {16, 24} <= {Problem.parse(key).m for key in (*tuned.unmeasured, *tuned.outcomes)}


def test_without_the_option_no_m_is_added(wide: Tuner) -> None:
    wide()
    assert sorted(winners(wide)) == [8, 128]


def test_another_choice_of_problems_is_another_tuning(wide: Tuner) -> None:
    wide()
    with pytest.raises(Exception, match="on a grid of m"):
        wide(grid=grid.Grid.STEPS)


def test_a_tuned_grid_is_confirmed_by_another_gpu(wide: Tuner) -> None:
    """Tuned again, its problems are those of the bundle, each once."""
    from tuning_bench import bench

    wide(grid=grid.Grid.STEPS, on=replace(bench(wide.timer), uuid="GPU-1"))
    first = wide.path
    other = wide.beside("again.nvgemm")
    tuned = wide(first, other, grid=grid.Grid.STEPS, on=replace(bench(wide.timer), uuid="GPU-2"))
    assert len(tuned.header.rankings) == len(header_of(first).rankings)
    assert all(one.measured and one.measured.is_confirmed for one in tuned.header.rankings)
    assert [one.problem.m for one in tuned.header.rankings if one.is_declared] == [8, 128]


def test_serving_sizes_are_those_of_captured_graphs_and_steps_above() -> None:
    """Engines call the first, and any number of tokens above."""
    assert grid.SERVING[:5] == (1, 2, 4, 8, 12)
    assert {12, 24, 40, 248, 256, 272, 496, 512} <= {*grid.SERVING}
    assert {3, 6, 260, 264, 520, 640} & {*grid.SERVING} == set()
    above = [m for m in grid.SERVING if m >= 512]
    assert above[:5] == [512, 768, 1024, 1536, 2048]
    assert list(grid.SERVING) == sorted(set(grid.SERVING))


def test_serving_sizes_take_the_fastest_at_both_neighbours() -> None:
    declared = [at(16, *"abcde"), at(32, *"abcde"), at(16, "a", n=64)]
    outcomes = {
        declared[0].problem.key: measured(aten=1, a=10, b=30, c=11, d=11, spread=2),
        declared[1].problem.key: measured(b=10, a=30),
    }
    (between,) = grid.between_measured(declared, outcomes)
    assert between.problem.m == 24
    assert between.kernels == (("a", None), ("b", None), ("c", None))
    assert not between.is_declared
    (unknown,) = grid.between_measured(declared[:2], {})
    assert unknown.kernels == (("a", None), ("b", None))
    (half,) = grid.between_measured(declared[:2], {declared[1].problem.key: measured(aten=1)})
    assert half.kernels == (("a", None), ("b", None)), "without a kernel's time"


def test_serving_sizes_are_listed_before_anything_is_measured() -> None:
    declared = [at(m) for m in (4, 256, 16, 512, 8192)] + [at(2, n=64), at(8, n=64)]
    listed = grid.serving_between(ranking.problem for ranking in declared)
    assert sorted(listed) == sorted(
        ranking.problem for ranking in grid.between_measured(declared, {})
    )
    assert [problem.m for problem in listed if problem.n == 64] == [4]
    assert {ranking.problem for ranking in declared}.isdisjoint(listed)


def test_serving_sizes_are_measured_with_their_neighbours_winners(wide: Tuner) -> None:
    tuned = wide(grid=grid.Grid.SERVING)
    sizes = [8, 12, *range(16, 128, 8), 128]
    assert winners(wide) == {m: "Cpu_1x1" if m <= 33 else "Cpu_16x16" for m in sizes}
    assert [one.problem.m for one in wide.header.rankings if one.is_declared] == [8, 128]
    between = [one for one in wide.header.rankings if not one.is_declared]
    assert {tuple(operators(wide.header, one)) for one in between} == {
        ("Cpu_1x1", "Cpu_16x16"), ("Cpu_16x16", "Cpu_1x1"),
    }  # fmt: skip
    assert (tuned.is_complete, tuned.measured_now) == (True, len(sizes))
    again = wide(grid=grid.Grid.SERVING)
    assert (again.measured_now, again.is_complete) == (0, True)


def test_serving_sizes_that_are_interrupted_go_on(wide: Tuner) -> None:
    for after in (1, 2, 9):
        wide.interrupt(after, grid=grid.Grid.SERVING)
    left = wide(
        grid=grid.Grid.SERVING, budget_s=10.0, ticks=[0.0, 0.0, *itertools.repeat(99.0, 50)]
    )
    assert not left.is_complete
    assert wide(grid=grid.Grid.SERVING).is_complete
    assert len(winners(wide)) == 17


def test_confirmed_rankings_are_kept_if_wished(wide: Tuner) -> None:
    """They serve as neighbours, and the sizes between are measured, then confirmed in turn."""
    from tuning_bench import bench

    first, confirmed, serving, again = map(
        wide.beside, ("1.nvgemm", "2.nvgemm", "3.nvgemm", "4.nvgemm")
    )

    def tune(path: Path, output: Path, uuid: str, **options: Any) -> Tuned:
        return wide(path, output, on=replace(bench(wide.timer), uuid=uuid), **options)

    tune(wide.tunable, first, "GPU-1")
    kept = tune(first, wide.beside("0.nvgemm"), "GPU-2", skips_confirmed=True)
    assert kept.measured_now == 2, "one GPU's measurement is not kept"
    tune(first, confirmed, "GPU-2")
    nothing = tune(confirmed, wide.beside("5.nvgemm"), "GPU-3", skips_confirmed=True)
    assert (nothing.measured_now, nothing.is_complete) == (0, True)
    how = {"grid": grid.Grid.SERVING, "skips_confirmed": True}
    assert tune(confirmed, serving, "GPU-1", **how).measured_now == 15
    tuned = tune(serving, again, "GPU-2", **how)
    assert tuned.measured_now == 15
    rankings = header_of(again).rankings
    assert len(rankings) == 17
    assert all(one.measured and one.measured.is_confirmed for one in rankings)
    for name in ("torch", "cuda"):
        other = replace(
            bench(wide.timer), versions=replace(bench(wide.timer).versions, **{name: "9.9"})
        )
        then = wide(confirmed, wide.beside(f"{name}.nvgemm"), on=other, skips_confirmed=True)
        assert then.measured_now == 2, "ATen's time counts with another release only"
