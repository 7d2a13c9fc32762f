"""Real kernels for Blackwell with which emulation found or settled something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nvgemm_aot.emulator.checking.child_processes import check_kernels
from nvgemm_aot.emulator.checking.kernel_check import KernelReport, Verdict
from nvgemm_aot.emulator.checking.manifest_tasks import PlannedKernel, prepare
from nvgemm_aot.pipeline.compiler import make_tasks
from nvgemm_aot.providers import Candidate, load_provider
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.problem import Signature

pytestmark = pytest.mark.slow

Emulate = Callable[..., KernelReport]


@pytest.fixture
def emulate(kernel_cache: Cache) -> Emulate:
    """Compiles the first kernel of a kind, and checks it for all or the first small problems."""

    def run(
        provider: str,
        signature: str,
        kind: Callable[[Candidate], bool],
        *,
        problems: int | None = None,
    ) -> KernelReport:
        source, target = load_provider(provider), build_target("sm_100f")
        found = source.enumerate(Signature.parse(signature), target).candidates
        (task,) = make_tasks([next(filter(kind, found))], target, source)
        prepared = prepare([PlannedKernel(task=task)], kernel_cache, jobs=1, seeds=(0, 1, 2))
        assert not prepared.failures
        (kernel,) = prepared.tasks
        kernel = replace(kernel, problems=kernel.problems[:problems])
        ((_, report),) = check_kernels([kernel], jobs=1)
        return report

    return run


def assert_right(report: KernelReport) -> None:
    assert {run.reason for run in report.runs} == {None}


@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_tgv_frees_tensor_memory_behind_its_readers(emulate: Emulate, op: str) -> None:
    def is_tgv(candidate: Candidate) -> bool:
        return "TgvGemm" in candidate.operator

    report = emulate("cutlass_operators", f"{op}/tn/bf16xbf16/fp32/bf16", is_tgv)
    assert_right(report)


@pytest.mark.parametrize(
    "signature",
    ["mm/tn/bf16xbf16/fp32/bf16/bias", "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias"],
)
def test_rows_and_columns_are_broadcast_to_tiles_of_64_rows(
    emulate: Emulate, signature: str
) -> None:
    def is_small(candidate: Candidate) -> bool:
        return candidate.design.tile[:2] == (64, 64) and candidate.design.cluster == (2, 1)

    assert_right(emulate("cutlass_operators", signature, is_small))


@pytest.mark.parametrize("blocks", [1, 2])
def test_gathered_rows_are_fenced_for_the_tensor_cores(emulate: Emulate, blocks: int) -> None:
    def is_pair(candidate: Candidate) -> bool:
        return candidate.design.ctas_per_tile == blocks

    signature = "gathered_grouped_mm/tn/bf16xbf16/fp32/bf16"
    assert_right(emulate("quack", signature, is_pair))


def test_the_unwritten_end_of_a_bias_reaches_no_result(emulate: Emulate) -> None:
    """Threads read the bias's whole tile, of which only columns of the result were copied."""

    def is_any(candidate: Candidate) -> bool:
        return True

    signature = "mm/tn/bf16xbf16/fp32/bf16/swiglu_oai_halves"
    report = emulate("quack", signature, is_any, problems=1)
    assert {run.verdict for run in report.runs} == {Verdict.SUSPECT}
    for run in report.runs:
        assert run.reason is not None
        assert "(ld.shared." in run.reason
        assert run.reason.endswith(
            "that nobody has written; with other contents there, the result is the same"
        )
