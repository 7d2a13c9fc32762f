"""Gates of groups for training: with the product kept, gradients of gates, and ups beside gates.

Needs the wheel of grouped.yaml, whose kernels `test_kernels` looks at as at all others.
"""

from __future__ import annotations

import pytest
import torch
from edges import problem_of
from gemm_arguments import Arguments, exact_arguments, poisoned, random_arguments
from gemm_reference import assert_close, cut_off
from installed import installed_kernels, launch
from torch.nn import functional

import nvgemm_runtime
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.epilogues import (
    ALL_EPILOGUES,
    Epilogue,
    Gate,
    GateForm,
    WeightOrder,
    find_gated,
)
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.gemm.roles import Role, sum_parts

DEVICE = "cuda"
FORMS = (GateForm.KEPT, GateForm.GRADIENT, GateForm.GRADIENT_SUMS, GateForm.UPS)
KERNELS = [
    kernel
    for _, kernel in installed_kernels()
    if kernel.signature.op is Op.GROUPED_MM and kernel.signature.form in FORMS
]

each = pytest.mark.parametrize(
    "kernel", KERNELS, ids=[f"{one.id[:12]}-{one.signature.key}" for one in KERNELS]
)

RAGGED = (0, 1, 129, 0, 63, 2, 300, 0)
"""Rows of each group."""

MANY = tuple((7 * i) % 11 for i in range(100))
"""More groups than the scheduler counts at a time."""

REST = 41
"""Rows behind the last group, which nothing computes."""

K = 208
"""Not whole tiles."""

MARGIN = 64
"""Rows and columns of a frame around a result."""


def columns(kernel: Kernel, hidden: int) -> int:
    """Columns of B where a gate gives, or gave, ``hidden`` columns."""
    form = kernel.signature.form
    return 2 * hidden if form is not None and form.has_pairs else hidden


def arguments_for(kernel: Kernel, counts: tuple[int, ...], rest: int = 0) -> Arguments:
    """Groups of so many rows.

    A product lies where it was kept, between what the gate gave; gates lie in front of the result.
    """
    rows = sum(counts) + rest
    problem = problem_of(kernel.signature, rows, columns(kernel, 328), K, count=len(counts))
    arguments = random_arguments(problem, DEVICE)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    arguments.tensors[Role.OFFSETS] = ends.to(DEVICE)
    form = kernel.signature.form
    if kernel.signature.is_gradient:
        product = arguments.tensors[Role.ADDEND]
        wide = product.new_full((rows, product.shape[1] // 2 * 3), float("nan"))
        wide[:, : product.shape[1]] = product
        arguments.tensors[Role.ADDEND] = wide[:, : product.shape[1]]
    if form is GateForm.UPS:
        gates, out = arguments.tensors[Role.ADDEND], arguments.out
        wide = torch.cat((gates, out), 1)
        arguments.tensors[Role.ADDEND] = wide[:, : gates.shape[1]]
        arguments.tensors[Role.OUT] = wide[:, gates.shape[1] :]
    return arguments


def framed(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the result a window of a poisoned frame, and sums one; returns that and a copy."""
    rows, width = arguments.out.shape
    shape = (rows + 2 * MARGIN, width + 2 * MARGIN)
    frame = poisoned(shape, arguments.problem.signature.out, DEVICE)
    arguments.tensors[Role.OUT] = frame[MARGIN:-MARGIN, MARGIN:-MARGIN]
    if Role.SUMS in arguments.tensors:
        parts = arguments.tensors[Role.SUMS].shape[1]
        around = poisoned((rows + 2 * MARGIN, parts), DType.FP32, DEVICE)
        arguments.tensors[Role.SUMS] = around[MARGIN:-MARGIN].zero_()
    return frame, frame.clone()


def assert_sums_unchanged(arguments: Arguments, rows: int) -> None:
    """What is around the sums, and those of the rows from this one on; there may be none."""
    sums = arguments.tensors.get(Role.SUMS)
    if sums is None:
        return
    assert not sums[rows:].any()
    assert sums._base is not None
    for edge in (sums._base[:MARGIN], sums._base[-MARGIN:]):
        assert (edge.view(torch.uint8) == 0xFF).all()


def assert_unchanged(frame: torch.Tensor, before: torch.Tensor, rows: int) -> None:
    """All of a frame but the first rows of its window."""
    window = (slice(MARGIN, MARGIN + rows), slice(MARGIN, -MARGIN))
    frame[window] = before[window]
    assert torch.equal(frame.view(torch.uint8), before.view(torch.uint8))


@each
def test_ragged_groups_are_right_and_nothing_else_is_written(kernel: Kernel) -> None:
    """Empty groups, one row, odd numbers of rows; rows of no group, and what is around, stay."""
    arguments = arguments_for(kernel, RAGGED, REST)
    frame, before = framed(arguments)
    out = launch(kernel, arguments)
    assert_close(out[: sum(RAGGED)], arguments.first_rows(sum(RAGGED)))
    assert_unchanged(frame, before, sum(RAGGED))
    assert_sums_unchanged(arguments, sum(RAGGED))


@each
def test_many_groups_are_right(kernel: Kernel) -> None:
    arguments = arguments_for(kernel, MANY)
    assert_close(launch(kernel, arguments), arguments)


@each
@pytest.mark.parametrize("ends", [(10, 64, 4000, 1_000_000_000), (-5, 20, -(2**31), 128)])
def test_wrong_ends_write_nothing_outside_the_result(kernel: Kernel, ends: tuple[int, ...]) -> None:
    """What the result holds is undefined."""
    arguments = exact_arguments(
        problem_of(kernel.signature, 128, columns(kernel, 328), K, count=4), DEVICE
    )
    arguments.tensors[Role.OFFSETS] = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    frame, before = framed(arguments)
    launch(kernel, arguments)
    torch.cuda.synchronize()
    assert_unchanged(frame, before, 128)
    assert_sums_unchanged(arguments, 128)


@each
@pytest.mark.parametrize("hidden", [8, 1000])
def test_columns_that_end_within_a_tile_are_right(kernel: Kernel, hidden: int) -> None:
    """No part of the result reaches into the next, which begins within the same tile."""
    problem = problem_of(kernel.signature, 330, columns(kernel, hidden), 136, count=5)
    arguments = random_arguments(problem, DEVICE)
    assert_close(launch(kernel, arguments), arguments)


def join(gate: Gate, gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    if gate is Gate.SWIGLU_OAI:
        gates, ups = cut_off(gates, 7.0, below=False), cut_off(ups, 7.0, below=True)
        return gates * torch.sigmoid(1.702 * gates) * (ups + 1)
    if gate is Gate.GEGLU:
        return functional.gelu(gates, approximate="tanh") * ups
    return functional.silu(gates) * ups


def multiply(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A product of groups in fp64."""
    parts = a.double().tensor_split(ends[:-1].long().cpu())
    return torch.cat([part @ one.double() for part, one in zip(parts, b)])


@pytest.mark.parametrize("order", WeightOrder)
@pytest.mark.parametrize("gate", Gate)
def test_a_gradient_of_what_was_kept_is_autograds(gate: Gate, order: WeightOrder) -> None:
    """A forward pass and the backward pass through it, as experts in training have them."""
    torch.manual_seed(0)
    dim, hidden, groups = 256, 328, len(RAGGED)
    ends = torch.tensor(RAGGED, device=DEVICE).cumsum(0).to(torch.int32)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(torch.bfloat16)

    x, grad = made(sum(RAGGED), dim), made(sum(RAGGED), dim)
    w_up, w_down = made(groups, 2 * hidden, dim) / 4, made(groups, dim, hidden) / 16
    bias = made(groups, 2 * hidden) if gate.row.is_biased else None
    stored = nvgemm_runtime.grouped_mm(
        x, w_up.mT, ends, epilogue=find_gated(gate, order, GateForm.KEPT), bias=bias
    )
    product = stored[:, : 2 * hidden]
    found = nvgemm_runtime.grouped_mm(
        grad, w_down, ends, epilogue=find_gated(gate, order, GateForm.GRADIENT), product=product
    )
    exact = multiply(x, w_up.mT, ends)
    if bias is not None:
        exact += bias.double().repeat_interleave(torch.tensor(RAGGED, device=DEVICE), 0)
    torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=2**-12)

    kept = product.double().requires_grad_()
    pair = kept.chunk(2, -1) if order is WeightOrder.HALVES else (kept[:, ::2], kept[:, 1::2])
    given = join(gate, *pair)
    torch.testing.assert_close(
        stored[:, 2 * hidden :].double(), given.detach(), rtol=2**-5, atol=2**-3
    )
    of_given = multiply(grad, w_down, ends)
    wanted = torch.autograd.grad(given, kept, of_given)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=2**-10)

    sums = torch.zeros((sum(RAGGED), sum_parts(hidden)), device=DEVICE)
    with_sums = nvgemm_runtime.grouped_mm(
        grad, w_down, ends, epilogue=find_gated(gate, order, GateForm.GRADIENT_SUMS),
        product=product, sums=sums,
    )  # fmt: skip
    torch.testing.assert_close(with_sums.double(), wanted, rtol=2**-7, atol=2**-10)
    terms = (given * of_given).detach()
    error = (sums.sum(1).double() - terms.sum(1)).abs()
    assert bool((error <= 2**-8 * terms.abs().sum(1) + 2**-10).all())


UPS = [one for one in ALL_EPILOGUES if one.form is GateForm.UPS]


@pytest.mark.parametrize("epilogue", UPS, ids=lambda one: one.name)
def test_gates_and_ups_of_two_weights_are_stored_as_of_one(epilogue: Epilogue) -> None:
    """Side by side in one buffer, so that the gradient reads them where they are."""
    assert epilogue.gate is not None
    torch.manual_seed(0)
    dim, hidden, groups = 256, 328, len(RAGGED)
    ends = torch.tensor(RAGGED, device=DEVICE).cumsum(0).to(torch.int32)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(torch.bfloat16)

    x, grad, w_down = made(sum(RAGGED), dim), made(sum(RAGGED), dim), made(groups, dim, hidden) / 16
    w_gate, w_up = (made(groups, hidden, dim) / 4 for _ in range(2))
    stored = poisoned((sum(RAGGED), 3 * hidden), DType.BF16, DEVICE)
    gates, others = stored[:, :hidden], stored[:, hidden:]
    nvgemm_runtime.grouped_mm(x, w_gate.mT, ends, gates)
    before = gates.clone()
    nvgemm_runtime.grouped_mm(x, w_up.mT, ends, others, epilogue=epilogue, gates=gates)
    assert torch.equal(gates, before)

    exact = multiply(x, w_up.mT, ends)
    torch.testing.assert_close(others[:, :hidden].double(), exact, rtol=2**-8, atol=2**-12)
    wanted = join(epilogue.gate, gates.double(), exact)
    torch.testing.assert_close(others[:, hidden:].double(), wanted, rtol=2**-7, atol=2**-3)

    of_gate = find_gated(epilogue.gate, WeightOrder.HALVES, GateForm.GRADIENT)
    product = stored[:, : 2 * hidden]
    found = nvgemm_runtime.grouped_mm(grad, w_down, ends, epilogue=of_gate, product=product)
    kept = product.double().requires_grad_()
    given = join(epilogue.gate, *kept.chunk(2, -1))
    of_kept = torch.autograd.grad(given, kept, multiply(grad, w_down, ends))[0]
    torch.testing.assert_close(found.double(), of_kept, rtol=2**-7, atol=2**-10)


def test_every_gate_in_each_order_and_form_is_installed() -> None:
    wanted = {
        (epilogue, dtype)
        for epilogue in ALL_EPILOGUES
        if epilogue.form in FORMS
        for dtype in ("bf16", "fp16")
    }
    assert wanted == {(one.signature.epilogue, one.signature.a.value) for one in KERNELS}
