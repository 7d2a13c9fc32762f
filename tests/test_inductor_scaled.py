"""Products with scales, and those of groups, among Inductor's choices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import cpu_kernels
import cpu_provider
import recording_kernels
from inductor_session import InductorSession
from nvgemm_aot.cache import Cache
from nvgemm_aot.pipeline import BuiltBundle
from nvgemm_runtime.epilogue import Epilogue
from nvgemm_runtime.problem import DType, Op
from nvgemm_runtime.scales import ScaleRecipe

Tensor = torch.Tensor

M, N, K = 128, 32, 64
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def scaling(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Recording kernels with each kind of scales, and for groups."""
    kinds = [
        (ScaleRecipe.FP32_TENSOR, None, DType.FP8_E4M3),
        (ScaleRecipe.FP32_TENSOR, Epilogue.BIAS, DType.FP8_E4M3),
        (ScaleRecipe.FP32_ROW, None, DType.FP8_E4M3),
        (ScaleRecipe.E8M0_1X32, None, DType.FP8_E4M3),
        (ScaleRecipe.E8M0_1X32, None, DType.FP4_E2M1),
        (ScaleRecipe.E4M3_1X16, None, DType.FP4_E2M1),
    ]
    served = [
        cpu_kernels.signature("tn", operand=operand, scales=scales, epilogue=epilogue)
        for scales, epilogue, operand in kinds
    ]
    served.append(cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16))
    return recording_kernels.build_recording(
        [cpu_provider.problem_of(one, (M, N, K)) for one in served],
        tmp_path_factory.mktemp("scaling"),
        kernel_cache,
    )


@pytest.fixture(autouse=True)
def kernels_win(inductor: InductorSession, scaling: BuiltBundle) -> None:
    inductor.use(scaling.path)
    inductor.slow_down_aten()


@pytest.fixture
def events(inductor: InductorSession, tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """The GEMMs that came up."""
    path = tmp_path / "events"
    inductor.monkeypatch.setenv("NVGEMM_AOT_EXPLAIN", str(path))
    return lambda: [event for event in map(json.loads, path.open()) if event["event"] == "met"]


def fp8() -> tuple[Tensor, Tensor]:
    return torch.randn(M, K).to(FP8), torch.randn(N, K).to(FP8).t()


def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *bias: Tensor) -> Tensor:
    return torch._scaled_mm(
        a, b, scale_a, scale_b, *bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def exact(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *bias: Tensor) -> Tensor:
    """What `scaled` computes, with one rounding."""
    product = (a.float() @ b.float()) * scale_a * scale_b
    return (product + sum(one.float() for one in bias)).bfloat16()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_tensor(inductor: InductorSession, shape: tuple[int, ...]) -> None:
    arguments = *fp8(), torch.full(shape, 0.5), torch.full(shape, 3.0)
    compiled = inductor.compile(scaled, *arguments)
    torch.testing.assert_close(compiled.result, exact(*arguments))
    assert len(compiled.launched) == 1
    assert "nvgemm_aot_gemm(torch._scaled_mm" in compiled.code[0]
    assert "extern_kernels._scaled_mm(" not in compiled.code[0]


def test_a_bias_behind_the_scales(inductor: InductorSession) -> None:
    arguments = *fp8(), torch.tensor(0.5), torch.tensor(3.0), torch.randn(N).bfloat16()
    compiled = inductor.compile(scaled, *arguments)
    torch.testing.assert_close(compiled.result, exact(*arguments))
    assert len(compiled.launched) == 1


def test_a_scale_for_each_row(inductor: InductorSession) -> None:
    arguments = *fp8(), torch.rand(M, 1), torch.rand(1, N)
    computed = torch.compile  # torch 2.11 has no row-wise scales on a CPU: ATen is not asked
    assert computed
    stub_aten(inductor)
    compiled = inductor.compile(scaled, *arguments)
    torch.testing.assert_close(compiled.result, exact(*arguments))
    assert len(compiled.launched) == 1


def stub_aten(inductor: InductorSession) -> None:
    """ATen computes no such thing on a CPU: let its choice be timed all the same."""
    import time

    from torch._inductor.select_algorithm import extern_kernels

    def wait(*_: Any, out: Tensor, **__: Any) -> Tensor:
        time.sleep(0.02)
        return out

    inductor.monkeypatch.setattr(extern_kernels, "_scaled_mm", wait)
