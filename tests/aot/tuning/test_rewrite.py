"""New contents of bundles: tuned together, and pruned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuner import Tuner

import cpu_provider
from nvgemm_aot.bundle.content import BundleContent, ProblemRanking, read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.rankings.agreement import DISAGREEMENT
from nvgemm_aot.rankings.pruning import keep_winners
from nvgemm_aot.tuning.rewrite import prune, read_together, tuned_content
from nvgemm_aot.tuning.state import state_path
from nvgemm_runtime.bundle.format import (
    Conditions,
    Measured,
    RankingSource,
    Scope,
    UnservedReason,
)
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.matching.device import device_facts
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView, Match
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


def of_another_cuda(ranking: ProblemRanking) -> ProblemRanking:
    assert ranking.source.conditions is not None
    conditions = replace(ranking.source.conditions, cuda="99.0")
    return replace(ranking, source=replace(ranking.source, conditions=conditions))


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


@pytest.mark.parametrize("is_first", [True, False])
def test_measurements_of_two_products_stay_beside_each_other(
    tuner: Tuner, two: tuple[Path, ...], is_first: bool
) -> None:
    paths = [rerank(tuner, two[0], of_another_gpu), two[1]]
    tuner(paths if is_first else paths[::-1], budget_s=0.0)
    header, here = tuner.header, bench().facts.name
    assert header.products == (("another", here) if is_first else (here, "another"))
    assert tuner.all_doubts == {()}
    for gpu, winner in (("another", "Cpu_8x32"), (here, "Cpu_16x16")):
        rankings = header.rankings_on(gpu)
        assert {header.gpu_of(one) for one in rankings} == {gpu}
        assert {operators(header, one)[0] for one in rankings} == {winner}


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


@pytest.fixture
def content(tunable: Path) -> BundleContent:
    with Bundle(tunable) as bundle:
        return read_content(bundle)


def measured(
    ranking: ProblemRanking, times: Mapping[str, tuple[int, int]], *doubts: str
) -> ProblemRanking:
    """A ranking with such times and spreads by kernel."""
    conditions = Conditions(driver="1", torch="2", cuda="13.0", date="2026-11-21")
    spreads_ns = tuple(spread for _, spread in times.values())
    return replace(
        ranking,
        source=RankingSource(kind="measurement", by="x", gpu="cpu", conditions=conditions),
        kernels=tuple((id_, time) for id_, (time, _) in times.items()),
        measured=Measured(spreads_ns=spreads_ns, aten=None, triton=None, doubts=doubts),
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
    facts = device_facts("cpu", 0)
    for names in (("one", "other"), ("other", "one")):
        with Bundle(tmp_path / names[0]) as a, Bundle(tmp_path / names[1]) as b:
            joined = read_together([a, b], facts)
        (found,) = (one for one in joined.rankings if one.problem == first.problem)
        assert found.is_declared == (declaring != "neither")


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
