"""The gradients of gates and ups, of the down projection's weights, and of rows' weights.

By a kernel that takes the gradient of the result through the down projection and the gate, where
one serves, and else by that product and operators. While torch.compile traces, that is decided by
what `traced` defines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..gemm.epilogues import GateForm
from .activations import Activation
from .gates import Plan, UpProjection, activated, pieces_of
from .operators import apply_weights, dense_like, is_watched, sum_products, widen
from .products import gate_gradients, owner_of_rows, rows


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What the backward needs of the activation; None for what is not asked for.

    Attributes:
        grad: The gradient of the down projection's result that goes with ``joined``.
        joined: What the activation gave, for the gradient of the down projection's weights.
        gates: The gradients of gates, or of gates and ups in one matrix. Where the gradient of
            rows' weights is asked for, they have these weights only if `scores_go_on_gates`.
        ups: Those of ups, likewise; None where there is no matrix of their own.
        scores: The gradient of each row's weight, in fp32.
        w_down: The gradient of the down projection's weights, where it is known already.
    """

    grad: torch.Tensor
    joined: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    ups: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    w_down: torch.Tensor | None = None

    def with_parts(self, gates: torch.Tensor, ups: torch.Tensor) -> Gradients:
        """The same, with the gradients of gates and ups apart."""
        return replace(self, gates=gates, ups=ups)


def scores_go_on_gates(w_down: torch.Tensor) -> bool:
    """Whether gradients of gates and ups get rows' weights: where they are narrower than rows.

    Else rows themselves get them, and the sums of rows' gradients.
    """
    return bool(2 * w_down.shape[2] < w_down.shape[1])


def gradients_by_kernel(
    plan: Plan,
    projected: UpProjection,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    w_down: torch.Tensor,
    down_bias: torch.Tensor | None,
    offsets: torch.Tensor,
    *,
    for_down: bool,
    for_scores: bool,
) -> Gradients | None:
    """Take the gradient of the result to gates and ups by one kernel, if one serves."""
    # Before more is looked at: Dynamo of torch 2.11 does not iterate enumerations.
    if not plan.uses_kernels or projected.ups is not None:
        return None
    product, epilogue = projected.gates, plan.epilogue(GateForm.GRADIENT)
    if product is None or epilogue is None or is_watched(grad):
        return None
    given = grad if for_scores else apply_weights(grad, scores, is_compiled=plan.is_compiled)
    found = gate_gradients(given, w_down, offsets, product, epilogue)
    if found is None:
        return None
    return behind_kernel(
        plan, projected, found, grad, given, scores, w_down, down_bias, offsets,
        for_down=for_down, for_scores=for_scores,
    )  # fmt: skip


def behind_kernel(
    plan: Plan,
    projected: UpProjection,
    found: torch.Tensor,
    grad: torch.Tensor,
    given: torch.Tensor,
    scores: torch.Tensor | None,
    w_down: torch.Tensor,
    down_bias: torch.Tensor | None,
    offsets: torch.Tensor,
    *,
    for_down: bool,
    for_scores: bool,
) -> Gradients:
    """All that the backward needs, by what a kernel found.

    The gradient of a row's weight is the sum of what the activation gave times its gradient, and so
    of ups times theirs, where ups are a factor as they are. Where they are cut off, it is that of
    the down projection's result times the given gradient. That product is computed again, which
    moves a quarter of the memory that operators do: for 98,304 rows, 2880 columns in and out and
    32 experts (gpt-oss-20b), 1.6 TFLOP more and about 60 bytes for each of what the activation
    gives in place of about 280.

    Args:
        plan: What to compute.
        projected: What the up projection gave.
        found: Gradients of gates and ups in one matrix, which may be overwritten: of ``given``.
        grad: The gradient of the result.
        given: The same, times the rows' weights unless their gradient is wanted.
        scores: The rows' weights.
        w_down: Weights of the down projection.
        down_bias: Its bias.
        offsets: End of each expert's rows.
        for_down: Whether the gradient of the down projection's weights is wanted.
        for_scores: Whether that of the rows' weights is.
    """
    assert projected.gates is not None
    gates, ups = plan.parts(projected.gates, projected.ups)
    ups_are_cut = plan.activation.kind is Activation.SWIGLU_OAI
    joined = projected.joined
    if joined is None and (for_down or (for_scores and ups_are_cut)):
        joined = activated(plan, gates, ups)
    by_row = None
    if for_scores:
        assert scores is not None
        if ups_are_cut:
            assert joined is not None
            result = rows(joined, w_down.mT, offsets, down_bias)
            by_row = sum_products(grad, result, is_compiled=plan.is_compiled)
        else:
            of_ups = plan.split(found)[1]
            by_row = sum_products(of_ups, ups, is_compiled=plan.is_compiled)
            by_row = by_row + _of_bias(plan, grad, offsets, down_bias)
        if scores_go_on_gates(w_down):
            found.mul_(scores[:, None])
        given = apply_weights(grad, scores, is_compiled=plan.is_compiled)
    return Gradients(grad=given, joined=joined if for_down else None, gates=found, scores=by_row)


def gradients_by_operators(
    plan: Plan,
    projected: UpProjection,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    w_down: torch.Tensor,
    down_bias: torch.Tensor | None,
    offsets: torch.Tensor,
    *,
    for_down: bool,
    for_gates: bool,
    for_scores: bool,
) -> Gradients:
    """Take the gradient of the result to gates and ups by a product and operators, in fp32."""
    gate_rows, up_rows = projected.gates, projected.ups
    assert gate_rows is not None
    gate, up = plan.parts(gate_rows, up_rows)
    grad_hidden = rows(grad, w_down, offsets) if for_gates or for_scores else None
    hidden = dense_like(gate) if for_down else None
    grad_gate_rows = torch.empty_like(gate_rows) if for_gates else None
    grad_up_rows = None if up_rows is None or not for_gates else torch.empty_like(up_rows)
    by_row = widen(gate.new_empty(gate.shape[0])) if for_scores else None
    for piece in pieces_of(plan, gate):
        gates, ups = widen(gate[piece]), up[piece]
        factor = None if scores is None else scores[piece, None]
        if for_down or for_scores:
            joined = plan.activation.apply(gates, ups)
        if hidden is not None:  # the factor is on the narrower of the two
            hidden[piece] = joined if factor is None else joined * factor
        if grad_hidden is not None:
            grads = widen(grad_hidden[piece])
        if by_row is not None:
            by_row[piece] = (grads * joined).sum(-1)
        if grad_gate_rows is not None:
            if factor is not None and (scores_go_on_gates(w_down) or not for_scores):
                grads = grads * factor
            of_gates, of_ups = plan.parts(grad_gate_rows, grad_up_rows)
            of_gates[piece], of_ups[piece] = plan.activation.gradients(gates, ups, grads)
    if by_row is not None:
        by_row = by_row + _of_bias(plan, grad, offsets, down_bias)
    return Gradients(
        grad=grad, joined=hidden, gates=grad_gate_rows, ups=grad_up_rows, scores=by_row
    )


def _of_bias(
    plan: Plan, grad: torch.Tensor, offsets: torch.Tensor, down_bias: torch.Tensor | None
) -> torch.Tensor | int:
    """What the bias of the down projection adds to the gradient of each row's weight."""
    if down_bias is None:
        return 0
    by_row = down_bias.index_select(0, owner_of_rows(offsets, grad.shape[0]))
    return sum_products(grad, by_row, is_compiled=plan.is_compiled)


def traced_gradients(
    plan: Plan,
    projected: UpProjection,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    w_down: torch.Tensor,
    down_bias: torch.Tensor | None,
    offsets: torch.Tensor,
    *,
    for_down: bool,
    for_gates: bool,
    for_scores: bool,
) -> Gradients:
    """Take the gradient of the result by an operator that becomes others when traced further.

    The gradient of the down projection's weights is among its results: only the operator knows
    whether rows' weights belong to the gradient of rows, or to what the activation gave.
    """
    order = None if plan.order is None else plan.order.value
    found = list(
        torch.ops.nvgemm_moe.up_gradients(
            grad, w_down, down_bias, offsets,
            projected.gates, projected.ups, projected.joined, scores,
            plan.activation.kind.value, order, for_down, for_gates, for_scores,
        )
    )  # fmt: skip
    down = found.pop(0) if for_down else None
    gates = found.pop(0) if for_gates else None
    ups = found.pop(0) if for_gates and projected.ups is not None else None
    by_row = found.pop(0) if for_scores else None
    return Gradients(grad=grad, gates=gates, ups=ups, scores=by_row, w_down=down)
