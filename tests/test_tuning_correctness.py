"""Operands of tuning, and what counts as a wrong result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvgemm_aot.linker import compiler
from nvgemm_aot.tuning import gpu_state
from nvgemm_aot.tuning.contenders import aten_run, triton_run
from nvgemm_aot.tuning.correctness import find_fault, is_like, reference
from nvgemm_aot.tuning.gpu_state import Blind, GpuState, slowdowns, watch_gpu
from nvgemm_aot.tuning.operands import MOST_SETS, Operands, make_sets, poison
from nvgemm_runtime.operands import torch_dtype
from nvgemm_runtime.problem import DType, Layout, Op, Problem, Signature

SIGNATURES = [
    "mm/tn/bf16xbf16/fp32/bf16",
    "bmm/nt/bf16xbf16/fp32/bf16",
    "mm/nn/fp16xfp16/fp32/fp16",
    "mm/tn/fp16xfp16/fp32/fp32",
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16",
    "mm/tn/fp8_e4m3xfp8_e5m2/fp32/fp8_e4m3",
    "mm/tn/fp8_e5m2xfp8_e5m2/fp32/fp8_e5m2",
    "mm/tn/int8xint8/int32/int32",
    "mm/tn/int8xint8/int32/fp32",
    "mm/tn/int8xint8/int32/bf16",
    "mm/tn/int8xint8/int32/fp16",
    "mm/tn/int8xint8/int32/int8",
    "mm/tn/uint8xuint8/int32/int32",
    "mm/tn/uint8xuint8/int32/fp32",
    "mm/tn/uint8xuint8/int32/uint8",
    "mm/tn/bf16xbf16/fp32/bf16/bias",
    "mm/tn/fp16xfp16/fp32/fp16/bias_relu",
    "mm/nn/bf16xbf16/fp32/bf16/bias_gelu_tanh",
    "mm/tn/bf16xbf16/fp32/fp32/bias_silu",
    "bmm/tn/bf16xbf16/fp32/bf16/add",
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor",
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias",
    "grouped_mm/tn/bf16xbf16/fp32/bf16",
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32",
    "mm/nt/fp8_e5m2xfp8_e5m2/fp32/fp8_e4m3/e8m0_1x32",
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e5m2/e8m0_1x32",
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16",
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e4m3/e4m3_1x16",
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp16/e8m0_1x16",
]


def problem(key: str, k: int = 4096) -> Problem:
    signature = Signature.parse(key)
    batch = 2 if signature.op is Op.BMM else 1
    groups = 3 if signature.op is Op.GROUPED_MM else 1
    return Problem(signature=signature, m=48, n=64, k=k, batch=batch, groups=groups)


def operands(given: Problem) -> Operands:
    return make_sets(given, "cpu", seed=1, total_bytes=1)[0]


def rounded(wanted: torch.Tensor, out: DType) -> torch.Tensor:
    return wanted.to(torch_dtype(out))


@pytest.mark.parametrize("key", SIGNATURES)
@pytest.mark.parametrize("k", [16, 4096, 30000])
def test_a_correctly_rounded_result_is_right(key: str, k: int) -> None:
    given = problem(key, k)
    wanted = reference(operands(given), given.signature)
    result = rounded(wanted, given.signature.out)
    assert torch.isfinite(result.float()).all(), "sums fit into the output's type"
    assert find_fault(result, wanted, given.signature) is None
    assert result.double().std() > 0.4 or given.signature.out is DType.INT8


@pytest.mark.parametrize("key", SIGNATURES)
def test_one_element_that_was_not_written_is_noticed(key: str) -> None:
    given = problem(key)
    tensors = operands(given)
    out = tensors[2]
    wanted = reference(tensors, given.signature)
    wanted[..., 7, 9] = 5.0  # what 0xFF never means
    result = rounded(wanted, given.signature.out)
    poison(out)
    result[..., 7, 9] = out[..., 7, 9]
    fault = find_fault(result, wanted, given.signature)
    assert fault is not None
    assert f"{given.batch} of {result.numel()} elements" in fault


@pytest.mark.parametrize("key", SIGNATURES)
def test_a_sum_that_lacks_one_product_is_noticed(key: str) -> None:
    given = problem(key, 4096)
    a, b, *others = operands(given)
    wanted = reference([a, b, *others], given.signature)
    lacking = reference([a[..., :-1], b[..., :-1, :], *others], given.signature)
    is_coarse = given.signature.out in (DType.FP8_E4M3, DType.FP8_E5M2)
    fault = find_fault(rounded(lacking, given.signature.out), wanted, given.signature)
    assert (fault is not None) or is_coarse


@pytest.mark.parametrize("layout", [layout.value for layout in Layout])
def test_operands_have_the_problems_layout(layout: str) -> None:
    given = problem(f"mm/{layout}/bf16xbf16/fp32/bf16")
    a, b, out = operands(given)
    assert a.shape == (48, 4096)
    assert b.shape == (4096, 64)
    assert out.shape == (48, 64)
    assert (a.stride()[1] == 1) == given.signature.layout.a_row_major
    assert (b.stride()[1] == 1) == given.signature.layout.b_row_major


def test_sets_fill_the_space_that_a_cache_needs_and_differ() -> None:
    given = problem("mm/tn/bf16xbf16/fp32/bf16", 64)
    one = 2 * (48 * 64 + 64 * 64 + 48 * 64)
    sets = make_sets(given, "cpu", seed=1, total_bytes=5 * one)
    assert len(sets) == 5
    assert len({tensor.data_ptr() for each in sets for tensor in each}) == 15
    assert not torch.equal(sets[0][0], sets[1][0])
    assert len(make_sets(given, "cpu", seed=1, total_bytes=1)) == 2
    assert len(make_sets(given, "cpu", seed=1, total_bytes=10**9)) == MOST_SETS


def test_atens_operator_computes_the_same() -> None:
    for key in (
        "mm/nt/fp32xfp32/fp32/fp32",
        "bmm/tn/bf16xbf16/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/bf16/bias",
        "mm/tn/bf16xbf16/fp32/bf16/add",
        "bmm/tn/bf16xbf16/fp32/bf16/bias",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor/bias",
        "grouped_mm/tn/bf16xbf16/fp32/bf16",
    ):
        given = problem(key, 64)
        tensors = operands(given)
        run = aten_run(given.signature)
        assert run is not None
        found, wanted = run(*tensors), reference(tensors, given.signature)
        assert is_like(found, wanted), key
        assert not is_like(found * 1.2, wanted)


def test_aten_has_nothing_for_what_it_cannot_compute() -> None:
    for key in (
        "bmm/tn/int8xint8/int32/int32",
        "mm/tn/int8xint8/int32/int8",
        "bmm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/fp16",
        "mm/tn/bf16xbf16/fp32/bf16/bias_relu",
        "mm/tn/bf16xbf16/fp32/fp32/bias",
        "grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16",
    ):
        assert aten_run(Signature.parse(key)) is None
    for key in ("mm/tn/int8xint8/int32/int32", "mm/tn/bf16xbf16/fp32/bf16/bias"):
        assert triton_run(Signature.parse(key)) is None


CURVES = {
    "bias_relu": torch.nn.functional.relu,
    "bias_gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "bias_silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("epilogue", CURVES)
def test_activations_are_torchs(epilogue: str) -> None:
    given = problem(f"mm/tn/fp16xfp16/fp32/fp16/{epilogue}", 16)
    a, b, _, addend = operands(given)
    wanted = CURVES[epilogue](torch.addmm(addend.double(), a.double(), b.double()))
    torch.testing.assert_close(reference(operands(given), given.signature), wanted)


@pytest.mark.parametrize("place", [3, 4, 5])
def test_another_scale_or_addend_is_noticed(place: int) -> None:
    given = problem("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias")
    tensors = list(operands(given))
    wanted = reference(tensors, given.signature)
    tensors[place] = tensors[place].roll(1, -1 if place > 3 else 0) * 4
    other = rounded(reference(tensors, given.signature), given.signature.out)
    assert find_fault(other, wanted, given.signature) is not None


def test_groups_share_the_rows_evenly() -> None:
    given = problem("grouped_mm/tn/bf16xbf16/fp32/bf16", 64)
    a, b, out, offsets = operands(given)
    assert offsets.tolist() == [16, 32, 48]
    assert b.shape == (3, 64, 64)
    wanted = torch.cat([a[16 * g : 16 * g + 16].double() @ b[g].double() for g in range(3)])
    assert torch.equal(reference([a, b, out, offsets], given.signature), wanted)


def test_a_cap_on_power_is_no_slowdown() -> None:
    assert slowdowns(0x04 | 0x01) == ()
    assert slowdowns(0x04 | 0x40 | 0x80) == ("hardware thermal slowdown", "hardware power brake")


def test_a_machine_without_a_driver_is_measured_blindly() -> None:
    watch = watch_gpu("GPU-00000000-0000-0000-0000-000000000000")
    if not torch.cuda.is_available():
        assert isinstance(watch, Blind)
        assert watch.look() == GpuState(utilization_percent=None, slowdowns=None)


NVML = """
#include <string.h>
typedef struct { unsigned gpu, memory; } utilization_t;
static int device;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **found) {
  *found = &device;
  return strcmp(uuid, "GPU-1234") ? 6 : 0;  /* NVML_ERROR_NOT_FOUND */
}
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  if (length < 10) return 7;
  strcpy(version, "580.95.05");
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *asked, utilization_t *rates) {
  if (asked != &device) return 2;
  rates->gpu = 63; rates->memory = 7;
  return UTILIZATION_STATUS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *asked, unsigned long long *reasons) {
  if (asked != &device) return 2;
  *reasons = 0x100000044ull;
  return REASONS_STATUS;
}
"""


@pytest.mark.parametrize(
    ("status", "percent", "words"),
    [(0, 63, ("hardware thermal slowdown",)), (3, None, None)],  # NVML_ERROR_NOT_SUPPORTED
)
def test_reads_what_the_drivers_library_tells(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    percent: int | None,
    words: tuple[str, ...] | None,
) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    statuses = [f"-DUTILIZATION_STATUS={status}", f"-DREASONS_STATUS={status}"]
    command = [*compiler(), *statuses, "-shared", "-fPIC"]
    subprocess.run([*command, "-o", library, tmp_path / "nvml.c"], check=True)
    monkeypatch.setattr(gpu_state, "_LIBRARY", str(library))
    watch = watch_gpu("GPU-1234")
    assert watch.driver == "580.95.05"
    assert watch.look() == GpuState(utilization_percent=percent, slowdowns=words)
    assert isinstance(watch_gpu("GPU-5678"), Blind)


def test_measuring_needs_nothing_of_the_compiler_side() -> None:
    """As where kernels run: without pydantic, yaml, the compiler and its model."""
    missing = ("pydantic", "yaml", "cutlass", "nvMatmulHeuristics", "wheel", "packaging.utils")
    script = (
        f"import sys\nfor name in {missing}: sys.modules[name] = None\n"
        "import nvgemm_aot.cli, nvgemm_aot.render_tune, nvgemm_aot.tuning.bench\n"
        "import nvgemm_aot.tuning.tune\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
