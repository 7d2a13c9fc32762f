"""Arguments for every row of the support table: what roles say, and with the right results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from edges import BATCH, GROUPS, edges, problem_of
from gemm_arguments import Arguments, exact_arguments, random_arguments
from gemm_reference import (
    assert_close,
    assert_exact,
    has_exact_results,
    operand_values,
    reference,
    reference_sums,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from nvgemm_aot.emulator.checking.every_signature import EVERY_SIGNATURE
from nvgemm_aot.emulator.checking.small_problems import size_steps
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES
from nvgemm_runtime.gemm.extra_operands import check_offset_values
from nvgemm_runtime.gemm.operands import requests, torch_dtype
from nvgemm_runtime.gemm.problem import Layout, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype, role_shape, roles
from nvgemm_runtime.gemm.support import OUTS
from nvgemm_runtime.gemm.types import ScaleRecipe

pytestmark = pytest.mark.slow  # computes with every row of the support table

ROWS: dict[str, list[Signature]] = {}
"""Rows of the support table, each with its signatures of all layouts and epilogues: a test for each
of those takes longer than what it tests."""

for served in EVERY_SIGNATURE:
    types = dict.fromkeys((served.a, served.b))
    parts = (served.op, *types, served.scales)
    key = "-".join(part.value for part in parts if part is not None)
    ROWS.setdefault(key, []).append(served)


def of_one_layout(signatures: list[Signature]) -> list[Signature]:
    """Those of the usual layout, or where there are none, of the first."""
    layouts = [one.layout for one in signatures]
    layout = Layout.TN if Layout.TN in layouts else layouts[0]
    return [one for one in signatures if one.layout is layout]


every_row = pytest.mark.parametrize("signatures", [*ROWS.values()], ids=[*ROWS])
in_one_layout = pytest.mark.parametrize(
    "signatures", [*map(of_one_layout, ROWS.values())], ids=[*ROWS]
)


def small(signature: Signature) -> Problem:
    """Sizes that no two dimensions share, m beyond one block of 128 rows of scales."""
    step_m, step_n, step_k = size_steps(signature, 16)
    return problem_of(signature, -(-144 // step_m) * step_m, 3 * step_n, 5 * step_k)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_the_table_has_every_op_type_and_recipe() -> None:
    assert {signature.op for signature in EVERY_SIGNATURE} == set(Op)
    assert {signature.dtype for signature in EVERY_SIGNATURE} == set(OUTS)
    assert {signature.scales for signature in EVERY_SIGNATURE} == {None, *ScaleRecipe}
    assert {signature.epilogue for signature in EVERY_SIGNATURE} == {None, *ALL_EPILOGUES}


@every_row
@pytest.mark.parametrize("make", [exact_arguments, random_arguments])
def test_arguments_pose_the_problem_they_were_made_for(
    signatures: list[Signature], make: Callable[[Problem, str], Arguments]
) -> None:
    for signature in signatures:
        problem = small(signature)
        arguments = make(problem, "cpu")
        assert_as_roles_say(arguments)
        asked = requests(
            signature.op, arguments.a, arguments.b, out=arguments.out, extras=arguments.extras
        )
        assert [request.problem for request in asked] == [problem]
        assert asked[0].is_compact
        assert asked[0].alignment_bytes >= 16


@in_one_layout
def test_fake_tensors_are_made_alike(signatures: list[Signature]) -> None:
    with FakeTensorMode():
        for signature in signatures:
            for make in (exact_arguments, random_arguments):
                arguments = make(small(signature), "cpu")
                assert_as_roles_say(arguments)


def assert_as_roles_say(arguments: Arguments) -> None:
    problem = arguments.problem
    signature = problem.signature
    assert set(arguments.tensors) == set(roles(signature))
    for role, tensor in arguments.tensors.items():
        assert tuple(tensor.shape) == role_shape(problem, role), role
        assert tensor.dtype is torch_dtype(role_dtype(signature, role)), role
        transposed = (role is Role.A and not signature.layout.a_row_major) or (
            role is Role.B and not signature.layout.b_row_major
        )
        assert (tensor.mT if transposed else tensor).is_contiguous(), role
    assert len(arguments.others) == len(roles(signature)) - 3


@in_one_layout
def test_exact_results_fit_their_type(signatures: list[Signature]) -> None:
    """So that rounding in any direction gives the same, and no sum hides behind infinity."""
    for signature in signatures:
        if not has_exact_results(signature):
            continue
        arguments = exact_arguments(small(signature), "cpu")
        result = reference(arguments)
        assert bool(result.any()), "zeros alone would show nothing"
        rounded = result.to(torch_dtype(signature.out)).double()
        share = float((rounded == result).double().mean())
        assert share > 0.98, (signature.key, share)
        assert_exact(result.to(torch_dtype(signature.out)), arguments)


@in_one_layout
def test_rounded_results_are_within_the_bound_and_wrong_ones_are_not(
    signatures: list[Signature],
) -> None:
    for signature in signatures:
        arguments = random_arguments(small(signature), "cpu")
        result = reference(arguments)
        assert bool(result.isfinite().all())
        right = result.to(torch_dtype(signature.out))
        if Role.SUMS in arguments.tensors:
            with pytest.raises(AssertionError, match=r"sums of rows: .*elements are wrong"):
                assert_close(right, arguments)
            arguments.tensors[Role.SUMS][:, 0] = reference_sums(arguments)
        assert_close(right, arguments)
        for wrong in (result * 1.5 + 1, result.roll(1, -1)):
            with pytest.raises(AssertionError, match="elements are wrong"):
                assert_close(wrong.to(torch_dtype(signature.out)), arguments)


def signature(key: str) -> Signature:
    return Signature.parse(key)


@pytest.mark.parametrize("recipe", ["e8m0_1x32", "e4m3_1x16", "e8m0_1x16"])
@pytest.mark.parametrize("role", [Role.SCALE_A, Role.SCALE_B])
def test_every_block_scale_matters(recipe: str, role: Role) -> None:
    """A kernel that reads one scale from another's place does not pass as exact."""
    key = f"mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp32/{recipe}"
    problem = problem_of(signature(key), 130, 160, 256)
    arguments = exact_arguments(problem, "cpu")
    right = reference(arguments).float()
    scales = arguments.tensors[role].view(torch.uint8)
    blocks = problem.k // (problem.signature.scales.block or 1)
    used = (problem.m if role is Role.SCALE_A else problem.n) * blocks
    seen = 0
    for place in torch.randperm(scales.numel())[:64].tolist():
        before = int(scales[place])
        scales[place] = before + 8
        seen += not torch.equal(reference(arguments).float(), right)
        scales[place] = before
    # Padding is not seen, nor blocks of zeros alone.
    assert seen > 32 * used / scales.numel()


def test_a_scaled_product_is_one_of_scaled_operands() -> None:
    problem = problem_of(signature("mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp32/fp32_row"), 7, 16, 32)
    arguments = random_arguments(problem, "cpu")
    scale_a, scale_b = arguments.others
    unscaled = arguments.a.double() @ arguments.b.double()
    torch.testing.assert_close(reference(arguments), scale_a.double() * unscaled * scale_b.double())
    assert operand_values(problem, arguments.tensors, Role.B).shape == (16, 32)


@pytest.mark.parametrize("out", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("operand", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("recipe", ["fp32_tensor", "fp32_row"])
def test_fp32_scales_are_as_in_torchs_own_scaled_mm(recipe: str, operand: str, out: str) -> None:
    problem = problem_of(signature(f"mm/tn/{operand}x{operand}/fp32/{out}/{recipe}"), 48, 96, 128)
    for make in (exact_arguments, random_arguments):
        arguments = make(problem, "cpu")
        result = torch._scaled_mm(
            arguments.a, arguments.b, *arguments.others, out_dtype=arguments.out.dtype
        )
        assert_close(result, arguments)
        if make is exact_arguments:
            assert_exact(result, arguments)


@pytest.mark.parametrize("operand", ["bf16", "fp16"])
def test_groups_are_as_in_torchs_own_grouped_mm(operand: str) -> None:
    key = f"grouped_mm/tn/{operand}x{operand}/fp32/{operand}"
    problem = problem_of(signature(key), 50, 48, 32, count=5)
    arguments = exact_arguments(problem, "cpu")
    (ends,) = arguments.others
    check_offset_values(ends, problem.m)
    assert int(ends[-1]) == 50
    assert ends[0] == ends[1], "an empty group"
    assert_exact(torch._grouped_mm(arguments.a, arguments.b, ends), arguments)


@pytest.mark.parametrize(("op", "function"), [("mm", torch.addmm), ("bmm", torch.baddbmm)])
@pytest.mark.parametrize("epilogue", ["bias", "add"])
def test_sums_are_as_torchs_own(op: str, function: object, epilogue: str) -> None:
    problem = problem_of(signature(f"{op}/tn/fp16xfp16/fp32/fp16/{epilogue}"), 33, 48, 64)
    arguments = exact_arguments(problem, "cpu")
    assert callable(function)
    assert_exact(function(*arguments.others, arguments.a, arguments.b), arguments)


@pytest.mark.parametrize(
    ("epilogue", "activation"),
    [
        ("bias_relu", torch.relu),
        ("bias_silu", torch.nn.functional.silu),
        ("bias_gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations_are_torchs_own(epilogue: str, activation: object) -> None:
    problem = problem_of(signature(f"mm/tn/bf16xbf16/fp32/fp32/{epilogue}"), 33, 48, 64)
    arguments = random_arguments(problem, "cpu")
    plain = arguments.a.double() @ arguments.b.double() + arguments.others[0].double()
    assert callable(activation)
    torch.testing.assert_close(reference(arguments), activation(plain))


@in_one_layout
def test_edges_are_problems_that_a_kernel_serves(signatures: list[Signature]) -> None:
    for signature in signatures:
        step_m, step_n, step_k = size_steps(signature, 16)
        for problem in edges(signature, 16):
            assert problem.signature == signature
            assert (problem.m % step_m, problem.n % step_n, problem.k % step_k) == (0, 0, 0)
            arguments = exact_arguments(problem, "meta")
            assert arguments.out.shape[-2:] == (problem.m, problem.out_n)
            assert problem.batch in (1, BATCH, GROUPS)
