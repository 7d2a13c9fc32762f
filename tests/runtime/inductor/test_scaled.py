"""Products with scales, and those of groups, among Inductor's choices."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from microscaling import dequantise, quantise, swizzle
from torch._inductor.select_algorithm import extern_kernels
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

import cpu_kernels
import cpu_provider
import recording_kernels
from inductor_session import InductorSession
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import BIAS
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.gemm.types import ScaleRecipe
from nvgemm_runtime.recording.recorder import Recorder
from nvgemm_runtime.settings import DEBUG_VARIABLE

Tensor = torch.Tensor

M, N, K = 128, 32, 64
FP8 = torch.float8_e4m3fn
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.fixture(scope="module")
def scaling(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Recording kernels with each kind of scales, and for groups."""
    kinds = [
        (ScaleRecipe.FP32_TENSOR, None, DType.FP8_E4M3),
        (ScaleRecipe.FP32_TENSOR, BIAS, DType.FP8_E4M3),
        (ScaleRecipe.FP32_ROW, None, DType.FP8_E4M3),
        (ScaleRecipe.E8M0_1X32, None, DType.FP8_E4M3),
        (ScaleRecipe.E8M0_1X32, None, DType.FP4_E2M1),
        (ScaleRecipe.E4M3_1X16, None, DType.FP4_E2M1),
    ]
    served = [
        cpu_kernels.signature("tn", operand=operand, scales=scales, epilogue=epilogue)
        for scales, epilogue, operand in kinds
    ]
    served += [
        cpu_kernels.signature("tn", operand=a, b=b, scales=scales)
        for a, b in itertools.permutations((DType.FP8_E4M3, DType.FP8_E5M2))
        for scales in (ScaleRecipe.FP32_TENSOR, ScaleRecipe.FP32_ROW)
    ]
    served.append(cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16))
    served.append(
        cpu_kernels.signature(
            "tn", op=Op.GROUPED_MM, operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_ROW
        )
    )
    served.append(cpu_kernels.signature("nt", op=Op.K_GROUPED_MM, operand=DType.BF16))
    return recording_kernels.build_recording(
        [cpu_provider.problem_of(one, (M, N, K)) for one in served],
        tmp_path_factory.mktemp("scaling"),
        kernel_cache,
    )


@pytest.fixture(autouse=True)
def kernels_win(inductor: InductorSession, scaling: BuiltBundle) -> None:
    inductor.use(scaling.path)
    inductor.slow_down_aten()


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
    stub_aten(inductor)
    compiled = inductor.compile(scaled, *arguments)
    torch.testing.assert_close(compiled.result, exact(*arguments))
    assert len(compiled.launched) == 1


E5M2 = torch.float8_e5m2


@pytest.mark.parametrize("of_rows", [False, True], ids=["tensors", "rows"])
@pytest.mark.parametrize(("type_a", "type_b"), [(E5M2, FP8), (FP8, E5M2)], ids=["e5m2", "e4m3"])
def test_fp8_of_two_types(
    inductor: InductorSession,
    met: Callable[[], list[dict[str, Any]]],
    type_a: torch.dtype,
    type_b: torch.dtype,
    of_rows: bool,
) -> None:
    """As in training: gradients are e5m2, and weights and activations e4m3."""
    scales = (torch.rand(M, 1), torch.rand(1, N)) if of_rows else (torch.rand(()), torch.rand(()))
    arguments = torch.randn(M, K).to(type_a), torch.randn(N, K).to(type_b).t(), *scales
    if of_rows:
        stub_aten(inductor)
    compiled = inductor.compile(scaled, *arguments)
    torch.testing.assert_close(compiled.result, exact(*arguments))
    assert len(compiled.launched) == 1
    (event,) = met()
    types = "fp8_e5m2xfp8_e4m3" if type_a is E5M2 else "fp8_e4m3xfp8_e5m2"
    recipe = "fp32_row" if of_rows else "fp32_tensor"
    assert event["gemm"] == f"mm/tn/{types}/fp32/bf16/{recipe}/m{M}n{N}k{K}"


def stub_aten(inductor: InductorSession, name: str = "_scaled_mm") -> None:
    """ATen computes no such thing on a CPU: let its choice be timed all the same, and lose."""

    def wait(a: Tensor, b: Tensor, *_: Any, out: Tensor | None = None, **__: Any) -> Tensor:
        inductor.lose()
        return torch.empty(len(a), b.shape[-1], dtype=torch.bfloat16) if out is None else out

    inductor.monkeypatch.setattr(extern_kernels, name, wait)


KINDS = {
    "mxfp8": (FP8, torch.float8_e8m0fnu, 32),
    "nvfp4": (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16),
}


def blocks(name: str, n: int = N) -> tuple[tuple[Tensor, ...], Tensor]:
    """Operands with their scales, and what comes of them."""
    dtype, scale, block = KINDS[name]
    a, scale_a = quantise(torch.randn(32, 128), dtype, scale, block)
    b, scale_b = quantise(torch.randn(n, 128), dtype, scale, block)
    wanted = dequantise(a, scale_a, block) @ dequantise(b, scale_b, block).t()
    return (a, b.t(), swizzle(scale_a), swizzle(scale_b)), wanted.bfloat16()


@pytest.mark.parametrize("name", KINDS)
def test_scales_of_blocks(inductor: InductorSession, name: str) -> None:
    """As torch's first operator takes them: swizzled, and told apart by their types."""
    stub_aten(inductor)
    if name == "nvfp4" and RELEASE < (2, 13):
        pytest.skip("this torch makes no numbers of fp4 to time choices with: a miss")
    arguments, wanted = blocks(name)
    compiled = inductor.compile(scaled, *arguments)
    assert len(compiled.launched) == 1
    torch.testing.assert_close(compiled.result, wanted, rtol=2**-7, atol=1e-3)


def grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(a, b, offs=ends)


def groups() -> tuple[Tensor, Tensor, Tensor]:
    ends = torch.tensor([8, 40, 40, 128], dtype=torch.int32)
    return torch.randn(M, K).bfloat16(), torch.randn(4, N, K).bfloat16().mT, ends


def test_groups(inductor: InductorSession) -> None:
    arguments = groups()
    compiled = inductor.compile(grouped, *arguments)
    torch.testing.assert_close(compiled.result, grouped(*arguments), rtol=2**-7, atol=1e-3)
    assert len(compiled.launched) == 1
    assert "torch._grouped_mm(*a, **o)" in compiled.code[0]
    gone = compiled.code[0].replace("from nvgemm_runtime.", "from gone.")
    module: dict[str, Any] = {}
    exec(gone, module)
    (without_us,) = module["call"](list(arguments))
    torch.testing.assert_close(without_us, grouped(*arguments))


def scaled_groups(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    return torch._scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def groups_with_scales() -> tuple[Tensor, ...]:
    ends = torch.tensor([16, 48, 48, M], dtype=torch.int32)
    a, b = torch.randn(M, K).to(FP8), torch.randn(4, N, K).to(FP8).mT
    return a, b, torch.rand(M) + 0.5, torch.rand(4, N) + 0.5, ends


def test_groups_with_a_scale_for_each_row(
    inductor: InductorSession, met: Callable[[], list[dict[str, Any]]]
) -> None:
    arguments = groups_with_scales()
    stub_aten(inductor, "_scaled_grouped_mm")
    compiled = inductor.compile(scaled_groups, *arguments)
    a, b, scale_a, scale_b, ends = arguments
    wanted = torch.empty(M, N)
    for group, (begin, end) in enumerate(zip([0, *ends.tolist()], ends.tolist())):
        product = a[begin:end].float() @ b[group].float()
        wanted[begin:end] = product * scale_a[begin:end, None] * scale_b[group]
    torch.testing.assert_close(compiled.result, wanted.bfloat16(), rtol=2**-7, atol=1e-3)
    assert len(compiled.launched) == 1
    assert "torch._scaled_grouped_mm(*a, **o)" in compiled.code[0]
    (event,) = met()
    assert event["gemm"] == f"grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/g4m{M}n{N}k{K}"


def test_ends_behind_scales_are_checked_where_the_user_debugs(inductor: InductorSession) -> None:
    inductor.monkeypatch.setenv(DEBUG_VARIABLE, "1")
    *operands, ends = groups_with_scales()
    stub_aten(inductor, "_scaled_grouped_mm")
    compiled = inductor.compile(scaled_groups, *operands, ends)
    with pytest.raises(ValueError, match=r"group 3 ends at row 144, must end in 48\.\.128"):
        compiled.function(*operands, ends + torch.tensor([0, 0, 0, 16], dtype=torch.int32))


def groups_along_k() -> tuple[Tensor, Tensor, Tensor]:
    ends = torch.tensor([8, 9, 9, K], dtype=torch.int32)
    return torch.randn(K, M).bfloat16().mT, torch.randn(K, N).bfloat16(), ends


def test_groups_along_k(inductor: InductorSession) -> None:
    arguments = groups_along_k()
    compiled = inductor.compile(grouped, *arguments)
    torch.testing.assert_close(compiled.result, grouped(*arguments), rtol=2**-7, atol=1e-3)
    assert (compiled.result[2] == 0).all()
    assert len(compiled.launched) == 1
    assert "torch._grouped_mm(*a, **o)" in compiled.code[0]


def test_ends_along_k_are_checked_where_the_user_debugs(inductor: InductorSession) -> None:
    inductor.monkeypatch.setenv(DEBUG_VARIABLE, "1")
    a, b, ends = groups_along_k()
    compiled = inductor.compile(grouped, a, b, ends)
    assert len(compiled.launched) == 1
    with pytest.raises(ValueError, match=r"k_grouped_mm: group 3 ends at k 65, must"):
        compiled.function(a, b, ends + torch.tensor([0, 0, 0, 1], dtype=torch.int32))


@pytest.mark.parametrize("is_debugging", [False, True])
def test_ends_of_groups_are_checked_where_the_user_debugs(
    inductor: InductorSession, is_debugging: bool
) -> None:
    inductor.monkeypatch.setenv(DEBUG_VARIABLE, str(int(is_debugging)))
    a, b, ends = groups()
    compiled = inductor.compile(grouped, a, b, ends)
    assert len(compiled.launched) == 1
    falling = torch.tensor([8, 7, 40, 128], dtype=torch.int32)
    if is_debugging:
        with pytest.raises(ValueError, match=r"group 1 ends at row 7, must end in 8\.\.128"):
            compiled.function(a, b, falling)
    else:
        assert compiled.function(a, b, falling).shape == (M, N)


MISSES: dict[str, tuple[Callable[..., Any], str]] = {
    "a batch": (lambda a, b, e: functional.grouped_mm(a.view(4, 32, K), b), "grouped_mm takes"),
    "groups along k that is contiguous": (
        lambda a, b, e: functional.grouped_mm(a, b[0].mT.contiguous().mT[:, :32], offs=e // 2),
        "k_grouped_mm/tn",
    ),
    "row-major": (
        lambda a, b, e: functional.grouped_mm(a, b.contiguous(), offs=e),
        "no bundled kernel computes grouped_mm/tt",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_other_groups_are_misses(
    inductor: InductorSession, met: Callable[[], list[dict[str, Any]]], name: str
) -> None:
    function, reason = MISSES[name]
    arguments = groups()
    compiled = inductor.compile(function, *arguments)
    torch.testing.assert_close(compiled.result, function(*arguments))
    assert compiled.launched == ()
    (event,) = met()
    assert event["basis"] == "miss"
    assert any(reason in one for one in event["reasons"])


def second(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Torch's later operator, which is told what the scales are."""
    if RELEASE < (2, 13):  # dynamo looks neither into the function nor at its enums there
        kind = 3 if a.dtype is FP8 else 2
        given = [scale_a], [kind], [1], [scale_b], [kind], [1]
        result: Tensor = torch.ops.aten._scaled_mm_v2(a, b, *given, None, torch.bfloat16)
        return result
    block = ScalingType.BlockWise1x32 if a.dtype is FP8 else ScalingType.BlockWise1x16
    swizzle = SwizzleType.SWIZZLE_32_4_4
    return functional.scaled_mm(
        a, b, scale_a, block, scale_b, block,
        swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.fixture
def slow_second(inductor: InductorSession) -> None:
    importlib.import_module(
        "nvgemm_runtime.inductor.fusion.scaled"
    )  # which defines what is replaced
    stub_aten(inductor, "nvgemm_aot_scaled_mm_v2")


WITHOUT_E8M0 = RELEASE < (2, 13)
"""Torch 2.11 and 2.12 keep the operator with scales of that type from every lowering
(``unsupported_input_tensor`` in ``torch._inductor.lowering``)."""


@pytest.mark.usefixtures("slow_second")
@pytest.mark.parametrize("name", ["nvfp4"] if WITHOUT_E8M0 else KINDS)
def test_swizzled_scales_of_the_later_operator(
    inductor: InductorSession, met: Callable[[], list[dict[str, Any]]], name: str
) -> None:
    arguments, wanted = blocks(name)
    compiled = inductor.compile(second, *arguments)
    assert len(compiled.launched) == 1
    torch.testing.assert_close(compiled.result, wanted, rtol=2**-7, atol=1e-3)
    (event,) = met()
    assert event["basis"] == "signature"
    assert "torch.ops.aten._scaled_mm_v2.out(a, b, [s], [recipe_a]" in compiled.code[0]


@pytest.mark.usefixtures("slow_second")
def test_what_no_kernel_has_is_a_miss_and_left_to_inductor(
    inductor: InductorSession, met: Callable[[], list[dict[str, Any]]]
) -> None:
    inductor.use()
    arguments, _ = blocks("nvfp4")
    with pytest.raises(Exception, match=r"swizzle|CPU"):  # ATen has it on GPUs alone
        inductor.compile(second, *arguments)
    (event,) = met()
    assert event["basis"] == "miss"
    assert event["gemm"] == "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16/m32n32k128"


@pytest.mark.usefixtures("slow_second")
def test_a_recording_names_the_scales(inductor: InductorSession, tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD", str(path))
    inductor.compile(second, *blocks("nvfp4")[0])
    recorded = Recorder(path).read()
    assert {problem.key: count for problem, count in recorded.problems.items()} == {
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16/m32n32k128": 1
    }
    assert not recorded.undeclarable


@pytest.mark.usefixtures("slow_second")
def test_kernels_stay_out_of_generated_cpp(
    inductor: InductorSession, met: Callable[[], list[dict[str, Any]]]
) -> None:
    from torch._inductor import config

    with config.patch(cpp_wrapper=True), contextlib.suppress(Exception):  # ATen, on a CPU
        inductor.compile(second, *blocks("nvfp4")[0])
    (event,) = met()
    assert "generated C++ cannot call ATen's _scaled_mm_v2" in event["reasons"][0]


@pytest.mark.usefixtures("slow_second")
@pytest.mark.skipif(RELEASE < (2, 13), reason="dynamo does not look into the function there")
def test_two_levels_of_scales_are_a_miss(
    inductor: InductorSession, met: Callable[[], list[dict[str, Any]]]
) -> None:
    """As torch has NVFP4 with one more scale for the tensor."""

    def two_levels(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, one: Tensor) -> Tensor:
        recipes = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        return functional.scaled_mm(
            a, b, [scale_a, one], recipes, [scale_b, one], recipes,
            swizzle_a=swizzles, swizzle_b=swizzles, output_dtype=torch.bfloat16,
        )  # fmt: skip

    with pytest.raises(Exception, match=r"swizzle|CPU"):
        inductor.compile(two_levels, *blocks("nvfp4")[0], torch.ones(()))
    (event,) = met()
    assert event["reasons"] == ["scales have 2 levels, kernels take 1"]
