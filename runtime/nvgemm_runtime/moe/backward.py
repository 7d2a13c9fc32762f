"""Backward of the experts' function.

If a kernel serves, it takes the gradient through the down projection and the gate. An activation
that was not saved is computed again: as in the forward if that kernel serves, else in fp32, a few
rows at a time, so that its tensors stay small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..gemm.epilogues import GateForm
from ..gemm.moe_operators import BIAS_COLUMNS
from .gated_products import gate_gradients
from .gradients import Backward, Gradients, gradients_by_operators, with_bias
from .operators import is_watched, sum_products
from .plan import ExpertsPlan, KernelUse, UpProjection, activate
from .products import added_rows, columns, rows, weight_gradient
from .routing import sum_rows_of_tokens


def take_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients for the forward's arguments, in order; None if not requested.

    Raises:
        RuntimeError: If the gradients should have gradients.
    """
    # While compiling, AOTAutograd itself refuses a second backward.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "experts: the backward has no derivative; call backward() or grad() without "
            "create_graph=True"
        )
    (
        offsets, indices, token_rows, routing_weights, token_routing_weights,
        x, w_first, w_second, w_down, down_bias, *saved,
    ) = ctx.saved_tensors  # fmt: skip
    plan: ExpertsPlan = ctx.plan
    # Compiled autograd, which may compile an eager call's backward, cannot trace this.
    if plan.kernels is KernelUse.LAUNCHED and not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
    (
        for_routing_weights, for_x, for_first, for_second, for_down,
        for_first_bias, for_second_bias, for_down_bias,
    ) = ctx.needs_input_grad[4:]  # fmt: skip
    grad = grad.to(x.dtype)
    grad = grad.index_select(0, indices) if plan.combine else grad.contiguous()

    # Apply routing weights while gathering, which needs no extra pass, else to the narrower.
    weighs_gates = indices is None and 2 * w_down.shape[2] < w_down.shape[1]
    projected = UpProjection(**dict(zip(("first", "second", "activated"), saved)))
    task = Backward(
        grad=grad, routing_weights=routing_weights, w_down=w_down, down_bias=down_bias,
        offsets=offsets, for_down=for_down,
        for_gates=for_x or for_first or for_second or for_first_bias or for_second_bias,
        for_routing_weights=for_routing_weights, weighs_gates=weighs_gates,
    )  # fmt: skip
    grad_first, grad_second, routing_grads, grad_w_down = _gradients_of_activation(
        plan, projected, task
    )
    gradients = {"w_down": grad_w_down}
    if for_down_bias:
        gradients["down_bias"] = _bias_gradient(grad, offsets, routing_weights)
    del projected, saved, task, grad  # frees their memory
    if routing_grads is not None:
        gradients["routing_weights"] = routing_grads.to(routing_weights.dtype)
    if grad_first is not None:
        if weighs_gates or not for_routing_weights:  # these gradients are weighted already
            routing_weights = token_routing_weights = None
        elif token_rows is None:
            token_routing_weights = routing_weights
        if for_first or for_second:
            gathered = plan.weighted(x, indices, routing_weights)
            if for_first:
                gradients["w_first"] = weight_gradient(grad_first, gathered, offsets, w_first)
            if for_second:
                gradients["w_second"] = weight_gradient(grad_second, gathered, offsets, w_second)
            del gathered  # frees its memory for the rows' gradient
        if for_first_bias:
            gradients["first_bias"] = _bias_gradient(grad_first, offsets, routing_weights)
        if for_second_bias:
            gradients["second_bias"] = _bias_gradient(grad_second, offsets, routing_weights)
        if for_x:
            grad_x = _gradient_of_rows(plan, grad_first, grad_second, w_first, w_second, offsets)
            if indices is not None:
                grad_x = sum_rows_of_tokens(
                    grad_x, offsets, indices, token_rows, token_routing_weights, x.shape[0],
                    is_compiled=plan.is_compiled, by_kernel=ctx.sums_rows,
                )  # fmt: skip
            else:
                grad_x = plan.weighted(grad_x, None, routing_weights)
            gradients["x"] = grad_x
    order = (
        "routing_weights", "x", "w_first", "w_second", "w_down", "first_bias", "second_bias",
        "down_bias",
    )  # fmt: skip
    return (None, None, None, None, *(gradients.get(name) for name in order))


def _gradients_of_activation(
    plan: ExpertsPlan, projected: UpProjection, task: Backward
) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients for both products, routing weights and the down projection's weights.

    Each is None if not requested; the second also if there is one product.
    """
    grad_w_down = None
    if (
        task.for_down
        and projected.activated is not None
        and (task.for_routing_weights or task.routing_weights is None)
    ):
        # Before the gates' gradients, which take more memory.
        weighed = task.down_operands(plan, projected.activated)
        grad_w_down = weight_gradient(*weighed, task.offsets, task.w_down)
        del weighed
        task = replace(task, for_down=False)
    result = _gradients_by_kernel(plan, projected, task) if task.for_gates else None
    if result is None:
        result = gradients_by_operators(plan, projected, task)
    first, second = result.first, result.second
    if plan.order is None and second is None and first is not None:
        first, second = plan.split(first)
    if result.activated is not None:
        grad_w_down = weight_gradient(result.grad, result.activated, task.offsets, task.w_down)
    return first, second, result.routing_weights, grad_w_down


def _gradients_by_kernel(
    plan: ExpertsPlan, projected: UpProjection, task: Backward
) -> Gradients | None:
    """Takes the result's gradient to gates and ups by one kernel, or returns None."""
    # Return early, because Dynamo in torch 2.11 cannot iterate enums.
    product = projected.first
    if plan.kernels is None or product is None or projected.second is not None:
        return None
    if not plan.activation.has_kernels or (not plan.is_compiled and is_watched(task.grad)):
        return None
    kernel_grad = task.kernel_gradient(plan)
    operands = (kernel_grad, task.w_down, task.offsets, product)
    forms = (
        (GateForm.GRADIENT_SUMS, GateForm.GRADIENT)
        if task.for_routing_weights
        else (GateForm.GRADIENT,)
    )
    for form in forms:
        epilogue = plan.epilogue(form)
        assert epilogue is not None  # every gate has both
        gradients = gate_gradients(*operands, epilogue, use=plan.kernels)
        if gradients is not None:
            return _complete(plan, projected, task, *gradients, kernel_grad=kernel_grad)
    return None


def _complete(
    plan: ExpertsPlan,
    projected: UpProjection,
    task: Backward,
    gradients: torch.Tensor,
    sums: torch.Tensor | None = None,
    *,
    kernel_grad: torch.Tensor,
) -> Gradients:
    """Completes the backward pass from the kernel's output.

    A routing weight's gradient is the sum of the activation's results times their gradients, which
    the kernel may provide. Without it, and with unclamped ups, it is the sum of ups times their
    gradients. With clamped ups, it is the sum of the down projection's result times the given
    gradient. That product is computed again, which moves a quarter of the memory that operators
    would. For 98,304 rows, 2880 columns in and out and 32 experts (gpt-oss-20b), it costs 1.6 TFLOP
    and moves about 60 bytes for each activation value, instead of about 280.

    Args:
        plan: Computation to run.
        projected: Up projection result.
        task: Backward inputs and requested gradients.
        gradients: Kernel output: gate and up gradients in one matrix, for ``kernel_grad``. May be
            overwritten.
        sums: For each row, the sum of the activation's results times their gradients; None to
            compute it here. In eager code a kernel provides it, with 0 for rows that no expert has.
        kernel_grad: Gradient passed to the kernel.
    """
    assert projected.first is not None
    gates, ups = plan.split(projected.first)
    ups_are_cut = plan.activation.clamps
    grad, activated = kernel_grad, projected.activated
    needs_result = task.for_routing_weights and sums is None and ups_are_cut
    if activated is None and (task.for_down or needs_result):
        activated = activate(plan, gates, ups)
    routing_grads = None
    if task.for_routing_weights:
        assert task.routing_weights is not None
        is_masked = sums is not None and task.down_bias is None and not plan.is_compiled
        if needs_result:
            assert activated is not None
            result = rows(activated, task.w_down.mT, task.offsets, task.down_bias)
            routing_grads = sum_products(task.grad, result, is_compiled=plan.is_compiled)
        else:
            if sums is None:
                sums = sum_products(plan.split(gradients)[1], ups, is_compiled=plan.is_compiled)
            routing_grads = with_bias(plan, task, sums)
        if not is_masked:
            routing_grads = task.mask_unowned(routing_grads)
        if task.weighs_gates:
            gradients.mul_(task.routing_weights[:, None])
        if task.for_down:
            assert activated is not None
            grad, activated = task.down_operands(plan, activated)
    activated = activated if task.for_down else None
    return Gradients(grad=grad, activated=activated, first=gradients, routing_weights=routing_grads)


def _gradient_of_rows(
    plan: ExpertsPlan,
    grad_first: torch.Tensor,
    grad_second: torch.Tensor | None,
    w_first: torch.Tensor,
    w_second: torch.Tensor | None,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Returns the rows' gradient from one product or two.

    The second product is added to the first in place, by one kernel if one serves.
    """
    if grad_second is None:
        return rows(grad_first, w_first, offsets)
    assert w_second is not None
    second = (grad_second, w_second, offsets)
    if plan.adds_rows(*second):
        return added_rows(*second, grad_first, w_first)
    return rows(grad_first, w_first, offsets) + rows(*second)


def _bias_gradient(
    grad: torch.Tensor, offsets: torch.Tensor, routing_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums each group's rows, times their routing weights, as a product with a fixed order.

    The other matrix has columns of ones. With routing weights, its first column holds them rounded
    and its second column their rounding errors. Each column gives a sum in fp32 that is rounded.
    """
    if routing_weights is None:
        ones = grad.new_ones((grad.shape[0], BIAS_COLUMNS))
        return columns(grad, ones, offsets)[..., 0]
    near = routing_weights.to(grad.dtype)
    zeros = grad.new_zeros((grad.shape[0], BIAS_COLUMNS - 2))
    parts = (near[:, None], (routing_weights - near).to(grad.dtype)[:, None], zeros)
    return columns(grad, torch.cat(parts, 1), offsets)[..., :2].sum(-1)
