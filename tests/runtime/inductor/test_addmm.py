"""Sums, and products of integers, among Inductor's choices: addmm, baddbmm and _int_mm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cpu_kernels
import cpu_provider
import recording_kernels
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import ADD, BIAS
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.launch import compiled as generated

Tensor = torch.Tensor

M, N, K = 16, 32, 64


@pytest.fixture(scope="module")
def sums(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Recording kernels that add a row or a matrix, to matrices and batches, in two types."""
    served = [
        cpu_kernels.signature(layout, op=op, operand=operand, epilogue=epilogue)
        for layout in ("tt", "tn")
        for op in (Op.MM, Op.BMM)
        for operand in (DType.FP32, DType.BF16)
        for epilogue in (BIAS, ADD)
    ]
    served.append(cpu_kernels.signature("tn", operand=DType.INT8))
    return recording_kernels.build_recording(
        [cpu_provider.problem_of(one, (M, N, K)) for one in served],
        tmp_path_factory.mktemp("sums"),
        kernel_cache,
    )


@pytest.fixture(autouse=True)
def kernels_win(inductor: InductorSession, sums: BuiltBundle) -> None:
    inductor.use(sums.path)
    inductor.slow_down_aten()


def matrices(*lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(*lead, M, K).to(dtype), torch.randn(*lead, K, N).to(dtype)


ADDENDS = {
    "vector": ((N,), "bias"),
    "one row": ((1, N), "bias"),
    "matrix": ((M, N), "add"),
}


@pytest.mark.parametrize("name", ADDENDS)
def test_addmm(inductor: InductorSession, sums: BuiltBundle, name: str) -> None:
    shape, epilogue = ADDENDS[name]
    a, b = matrices()
    addend = torch.randn(shape)
    compiled = inductor.compile(torch.addmm, addend, a, b)
    torch.testing.assert_close(compiled.result, torch.addmm(addend, a, b))
    assert compiled.launched == ("Cpu_16x16",)
    (code,) = compiled.code
    key = f"mm/tt/fp32xfp32/fp32/fp32/{epilogue}"
    (kernel,) = [one for one in sums.header.kernels if one.signature.key == key]
    assert f"nvgemm_aot_gemm(torch.addmm, '{kernel.id}'" in code
    assert "extern_kernels.addmm(" not in code


def test_a_linear_layer_with_a_bias(inductor: InductorSession) -> None:
    layer = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    x = torch.randn(2, M // 2, K, dtype=torch.bfloat16)
    with torch.no_grad():
        compiled = inductor.compile(layer, x)
        torch.testing.assert_close(compiled.result, layer(x))
    assert len(compiled.launched) == 1


def test_a_residual_that_is_added_to_a_product(inductor: InductorSession) -> None:
    """Inductor makes an addmm of it."""
    a, b = matrices()
    residual = torch.randn(M, N)
    compiled = inductor.compile(lambda r, a, b: r + a @ b, residual, a, b)
    torch.testing.assert_close(compiled.result, residual + a @ b)
    assert len(compiled.launched) == 1


@pytest.mark.parametrize("shape", [(3, M, N), (N,), (1, 1, N)])
def test_baddbmm(inductor: InductorSession, shape: tuple[int, ...]) -> None:
    a, b = matrices(3)
    addend = torch.randn(shape)
    compiled = inductor.compile(torch.baddbmm, addend, a, b)
    torch.testing.assert_close(compiled.result, torch.baddbmm(addend, a, b))
    assert len(compiled.launched) == 1
    assert "nvgemm_aot_gemm(torch.baddbmm" in compiled.code[0]


def test_int_mm(inductor: InductorSession) -> None:
    a = torch.randint(-9, 9, (M * 2, K), dtype=torch.int8)
    b = torch.randint(-9, 9, (N, K), dtype=torch.int8).t()
    compiled = inductor.compile(torch._int_mm, a, b)
    torch.testing.assert_close(compiled.result, torch._int_mm(a, b))
    assert len(compiled.launched) == 1
    assert "nvgemm_aot_gemm(torch._int_mm" in compiled.code[0]


@pytest.mark.parametrize("shape", [(M, N), (3, 1, N)])
def test_batches_that_share_what_is_added_are_misses(
    inductor: InductorSession,
    met: Callable[[], list[dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
    shape: tuple[int, ...],
) -> None:
    a, b = matrices(3)
    addend = torch.randn(shape)
    compiled = inductor.compile(torch.baddbmm, addend, a, b)
    torch.testing.assert_close(compiled.result, torch.baddbmm(addend, a, b))
    assert compiled.launched == ()
    (event,) = met()
    assert event["reasons"][0].startswith("addend has shape [3, 16, 32] and strides [")
    assert warnings_of(caplog) == []


MISSES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], str]] = {
    "alpha": (lambda c, a, b: torch.addmm(c, a, b, alpha=2), (N,), "alpha is 2, must be 1"),
    "beta": (lambda c, a, b: torch.addmm(c, a, b, beta=3), (N,), "beta is 3, must be 1"),
    "a column": (torch.addmm, (M, 1), "addend has shape [16, "),
}


@pytest.mark.parametrize("name", MISSES)
def test_sums_that_no_kernel_computes_are_misses(
    inductor: InductorSession, met: Callable[[], list[dict[str, Any]]], name: str
) -> None:
    function, shape, reason = MISSES[name]
    a, b = matrices()
    addend = torch.randn(shape)
    compiled = inductor.compile(function, addend, a, b)
    torch.testing.assert_close(compiled.result, function(addend, a, b))
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]
    (event,) = met()
    assert (event["basis"], event["gemm"][:6]) == ("miss", "addmm ")
    assert event["reasons"][0].startswith(reason)


def test_what_no_bundle_has_is_a_miss_that_names_it(
    inductor: InductorSession, met: Callable[[], list[dict[str, Any]]]
) -> None:
    a, b = matrices(dtype=torch.float16)
    compiled = inductor.compile(torch.addmm, torch.randn(N).half(), a, b)
    assert compiled.launched == ()
    (event,) = met()
    assert event["gemm"] == "mm/tt/fp16xfp16/fp32/fp16/bias/m16n32k64"
    wanted = "no bundled kernel computes mm/tt/fp16xfp16/fp32/fp16/bias"
    assert any(reason.startswith(wanted) for reason in event["reasons"])
    product = "mm/tt/fp16xfp16/fp32/fp32"
    wanted = f"for the product alone, {product}/m16n32k64: no bundled kernel computes {product} ("
    assert sum(reason.startswith(wanted) for reason in event["reasons"]) == 1


def test_addends_that_come_otherwise_at_run_time_go_to_aten(inductor: InductorSession) -> None:
    a, b = matrices()
    flat = torch.randn(N + 1)
    compiled = inductor.compile(torch.addmm, flat[:-1], a, b)
    assert len(compiled.launched) == 1
    unaligned = flat[1:]
    torch.testing.assert_close(compiled.function(unaligned, a, b), torch.addmm(unaligned, a, b))
    assert inductor.launched(compiled.function, unaligned, a, b) == ()
    assert len(inductor.launched(compiled.function, flat[:-1], a, b)) == 1


def test_a_kernel_that_is_gone_leaves_atens_own_call(inductor: InductorSession) -> None:
    gemm = generated.gemm(torch.addmm, "0" * 64, "nvgemm-kernels-model 1.0", (1, 2, 0))
    a, b = matrices()
    bias, out = torch.randn(N), torch.empty(M, N)
    assert gemm(bias, a, b, alpha=2, beta=3, out=out) is out
    torch.testing.assert_close(out, torch.addmm(bias, a, b, alpha=2, beta=3))


def test_generated_code_runs_without_us(inductor: InductorSession) -> None:
    """What a module defines for itself where this package cannot be imported."""
    from nvgemm_runtime.inductor.autotuning.choices import _HEADER

    module: dict[str, Any] = {"torch": torch}
    exec(_HEADER.replace("from nvgemm_runtime.", "from gone."), module)
    gemm = module["nvgemm_aot_gemm"](torch.addmm, "0" * 64, "a wheel", (1, 2, 0), False)
    a, b = matrices()
    bias, out = torch.randn(N), torch.empty(M, N)
    torch.testing.assert_close(gemm(bias, a, b, alpha=1, beta=1, out=out), torch.addmm(bias, a, b))


@pytest.fixture(scope="module")
def products(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Recording kernels that multiply bf16 into fp32 and add nothing, as Hopper has them."""
    served = [
        cpu_kernels.signature("tt", op=op, operand=DType.BF16, out=DType.FP32)
        for op in (Op.MM, Op.BMM)
    ]
    return recording_kernels.build_recording(
        [cpu_provider.problem_of(one, (M, N, K)) for one in served],
        tmp_path_factory.mktemp("products"),
        kernel_cache,
    )


@pytest.mark.parametrize("shape", [(N,), (M, N), (M, 1)])
def test_a_product_in_fp32_and_a_sum_where_no_kernel_adds(
    inductor: InductorSession,
    products: BuiltBundle,
    met: Callable[[], list[dict[str, Any]]],
    shape: tuple[int, ...],
) -> None:
    inductor.use(products.path)
    a, b = matrices(dtype=torch.bfloat16)
    addend = torch.randn(shape).bfloat16()
    compiled = inductor.compile(torch.addmm, addend, a, b)
    once_rounded = (a.float() @ b.float() + addend.float()).bfloat16()
    torch.testing.assert_close(compiled.result, once_rounded)
    assert len(compiled.launched) == 1
    assert "nvgemm_addmm_split_" in compiled.code[0]
    (event,) = met()
    assert event["basis"] == "signature", "the product is declared, the sum is not"
    assert all(name.startswith("nvgemm_addmm_split_") for name in event["offered"])
    unaligned = torch.randn(M * K + 1).bfloat16()[1:].view(M, K)
    assert inductor.launched(compiled.function, addend, unaligned, b) == ()
    torch.testing.assert_close(
        compiled.function(addend, unaligned, b), torch.addmm(addend, unaligned, b)
    )


def test_batches_of_products_in_fp32(inductor: InductorSession, products: BuiltBundle) -> None:
    inductor.use(products.path)
    a, b = matrices(3, dtype=torch.bfloat16)
    addend = torch.randn(M, N).bfloat16()
    compiled = inductor.compile(torch.baddbmm, addend, a, b)
    once_rounded = (a.float() @ b.float() + addend.float()).bfloat16()
    torch.testing.assert_close(compiled.result, once_rounded)
    assert len(compiled.launched) == 1


@pytest.mark.slow
def test_split_sums_stay_out_of_generated_cpp(
    inductor: InductorSession, products: BuiltBundle
) -> None:
    inductor.use(products.path)
    a, b = matrices(dtype=torch.bfloat16)
    addend = torch.randn(N).bfloat16()
    compiled = inductor.compile(torch.addmm, addend, a, b, options={"cpp_wrapper": True})
    assert compiled.launched == ()
    assert "nvgemm_aot" not in "".join(compiled.code)


@pytest.mark.slow
def test_sums_and_integers_in_generated_cpp(inductor: InductorSession) -> None:
    a, b = matrices()
    bias = torch.randn(N)
    x = torch.randint(-9, 9, (M * 2, K), dtype=torch.int8)
    y = torch.randint(-9, 9, (N, K), dtype=torch.int8).t()

    def model(bias: Tensor, a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Any:
        return torch.addmm(bias, a, b), torch._int_mm(x, y)

    compiled = inductor.compile(model, bias, a, b, x, y, options={"cpp_wrapper": True})
    for got, wanted in zip(compiled.result, model(bias, a, b, x, y)):
        torch.testing.assert_close(got, wanted)
    assert len(compiled.launched) == 2
    code = "".join(compiled.code)
    assert code.count("nvgemm_aot::gemm(") == 2
    assert "aoti_torch_cpu_addmm_out(" in code
    flat = torch.randn(N + 1)
    torch.testing.assert_close(
        compiled.function(flat[1:], a, b, x, y)[0], torch.addmm(flat[1:], a, b)
    )
    assert len(inductor.launched(compiled.function, flat[1:], a, b, x, y)) == 1
