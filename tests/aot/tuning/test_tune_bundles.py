"""Tuning bundles: what is measured, and what is written of it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tuner import Tuner

import cpu_kernels
import cpu_provider
from nvgemm_aot.bundle.content import BundleContent
from nvgemm_aot.tuning.measuring.problem_times import UNDECIDED
from nvgemm_aot.tuning.measuring.race import LEAST_SAMPLES
from nvgemm_aot.tuning.tune_bundles import PROGRAM
from nvgemm_runtime.bundle.ranking_entries import APART, Scope, UnservedReason
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.gemm.epilogues import ADD, BIAS, Epilogue
from nvgemm_runtime.gemm.problem import DType, Op, Signature
from nvgemm_runtime.gemm.types import ScaleRecipe
from synthetic_bundles import write_synthetic_bundle
from synthetic_facts import H200
from tuning_bench import PROBLEMS, LazyWithTransposes, bench, header_of, operators

FP8, FP4 = DType.FP8_E4M3, DType.FP4_E2M1


def grouped(layout: str, epilogue: Epilogue) -> Signature:
    return cpu_kernels.signature(layout, op=Op.GROUPED_MM, operand=DType.BF16, epilogue=epilogue)


@pytest.mark.slow
def test_addends_scales_and_groups_are_measured(tuner: Tuner) -> None:
    served = {
        cpu_kernels.signature("tn", operand=DType.BF16, epilogue=BIAS): True,
        cpu_kernels.signature(
            "tn", operand=DType.FP16, epilogue=Epilogue.parse("bias_silu")
        ): False,
        cpu_kernels.signature("tn", op=Op.BMM, epilogue=ADD): True,
        cpu_kernels.signature("tn", operand=FP8, scales=ScaleRecipe.FP32_TENSOR): True,
        cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16): True,
        grouped("tn", Epilogue.parse("swiglu_oai_halves_kept")): False,
        grouped("tt", Epilogue.parse("swiglu_oai_halves_gradient")): False,
        cpu_kernels.signature("tn", operand=FP8, scales=ScaleRecipe.E8M0_1X32): False,
        cpu_kernels.signature("tn", operand=FP4, scales=ScaleRecipe.E8M0_1X32): False,
        cpu_kernels.signature("tn", operand=FP4, scales=ScaleRecipe.E4M3_1X16): False,
        cpu_kernels.signature("tn", operand=FP4, scales=ScaleRecipe.E8M0_1X16): False,
    }
    problems = [cpu_provider.problem_of(one) for one in served]
    tuned = tuner(tuner.build(problems), on=bench())
    assert {problem.key for problem in problems} == {*tuned.outcomes}
    for problem, has_aten in zip(problems, served.values()):
        outcome = tuned.outcomes[problem.key]
        assert (len(outcome.kernels), outcome.wrong) == (3, {})
        assert (outcome.aten is not None) == has_aten, problem.key


def test_a_problem_whose_kernels_cannot_be_launched_keeps_its_ranking(tuner: Tuner) -> None:
    later = tuner.change(
        lambda content: replace(
            content,
            kernels=tuple(
                replace(kernel, calling_convention="later:gemm(a,b,out)")
                for kernel in content.kernels
            ),
        )
    )
    tuned = tuner(later)
    assert tuned.unmeasured.keys() == {problem.key for problem in PROBLEMS}
    assert all("none can be launched" in reason for reason in tuned.unmeasured.values())
    assert all(ranking.measured is None for ranking in tuner.header.rankings)


def test_what_no_kernel_is_left_for_is_named_with_the_reason(tuner: Tuner) -> None:
    problems = (*PROBLEMS, cpu_provider.problem("tn"))
    tuner(tuner.build(problems, LazyWithTransposes()), accepts_suspect=True)
    assert [ranking.problem for ranking in tuner.header.rankings] == list(PROBLEMS)
    ((problem, reason),) = tuner.header.unserved.items()
    assert problem == problems[-1]
    assert reason.text.startswith("dropped when tuned: all of 3 kernels made for it, kernel ")
    assert f"{problem.key}: " in reason.text
    assert "elements are wrong" in reason.text
    assert reason.scope is Scope.PROBLEM


def test_reasons_of_the_build_stay(tuner: Tuner) -> None:
    unserved = {cpu_provider.problem("nn"): UnservedReason(text="no", scope=Scope.SIGNATURE)}
    given = tuner.change(lambda content: replace(content, unserved=unserved))
    for name, paths in (("a", [given, tuner.tunable]), ("b", [tuner.tunable, given])):
        output = tuner.beside(f"{name}.nvgemm")
        tuner(paths, output)
        assert header_of(output).unserved == unserved


def test_everything_is_measured_by_the_clock_of_this_machine(tuner: Tuner) -> None:
    problems = [
        cpu_provider.problem("tn"),
        cpu_provider.problem("nt", op=Op.BMM, operand=DType.BF16),
        cpu_provider.problem("tn", operand=DType.INT8),
        cpu_provider.problem("nn", op=Op.BMM, operand=DType.INT8),
    ]
    tunable = tuner.build(problems)
    before = header_of(tunable)
    tuned = tuner(tunable, on=bench())
    header = tuner.header
    assert [kernel.id for kernel in header.kernels] == [kernel.id for kernel in before.kernels]
    assert header.build_key != before.build_key
    assert (tuned.unmeasured, tuned.measured_now) == ({}, 4)
    # Where the machine is busy, times vary too much to tell the fastest.
    doubts = {ranking.measured and ranking.measured.doubts for ranking in header.rankings}
    assert doubts <= {(), (UNDECIDED,)}
    assert tuned.is_complete == (doubts == {()})
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
        assert (source.conditions.date, source.conditions.driver) == ("2026-11-21", "580.95.05")


def test_kernels_are_ranked_by_their_times_with_atens_beside(tuner: Tuner) -> None:
    tuner()
    assert tuner.orders == [["Cpu_8x32", "Cpu_16x16", "Cpu_1x1"]] * len(PROBLEMS)
    for ranking in tuner.header.rankings:
        assert [place.time_ns for place in ranking.kernels] == [200, 300, 500]
        measured = ranking.measured
        assert measured is not None
        assert measured.aten is not None
        assert (measured.spreads_ns, measured.aten.time_ns) == ((0, 0, 0), 250)
        assert (measured.triton, measured.doubts) == (None, ())
    assert len(tuner.timer.sampled) == len(PROBLEMS) * 4 * LEAST_SAMPLES, "no more than needed"


def test_the_same_measurement_gives_the_same_bytes(tuner: Tuner) -> None:
    paths = [tuner.beside(name) for name in ("one.nvgemm", "two.nvgemm")]
    for path in paths:
        tuner(output=path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_bundle_for_another_architecture_is_refused_before_anything_else(
    tuner: Tuner, tmp_path: Path
) -> None:
    tunable = write_synthetic_bundle(tmp_path / "b.nvgemm", "sm_100f")
    with pytest.raises(TuningError, match=r"sm_100f kernels do not run on NVIDIA H200, .* 9\.0"):
        tuner(tunable, on=bench(facts=H200))
    assert list(tmp_path.iterdir()) == [tunable]


def test_a_bundle_without_problems_is_refused(tuner: Tuner) -> None:
    bare = tuner.change(lambda content: replace(content, rankings=()))
    with pytest.raises(TuningError, match=f"{bare}: no problem is declared"):
        tuner(bare)


def test_all_kernels_of_a_signature_are_measured_where_asked(tuner: Tuner) -> None:
    few = tuner.rerank(
        lambda one: one if one.problem == PROBLEMS[2] else replace(one, kernels=one.kernels[:1])
    )
    tuner(few)
    assert list(map(len, tuner.orders)) == [1, 1, 3]
    other = tuner.beside("all.nvgemm")
    tuner(few, other, all_kernels=True)
    assert [len(ranking.kernels) for ranking in header_of(other).rankings] == [3, 3, 3]


def test_kernels_that_operands_are_not_aligned_for_are_not_measured(tuner: Tuner) -> None:
    odd = cpu_provider.problem(sizes=(8, 33, 64))
    tuner(tuner.build([odd, PROBLEMS[0]]), all_kernels=True)
    assert sorted(tuner.orders, key=len)[0] == ["Cpu_1x1"]
    assert sorted(map(len, tuner.orders)) == [1, 3]


def test_measuring_needs_nothing_of_the_compiler_side() -> None:
    """As where kernels run: without pydantic, yaml, the compiler and its model."""
    missing = ("pydantic", "yaml", "cutlass", "nvMatmulHeuristics", "wheel", "packaging.utils")
    script = (
        f"import sys\nfor name in {missing}: sys.modules[name] = None\n"
        "import nvgemm_aot.cli.main, nvgemm_aot.cli.rankings.tune\n"
        "import nvgemm_aot.tuning.measuring.gpu\n"
        "import nvgemm_aot.tuning.tune_bundles\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_launches_are_timed_apart_and_back_to_back_beside(tuner: Tuner) -> None:
    beside = {"Cpu_8x32": [190.0], "aten": [180.0], "Cpu_16x16": [150.0], "Cpu_1x1": [1.0]}
    tuner.timer.times_back_to_back = beside
    tuned = tuner()
    assert tuner.orders == [["Cpu_8x32", "Cpu_16x16", "Cpu_1x1"]] * len(PROBLEMS), "apart decides"
    ids = {kernel.operator: kernel.id for kernel in tuner.header.kernels}
    for outcome in tuned.outcomes.values():
        found = {name: timing.time_ns for name, timing in outcome.back_to_back.items()}
        assert found == {ids["Cpu_8x32"]: 190, "aten": 180}, "the first and torch's own"
    (source,) = tuner.header.sources
    assert source.conditions is not None
    assert source.conditions.launches == APART


def test_the_gpu_is_recorded_by_a_digest_of_its_uuid(tuner: Tuner) -> None:
    tuner(on=replace(bench(tuner.timer), uuid="GPU-1234"))
    (source,) = tuner.header.sources
    assert source.conditions is not None
    assert source.conditions.gpu_sha256 == hashlib.sha256(b"GPU-1234").hexdigest()
    assert b"GPU-1234" not in tuner.path.read_bytes()


def test_winners_of_neighbouring_m_are_measured_too_until_nobody_lacks_one(tuner: Tuner) -> None:
    by_m = {8: "Cpu_1x1", 16: "Cpu_16x16", 32: "Cpu_8x32"}
    ids = {kernel.operator: kernel.id for kernel in header_of(tuner.tunable).kernels}

    def one_each(content: BundleContent) -> BundleContent:
        return replace(
            content,
            rankings=tuple(
                replace(one, kernels=((ids[by_m[one.problem.m]], None),))
                for one in content.rankings
            ),
        )

    given = tuner.change(one_each)
    tuner(given)
    assert tuner.orders == [["Cpu_1x1"], ["Cpu_16x16"], ["Cpu_8x32"]]
    other = tuner.beside("neighbours.nvgemm")
    tuned = tuner(given, other, neighbours=True)
    # By `SLOW_FIRST`, Cpu_8x32 is faster than Cpu_16x16, and that than Cpu_1x1: m 16 gets it from
    # m 32, and m 8 from m 16 in a further pass.
    header = header_of(other)
    assert [operators(header, ranking) for ranking in header.rankings] == [
        ["Cpu_8x32", "Cpu_16x16", "Cpu_1x1"],
        ["Cpu_8x32", "Cpu_16x16", "Cpu_1x1"],
        ["Cpu_8x32", "Cpu_16x16"],
    ]
    assert tuned.is_complete
    again = tuner(given, other, neighbours=True)
    assert (again.measured_now, tuner.timer.prepared) == (0, [])
