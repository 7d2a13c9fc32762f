"""Up projections and their gated activation.

Kernels with the gate as their epilogue compute both if one serves. Operators compute them if no
kernel serves, or if a dispatch mode or a tensor subclass observes operators.
"""

from __future__ import annotations

import torch

from ..gemm.epilogues import GateForm
from ..gemm.moe_operators import GATHERED_MAX_N
from .gated_products import gated_rows, paired_gated_rows, paired_rows
from .operators import taken_rows
from .plan import ExpertsPlan, UpProjection
from .products import rows


def project_up(
    plan: ExpertsPlan,
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
    (w_first, w_second), (first_bias, _) = weights, biases
    columns = w_first.shape[1] + (0 if w_second is None else w_second.shape[1])
    if indices is not None and columns > GATHERED_MAX_N:
        x, indices = taken_rows(x, indices), None
    forms = _forms(plan, weights, biases)
    numbers: list[torch.Tensor | None] = [None]
    if indices is not None and forms:
        numbers.insert(0, indices.to(torch.int32).contiguous())  # as kernels take them
    for row_numbers in numbers:
        a = taken_rows(x, indices) if row_numbers is None else x
        for form in forms:
            epilogue = plan.epilogue(form)
            if epilogue is None:
                continue
            if w_second is None:
                if (epilogue.addend is None) is not (first_bias is None):
                    continue
                stored = gated_rows(
                    a, w_first.mT, offsets, first_bias, epilogue, row_numbers, use=plan.kernels
                )
            else:
                stored = paired_gated_rows(
                    a, w_first.mT, w_second.mT, offsets, epilogue, row_numbers, use=plan.kernels
                )
            if stored is None:
                continue
            if form is GateForm.JOINED:
                return UpProjection(activated=stored)
            return UpProjection(first=stored[:, :columns], activated=stored[:, columns:])
    return _without_gate(plan, a, offsets, weights, biases, w_down)


def _forms(
    plan: ExpertsPlan,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> tuple[GateForm, ...]:
    """Returns the forms of a gate that can compute the up projection in a kernel, best first.

    Bundles for training may only have the kernel that also stores the product.
    """
    if plan.kernels is None:
        return ()
    if weights[1] is not None:
        return (GateForm.UPS,) if biases[0] is None and biases[1] is None else ()
    return (GateForm.KEPT,) if plan.wants_grad else (GateForm.JOINED, GateForm.KEPT)


def _without_gate(
    plan: ExpertsPlan,
    x: torch.Tensor,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    w_down: torch.Tensor,
) -> UpProjection:
    """Computes the up projection without its activation."""
    (w_first, w_second), (first_bias, second_bias) = weights, biases
    if w_second is not None and plan.kernels is not None:
        gradient = plan.epilogue(GateForm.GRADIENT) if plan.wants_grad else None
        reader = None if gradient is None else (w_down, gradient)
        both = paired_rows(
            x, w_first.mT, w_second.mT, offsets, *biases, use=plan.kernels, reader=reader
        )
        if both is not None:
            return UpProjection(first=both)
    first = rows(x, w_first.mT, offsets, first_bias)
    second = None if w_second is None else rows(x, w_second.mT, offsets, second_bias)
    return UpProjection(first=first, second=second)
