"""The operators of GEMMs that take more than A and B."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edges import problem_of
from gemm_arguments import Arguments, random_arguments
from gemm_reference import assert_close

from cpu_kernels import Register, signature
from nvgemm_runtime.gemm.epilogues import ADD, BIAS, Epilogue
from nvgemm_runtime.gemm.problem import DType, Op, Signature
from nvgemm_runtime.gemm.types import ScaleRecipe

BIASED = signature("tn", operand=DType.BF16, epilogue=BIAS)
ROW_WISE = signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_ROW)
GROUPED = signature("tn", op=Op.GROUPED_MM, operand=DType.BF16)
SCALED_GROUPS = signature(
    "tn", op=Op.GROUPED_MM, operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_ROW
)
GROUPED_SWIGLU = signature(
    "tt", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=Epilogue.parse("swiglu_interleaved")
)
GROUPED_OAI = signature(
    "tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=Epilogue.parse("swiglu_oai_halves")
)
GROUPED_KEPT, GROUPED_GRADIENT, GROUPED_SUMS, GROUPED_UPS = (
    signature("tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=epilogue)
    for epilogue in (
        Epilogue.parse("geglu_interleaved_kept"),
        Epilogue.parse("geglu_interleaved_gradient"),
        Epilogue.parse("geglu_interleaved_gradient_sums"),
        Epilogue.parse("geglu_halves_ups"),
    )
)
K_GROUPED = signature("nt", op=Op.K_GROUPED_MM, operand=DType.BF16)
GATHERED_GROUPS = signature("tn", op=Op.GATHERED_GROUPED_MM, operand=DType.BF16)
SIGNATURES = (
    BIASED,
    signature("tn", operand=DType.BF16, epilogue=ADD),
    signature("tn", op=Op.BMM, operand=DType.BF16, epilogue=Epilogue.parse("bias_silu")),
    ROW_WISE,
    signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_TENSOR, epilogue=BIAS),
    signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.E8M0_1X32),
    signature("tn", operand=DType.FP4_E2M1, scales=ScaleRecipe.E4M3_1X16),
    GROUPED,
    SCALED_GROUPS,
    signature("tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=BIAS),
    GROUPED_SWIGLU,
    GROUPED_OAI,
    K_GROUPED,
    signature("tt", op=Op.GATHERED_MM, operand=DType.BF16),
    GATHERED_GROUPS,
    signature(
        "tn",
        op=Op.GATHERED_GROUPED_MM,
        operand=DType.BF16,
        epilogue=Epilogue.parse("swiglu_oai_halves"),
    ),
)

by_key = pytest.mark.parametrize("served", SIGNATURES, ids=lambda served: served.key)


def arguments_of(served: Signature) -> Arguments:
    torch.manual_seed(0)
    return random_arguments(problem_of(served, 16, 32, 64), "cpu")


def operator_of(arguments: Arguments, kernel: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    name, tensors, keywords = arguments.operator_call()
    return getattr(torch.ops.nvgemm_aot, name), (*tensors, kernel), dict(keywords)


@pytest.mark.parametrize(
    "served",
    [
        *(served for served in SIGNATURES if served.scales is None),
        # opcheck multiplies and copies arguments, which torch's CPU does with no fp8.
        signature("tn", operand=DType.BF16, scales=ScaleRecipe.FP32_ROW),
        signature("tn", operand=DType.BF16, scales=ScaleRecipe.FP32_TENSOR, epilogue=BIAS),
    ],
    ids=lambda served: served.key,
)
def test_opcheck(register: Register, served: Signature) -> None:
    id, _ = register(served)
    arguments = arguments_of(served)
    packet, positional, keywords = operator_of(arguments, id)
    torch.library.opcheck(packet.default, positional, keywords)
    out = torch.zeros_like(arguments.out)
    torch.library.opcheck(packet.out, positional, {**keywords, "out": out})


@by_key
def test_out_forms_and_try_gemm_give_the_same(register: Register, served: Signature) -> None:
    id, handle = register(served)
    arguments = arguments_of(served)
    packet, positional, keywords = operator_of(arguments, id)
    made = packet(*positional, **keywords)
    assert_close(made, arguments)
    packet.out(*positional, **keywords, out=arguments.out)
    assert torch.equal(made, arguments.out)
    if served.op.is_gathered:
        return  # which generated C++ does not call
    tried = torch.zeros_like(made)
    a, b, _ = arguments.operands()
    extras = arguments.extras.named
    assert torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=tried, **extras)
    assert torch.equal(made, tried)
    assert not torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=tried)


@pytest.mark.parametrize("name", ["input", "a", "b"])
def test_derivatives_are_not_lost(register: Register, name: str) -> None:
    id, _ = register(BIASED)
    bias, a, b = arguments_of(BIASED).operator_call()[1]
    tensors = {"input": bias, "a": a, "b": b}
    tensors[name].requires_grad_()
    packet = torch.ops.nvgemm_aot.addmm
    with pytest.raises(RuntimeError, match=rf"nvgemm_aot::addmm: {name} requires grad"):
        packet(*tensors.values(), id)
    out = torch.zeros(16, 32).bfloat16()
    with pytest.raises(RuntimeError, match=rf"nvgemm_aot::addmm.out: {name} requires grad"):
        packet.out(*tensors.values(), id, out=out)
    with torch.no_grad():
        assert packet(*tensors.values(), id).shape == out.shape


def test_derivatives_are_not_lost_through_keywords(register: Register) -> None:
    served = SIGNATURES[4]
    id, _ = register(served)
    packet, positional, keywords = operator_of(arguments_of(served), id)
    keywords["bias"].requires_grad_()
    with pytest.raises(RuntimeError, match="scaled_mm: bias requires grad"):
        packet(*positional, **keywords)


def test_an_out_that_is_a_negative_view_is_refused(register: Register) -> None:
    id, _ = register(BIASED)
    arguments = arguments_of(BIASED)
    packet, positional, _ = operator_of(arguments, id)
    with pytest.raises(RuntimeError, match=r"addmm.out: out is a lazily negated view"):
        packet.out(*positional, out=torch._neg_view(arguments.out))


def test_negative_views_are_resolved(register: Register) -> None:
    id, _ = register(BIASED)
    bias, a, b = arguments_of(BIASED).operator_call()[1]
    negative = torch.ops.nvgemm_aot.addmm(torch._neg_view(bias), a, b, id)
    assert torch.equal(negative, torch.ops.nvgemm_aot.addmm(-bias, a, b, id))


def test_kernels_of_other_operators_are_refused(register: Register) -> None:
    biased, _ = register(BIASED)
    grouped, _ = register(GROUPED)
    bias, a, b = arguments_of(BIASED).operator_call()[1]
    with pytest.raises(RuntimeError, match=f"kernel {grouped[:12]} is for grouped_mm, not for mm"):
        torch.ops.nvgemm_aot.addmm(bias, a, b, grouped)
    with pytest.raises(RuntimeError, match="addend is missing; the kernel takes"):
        torch.ops.nvgemm_aot.mm(a, b, biased)
    with pytest.raises(RuntimeError, match="scale_a is given; the kernel takes"):
        torch.ops.nvgemm_aot.scaled_mm(a, b, bias, bias, biased, bias=bias)


def test_fake_results_need_shapes_that_fit(register: Register) -> None:
    id, _ = register(GROUPED)
    a, b, offsets = (tensor.to("meta") for tensor in arguments_of(GROUPED).operator_call()[1])
    assert torch.ops.nvgemm_aot.grouped_mm(a, b, offsets, id).shape == (16, 32)
    with pytest.raises(RuntimeError, match="have 2 and 2 dimensions; must have 2 and 3"):
        torch.ops.nvgemm_aot.grouped_mm(a, b[0], offsets, id)
    with pytest.raises(RuntimeError, match="k must agree"):
        torch.ops.nvgemm_aot.grouped_mm(a[:, :8], b, offsets, id)


def test_gates_of_groups_have_an_operator_of_their_own(register: Register) -> None:
    gated, _ = register(GROUPED_SWIGLU)
    plain, _ = register(GROUPED)
    operators = torch.ops.nvgemm_aot
    tensors = arguments_of(GROUPED_SWIGLU).operator_call()[1]
    with pytest.raises(RuntimeError, match=f"{gated[:12]} .*gated epilogue: call grouped_gated_mm"):
        operators.grouped_mm(*tensors, gated)
    with pytest.raises(RuntimeError, match=f"kernel {plain[:12]} has no gated epilogue"):
        operators.grouped_gated_mm(*tensors, plain)
    with pytest.raises(RuntimeError, match="is for grouped_mm, not for mm"):
        operators.gated_mm(tensors[0], tensors[1], gated)
    meta = [tensor.to("meta") for tensor in tensors]
    assert operators.grouped_gated_mm(*meta, gated).shape == (16, 16)
    with pytest.raises(RuntimeError, match="b has 31 columns; must have pairs"):
        operators.grouped_gated_mm(meta[0], meta[1][..., :31], meta[2], gated)


def test_gathered_groups_have_the_rows_that_are_named(register: Register) -> None:
    kept, _ = register(
        signature(
            "tn",
            op=Op.GATHERED_GROUPED_MM,
            operand=DType.BF16,
            epilogue=Epilogue.parse("geglu_halves_kept"),
        )
    )
    id, _ = register(GATHERED_GROUPS)
    grouped, _ = register(GROUPED)
    operators = torch.ops.nvgemm_aot
    a, b, offsets, rows = arguments_of(GATHERED_GROUPS).operator_call()[1]
    few = rows[:7], offsets.clamp(max=7)
    assert operators.gathered_grouped_mm(a, b, few[1], few[0], id).shape == (7, 32)
    meta = [one.to("meta") for one in (a, b, few[1], few[0])]
    assert operators.gathered_grouped_mm(*meta, id).shape == (7, 32)
    with pytest.raises(RuntimeError, match=r"rows are \(7, 1\); must be \[m\]"):
        operators.gathered_grouped_mm(*meta[:3], meta[3][:, None], id)
    for wrong in (rows[:, None], rows[None], rows.view(4, 4), rows[0]):
        with pytest.raises(RuntimeError, match=f"rows has {wrong.dim()} dimensions; must have 1"):
            operators.gathered_grouped_mm(a, b, offsets, wrong, id)
    with pytest.raises(RuntimeError, match="is for grouped_mm, not for gathered_grouped_mm"):
        operators.gathered_grouped_mm(a, b, offsets, rows, grouped)
    said = "no operator supports: call nvgemm_runtime.gathered_grouped_mm"
    with pytest.raises(RuntimeError, match=said):
        operators.gathered_grouped_gated_mm(a, b, offsets, rows, kept)


@pytest.mark.parametrize(
    ("served", "text"),
    [
        (GROUPED_KEPT, "keeps its product, which no operator supports"),
        (GROUPED_GRADIENT, "computes a gate's gradient, which no operator supports"),
        (GROUPED_SUMS, "computes a gate's gradient, which no operator supports"),
        (GROUPED_UPS, "reads gates, which no operator supports"),
    ],
    ids=["kept", "gradient", "sums", "ups"],
)
def test_gates_in_training_have_no_operator(
    register: Register, served: Signature, text: str
) -> None:
    id, _ = register(served)
    operators = torch.ops.nvgemm_aot
    tensors = arguments_of(GROUPED).operator_call()[1]
    said = f"kernel {id[:12]} {text}: call nvgemm_runtime.grouped_mm"
    for operator in (operators.grouped_gated_mm, operators.grouped_mm):
        with pytest.raises(RuntimeError, match=said):
            operator(*tensors, id)
        with pytest.raises(RuntimeError, match=said):
            operator.out(*tensors, id, out=torch.empty(16, 32).bfloat16())


def _rows_of(bias: torch.Tensor, change: str) -> torch.Tensor:
    groups, n = bias.shape
    return {
        "fewer groups": lambda: bias[:-1],
        "fewer columns": lambda: bias[:, : n // 2],
        "one row": lambda: bias[0],
        "one row for all": lambda: bias[:1].expand(groups, n),
        "across": lambda: bias.T.contiguous().T,
        "another type": lambda: bias.half(),
    }[change]()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fewer groups", r"addend has shape \(2, 32\); must have \(3, 32\), a row for each matrix"),
        ("fewer columns", r"addend has shape \(3, 16\); must have \(3, 32\), a row for each"),
        ("one row", r"addend has 1 dimensions, shape \(32\).*must have 2"),
        ("one row for all", "addend has stride 0 along dimension 0"),
        ("across", "addend has stride 3 along dimension 1"),
        ("another type", "addend is float16; must be bfloat16"),
    ],
)
def test_a_bias_of_groups_that_does_not_fit_is_refused(
    register: Register, change: str, message: str
) -> None:
    id, handle = register(GROUPED_OAI)
    arguments = arguments_of(GROUPED_OAI)
    packet, positional, keywords = operator_of(arguments, id)
    wrong = _rows_of(keywords["bias"], change)
    with pytest.raises(RuntimeError, match=message):
        packet(*positional, bias=wrong)
    out = arguments.out
    before = out.view(torch.uint8).clone()
    a, b, offsets = positional[:3]
    tried = torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out, offsets=offsets, addend=wrong)
    assert not tried
    assert torch.equal(out.view(torch.uint8), before)


def test_a_bias_of_groups_may_lie_in_a_wider_one(register: Register) -> None:
    id, _ = register(GROUPED_OAI)
    arguments = arguments_of(GROUPED_OAI)
    packet, positional, keywords = operator_of(arguments, id)
    wide = torch.cat([keywords["bias"]] * 2, dim=1)[:, :32]
    assert_close(packet(*positional, bias=wide), arguments)


def test_no_groups_need_no_bias_and_give_zeros(register: Register) -> None:
    id, _ = register(GROUPED_OAI)
    arguments = arguments_of(GROUPED_OAI)
    empty = torch.empty(0, 32).bfloat16()
    out = torch.ops.nvgemm_aot.grouped_gated_mm(
        arguments.a, arguments.b[:0], torch.empty(0, dtype=torch.int32), id, bias=empty
    )
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("operand", [DType.FP8_E4M3, DType.FP4_E2M1])
def test_scaled_results_are_traced(register: Register, operand: DType) -> None:
    served = next(one for one in SIGNATURES if one.scales is not None and one.a is operand)
    id, _ = register(served)
    arguments = arguments_of(served)
    packet, positional, keywords = operator_of(arguments, id)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in positional]
    made = packet(*meta, **{name: x.to("meta") for name, x in keywords.items()})
    assert (made.shape, made.dtype) == (arguments.out.shape, arguments.out.dtype)
