"""Up projections and their gated activation.

Kernels with the gate as their epilogue compute both if one serves. Operators compute them if no
kernel serves, or if a dispatch mode or a tensor subclass observes operators.
"""

from __future__ import annotations

import torch

from ..gemm.epilogues import Epilogue, GateForm
from ..gemm.moe_operators import GATHERED_MAX_N
from .gated_products import gated_rows, paired_gated_rows, paired_rows
from .operators import taken_rows
from .plan import Plan, UpProjection
from .products import rows


def project_up(
    plan: Plan,
    x: torch.Tensor,
    indices: torch.Tensor | None,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    w_down: torch.Tensor,
) -> UpProjection:
    """Multiplies rows by the gate and up weights, in as few launches as possible.

    ``indices`` selects ``x``'s rows. For experts that are not wide, a kernel that gathers rows and
    applies the gate is preferred to a copy. Width decides, because a kernel serves any number of
    columns and may still be slower.
    """
    (w_gate, w_up), (gate_bias, up_bias) = weights, biases
    columns = w_gate.shape[1] + (0 if w_up is None else w_up.shape[1])
    if indices is not None and columns > GATHERED_MAX_N:
        x, indices = taken_rows(x, indices), None
    if plan.kernels is not None and indices is not None:
        narrow = indices.to(torch.int32).contiguous()  # as kernels take them
        projection = _with_gate(plan, x, narrow, offsets, weights, biases)
        if projection is not None:
            return projection
    gathered = taken_rows(x, indices)
    if plan.kernels is not None:
        projection = _with_gate(plan, gathered, None, offsets, weights, biases)
        if projection is not None:
            return projection
        if w_up is not None:
            gradient = plan.epilogue(GateForm.GRADIENT) if plan.wants_grad else None
            reader = None if gradient is None else (w_down, gradient)
            both = paired_rows(
                gathered, w_gate.mT, w_up.mT, offsets, *biases, use=plan.kernels, reader=reader
            )
            if both is not None:
                return UpProjection(gates=both)
    gates = rows(gathered, w_gate.mT, offsets, gate_bias)
    ups = None if w_up is None else rows(gathered, w_up.mT, offsets, up_bias)
    return UpProjection(gates=gates, ups=ups)


def _with_gate(
    plan: Plan,
    x: torch.Tensor,
    indices: torch.Tensor | None,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> UpProjection | None:
    """Computes the up projection with a gate in a kernel, or returns None if none serves."""
    w_gate, w_up = weights
    if w_up is None:
        return _joined_by_kernel(plan, x, indices, offsets, w_gate, biases[0])
    epilogue = plan.epilogue(GateForm.UPS)
    if epilogue is None or any(bias is not None for bias in biases):
        return None
    hidden = w_gate.shape[1]
    stored = paired_gated_rows(x, w_gate.mT, w_up.mT, offsets, epilogue, indices, use=plan.kernels)
    if stored is None:
        return None
    # The gate's gradient reads the first two thirds.
    return UpProjection(gates=stored[:, : 2 * hidden], joined=stored[:, 2 * hidden :])


def _joined_by_kernel(
    plan: Plan,
    x: torch.Tensor,
    indices: torch.Tensor | None,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> UpProjection | None:
    """Computes the up projection by one kernel with the gate, or returns None if none serves.

    Bundles for training may only have the kernel that also stores the product.
    """
    for form in (GateForm.KEPT,) if plan.wants_grad else (GateForm.JOINED, GateForm.KEPT):
        epilogue = plan.epilogue(form)
        if epilogue is None or not _fits_bias(epilogue, bias):
            continue
        stored = gated_rows(x, weight.mT, offsets, bias, epilogue, indices, use=plan.kernels)
        if stored is None:
            continue
        if form is GateForm.JOINED:
            return UpProjection(joined=stored)
        n = weight.shape[1]
        return UpProjection(gates=stored[:, :n], joined=stored[:, n:])
    return None


def _fits_bias(epilogue: Epilogue, bias: torch.Tensor | None) -> bool:
    """Returns True if the epilogue adds a bias and there is one, or neither."""
    return (epilogue.addend is None) is (bias is None)
