"""Tuning several bundles together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.bundle.content import ProblemRanking, read_content
from nvgemm_aot.bundle.writer import encode_bundle, write_bundle
from nvgemm_aot.storage.cache import Cache
from nvgemm_aot.tuning.outcome import DISAGREEMENT
from nvgemm_aot.tuning.state import state_path
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError
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


def test_bundles_of_two_toolchains_are_not_tuned_together(
    tunable: Path, tmp_path: Path, tuned_path: Path
) -> None:
    with Bundle(tunable) as bundle:
        data, _ = encode_bundle(replace(read_content(bundle), toolchain={"cc": "another"}))
    other = tmp_path / "other.nvgemm"
    other.write_bytes(data)
    with pytest.raises(TuningError, match=f"{other}: toolchain is .*tune them one by one"):
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


def test_bundles_of_two_device_profiles_are_not_tuned_together(
    tunable: Path, tmp_path: Path, tuned_path: Path
) -> None:
    with Bundle(tunable) as bundle:
        content = read_content(bundle)
    other = tmp_path / "other.nvgemm"
    write_bundle(other, replace(content, device="another"))
    with pytest.raises(TuningError, match=f"{other}: device is another, that of .* is"):
        run([tunable, other], tuned_path, bench())


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
