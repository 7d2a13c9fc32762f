"""A MoE layer's experts as one differentiable function.

Forward: if a kernel has the gate as its epilogue, it computes the up projection and stores it
before the activation's result. Both are saved for the backward. With two weights, one launch
computes gates and a second computes ups and the activation. Otherwise torch's operators compute the
activation.

Backward: if a kernel serves, it takes the gradient through the down projection and the gate. An
activation that was not saved is computed again: as in the forward if that kernel serves, else in
fp32, a few rows at a time, so that its tensors stay small.

While torch.compile traces, a call is one operator, which the graph replaces with the same kernels
as operators. If none serves, operators compute the activation in fp32 for all rows at once, because
Inductor fuses them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..gemm.epilogues import Gate, WeightOrder
from ..gemm.moe_operators import BIAS_COLUMNS
from ..settings import is_debugging
from .activations import GatedActivation
from .checks import check_dtypes, check_kinds, check_shapes, check_values, named, parts_of_pairs
from .expert_operands import ExpertOperands
from .gates import project_up
from .gradients import Backward, gradients_by_operators
from .kernel_gradients import gradients_by_kernel
from .operators import autocast_type, is_watched
from .plan import KernelUse, Plan, UpProjection, activated
from .products import added_rows, columns, rows, weight_gradient
from .tokens import owned_rows, sum_rows_of_tokens
from .traced import define_whole, is_traced_whole

_GATES = {gate.value: gate for gate in Gate}
_ORDERS = {order.value: order for order in WeightOrder}


def experts(
    x: torch.Tensor,
    w_up: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    w_down: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    activation: str = "swiglu",
    weights: str = "halves",
    up_bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    down_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    token_rows: torch.Tensor | None = None,
    routing_weights: torch.Tensor | None = None,
    combine: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """Computes each expert's up projection, gated activation and down projection for its rows.

    Differentiable once, in x, all weights and biases, and routing weights. A weight that requires
    no grad costs no product. torch.compile can trace it with ``fullgraph=True``. Under autocast all
    floating operands except routing weights are cast to autocast's dtype.

    If a kernel has the activation as its epilogue, it computes the activation in fp32 from the
    unrounded up projection and rounds once. With two weights, gates are rounded and ups are not.
    Otherwise the activation is computed from the rounded up projection: in fp32 for ``swiglu_oai``
    and in compiled code, else by torch's operators in the operands' dtype, as in torchtitan.

    Group ends are on the device, so a call does not see them. If ends fall or pass the last row,
    results are undefined, and kernels from torch or from providers other than quack may access
    memory outside their tensors. NVGEMM_AOT_DEBUG=1 copies and checks ends and indices, which waits
    for the device. Compiled code checks only ends.

    Args:
        x: Rows [rows, dim], sorted by expert; with ``indices`` tokens [tokens, dim] in any order.
        w_up: Gate and up weights [experts, 2 * hidden, dim] with any strides, fastest if one of the
            last two is 1; or a pair of weights [experts, hidden, dim]: gate, up.
        w_down: Weights [experts, dim, hidden], likewise.
        offsets: End of each expert's rows, ascending: int32 or int64 [experts]. Without
            ``combine``, the result and x's gradient are undefined in rows past the last end.
        counts: Rows per expert, instead of offsets: int32 or int64 [experts].
        activation: ``swiglu``: ``silu(gate) * up``; ``geglu``: ``gelu(gate) * up`` with gelu's tanh
            form; ``swiglu_oai``: ``gate * sigmoid(alpha * gate) * (up + 1)``, with gates clamped to
            at most ``limit`` and ups to ``-limit..limit``.
        weights: ``halves`` if all gates come before all ups in ``w_up`` and ``up_bias``,
            ``interleaved`` if they alternate, gate first. Ignored for a pair.
        up_bias: Bias [experts, 2 * hidden], or a pair [experts, hidden] if the weights are a pair.
        down_bias: Bias [experts, dim].
        indices: Each row's token: int32 or int64 [rows]. A token outside ``x`` gives an undefined
            result if a kernel gathers rows, else torch's error.
        token_rows: Each token's rows, if each has k: int32 or int64 [tokens, k], the inverse of
            ``indices`` (`sort_by_expert` returns both). With it, a token's rows are added in its
            order; without it in any order, which takes longer.
        routing_weights: Factor for each row's result: floating [rows].
        combine: Add the results of each token's rows, in fp32, instead of returning rows. Needs
            ``indices``. Rows past the last end add nothing.
        alpha: ``swiglu_oai`` constant.
        limit: ``swiglu_oai`` constant.

    Returns:
        Results [rows, dim], or with ``combine`` [tokens, dim], in the operands' dtype.

    Raises:
        ValueError: If shapes, devices or names do not fit. Under NVGEMM_AOT_DEBUG=1 also if offsets
            fall or pass the last row, a count is negative, or an index is out of range.
        TypeError: If dtypes differ or cannot be computed, or a tensor is a DTensor: pass its
            ``to_local()``.
        RuntimeError: In a backward with ``create_graph=True``: there is no second derivative.
    """
    w_gate, w_up_alone, gate_bias, up_bias_alone = parts_of_pairs(w_up, up_bias)
    operands = ExpertOperands(
        x, w_gate, w_up_alone, w_down, offsets, counts, activation, weights, gate_bias,
        up_bias_alone, down_bias, indices, token_rows, routing_weights, combine, alpha, limit,
        autocast_type(x),
    )  # fmt: skip
    return _operator(*operands) if is_traced_whole() else compute_experts(operands)


def compute_experts(operands: ExpertOperands, *, is_traced: bool = False) -> torch.Tensor:
    """Computes `experts`, called directly or traced in place of its operator."""
    activation = GatedActivation(
        kind=named("activation", _GATES, operands.activation),
        alpha=operands.alpha,
        limit=operands.limit,
    )
    order = None if operands.w_up is not None else named("weights", _ORDERS, operands.weights)
    offsets, counts = operands.offsets, operands.counts
    if (offsets is None) == (counts is None):
        raise ValueError("experts: give either offsets or counts")
    floating, others = operands.floating(), operands.others()
    check_kinds(floating, others)
    check_shapes(floating, others, operands.combine)
    is_seen = is_watched(*floating.values(), *others.values())
    if not is_seen and is_debugging():
        check_values(others, operands.x.shape[0])
    ends = offsets if counts is None else torch.cumsum(counts, 0, dtype=torch.int32)
    assert ends is not None
    if operands.autocast is not None:
        operands = operands.cast(operands.autocast)
        floating = operands.floating()
    check_dtypes(floating)
    wants_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad
        for tensor in (*floating.values(), operands.routing_weights)
    )
    is_compiling = is_traced or torch.compiler.is_compiling()
    plan = Plan(
        activation=activation,
        order=order,
        combine=operands.combine,
        wants_grad=wants_grad,
        kernels=KernelUse.TRACED if is_traced else None if is_seen else KernelUse.LAUNCHED,
        is_compiled=is_compiling,
        in_pieces=not is_compiling,
    )
    result: torch.Tensor = _Experts.apply(
        plan, ends.to(torch.int32), operands.indices, operands.token_rows,
        operands.routing_weights, operands.x, operands.w_gate, operands.w_up, operands.w_down,
        operands.gate_bias, operands.up_bias, operands.down_bias,
    )  # fmt: skip
    return result


class _Experts(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        offsets: torch.Tensor,
        indices: torch.Tensor | None,
        token_rows: torch.Tensor | None,
        routing_weights: torch.Tensor | None,
        x: torch.Tensor,
        w_gate: torch.Tensor,
        w_up: torch.Tensor | None,
        w_down: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        projected = project_up(
            plan, x, indices, offsets, (w_gate, w_up), (gate_bias, up_bias), w_down
        )
        hidden = projected.joined
        if hidden is None:
            assert projected.gates is not None
            hidden = activated(plan, *plan.parts(projected.gates, projected.ups))
        weights_by_token, sums_rows = None, False
        if token_rows is not None and (plan.combine or plan.wants_grad):
            weights_by_token = None if routing_weights is None else routing_weights[token_rows]
            sums_rows = plan.sums_rows(x, *token_rows.shape)
            if sums_rows:
                token_rows = owned_rows(token_rows, offsets)
        ctx.plan, ctx.sums_rows = plan, sums_rows
        ctx.save_for_backward(
            offsets, indices, token_rows, routing_weights, weights_by_token,
            x, w_gate, w_up, w_down, down_bias,
            projected.gates, projected.ups, projected.joined,
        )  # fmt: skip
        result = rows(hidden, w_down.mT, offsets, down_bias)
        if not plan.combine:
            return plan.weighted(result, None, routing_weights)
        return sum_rows_of_tokens(
            result, offsets, indices, token_rows,
            routing_weights if token_rows is None else weights_by_token,
            x.shape[0], is_compiled=plan.is_compiled, by_kernel=sums_rows,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # While compiling, AOTAutograd itself refuses a second backward.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "experts: the backward has no derivative; call backward() or grad() without "
                "create_graph=True"
            )
        (
            offsets, indices, token_rows, routing_weights, weights_by_token,
            x, w_gate, w_up, w_down, down_bias, *saved,
        ) = ctx.saved_tensors  # fmt: skip
        plan: Plan = ctx.plan
        # Compiled autograd, which may compile an eager call's backward, cannot trace this.
        if plan.kernels is KernelUse.LAUNCHED and not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        (
            for_routing_weights, for_x, for_gate, for_up, for_down,
            for_gate_bias, for_up_bias, for_down_bias,
        ) = ctx.needs_input_grad[4:]  # fmt: skip
        for_gates = for_x or for_gate or for_up or for_gate_bias or for_up_bias
        gradients: dict[str, torch.Tensor] = {}
        grad = grad.to(x.dtype)
        grad = grad.index_select(0, indices) if plan.combine else grad.contiguous()

        # Apply routing weights while gathering, which needs no extra pass, else to the narrower.
        weighs_gates = indices is None and 2 * w_down.shape[2] < w_down.shape[1]
        projected = UpProjection(**dict(zip(("gates", "ups", "joined"), saved)))
        task = Backward(
            grad=grad, routing_weights=routing_weights, w_down=w_down, down_bias=down_bias,
            offsets=offsets, for_down=for_down, for_gates=for_gates,
            for_routing_weights=for_routing_weights, weighs_gates=weighs_gates,
        )  # fmt: skip
        if (
            for_down
            and projected.joined is not None
            and (for_routing_weights or routing_weights is None)
        ):
            # Before the gates' gradients, which take more memory.
            weighed = task.down_factors(plan, projected.joined)
            gradients["w_down"] = weight_gradient(*weighed, offsets, w_down)
            del weighed
            task = replace(task, for_down=False)
        of_activation = gradients_by_kernel(plan, projected, task) if for_gates else None
        if of_activation is None:
            of_activation = gradients_by_operators(plan, projected, task)
        grad_gate_rows, grad_up_rows = of_activation.gates, of_activation.ups
        if w_up is not None and grad_up_rows is None and grad_gate_rows is not None:
            grad_gate_rows, grad_up_rows = plan.split(grad_gate_rows)
        if of_activation.joined is not None:
            gradients["w_down"] = weight_gradient(
                of_activation.grad, of_activation.joined, offsets, w_down
            )
        by_row = of_activation.routing_weights
        if for_down_bias:
            gradients["down_bias"] = _bias_grad(grad, offsets, routing_weights)
        del of_activation, projected, saved, task, grad  # frees their memory
        if by_row is not None:
            gradients["routing_weights"] = by_row.to(routing_weights.dtype)
        if grad_gate_rows is not None:
            row_weights = token_weights = None
            if for_routing_weights and not weighs_gates:
                row_weights, token_weights = (
                    routing_weights,
                    routing_weights if token_rows is None else weights_by_token,
                )
            if for_gate or for_up:
                gathered = plan.weighted(x, indices, row_weights)
                if for_gate:
                    gradients["gate"] = weight_gradient(grad_gate_rows, gathered, offsets, w_gate)
                if for_up:
                    gradients["up"] = weight_gradient(grad_up_rows, gathered, offsets, w_up)
                del gathered  # frees its memory for the rows' gradient
            if for_gate_bias:
                gradients["gate_bias"] = _bias_grad(grad_gate_rows, offsets, row_weights)
            if for_up_bias:
                gradients["up_bias"] = _bias_grad(grad_up_rows, offsets, row_weights)
            if for_x:
                grad_x = _gradient_of_rows(
                    plan, grad_gate_rows, grad_up_rows, w_gate, w_up, offsets
                )
                if indices is not None:
                    grad_x = sum_rows_of_tokens(
                        grad_x, offsets, indices, token_rows, token_weights, x.shape[0],
                        is_compiled=plan.is_compiled, by_kernel=ctx.sums_rows,
                    )  # fmt: skip
                else:
                    grad_x = plan.weighted(grad_x, None, row_weights)
                gradients["x"] = grad_x
        order = (
            "routing_weights",
            "x",
            "gate",
            "up",
            "w_down",
            "gate_bias",
            "up_bias",
            "down_bias",
        )
        return (None, None, None, None, *(gradients.get(name) for name in order))


def _gradient_of_rows(
    plan: Plan,
    of_gates: torch.Tensor,
    of_ups: torch.Tensor | None,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Returns the rows' gradient from one product or two.

    The second product is added to the first in place, by one kernel if one serves.
    """
    if of_ups is None:
        return rows(of_gates, w_gate, offsets)
    assert w_up is not None
    second = (of_ups, w_up, offsets)
    if plan.adds_rows(*second):
        return added_rows(*second, of_gates, w_gate)
    return rows(of_gates, w_gate, offsets) + rows(*second)


def _bias_grad(
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


_operator = define_whole(
    "experts",
    "Tensor x, Tensor w_up, Tensor? w_ups, Tensor w_down, Tensor? offsets, Tensor? counts, "
    "str activation, str weights, Tensor? up_bias, Tensor? bias_of_ups, Tensor? down_bias, "
    "Tensor? indices, Tensor? token_rows, Tensor? routing_weights, bool combine, float alpha, "
    "float limit",
    lambda *operands: compute_experts(ExpertOperands(*operands), is_traced=True),
)
