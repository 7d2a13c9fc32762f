"""Bundles merged into one: which ranking, kernel, device and reason stays."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.bundle.parts.merge_bundles import Merged, merge_bundles
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.rankings.agreement import DISAGREEMENT, Relation
from nvgemm_aot.rankings.join_rankings import Superseded, joining
from nvgemm_aot.rankings.pruning import lost_service
from nvgemm_runtime.bundle.ranking_entries import CompileFailure, Scope, UnservedReason
from nvgemm_runtime.errors import BundleFormatError, PackagingError
from nvgemm_runtime.gemm.problem import Problem
from varied_content import (
    HERE,
    SIGNATURES,
    THERE,
    estimated,
    made_kernel,
    measured,
    measurement,
    varied_content,
)

PROBLEM = Problem(signature=SIGNATURES[0], m=16, n=4096, k=4096)
OTHER = replace(PROBLEM, m=32)
KERNELS = [made_kernel(SIGNATURES[0], number) for number in range(4)]
IDS = [kernel.id for kernel in KERNELS]
BASE = replace(
    varied_content(rows=1), kernels=(), rankings=(), unserved={}, device="H200", further_devices=()
)


def holding(*rankings: ProblemRanking, **change: object) -> BundleContent:
    ids = {id_ for ranking in rankings for id_, _ in ranking.kernels}
    kernels = tuple(kernel for kernel in KERNELS if kernel.id in ids)
    return replace(BASE, kernels=kernels, rankings=rankings, **change)  # type: ignore[arg-type]


@pytest.fixture
def merge(tmp_path: Path) -> Callable[..., tuple[Merged, list[Superseded]]]:
    """Merges contents in every order, which must give the same bytes."""

    def merged(*contents: BundleContent) -> tuple[Merged, list[Superseded]]:
        paths = []
        for number, content in enumerate(contents):
            paths.append(tmp_path / f"{number}.nvgemm")
            key = f"{number + 1:064x}"
            write_bundle(paths[-1], replace(content, build_key=key))
        made = []
        for order in itertools.permutations(paths):
            superseded: list[Superseded] = []
            join = functools.partial(joining, keeps_untimed=False, on_superseded=superseded.append)
            made.append((merge_bundles(order, join, generator="merger"), superseded))
        assert len({one.data for one, _ in made}) == 1
        return made[0]

    return merged


Merge = Callable[..., tuple[Merged, list[Superseded]]]


def only(merged: Merged, problem: Problem = PROBLEM) -> ProblemRanking:
    [ranking] = [one for one in merged.content.rankings if one.problem == problem]
    return ranking


def test_disjoint_bundles_give_everything_and_a_key_of_their_bytes(merge: Merge) -> None:
    merged, superseded = merge(
        holding(estimated(PROBLEM, IDS[:2])), holding(estimated(OTHER, IDS[1:3]))
    )
    assert not superseded
    assert {one.problem for one in merged.content.rankings} == {PROBLEM, OTHER}
    assert {kernel.id for kernel in merged.header.kernels} == set(IDS[:3])
    assert merged.header.build_key not in {f"{number:064x}" for number in (1, 2)}
    assert merged.header.generator == BASE.generator
    assert merged.left_out == []


def test_a_bundle_and_one_that_it_contains_are_the_larger_one(merge: Merge) -> None:
    large = holding(estimated(PROBLEM, IDS[:2]), estimated(OTHER, IDS[1:3]))
    merged, _ = merge(large, holding(estimated(PROBLEM, IDS[:2])))
    assert merged.equals is not None
    assert merged.equals.endswith("0.nvgemm")
    assert merged.header.build_key == f"{1:064x}"


def test_estimates_of_one_model_are_sorted_by_time(merge: Merge) -> None:
    times = [replace(estimated(PROBLEM, IDS[:2]), kernels=((IDS[0], 10), (IDS[1], 30)))]
    times += [replace(times[0], kernels=((IDS[2], 20),))]
    merged, _ = merge(*map(holding, times))
    assert only(merged).kernels == ((IDS[0], 10), (IDS[2], 20), (IDS[1], 30))


def test_estimates_of_two_models_do_not_compare(merge: Merge) -> None:
    one = estimated(PROBLEM, IDS[:2])
    other = estimated(PROBLEM, IDS[1:4])
    other = replace(other, source=replace(other.source, by="model 2.0"))
    merged, _ = merge(holding(one), holding(other))
    assert only(merged).kernels == (*other.kernels, (IDS[0], None))


def test_a_measurement_beats_an_estimate_and_the_kernels_left_out_are_listed(merge: Merge) -> None:
    timed = measured(PROBLEM, {IDS[0]: 100, IDS[1]: 200})
    merged, superseded = merge(holding(estimated(PROBLEM, IDS[1:4])), holding(timed))
    assert only(merged).kernels == timed.kernels
    assert only(merged).measured == timed.measured
    assert merged.left_out == sorted(IDS[2:])
    assert not superseded
    assert not lost_service(merged.contents, merged.content)


def test_losing_a_kernel_that_takes_more_operands_is_noticed(merge: Merge) -> None:
    narrow = replace(made_kernel(SIGNATURES[0], 9), alignment_bytes=4)
    content = replace(holding(), kernels=(narrow,), rankings=(estimated(PROBLEM, [narrow.id]),))
    merged, _ = merge(content, holding(measured(PROBLEM, {IDS[0]: 100})))
    assert lost_service(merged.contents, merged.content) == [narrow]


def test_two_gpus_that_agree_confirm_each_other(merge: Merge) -> None:
    times = {IDS[0]: 1000, IDS[1]: 2000}
    gpus = [
        measurement(uuid=uuid, date=date)
        for uuid, date in (("a", "2026-01-01"), ("b", "2026-01-02"))
    ]
    merged, superseded = merge(*(holding(measured(PROBLEM, times, gpu)) for gpu in gpus))
    ranking = only(merged)
    assert ranking.source == gpus[1]
    assert ranking.measured is not None
    assert ranking.measured.standing == "confirmed by 2 GPUs"
    [one] = superseded
    assert (one.relation, one.kept[:10], one.dropped[:10]) == (
        Relation.CONFIRMS, "2026-01-02", "2026-01-01",
    )  # fmt: skip


def test_three_gpus_that_agree_confirm_each_other(merge: Merge) -> None:
    times = {IDS[0]: 1000, IDS[1]: 2000}
    merged, superseded = merge(
        *(holding(measured(PROBLEM, times, measurement(uuid=uuid))) for uuid in "abc")
    )
    kept = only(merged).measured
    assert kept is not None
    assert kept.standing == "confirmed by 3 GPUs"
    assert len(superseded) == 2


def test_two_gpus_that_disagree_make_the_ranking_doubtful(merge: Merge) -> None:
    one = measured(PROBLEM, {IDS[0]: 1000, IDS[1]: 2000}, measurement(uuid="a"))
    other = measured(PROBLEM, {IDS[0]: 2000, IDS[1]: 1000}, measurement(uuid="b"))
    merged, [superseded] = merge(holding(one), holding(other))
    kept = only(merged).measured
    assert kept is not None
    assert kept.standing == "doubtful"
    assert kept.doubts[0].startswith(DISAGREEMENT)
    assert superseded.relation is Relation.CONTRADICTS


def test_more_evidence_beats_a_newer_day(merge: Merge) -> None:
    times = {IDS[0]: 1000, IDS[1]: 2000}
    old = measured(PROBLEM, times, measurement(date="2026-01-01"))
    assert old.measured is not None
    old = replace(old, measured=replace(old.measured, repeated=300))
    new = measured(PROBLEM, times, measurement(date="2026-02-02"))
    merged, [superseded] = merge(holding(old), holding(new))
    assert only(merged).measured == old.measured
    assert superseded.relation is Relation.NEITHER


def test_one_measurement_in_two_bundles_counts_once(merge: Merge) -> None:
    timed = measured(PROBLEM, {IDS[0]: 100, IDS[1]: 200})
    pruned = measured(PROBLEM, {IDS[0]: 100})
    merged, superseded = merge(holding(timed), holding(pruned, estimated(OTHER, IDS[:1])))
    assert not superseded
    assert only(merged).kernels == timed.kernels


def test_one_measurement_keeps_what_each_bundle_says_of_it(merge: Merge) -> None:
    timed = measured(PROBLEM, {IDS[0]: 100, IDS[1]: 200})
    assert timed.measured is not None
    confirmed = replace(timed, measured=replace(timed.measured, confirmed_by=("a" * 64, "b" * 64)))
    repeated = [
        replace(timed, measured=replace(timed.measured, repeated=seconds)) for seconds in (300, 600)
    ]
    merged, superseded = merge(*map(holding, (confirmed, *repeated)))
    assert not superseded
    kept = only(merged).measured
    assert kept is not None
    assert (kept.repeated, kept.confirmed_by) == (600, ("a" * 64, "b" * 64))


@pytest.mark.parametrize("are_all_timed", [True, False])
def test_evidence_for_one_measurement_that_cannot_be_kept_is_said(
    merge: Merge, are_all_timed: bool
) -> None:
    timed = measured(PROBLEM, {IDS[0]: 100, IDS[1]: 200})
    other = timed if are_all_timed else measured(PROBLEM, {IDS[0]: 100})
    evidence = (
        ({"confirmed_by": ("a" * 64, "b" * 64)}, {"confirmed_by": ("a" * 64, "c" * 64)})
        if are_all_timed
        else ({"repeated": 300}, {"repeated": 600})
    )
    rankings = []
    for ranking, stated in zip((timed, other), evidence):
        assert ranking.measured is not None
        rankings.append(replace(ranking, measured=replace(ranking.measured, **stated)))
    _, superseded = merge(*map(holding, rankings))
    assert len(superseded) == 1


def test_rankings_that_differ_in_whether_a_failure_is_transient_merge_in_any_order(
    merge: Merge,
) -> None:
    made = [
        replace(
            measured(PROBLEM, {IDS[0]: 100}),
            missing=(CompileFailure(operator="o", reason="killed", is_transient=is_transient),),
        )
        for is_transient in (False, True)
    ]
    merged, _ = merge(*map(holding, made))  # compares the bytes of both orders
    assert len(only(merged).missing) == 2


def test_products_stay_beside_each_other_and_the_device_lists_are_joined(merge: Merge) -> None:
    here = holding(measured(PROBLEM, {IDS[0]: 100}))
    there = holding(measured(PROBLEM, {IDS[1]: 100}, measurement(THERE)), device="H100")
    merged, superseded = merge(here, there)
    assert not superseded
    assert merged.header.devices == ("H100", "H200")
    assert merged.header.products == (THERE, HERE)
    firsts = [one.gpu for one in merged.content.rankings if not one.is_further]
    assert firsts == [THERE]


@pytest.mark.parametrize("served_by_another", [False, True])
def test_a_problem_that_another_bundle_serves_is_served(
    merge: Merge, served_by_another: bool
) -> None:
    reasons = [UnservedReason(text=text, scope=Scope.PROBLEM) for text in ("b", "a")]
    contents = [
        holding(estimated(OTHER, IDS[:1]), unserved={PROBLEM: reason}) for reason in reasons
    ]
    if served_by_another:
        undeclared = replace(measured(PROBLEM, {IDS[1]: 5}), is_declared=False)
        contents.append(holding(undeclared))
    merged, _ = merge(*contents)
    if served_by_another:
        assert merged.header.unserved == {}
        assert only(merged).is_declared
    else:
        assert merged.header.unserved == {PROBLEM: reasons[1]}


def test_a_failure_stays_unless_the_kernel_compiled_elsewhere(merge: Merge) -> None:
    failures = [
        CompileFailure(operator=name, reason="killed", is_transient=True)
        for name in (KERNELS[1].operator, "operator77")
    ]
    one = replace(estimated(PROBLEM, IDS[:1]), missing=tuple(failures))
    merged, _ = merge(holding(one), holding(estimated(PROBLEM, IDS[:2])))
    assert only(merged).missing == (failures[1],)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"toolchain": {"dsl": "4.9"}}, "toolchain"),
        ({"target": replace(BASE.target, arch="sm_100f")}, "target"),
    ],
)
def test_other_targets_and_toolchains_are_refused(
    merge: Merge, change: dict[str, object], what: str
) -> None:
    one = holding(estimated(PROBLEM, IDS[:1]))
    other = replace(one, **change)  # type: ignore[arg-type]
    with pytest.raises(PackagingError, match=f"{what} is .*, that of .* is .*; merge bundles of"):
        merge(one, other)


def test_a_damaged_bundle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.nvgemm"
    write_bundle(path, holding(estimated(PROBLEM, IDS[:1])))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    join = functools.partial(joining, keeps_untimed=False)
    with pytest.raises(BundleFormatError, match="body-digest"):
        merge_bundles([path], join, generator="merger")


def test_merging_a_bundle_with_itself_gives_it_back(tmp_path: Path) -> None:
    paths = [tmp_path / "one.nvgemm", tmp_path / "two.nvgemm"]
    for path in paths:
        write_bundle(path, varied_content())
    join = functools.partial(joining, keeps_untimed=False)
    assert merge_bundles(paths, join, generator="merger").data == paths[0].read_bytes()
