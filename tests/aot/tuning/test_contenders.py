"""Operands of tuning, and what counts as a wrong result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvgemm_aot.build.linker import compiler
from nvgemm_aot.tuning import gpu
from nvgemm_aot.tuning.contenders import aten_run, triton_run
from nvgemm_aot.tuning.correctness import expect, is_like, reference
from nvgemm_aot.tuning.gpu import Blind, GpuState, slowdowns, watch_gpu
from nvgemm_aot.tuning.random_operands import MOST_SETS, Operands, make_sets
from nvgemm_runtime.gemm.problem import Layout, Op, Problem, Signature


def problem(key: str, k: int = 4096) -> Problem:
    signature = Signature.parse(key)
    batch = 2 if signature.op is Op.BMM else 1
    groups = 3 if signature.op is Op.GROUPED_MM else 1
    return Problem(signature=signature, m=48, n=64, k=k, batch=batch, groups=groups)


def operands(given: Problem) -> Operands:
    return make_sets(given, "cpu", seed=1, total_bytes=1)[0]


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
        found = run(*tensors)
        expected = expect(tensors, given.signature, terms=given.k)
        assert is_like(found, expected), key
        assert not is_like(found * 1.2, expected)


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
    monkeypatch.setattr(gpu, "_LIBRARY", str(library))
    watch = watch_gpu("GPU-1234")
    assert watch.driver == "580.95.05"
    assert watch.look() == GpuState(utilization_percent=percent, slowdowns=words)
    assert isinstance(watch_gpu("GPU-5678"), Blind)


def test_measuring_needs_nothing_of_the_compiler_side() -> None:
    """As where kernels run: without pydantic, yaml, the compiler and its model."""
    missing = ("pydantic", "yaml", "cutlass", "nvMatmulHeuristics", "wheel", "packaging.utils")
    script = (
        f"import sys\nfor name in {missing}: sys.modules[name] = None\n"
        "import nvgemm_aot.cli.main, nvgemm_aot.cli.tune, nvgemm_aot.tuning.gpu\n"
        "import nvgemm_aot.tuning.session\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
