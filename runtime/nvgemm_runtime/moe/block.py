"""A MoE layer's experts, of sorted rows and from tokens to tokens, as differentiable functions.

Forward: if a kernel has the gate as its epilogue, it computes the up projection and stores it
before the activation's result. Both are saved for the backward. With two weights, one launch
computes gates and a second computes ups and the activation. Otherwise torch's operators compute the
activation.

While torch.compile traces, a call is one operator, which the graph replaces with the same kernels
as operators. If none serves, operators compute the activation in fp32 for all rows at once, because
Inductor fuses them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gemm.epilogues import Gate, WeightOrder
from ..settings import is_debugging
from .activations import GatedActivation
from .backward import take_gradients
from .expert_operands import (
    ExpertOperands,
    check_dtypes,
    check_kinds,
    check_routed,
    check_shapes,
    check_values,
    parse_name,
    parts_of_pairs,
)
from .gates import project_up
from .operators import autocast_type, define_whole, is_traced_whole, is_watched
from .plan import ExpertsPlan, KernelUse, activate
from .products import rows
from .routing import owned_rows, sort_by_expert, sum_rows_of_tokens

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
    results are undefined, and kernels from torch or from other packages may access memory outside
    their tensors. NVGEMM_AOT_DEBUG=1 copies and checks ends and indices, which waits for the
    device. Compiled code checks only ends.

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
    w_first, w_second, first_bias, second_bias = parts_of_pairs(w_up, up_bias)
    operands = ExpertOperands(
        x, w_first, w_second, w_down, offsets, counts, activation, weights, first_bias,
        second_bias, down_bias, indices, token_rows, routing_weights, combine, alpha, limit,
        autocast_type(x),
    )  # fmt: skip
    return _experts_operator(*operands) if is_traced_whole() else compute_experts(operands)


def compute_experts(operands: ExpertOperands, *, is_traced: bool = False) -> torch.Tensor:
    """Computes `experts`, called directly or traced in place of its operator."""
    activation = GatedActivation(
        kind=parse_name("activation", _GATES, operands.activation),
        alpha=operands.alpha,
        limit=operands.limit,
    )
    order = None
    if operands.w_second is None:
        order = parse_name("weights", _ORDERS, operands.order)
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
    plan = ExpertsPlan(
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
        operands.routing_weights, operands.x, operands.w_first, operands.w_second, operands.w_down,
        operands.first_bias, operands.second_bias, operands.down_bias,
    )  # fmt: skip
    return result


class _Experts(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        plan: ExpertsPlan,
        offsets: torch.Tensor,
        indices: torch.Tensor | None,
        token_rows: torch.Tensor | None,
        routing_weights: torch.Tensor | None,
        x: torch.Tensor,
        w_first: torch.Tensor,
        w_second: torch.Tensor | None,
        w_down: torch.Tensor,
        first_bias: torch.Tensor | None,
        second_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        projected = project_up(
            plan, x, indices, offsets, (w_first, w_second), (first_bias, second_bias), w_down
        )
        activated = projected.activated
        if activated is None:
            assert projected.first is not None
            activated = activate(plan, *plan.split(projected.first, projected.second))
        token_routing_weights, sums_rows = None, False
        if token_rows is not None and (plan.combine or plan.wants_grad):
            token_routing_weights = None if routing_weights is None else routing_weights[token_rows]
            sums_rows = plan.sums_rows(x, *token_rows.shape)
            if sums_rows:
                token_rows = owned_rows(token_rows, offsets)
        ctx.plan, ctx.sums_rows = plan, sums_rows
        ctx.save_for_backward(
            offsets, indices, token_rows, routing_weights, token_routing_weights,
            x, w_first, w_second, w_down, down_bias,
            projected.first, projected.second, projected.activated,
        )  # fmt: skip
        result = rows(activated, w_down.mT, offsets, down_bias)
        if not plan.combine:
            return plan.weighted(result, None, routing_weights)
        return sum_rows_of_tokens(
            result, offsets, indices, token_rows,
            routing_weights if token_rows is None else token_routing_weights,
            x.shape[0], is_compiled=plan.is_compiled, by_kernel=sums_rows,
        )  # fmt: skip

    backward = staticmethod(take_gradients)


def routed_experts(
    x: torch.Tensor,
    w_up: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    w_down: torch.Tensor,
    chosen: torch.Tensor,
    routing_weights: torch.Tensor | None = None,
    *,
    activation: str = "swiglu",
    weights: str = "halves",
    up_bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    down_bias: torch.Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """Sends each token through the experts that a router chose, and adds their results.

    Sorts rows by `sort_by_expert` and computes `experts` with ``combine``. Shared arguments are
    described in `experts`.

    Args:
        x: Tokens [tokens, dim].
        w_up: Gate and up weights.
        w_down: Down projection weights [experts, dim, hidden].
        chosen: Each token's experts: int32 or int64 [tokens, k]. A choice below 0, or past the last
            expert, belongs to another rank and adds nothing.
        routing_weights: Factor for each expert's result: floating, shaped as ``chosen``.
        activation: Gated activation.
        weights: Order of gates and ups.
        up_bias: Gate and up bias.
        down_bias: Down projection bias.
        alpha: ``swiglu_oai`` constant.
        limit: ``swiglu_oai`` constant.

    Returns:
        Sums [tokens, dim], added in fp32 and rounded to the operands' dtype.

    Raises:
        ValueError: If shapes, devices or names do not fit.
        TypeError: If dtypes differ or cannot be computed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    w_first, w_second, first_bias, second_bias = parts_of_pairs(w_up, up_bias)
    arguments = (
        x, w_first, w_second, w_down, chosen, routing_weights, activation, weights, first_bias,
        second_bias, down_bias, alpha, limit, autocast_type(x),
    )  # fmt: skip
    if is_traced_whole():
        return _routed_operator(*arguments)
    return compute_experts(_route(*arguments))


def _route(
    x: torch.Tensor,
    w_first: torch.Tensor,
    w_second: torch.Tensor | None,
    w_down: torch.Tensor,
    chosen: torch.Tensor,
    routing_weights: torch.Tensor | None,
    activation: str,
    order: str,
    first_bias: torch.Tensor | None,
    second_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    alpha: float,
    limit: float,
    autocast: torch.dtype | None,
) -> ExpertOperands:
    """Returns `routed_experts`' operands for `experts`, with rows sorted by expert."""
    check_routed(x, w_down, chosen, routing_weights)
    routing = sort_by_expert(chosen, w_down.shape[0])
    if routing_weights is not None:
        routing_weights = routing_weights.reshape(-1).index_select(0, routing.order)
    return ExpertOperands(
        x, w_first, w_second, w_down, routing.offsets, None, activation, order, first_bias,
        second_bias, down_bias, routing.indices, routing.token_rows, routing_weights, True, alpha,
        limit, autocast,
    )  # fmt: skip


_experts_operator = define_whole(
    "experts",
    "Tensor x, Tensor w_up, Tensor? w_ups, Tensor w_down, Tensor? offsets, Tensor? counts, "
    "str activation, str weights, Tensor? up_bias, Tensor? bias_of_ups, Tensor? down_bias, "
    "Tensor? indices, Tensor? token_rows, Tensor? routing_weights, bool combine, float alpha, "
    "float limit",
    lambda *operands: compute_experts(ExpertOperands(*operands), is_traced=True),
)

_routed_operator = define_whole(
    "routed_experts",
    "Tensor x, Tensor w_up, Tensor? w_ups, Tensor w_down, Tensor chosen, Tensor? routing_weights, "
    "str activation, str weights, Tensor? up_bias, Tensor? bias_of_ups, Tensor? down_bias, "
    "float alpha, float limit",
    lambda *arguments: compute_experts(_route(*arguments), is_traced=True),
)
