"""Gradients for gates and ups by one kernel, which the result's gradient goes through."""

from __future__ import annotations

import torch

from ..gemm.epilogues import GateForm
from .gated_products import gate_gradients
from .gradients import Backward, Gradients, with_bias
from .operators import is_watched, sum_products
from .plan import Plan, UpProjection, activated
from .products import rows


def gradients_by_kernel(plan: Plan, projected: UpProjection, task: Backward) -> Gradients | None:
    """Takes the result's gradient to gates and ups by one kernel, or returns None."""
    # Return early, because Dynamo in torch 2.11 cannot iterate enums.
    product = projected.gates
    if plan.kernels is None or product is None or projected.ups is not None:
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
            return complete_backward(plan, projected, task, *gradients, kernel_grad=kernel_grad)
    return None


def complete_backward(
    plan: Plan,
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
    assert projected.gates is not None
    gates, ups = plan.parts(projected.gates, projected.ups)
    ups_are_cut = plan.activation.clamps
    grad, joined = kernel_grad, projected.joined
    needs_result = task.for_routing_weights and sums is None and ups_are_cut
    if joined is None and (task.for_down or needs_result):
        joined = activated(plan, gates, ups)
    by_row = None
    if task.for_routing_weights:
        assert task.routing_weights is not None
        is_masked = sums is not None and task.down_bias is None and not plan.is_compiled
        if needs_result:
            assert joined is not None
            result = rows(joined, task.w_down.mT, task.offsets, task.down_bias)
            by_row = sum_products(task.grad, result, is_compiled=plan.is_compiled)
        else:
            if sums is None:
                sums = sum_products(plan.split(gradients)[1], ups, is_compiled=plan.is_compiled)
            by_row = with_bias(plan, task, sums)
        if not is_masked:
            by_row = task.mask_unowned(by_row)
        if task.weighs_gates:
            gradients.mul_(task.routing_weights[:, None])
        if task.for_down:
            assert joined is not None
            grad, joined = task.down_factors(plan, joined)
    joined = joined if task.for_down else None
    return Gradients(grad=grad, joined=joined, gates=gradients, routing_weights=by_row)
