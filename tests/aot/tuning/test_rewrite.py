"""New contents of bundles: tuned together, and pruned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cpu_provider
from nvgemm_aot.bundle.content import BundleContent, ProblemRanking, read_content
from nvgemm_aot.bundle.writer import encode_bundle, write_bundle
from nvgemm_aot.storage.cache import Cache
from nvgemm_aot.tuning.outcome import DISAGREEMENT
from nvgemm_aot.tuning.rewrite import prune
from nvgemm_aot.tuning.state import state_path
from nvgemm_runtime.bundle.format import Conditions, Measured, RankingSource
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.matching.device import device_facts
from nvgemm_runtime.matching.index import BundleView, Index, Match
from tuning_bench import (
    PROBLEMS,
    SLOW_FIRST,
    DictatedTimer,
    bench,
    build,
    doubts,
    header_of,
    operators,
    run,
)


def test_bundles_of_one_target_are_tuned_together(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    paths = [
        build(problems, tmp_path / name, kernel_cache, name=name)
        for name, problems in (("one", PROBLEMS[:2]), ("two", PROBLEMS[1:]))
    ]
    run(paths, tuned_path, bench(dictated))
    header = header_of(tuned_path)
    assert [ranking.problem for ranking in header.rankings] == sorted(PROBLEMS)
    assert len(header.kernels) == 3


@pytest.mark.parametrize("change", [{"toolchain": {"cc": "another"}}, {"device": "another"}])
def test_bundles_of_two_toolchains_or_device_profiles_are_not_tuned_together(
    tunable: Path, tmp_path: Path, tuned_path: Path, change: dict[str, Any]
) -> None:
    with Bundle(tunable) as bundle:
        data, _ = encode_bundle(replace(read_content(bundle), **change))
    other = tmp_path / "other.nvgemm"
    other.write_bytes(data)
    [what] = change
    with pytest.raises(TuningError, match=f"{other}: {what} is .*tune them one by one"):
        run([tunable, other], tuned_path, bench())


def test_what_one_bundle_measured_stays_until_it_is_measured_anew(
    tunable: Path, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    with Bundle(tunable) as bundle:
        content = read_content(bundle)
    cut = tuple(replace(ranking, kernels=ranking.kernels[:2]) for ranking in content.rankings)
    few, one = tmp_path / "few.nvgemm", tmp_path / "one.nvgemm"
    write_bundle(few, replace(content, rankings=cut))
    run(few, one, bench(dictated))
    before = header_of(one)
    for order in ([one, tunable], [tunable, one]):
        tuned = run(order, tuned_path, bench(dictated), budget_s=0.0)
        header = header_of(tuned_path)
        assert len(tuned.unmeasured) == 3
        assert len(header.kernels) == 3
        for ranking, former in zip(header.rankings, before.rankings):
            assert operators(header, ranking) == operators(before, former)
            assert ranking.measured == former.measured
            assert header.sources[ranking.source] == before.sources[former.source]
        tuned_path.unlink()
        state_path(tuned_path).unlink()
    run([one, tunable], tuned_path, bench(dictated))
    assert [len(ranking.kernels) for ranking in header_of(tuned_path).rankings] == [3, 3, 3]


OTHER_ORDER = {**SLOW_FIRST, "Cpu_16x16": [100.0], "Cpu_8x32": [400.0]}


@pytest.fixture
def two(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer
) -> tuple[tuple[Path, ...], DictatedTimer]:
    """Two measured bundles that contradict each other, and their clock."""
    paths = (tmp_path / "one.nvgemm", tmp_path / "two.nvgemm")
    for path, times in zip(paths, (SLOW_FIRST, OTHER_ORDER)):
        dictated.times = times
        run(tunable, path, bench(dictated))
    return paths, dictated


def changed(path: Path, change: Callable[[ProblemRanking], ProblemRanking]) -> Path:
    """A bundle with other rankings, beside it."""
    with Bundle(path) as bundle:
        content = read_content(bundle)
    other = path.with_name(f"changed-{path.name}")
    write_bundle(other, replace(content, rankings=tuple(map(change, content.rankings))))
    return other


def doubted(ranking: ProblemRanking) -> ProblemRanking:
    assert ranking.measured is not None
    return replace(ranking, measured=replace(ranking.measured, doubts=("it was busy",)))


def of_another_gpu(ranking: ProblemRanking) -> ProblemRanking:
    return replace(ranking, source=replace(ranking.source, gpu="another"))


def of_another_cuda(ranking: ProblemRanking) -> ProblemRanking:
    conditions = ranking.source.conditions
    assert conditions is not None
    return replace(
        ranking, source=replace(ranking.source, conditions=replace(conditions, cuda="99.0"))
    )


def first_operators(path: Path) -> set[str]:
    header = header_of(path)
    return {operators(header, ranking)[0] for ranking in header.rankings}


def test_measurements_that_contradict_each_other_make_one_uncertain_ranking(
    two: tuple[tuple[Path, ...], DictatedTimer], tuned_path: Path
) -> None:
    paths, timer = two
    run(paths, tuned_path, bench(timer), budget_s=0.0)
    assert first_operators(tuned_path) == {"Cpu_8x32"}
    assert all(
        DISAGREEMENT in text and "was fastest" in text for (text,) in doubts(tuned_path).values()
    )


def test_measurements_that_agree_stay_certain(
    tunable: Path, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    paths = [tmp_path / "one.nvgemm", tmp_path / "two.nvgemm"]
    for path in paths:
        run(tunable, path, bench(dictated))
    run(paths, tuned_path, bench(dictated), budget_s=0.0)
    assert set(doubts(tuned_path).values()) == {()}


@pytest.mark.parametrize("weaken", [doubted, of_another_gpu, of_another_cuda])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_measurement_that_says_less_here_gives_way(
    two: tuple[tuple[Path, ...], DictatedTimer],
    tuned_path: Path,
    weaken: Callable[[ProblemRanking], ProblemRanking],
    is_first: bool,
) -> None:
    (one, good), timer = two
    weak = changed(one, weaken)
    run([weak, good] if is_first else [good, weak], tuned_path, bench(timer), budget_s=0.0)
    assert first_operators(tuned_path) == {"Cpu_16x16"}


def test_an_uncertain_measurement_here_comes_before_another_gpus(
    two: tuple[tuple[Path, ...], DictatedTimer], tuned_path: Path
) -> None:
    (one, other), timer = two
    paths = [changed(one, of_another_gpu), changed(other, doubted)]
    run(paths, tuned_path, bench(timer), budget_s=0.0)
    assert first_operators(tuned_path) == {"Cpu_16x16"}
    assert set(doubts(tuned_path).values()) == {("it was busy",)}


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
