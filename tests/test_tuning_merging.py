"""Tuning several bundles together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.bundle import encode_bundle, write_bundle
from nvgemm_aot.bundle_content import read_content
from nvgemm_aot.cache import Cache
from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.errors import TuningError
from tuning_bench import (
    PROBLEMS,
    DictatedTimer,
    bench,
    build,
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
