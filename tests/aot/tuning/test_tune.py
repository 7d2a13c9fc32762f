"""Tuning bundles: what is measured, thrown out, doubted, kept over interruptions, and written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import cpu_kernels
import cpu_provider
from nvgemm_aot.bundle.content import read_content
from nvgemm_aot.bundle.writer import encode_bundle, write_bundle
from nvgemm_aot.storage.cache import Cache
from nvgemm_aot.tuning.measuring import UNDECIDED
from nvgemm_aot.tuning.race import LEAST_SAMPLES
from nvgemm_aot.tuning.session import PROGRAM
from nvgemm_runtime.bundle.format import Scope, UnservedReason
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.gemm.types import Epilogue, ScaleRecipe
from synthetic_bundles import write_synthetic_bundle
from synthetic_facts import H200
from tuning_bench import (
    PROBLEMS,
    DictatedTimer,
    LazyWithTransposes,
    bench,
    build,
    header_of,
    operators,
    run,
)

FP8, FP4 = DType.FP8_E4M3, DType.FP4_E2M1


def test_addends_scales_and_groups_are_measured(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path
) -> None:
    served = {
        cpu_kernels.signature("tn", operand=DType.BF16, epilogue=Epilogue.BIAS): True,
        cpu_kernels.signature("tn", operand=DType.FP16, epilogue=Epilogue.BIAS_SILU): False,
        cpu_kernels.signature("tn", op=Op.BMM, epilogue=Epilogue.ADD): True,
        cpu_kernels.signature("tn", operand=FP8, scales=ScaleRecipe.FP32_TENSOR): True,
        cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16): True,
        cpu_kernels.signature("tn", operand=FP8, scales=ScaleRecipe.E8M0_1X32): False,
        cpu_kernels.signature("tn", operand=FP4, scales=ScaleRecipe.E8M0_1X32): False,
        cpu_kernels.signature("tn", operand=FP4, scales=ScaleRecipe.E4M3_1X16): False,
        cpu_kernels.signature("tn", operand=FP4, scales=ScaleRecipe.E8M0_1X16): False,
    }
    problems = [cpu_provider.problem_of(one) for one in served]
    tunable = build(problems, tmp_path / "b", kernel_cache)
    tuned = run(tunable, tuned_path, bench())
    assert {problem.key for problem in problems} == {*tuned.outcomes}
    for problem, has_aten in zip(problems, served.values()):
        outcome = tuned.outcomes[problem.key]
        assert (len(outcome.kernels), outcome.wrong) == (3, {})
        assert (outcome.aten is not None) == has_aten, problem.key


def test_a_problem_whose_kernels_cannot_be_launched_keeps_its_ranking(
    tunable: Path, tmp_path: Path, tuned_path: Path
) -> None:
    with Bundle(tunable) as bundle:
        content = read_content(bundle)
    later = "later:gemm(a,b,out)"
    given = tmp_path / "given.nvgemm"
    kernels = tuple(replace(kernel, calling_convention=later) for kernel in content.kernels)
    write_bundle(given, replace(content, kernels=kernels))
    tuned = run(given, tuned_path, bench())
    assert tuned.unmeasured.keys() == {problem.key for problem in PROBLEMS}
    assert all("none can be launched" in reason for reason in tuned.unmeasured.values())
    assert all(ranking.measured is None for ranking in header_of(tuned_path).rankings)


def test_what_no_kernel_is_left_for_is_named_with_the_reason(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path
) -> None:
    problems = (*PROBLEMS, cpu_provider.problem("tn"))
    tunable = build(problems, tmp_path / "b", kernel_cache, LazyWithTransposes())
    run(tunable, tuned_path, bench(), accepts_suspect=True)
    header = header_of(tuned_path)
    assert [ranking.problem for ranking in header.rankings] == list(PROBLEMS)
    ((problem, reason),) = header.unserved.items()
    assert problem == problems[-1]
    assert reason.text.startswith("all 3 kernels that were made for it were thrown out when tuned")
    assert f"{problems[-1].key}: " in reason.text
    assert "elements are wrong" in reason.text
    assert reason.scope is Scope.PROBLEM


def test_reasons_of_the_build_stay(tunable: Path, tmp_path: Path, tuned_path: Path) -> None:
    problem = cpu_provider.problem("nn")
    with Bundle(tunable) as bundle:
        content = read_content(bundle)
    given = tmp_path / "given.nvgemm"
    why = UnservedReason(text="none compiles", scope=Scope.SIGNATURE)
    write_bundle(given, replace(content, unserved={problem: why}))
    run([given, tunable], tuned_path, bench())
    assert header_of(tuned_path).unserved == {problem: why}
    other = tmp_path / "other.nvgemm"
    run([tunable, given], other, bench())
    assert header_of(other).unserved == {problem: why}


def test_everything_is_measured_by_the_clock_of_this_machine(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path
) -> None:
    problems = [
        cpu_provider.problem("tn"),
        cpu_provider.problem("nt", op=Op.BMM, operand=DType.BF16),
        cpu_provider.problem("tn", operand=DType.INT8),
        cpu_provider.problem("nn", op=Op.BMM, operand=DType.INT8),
    ]
    tunable = build(problems, tmp_path / "b", kernel_cache)
    before = header_of(tunable)
    tuned = run(tunable, tuned_path, bench())
    header = header_of(tuned_path)
    assert [kernel.id for kernel in header.kernels] == [kernel.id for kernel in before.kernels]
    assert header.build_key != before.build_key
    assert not tuned.unmeasured
    assert tuned.measured_now == 4
    doubts = [ranking.measured and ranking.measured.doubts for ranking in header.rankings]
    # Where the machine is busy, times vary too much to tell the fastest.
    assert set(doubts) <= {(), (UNDECIDED,)}
    assert tuned.is_complete == (set(doubts) == {()})
    has_aten = {
        ranking.problem: ranking.measured is not None and ranking.measured.aten is not None
        for ranking in header.rankings
    }
    assert has_aten == dict(zip(problems, (True, True, True, False))), "ATen has no bmm of int8"
    for ranking in header.rankings:
        assert len(ranking.kernels) == 3
        source = header.sources[ranking.source]
        assert (source.kind, source.by, source.gpu) == ("measurement", PROGRAM, "cpu")
        assert source.conditions is not None
        assert source.conditions.date == "2026-11-21"
        assert source.conditions.driver == "580.95.05"


def test_kernels_are_ranked_by_their_times_with_atens_beside(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    run(tunable, tuned_path, bench(dictated))
    header = header_of(tuned_path)
    assert len(header.rankings) == len(PROBLEMS)
    for ranking in header.rankings:
        assert operators(header, ranking) == ["Cpu_8x32", "Cpu_16x16", "Cpu_1x1"]
        assert [place.time_ns for place in ranking.kernels] == [200, 300, 500]
        assert ranking.measured is not None
        assert ranking.measured.spreads_ns == (0, 0, 0)
        assert ranking.measured.aten is not None
        assert ranking.measured.aten.time_ns == 250
        assert ranking.measured.triton is None
        assert ranking.measured.doubts == ()


def test_the_same_measurement_gives_the_same_bytes(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer
) -> None:
    paths = [tmp_path / name for name in ("one.nvgemm", "two.nvgemm")]
    for each in paths:
        run(tunable, each, bench(dictated))
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_what_is_told_apart_is_not_sampled_further(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    run(tunable, tuned_path, bench(dictated))
    assert len(dictated.sampled) == len(PROBLEMS) * 4 * LEAST_SAMPLES


def test_a_bundle_for_another_architecture_is_refused_before_anything_else(
    tmp_path: Path, tuned_path: Path
) -> None:
    tunable = write_synthetic_bundle(tmp_path / "b.nvgemm", "sm_100f")
    with pytest.raises(TuningError, match=r"sm_100f kernels do not run on NVIDIA H200, .* 9\.0"):
        run(tunable, tuned_path, bench(facts=H200))
    assert list(tmp_path.iterdir()) == [tunable]


def test_a_bundle_without_problems_is_refused(
    tunable: Path, tmp_path: Path, tuned_path: Path
) -> None:
    with Bundle(tunable) as bundle:
        data, _ = encode_bundle(replace(read_content(bundle), rankings=()))
    bare = tmp_path / "bare.nvgemm"
    bare.write_bytes(data)
    with pytest.raises(TuningError, match=f"{bare}: no problem is declared"):
        run(bare, tuned_path, bench())


# Choosing kernels.


def test_all_kernels_of_a_signature_are_measured_where_asked(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    few = build(PROBLEMS, tmp_path / "few", kernel_cache)
    with Bundle(few) as bundle:
        content = read_content(bundle)
    cut = tuple(replace(r, kernels=r.kernels[:1]) for r in content.rankings[:2])
    data, _ = encode_bundle(replace(content, rankings=(*cut, content.rankings[2])))
    few.write_bytes(data)
    run(few, tuned_path, bench(dictated))
    assert [len(ranking.kernels) for ranking in header_of(tuned_path).rankings] == [1, 1, 3]
    other = tmp_path / "all.nvgemm"
    run(few, other, bench(dictated), all_kernels=True)
    assert [len(ranking.kernels) for ranking in header_of(other).rankings] == [3, 3, 3]


def test_kernels_that_operands_are_not_aligned_for_are_not_measured(
    tunable: Path, kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    odd = cpu_provider.problem(sizes=(8, 33, 64))
    mixed = build([odd, PROBLEMS[0]], tmp_path / "b", kernel_cache)
    run(mixed, tuned_path, bench(dictated), all_kernels=True)
    header = header_of(tuned_path)
    by_n = {ranking.problem.n: operators(header, ranking) for ranking in header.rankings}
    assert by_n[33] == ["Cpu_1x1"]
    assert len(by_n[32]) == 3
