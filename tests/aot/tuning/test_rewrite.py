"""New contents of bundles: tuned together, and pruned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuner import Tuner, by_operator, measured

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.rankings.agreement import DISAGREEMENT
from nvgemm_aot.tuning.rewrite import read_together, tuned_content
from nvgemm_aot.tuning.state.journal import state_path
from nvgemm_runtime.bundle.ranking_entries import Scope, UnservedReason
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.matching.device import NO_CUDA
from tuning_bench import PROBLEMS, SLOW_FIRST, bench, header_of, operators


def test_bundles_of_one_target_are_tuned_together(tuner: Tuner) -> None:
    tuner([tuner.build(PROBLEMS[:2], name="one"), tuner.build(PROBLEMS[1:], name="two")])
    assert [ranking.problem for ranking in tuner.header.rankings] == sorted(PROBLEMS)
    assert len(tuner.kernels) == 3


@pytest.mark.parametrize("change", [{"toolchain": {"cc": "another"}}, {"device": "another"}])
def test_bundles_of_two_toolchains_or_device_profiles_are_not_tuned_together(
    tuner: Tuner, change: dict[str, Any]
) -> None:
    other = tuner.change(lambda content: replace(content, **change))
    [what] = change
    with pytest.raises(TuningError, match=f"{other}: {what} is .*tune them one by one"):
        tuner([tuner.tunable, other])


def test_what_one_bundle_measured_stays_until_it_is_measured_anew(tuner: Tuner) -> None:
    few = tuner.rerank(lambda ranking: replace(ranking, kernels=ranking.kernels[:2]))
    one = tuner.beside("one.nvgemm")
    tuner(few, one)
    before = header_of(one)
    for order in ([one, tuner.tunable], [tuner.tunable, one]):
        assert len(tuner(order, budget_s=0.0).unmeasured) == 3
        header = tuner.header
        assert len(header.kernels) == 3
        for ranking, former in zip(header.rankings, before.rankings):
            assert operators(header, ranking) == operators(before, former)
            assert ranking.measured == former.measured
            assert header.sources[ranking.source] == before.sources[former.source]
        tuner.path.unlink()
        state_path(tuner.path).unlink()
    tuner([one, tuner.tunable])
    assert list(map(len, tuner.orders)) == [3, 3, 3]


OTHER_ORDER = {**SLOW_FIRST, "Cpu_16x16": [100.0], "Cpu_8x32": [400.0]}


@pytest.fixture
def two(tuner: Tuner) -> tuple[Path, ...]:
    """Two measured bundles that contradict each other."""
    paths = (tuner.beside("one.nvgemm"), tuner.beside("two.nvgemm"))
    for path, times in zip(paths, (SLOW_FIRST, OTHER_ORDER)):
        tuner.timer.times = times
        tuner(output=path)
    return paths


def doubted(ranking: ProblemRanking) -> ProblemRanking:
    assert ranking.measured is not None
    return replace(ranking, measured=replace(ranking.measured, doubts=("it was busy",)))


def of_another_gpu(ranking: ProblemRanking) -> ProblemRanking:
    return replace(ranking, source=replace(ranking.source, gpu="another"))


def with_cuda(ranking: ProblemRanking, cuda: str) -> ProblemRanking:
    assert ranking.source.conditions is not None
    conditions = replace(ranking.source.conditions, cuda=cuda)
    return replace(ranking, source=replace(ranking.source, conditions=conditions))


def of_another_cuda(ranking: ProblemRanking) -> ProblemRanking:
    return with_cuda(ranking, "99.0")


def rerank(tuner: Tuner, path: Path, change: Callable[[ProblemRanking], ProblemRanking]) -> Path:
    changed = replace(tuner, tunable=path).rerank(change)
    return changed.rename(path.with_name(f"changed-{path.name}"))


def test_measurements_that_contradict_each_other_make_one_uncertain_ranking(
    tuner: Tuner, two: tuple[Path, ...]
) -> None:
    tuner(two, budget_s=0.0)
    assert {order[0] for order in tuner.orders} == {"Cpu_8x32"}
    assert all(DISAGREEMENT in said and "was fastest" in said for (said,) in tuner.all_doubts)


def test_measurements_that_agree_stay_certain(tuner: Tuner) -> None:
    paths = [tuner.beside("one.nvgemm"), tuner.beside("two.nvgemm")]
    for path in paths:
        tuner(output=path)
    tuner(paths, budget_s=0.0)
    assert tuner.all_doubts == {()}


@pytest.mark.parametrize(
    ("evidence", "less"),
    [
        ({"repeated": 120}, {}),
        ({"confirmed_by": ("a" * 64, "b" * 64)}, {}),
        ({"confirmed_by": ("a" * 64, "b" * 64)}, {"repeated": 120}),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_of_measurements_that_agree_the_one_with_most_evidence_stays(
    tuner: Tuner, evidence: dict[str, Any], less: dict[str, Any], is_first: bool
) -> None:
    def give(what: dict[str, Any]) -> Callable[[ProblemRanking], ProblemRanking]:
        def make(ranking: ProblemRanking) -> ProblemRanking:
            assert ranking.measured is not None
            return replace(ranking, measured=replace(ranking.measured, **what))

        return make

    once = tuner.beside("once.nvgemm")
    tuner(output=once)
    paths = [
        rerank(tuner, once, give(what)).rename(tuner.beside(name))
        for what, name in ((less, "less.nvgemm"), (evidence, "more.nvgemm"))
    ]
    tuner(paths if is_first else paths[::-1], budget_s=0.0)
    found = [ranking.measured for ranking in tuner.header.rankings]
    for name, value in evidence.items():
        assert {getattr(one, name) for one in found} == {value}


@pytest.mark.parametrize("weaken", [doubted, of_another_cuda])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_measurement_that_says_less_here_gives_way(
    tuner: Tuner,
    two: tuple[Path, ...],
    weaken: Callable[[ProblemRanking], ProblemRanking],
    is_first: bool,
) -> None:
    paths = [rerank(tuner, two[0], weaken), two[1]]
    tuner(paths if is_first else paths[::-1], budget_s=0.0)
    assert {order[0] for order in tuner.orders} == {"Cpu_16x16"}


@pytest.mark.parametrize("cuda", [NO_CUDA, "13.0"])
def test_on_a_cpu_measurements_with_any_build_of_torch_count(
    tuner: Tuner, two: tuple[Path, ...], cuda: str
) -> None:
    paths = [
        rerank(tuner, two[0], lambda ranking: with_cuda(doubted(ranking), cuda)),
        rerank(tuner, two[1], lambda ranking: with_cuda(ranking, cuda)),
    ]
    tuner(paths, budget_s=0.0)
    assert {order[0] for order in tuner.orders} == {"Cpu_16x16"}


@pytest.mark.parametrize("is_first", [True, False])
def test_measurements_of_two_products_stay_beside_each_other(
    tuner: Tuner, two: tuple[Path, ...], is_first: bool
) -> None:
    paths = [rerank(tuner, two[0], of_another_gpu), two[1]]
    tuner(paths if is_first else paths[::-1], budget_s=0.0)
    header, here = tuner.header, bench().facts.name
    assert header.products == ("another", here)
    assert tuner.all_doubts == {()}
    for gpu, winner in (("another", "Cpu_8x32"), (here, "Cpu_16x16")):
        rankings = header.rankings_on(gpu)
        assert {header.gpu_of(one) for one in rankings} == {gpu}
        assert {operators(header, one)[0] for one in rankings} == {winner}


@pytest.mark.parametrize(
    ("agreed", "standing"),
    [
        ({"confirmed_by": ("a" * 64, "b" * 64)}, "confirmed by 2 GPUs"),
        ({"repeated": 300}, "repeated"),
    ],
)
def test_what_agreed_on_a_kernel_that_is_thrown_out_counts_no_more(
    content: BundleContent, agreed: dict[str, Any], standing: str
) -> None:
    ids = by_operator(content)
    times = {ids["Cpu_1x1"]: (100, 1), ids["Cpu_8x32"]: (200, 1), ids["Cpu_16x16"]: (300, 1)}
    made = measured(content.rankings[0], times)
    assert made.measured is not None
    content = replace(content, rankings=(replace(made, measured=replace(made.measured, **agreed)),))
    for operator, expected in (("Cpu_1x1", "measured once"), ("Cpu_8x32", standing)):
        broken = {ids[operator]: "it hangs"}
        tuned = tuned_content(content, {}, broken=broken, program="p", gpu="cpu")
        left = tuned.rankings[0].measured
        assert left is not None
        assert (left.standing, left.doubts, len(left.spreads_ns)) == (expected, (), 2)


@pytest.mark.parametrize("is_declared", [False, True])
def test_what_is_not_declared_and_has_no_kernel_left_is_left_out(
    content: BundleContent, is_declared: bool
) -> None:
    ids = by_operator(content)
    first, second = content.rankings[:2]
    only = replace(measured(first, {ids["Cpu_1x1"]: (100, 1)}), is_declared=is_declared)
    content = replace(content, rankings=(only, second))
    tuned = tuned_content(content, {}, broken={ids["Cpu_1x1"]: "it hangs"}, program="p", gpu="cpu")
    assert [one.problem for one in tuned.rankings] == [second.problem]
    assert list(tuned.unserved) == ([first.problem] if is_declared else [])


@pytest.mark.parametrize("declaring", ["ranked", "unserved", "neither"])
def test_what_one_of_several_bundles_declares_is_declared(
    content: BundleContent, tmp_path: Path, declaring: str
) -> None:
    """Whichever of them is read first."""
    ids = by_operator(content)
    first, second = content.rankings[:2]
    between = replace(measured(first, {ids["Cpu_1x1"]: (100, 1)}), is_declared=False)
    reason = UnservedReason(text="no", scope=Scope.PROBLEM)
    contents = {
        "one": replace(content, rankings=(between, second)),
        "other": replace(
            content,
            rankings=(first, second) if declaring == "ranked" else (second,),
            unserved={first.problem: reason} if declaring == "unserved" else {},
        ),
    }
    for name, made in contents.items():
        write_bundle(tmp_path / name, made)
    for names in (("one", "other"), ("other", "one")):
        with Bundle(tmp_path / names[0]) as a, Bundle(tmp_path / names[1]) as b:
            joined = read_together([a, b])
        (found,) = (one for one in joined.rankings if one.problem == first.problem)
        assert found.is_declared == (declaring != "neither")
