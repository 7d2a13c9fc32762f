"""The public functions that take more than A and B, with bundled kernels for the CPU."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from edges import problem_of
from gemm_arguments import Arguments, random_arguments
from gemm_reference import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

import cpu_provider
import nvgemm_runtime
from cpu_kernels import signature
from installed_bundles import use
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.epilogues import ADD, BIAS, Epilogue
from nvgemm_runtime.gemm.problem import DType, Op, Signature
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.gemm.types import ScaleRecipe
from nvgemm_runtime.launch.compiled import gemm
from nvgemm_runtime.launch.select import load_kernel
from nvgemm_runtime.settings import DEBUG_VARIABLE

BIASED = signature("tn", operand=DType.BF16, epilogue=BIAS)
RELU = signature("tn", operand=DType.BF16, epilogue=Epilogue.parse("bias_relu"))
MXFP8 = signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.E8M0_1X32)
GROUPED_BIAS = signature("tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=BIAS)
GROUPED_OAI = signature(
    "tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=Epilogue.parse("swiglu_oai_halves")
)
NVFP4_POWERS = signature("tn", operand=DType.FP4_E2M1, scales=ScaleRecipe.E8M0_1X16)
GROUPED = signature("tn", op=Op.GROUPED_MM, operand=DType.BF16)
K_GROUPED = signature("nt", op=Op.K_GROUPED_MM, operand=DType.BF16)


def arguments_of(served: Signature, m: int = 16, n: int = 32, k: int = 64) -> Arguments:
    torch.manual_seed(0)
    return random_arguments(problem_of(served, m, n, k), "cpu")


def call_of(arguments: Arguments) -> Callable[..., torch.Tensor]:
    """The public function with a problem's tensors; it takes ``out`` and ``kernel``."""
    name, tensors, keywords = arguments.function_call()
    values = {
        key: one.value if isinstance(one, enum.Enum) else one for key, one in keywords.items()
    }
    function = getattr(nvgemm_runtime, name)
    return lambda *, kernel=None, out=None, **more: function(
        *tensors, out=out, kernel=kernel, **{**values, **more}
    )


@pytest.mark.parametrize("served", cpu_provider.FUSED, ids=lambda served: served.key)
@pytest.mark.parametrize("sizes", [(16, 32, 64), (3, 16, 96)])
def test_computes_declared_and_other_sizes(
    installed: BuiltBundle, served: Signature, sizes: tuple[int, int, int]
) -> None:
    arguments = arguments_of(served, *sizes)
    call = call_of(arguments)
    made = call()
    assert made.dtype is arguments.out.dtype
    assert_close(made, arguments)
    assert call(out=arguments.out) is arguments.out
    assert torch.equal(made, arguments.out)


def test_a_kernel_can_be_named_and_passed(installed: BuiltBundle) -> None:
    for kernel in installed.header.kernels:
        arguments = arguments_of(kernel.signature)
        made = call_of(arguments)(kernel=kernel.id)
        assert_close(made, arguments)
        assert torch.equal(call_of(arguments)(kernel=load_kernel(kernel.id)), made)


@pytest.mark.parametrize(
    "served", [BIASED, MXFP8, GROUPED, GROUPED_OAI], ids=lambda served: served.key
)
def test_a_workspace_is_there_for_each_launch(
    served: Signature, tmp_path: Path, kernel_cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = cpu_provider.WithWorkspace()
    built = cpu_provider.build_bundle(
        [problem_of(served, 16, 32, 64)], tmp_path, kernel_cache, provider=provider
    )
    use(monkeypatch, built.path)
    arguments = arguments_of(served)
    for _ in range(2):
        assert_close(call_of(arguments)(), arguments)


def test_a_workspace_grows_with_the_problem_and_begins_with_zeros(
    tmp_path: Path, kernel_cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels refuse any other workspace, and leave theirs full of ones."""
    provider = cpu_provider.WithCounters()
    served = signature("tn", operand=DType.BF16)
    built = cpu_provider.build_bundle(
        [problem_of(served, 16, 32, 64)], tmp_path, kernel_cache, provider=provider
    )
    use(monkeypatch, built.path)
    nvgemm_runtime.load_operators()
    for kernel in built.header.kernels:
        generated = gemm(torch.ops.aten.mm.out, kernel.id, "a wheel")
        for m in (16, 48, 8):
            arguments = arguments_of(served, m, 32, 64)
            a, b, out = arguments.operands()
            for _ in range(2):
                assert_close(nvgemm_runtime.mm(a, b, kernel=kernel.id), arguments)
                out.fill_(float("nan"))
                assert_close(generated(a, b, out=out), arguments)
                operator = torch.ops.nvgemm_aot.mm(a, b, kernel.id)
                assert torch.equal(operator, out)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (16, 32)])
def test_a_row_is_added_in_whichever_shape_it_comes(
    installed: BuiltBundle, shape: tuple[int, ...]
) -> None:
    arguments = arguments_of(BIASED)
    (bias,) = arguments.others
    assert_close(nvgemm_runtime.addmm(bias.expand(shape), arguments.a, arguments.b), arguments)


def test_recipes_of_one_size_are_told_apart_by_name(installed: BuiltBundle) -> None:
    arguments = arguments_of(NVFP4_POWERS, k=32)
    named = call_of(arguments)()
    assert_close(named, arguments)
    a, b, scale_a, scale_b = (arguments.a, arguments.b, *arguments.others)
    taken_for_mxfp4 = nvgemm_runtime.scaled_mm(a, b, scale_a, scale_b)
    assert not torch.equal(taken_for_mxfp4, named)


def test_the_type_of_the_result_can_be_named(installed: BuiltBundle) -> None:
    arguments = arguments_of(MXFP8)
    with pytest.raises(NoKernelError, match="computes mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp16/e8m0_1x32"):
        call_of(arguments)(out_dtype=torch.float16)
    assert call_of(arguments)(out_dtype=torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"out is torch\.bfloat16, out_dtype torch\.float16"):
        call_of(arguments)(out_dtype=torch.float16, out=arguments.out)


REFUSALS: dict[str, tuple[Signature, Callable[[Arguments], Any], type, str]] = {
    "bias of another size": (BIASED, lambda x: nvgemm_runtime.addmm(x.others[0][:8], x.a, x.b),
        NoKernelError,
        r"addend has shape \[8\].*must be a row with 32 elements, or have .* shape \[16, 32\]"),
    "activation that none has": (BIASED,
        lambda x: nvgemm_runtime.addmm(*x.others, x.a, x.b, activation="tanh"), ValueError,
        "addmm: no such Activation: 'tanh' .known: relu, gelu_tanh, silu"),
    "scales of another size": (MXFP8,
        lambda x: nvgemm_runtime.scaled_mm(x.a, x.b, x.others[0][:256], x.others[1]), NoKernelError,
        "scale_a has 256 elements.*must have 512 .*e8m0_1x32 of 16 rows and k = 64, swizzled"),
    "scales of two dtypes": (MXFP8,
        lambda x: nvgemm_runtime.scaled_mm(x.a, x.b, x.others[0], torch.ones(1)), NoKernelError,
        "scales have different dtypes"),
    "recipe that there is none": (MXFP8,
        lambda x: nvgemm_runtime.scaled_mm(x.a, x.b, *x.others, recipe="1x32"), ValueError,
        "scaled_mm: no such ScaleRecipe: '1x32' .known: e8m0_1x32,"),
    "recipe of another dtype": (MXFP8,
        lambda x: nvgemm_runtime.scaled_mm(x.a, x.b, *x.others, recipe=ScaleRecipe.FP32_ROW),
        NoKernelError,
        "scale_a is torch.float8_e8m0fnu, must be torch.float32 for scales fp32_row"),
    "offsets of another shape": (GROUPED,
        lambda x: nvgemm_runtime.grouped_mm(x.a, x.b, x.others[0][:2]), ValueError,
        r"grouped_mm: offsets have shape \[2\], must have \[3\]"),
    "one row for all groups": (GROUPED_BIAS,
        lambda x: nvgemm_runtime.grouped_mm(x.a, x.b, x.others[0], bias=x.others[1][0]),
        NoKernelError,
        r"grouped addend has shape \[32\], must have \[3, 32\]: one row per group"),
    "rows of groups across": (GROUPED_OAI,
        lambda x: nvgemm_runtime.grouped_mm(
            x.a, x.b, x.others[0], epilogue="swiglu_oai_halves", bias=x.others[1].T.contiguous().T),
        NoKernelError, r"grouped addend has strides \[1, 3\], must be contiguous along n"),
    "an addend of another number of groups": (GROUPED_BIAS,
        lambda x: nvgemm_runtime.grouped_mm(x.a, x.b, x.others[0], bias=x.others[1][:2]),
        NoKernelError, r"grouped addend has shape \[2, 32\], must have \[3, 32\]"),
    "a gate of groups without its bias": (GROUPED_OAI,
        lambda x: nvgemm_runtime.grouped_mm(
            x.a, x.b, x.others[0], epilogue="swiglu_oai_halves"),
        NoKernelError, "swiglu_oai_halves needs bias"),
    "an activation of groups": (GROUPED_BIAS,
        lambda x: nvgemm_runtime.grouped_mm(x.a, x.b, x.others[0], epilogue="bias_silu"),
        ValueError, "grouped_mm: epilogue is bias_silu, must be gated or None"),
    "an addend with no products": (BIASED,
        lambda x: nvgemm_runtime.addmm(*x.others, x.a[:, :0], x.b[:0]), NoKernelError,
        "addmm: k is 0, so the result is the addend"),
    "fake tensors": (BIASED,
        lambda x: nvgemm_runtime.addmm(FakeTensorMode().from_tensor(x.others[0]), x.a, x.b),
        ValueError, "addmm: addend is a fake or functional tensor"),
    "lazily negated": (BIASED,
        lambda x: nvgemm_runtime.addmm(torch._neg_view(x.others[0]), x.a, x.b), ValueError,
        "addmm: an operand is a lazily negated view"),
    "lost derivative": (BIASED,
        lambda x: nvgemm_runtime.addmm(x.others[0].requires_grad_(), x.a, x.b), RuntimeError,
        "addmm: addend requires grad"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(installed: BuiltBundle, case: str) -> None:
    served, call, kind, message = REFUSALS[case]
    with pytest.raises(kind, match=message):
        call(arguments_of(served))


def test_a_named_kernel_must_apply_the_activation(installed: BuiltBundle) -> None:
    (relu,) = {
        k.id for k in installed.header.kernels if k.signature == RELU and k.operator == "Cpu_1x1"
    }
    arguments = arguments_of(BIASED)
    with pytest.raises(ValueError, match=f"addmm: kernel {relu[:12]} computes {RELU.key}"):
        call_of(arguments)(kernel=relu)
    with pytest.raises(ValueError, match=f"mm: kernel {relu[:12]} computes"):
        nvgemm_runtime.mm(arguments.a, arguments.b, kernel=relu)


def test_nothing_to_compute_needs_no_kernel(installed: BuiltBundle) -> None:
    a, b = torch.ones(0, 64).bfloat16(), torch.ones(64, 32).bfloat16().T.contiguous().T
    assert nvgemm_runtime.addmm(torch.ones(32).bfloat16(), a, b).shape == (0, 32)
    no_groups = nvgemm_runtime.grouped_mm(
        torch.ones(4, 64).bfloat16(), b[None][:0], torch.empty(0, dtype=torch.int32)
    )
    assert torch.equal(no_groups, torch.zeros(4, 32).bfloat16())
    gated = nvgemm_runtime.grouped_mm(
        torch.ones(4, 64).bfloat16(), b[None][:0], torch.empty(0, dtype=torch.int32),
        epilogue="swiglu_oai_halves", bias=torch.empty(0, 32).bfloat16(),
    )  # fmt: skip
    assert torch.equal(gated, torch.zeros(4, 16).bfloat16())
    no_rows = nvgemm_runtime.k_grouped_mm(
        torch.ones(0, 16).bfloat16().mT, torch.ones(0, 32).bfloat16(), torch.zeros(3).int()
    )
    assert torch.equal(no_rows, torch.zeros(3, 16, 32).bfloat16())
    no_ends = nvgemm_runtime.k_grouped_mm(a[:0].mT, b[:0], torch.empty(0, dtype=torch.int32))
    assert no_ends.shape == (0, 64, 32)


NOTHING_TO_COMPUTE: dict[str, tuple[Callable[[], Any], type, str]] = {
    "bias": (lambda: nvgemm_runtime.addmm(torch.ones(5), torch.ones(0, 64), torch.ones(64, 32)),
        NoKernelError, r"addend has shape \[5\].*must be a row with 32 elements"),
    "scales, k = 0": (
        lambda: nvgemm_runtime.scaled_mm(
            torch.ones(16, 0).to(torch.float8_e4m3fn), torch.ones(0, 32).to(torch.float8_e4m3fn),
            torch.ones(1).byte(), torch.ones(1).byte()),
        NoKernelError, "no kernel scales fp8_e4m3 with torch.uint8"),
    "offsets along k": (
        lambda: nvgemm_runtime.k_grouped_mm(
            torch.ones(16, 0), torch.ones(0, 32), torch.zeros(3, 1, dtype=torch.int32)),
        ValueError, "k_grouped_mm: offsets are missing or not one-dimensional"),
    "offsets' type along k": (
        lambda: nvgemm_runtime.k_grouped_mm(
            torch.ones(16, 0), torch.ones(0, 32), torch.zeros(3, dtype=torch.int64)),
        NoKernelError, "offsets are torch.int64, must be torch.int32"),
    "offsets": (
        lambda: nvgemm_runtime.grouped_mm(
            torch.ones(0, 64), torch.ones(4, 64, 32), torch.zeros(3, dtype=torch.int32)),
        ValueError, r"offsets have shape \[3\], must have \[4\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTHING_TO_COMPUTE)
def test_refuses_what_does_not_fit_though_there_is_nothing_to_compute(case: str) -> None:
    call, kind, message = NOTHING_TO_COMPUTE[case]
    with pytest.raises(kind, match=message):
        call()


def test_a_declared_sum_with_a_matrix_serves_one_row(
    kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = signature("tn", operand=DType.BF16, epilogue=ADD)
    built = cpu_provider.build_bundle(
        [cpu_provider.problem_of(served, (1, 32, 64))], tmp_path, kernel_cache
    )
    use(monkeypatch, built.path)
    a, b = torch.randn(1, 64).bfloat16(), torch.randn(32, 64).bfloat16().T
    residual = torch.randn(1, 32).bfloat16()
    wanted = (a.float() @ b.float() + residual.float()).bfloat16()
    torch.testing.assert_close(nvgemm_runtime.addmm(residual, a, b), wanted)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([4, 3, 16], "group 1 ends at row 3, must end in 4..16"),
        ([4, 8, 17], "group 2 ends at row 17, must end in 8..16"),
        ([-1, 8, 16], "group 0 ends at row -1, must end in 0..16"),
    ],
)
def test_offsets_are_checked_where_the_user_debugs(
    installed: BuiltBundle, monkeypatch: pytest.MonkeyPatch, ends: list[int], message: str
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    arguments = arguments_of(GROUPED)
    offsets = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"grouped_mm: {message}"):
        nvgemm_runtime.grouped_mm(arguments.a, arguments.b, offsets)
    assert_close(call_of(arguments)(), arguments)


def test_offsets_along_k_are_checked_where_the_user_debugs(
    installed: BuiltBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    arguments = arguments_of(K_GROUPED)
    offsets = torch.tensor([4, 3, 65], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k_grouped_mm: group 1 ends at k 3, must"):
        nvgemm_runtime.k_grouped_mm(arguments.a, arguments.b, offsets)
    assert_close(call_of(arguments)(), arguments)


def test_a_result_along_k_is_a_matrix_for_each_end(installed: BuiltBundle) -> None:
    arguments = arguments_of(K_GROUPED)
    out = torch.empty(2, 16, 32).bfloat16()
    with pytest.raises(ValueError, match=r"shape \[2, 16, 32\], must have \[3, 16, 32\]"):
        nvgemm_runtime.k_grouped_mm(arguments.a, arguments.b, arguments.others[0], out)


def test_choose_tells_groups_along_k_from_those_of_rows(installed: BuiltBundle) -> None:
    arguments = arguments_of(K_GROUPED)
    chosen = nvgemm_runtime.choose(*arguments.operands(), arguments.extras)
    assert chosen.kernel.signature == K_GROUPED


def test_rows_behind_the_last_group_are_left_alone(installed: BuiltBundle) -> None:
    arguments = arguments_of(GROUPED)
    out = torch.full_like(arguments.out, 7)
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    nvgemm_runtime.grouped_mm(arguments.a, arguments.b, offsets, out=out)
    assert (out[5:] == 7).all()
    assert not (out[:5] == 7).all()


@pytest.mark.parametrize("ends", [[0, 0, 16], [16, 16, 16], [1, 2, 3], [0, 9, 9]])
def test_each_group_adds_its_own_row(installed: BuiltBundle, ends: list[int]) -> None:
    """Empty groups, groups of one row, and rows behind the last."""
    for served in (GROUPED_BIAS, GROUPED_OAI):
        arguments = arguments_of(served)
        arguments.tensors[Role.OFFSETS] = torch.tensor(ends, dtype=torch.int32)
        made = call_of(arguments)()
        begin = 0
        for group, end in enumerate(ends):
            a, b, bias = arguments.a[begin:end], arguments.b[group], arguments.others[1][group]
            product = a.float() @ b.float() + bias.float()
            if served.is_gated:
                gates, ups = product.chunk(2, -1)
                gates, ups = gates.clamp(max=7.0), ups.clamp(-7.0, 7.0)
                product = gates * torch.sigmoid(1.702 * gates) * (ups + 1)
            torch.testing.assert_close(made[begin:end], product.bfloat16())
            begin = end


def test_a_named_kernel_of_groups_says_its_gate(installed: BuiltBundle) -> None:
    id_ = next(k.id for k in installed.header.kernels if k.signature == GROUPED_OAI)
    arguments = arguments_of(GROUPED_OAI)
    offsets, bias = arguments.others
    made = nvgemm_runtime.grouped_mm(arguments.a, arguments.b, offsets, kernel=id_, bias=bias)
    assert_close(made, arguments)
    with pytest.raises(ValueError, match=f"gated_mm: kernel {id_[:12]} computes grouped_mm/"):
        nvgemm_runtime.gated_mm(arguments.a, arguments.b[0], kernel=id_)


def test_explains_what_it_would_take(installed: BuiltBundle) -> None:
    arguments = arguments_of(MXFP8)
    found = nvgemm_runtime.explain(arguments.a, arguments.b, extras=arguments.extras)
    assert str(found).startswith(f"{arguments.problem.key}: declared\n  1. ")
    loaded = nvgemm_runtime.choose(*arguments.operands(), extras=arguments.extras)
    assert loaded.kernel.signature == MXFP8


def test_operands_with_gaps_are_no_match_for_kernels_without_strides(
    installed: BuiltBundle,
) -> None:
    arguments = arguments_of(MXFP8)
    a = torch.cat([arguments.a.view(torch.uint8)] * 2, dim=1)[:, :64].view(torch.float8_e4m3fn)
    with pytest.raises(
        NoKernelError, match=r"gaps between rows or matrices, and the kernels for .* none"
    ):
        nvgemm_runtime.scaled_mm(a, arguments.b, *arguments.others)
