"""`gated_mm` and its operator, with bundled kernels for the CPU: shapes, refusals, derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from edges import problem_of
from gemm_arguments import Arguments, random_arguments
from gemm_reference import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

import nvgemm_runtime
from cpu_kernels import signature
from installed_bundles import id_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.epilogues import BIAS, Epilogue, Gate, WeightOrder, find_gated
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.launch.select import load_kernel

SWIGLU = signature("tn", operand=DType.BF16, epilogue=Epilogue.parse("swiglu_halves"))
OAI = signature("tn", operand=DType.BF16, epilogue=Epilogue.parse("swiglu_oai_interleaved"))
BIASED = signature("tn", operand=DType.BF16, epilogue=BIAS)


@pytest.fixture
def swiglu(installed: BuiltBundle) -> Arguments:
    return random_arguments(problem_of(SWIGLU, 16, 32, 64), "cpu")


@pytest.fixture
def oai(installed: BuiltBundle) -> Arguments:
    return random_arguments(problem_of(OAI, 16, 32, 64), "cpu")


@pytest.mark.parametrize("gate", Gate)
def test_both_orders_of_the_same_weights_agree(installed: BuiltBundle, gate: Gate) -> None:
    a, weight = torch.randn(5, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    bias = torch.randn(24).bfloat16()
    woven = torch.stack(weight.chunk(2), 1).flatten(0, 1)
    woven_bias = torch.stack(bias.chunk(2), 1).flatten()
    added = gate.row.is_biased
    halves = nvgemm_runtime.gated_mm(
        a, weight.t(), epilogue=find_gated(gate, WeightOrder.HALVES), bias=bias if added else None
    )
    interleaved = nvgemm_runtime.gated_mm(
        a,
        woven.t(),
        epilogue=find_gated(gate, WeightOrder.INTERLEAVED).name,
        bias=woven_bias if added else None,
    )
    assert halves.shape == (5, 12)
    assert torch.equal(halves, interleaved)


def test_nan_in_gate_or_up_stays(installed: BuiltBundle, oai: Arguments) -> None:
    """Limits must not cut a NaN off."""
    oai.b[0, 4] = oai.b[0, 9] = float("nan")
    made = nvgemm_runtime.gated_mm(
        oai.a, oai.b, epilogue="swiglu_oai_interleaved", bias=oai.others[0]
    )
    assert made[:, [2, 4]].isnan().all()
    assert not made[:, [0, 1, 3, 5]].isnan().any()


def test_a_named_kernel_says_the_epilogue(installed: BuiltBundle, swiglu: Arguments) -> None:
    id_ = id_of(installed, SWIGLU)
    for kernel in (id_, load_kernel(id_)):
        assert_close(nvgemm_runtime.gated_mm(swiglu.a, swiglu.b, kernel=kernel), swiglu)


def test_choose_and_explain_find_the_kernel(installed: BuiltBundle, swiglu: Arguments) -> None:
    extras = ExtraOperands(gated=Epilogue.parse("swiglu_halves"))
    chosen = nvgemm_runtime.choose(swiglu.a, swiglu.b, swiglu.out, extras)
    assert chosen.kernel.signature == SWIGLU
    explained = nvgemm_runtime.explain(swiglu.a, swiglu.b, extras=extras)
    assert explained.request is not None
    assert explained.request.problem.key == f"{SWIGLU.key}/m16n32k64"
    assert explained.match is not None


def test_the_operator_computes_and_traces(installed: BuiltBundle, swiglu: Arguments) -> None:
    id_ = id_of(installed, SWIGLU)
    operator = torch.ops.nvgemm_aot.gated_mm
    assert_close(operator(swiglu.a, swiglu.b, id_), swiglu)
    operator.out(swiglu.a, swiglu.b, id_, out=swiglu.out)
    assert_close(swiglu.out, swiglu)
    with FakeTensorMode():
        a, b = torch.empty(7, 64, dtype=torch.bfloat16), torch.empty(64, 48, dtype=torch.bfloat16)
        assert operator(a, b, id_).shape == (7, 24)
        with pytest.raises(RuntimeError, match="must have pairs"):
            operator(a, b[:, :47], id_)
    compiled = torch.compile(lambda a, b: operator(a, b, id_) + 1, backend="aot_eager")
    assert torch.equal(compiled(swiglu.a, swiglu.b), operator(swiglu.a, swiglu.b, id_) + 1)


REFUSALS: dict[str, tuple[Callable[[Arguments, Arguments], Any], type[Exception], str]] = {
    "no epilogue": (lambda x, y: nvgemm_runtime.gated_mm(x.a, x.b), ValueError,
        r"epilogue is None, must be one of swiglu_halves, swiglu_interleaved"),
    "an epilogue without a gate": (
        lambda x, y: nvgemm_runtime.gated_mm(x.a, x.b, epilogue="bias"), ValueError,
        "epilogue is bias, must be one of swiglu_halves"),
    "an odd n": (
        lambda x, y: nvgemm_runtime.gated_mm(x.a, x.b[:, :31], epilogue="swiglu_halves"),
        ValueError, "b has 31 columns, must have an even number"),
    "an out of the product's shape": (
        lambda x, y: nvgemm_runtime.gated_mm(x.a, x.b, x.a.new_empty(16, 32),
            epilogue="swiglu_halves"),
        ValueError, r"out has shape \[16, 32\], must have \[16, 16\]"),
    "a bias too many": (
        lambda x, y: nvgemm_runtime.gated_mm(x.a, x.b, epilogue="swiglu_halves", bias=y.others[0]),
        NoKernelError, "swiglu_halves takes no bias"),
    "a bias too few": (
        lambda x, y: nvgemm_runtime.gated_mm(x.a, x.b, epilogue="swiglu_oai_halves"),
        NoKernelError, "swiglu_oai_halves needs bias"),
    "a bias of the result's length": (
        lambda x, y: nvgemm_runtime.gated_mm(x.a, x.b, epilogue="swiglu_oai_halves",
            bias=y.others[0][:16]),
        NoKernelError, "must be a row with 32 elements"),
    "halves of a row-major B": (
        lambda x, y: nvgemm_runtime.gated_mm(x.a, x.b.contiguous(), epilogue="swiglu_halves"),
        NoKernelError, "no kernel for mm/tt/bf16xbf16/fp32/bf16/swiglu_halves"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(swiglu: Arguments, oai: Arguments, name: str) -> None:
    call, error, text = REFUSALS[name]
    with pytest.raises(error, match=text):
        call(swiglu, oai)


def test_functions_refuse_kernels_of_each_other(installed: BuiltBundle, swiglu: Arguments) -> None:
    """Whether by an id or, quickly, by a loaded kernel and an out of the right shape for it."""
    gated, plain = (load_kernel(id_of(installed, one)) for one in (SWIGLU, BIASED))
    for kernel in (gated, gated.kernel.id):
        for out in (None, swiglu.out):
            with pytest.raises(ValueError, match=r"computes mm/tn.*swiglu_halves"):
                nvgemm_runtime.mm(swiglu.a, swiglu.b, out, kernel)
    with pytest.raises(RuntimeError, match="gated epilogue: call gated_mm"):
        torch.ops.nvgemm_aot.mm(swiglu.a, swiglu.b, gated.kernel.id)
    with pytest.raises(RuntimeError, match="has no gated epilogue"):
        torch.ops.nvgemm_aot.gated_mm(swiglu.a, swiglu.b, plain.kernel.id)
    with pytest.raises(ValueError, match=r"computes mm/tn.*/bias"):
        nvgemm_runtime.gated_mm(swiglu.a, swiglu.b, kernel=plain)


def test_refuses_to_lose_a_gradient(installed: BuiltBundle, swiglu: Arguments) -> None:
    b = swiglu.b.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="gated_mm: b requires grad"):
        nvgemm_runtime.gated_mm(swiglu.a, b, epilogue="swiglu_halves")
    id_ = id_of(installed, SWIGLU)
    with pytest.raises(RuntimeError, match="b requires grad"):
        torch.ops.nvgemm_aot.gated_mm(swiglu.a, b, id_)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 32, 64), (16, 0, 64), (16, 32, 0)])
def test_zero_sizes(installed: BuiltBundle, m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16().t()
    made = nvgemm_runtime.gated_mm(a, b, epilogue="swiglu_halves")
    assert made.shape == (m, n // 2)
    assert not made.any()
