"""Routed experts: from tokens and a router's choices to tokens."""

from __future__ import annotations

import functools

import torch

from .block import compute_experts
from .checks import check_tensor, parts_of_pairs
from .expert_operands import ExpertOperands
from .operators import autocast_type, define_whole, is_traced_whole
from .tokens import sort_by_expert


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
    w_gate, w_up_alone, gate_bias, up_bias_alone = parts_of_pairs(w_up, up_bias)
    arguments = (
        x, w_gate, w_up_alone, w_down, chosen, routing_weights, activation, weights, gate_bias,
        up_bias_alone, down_bias, alpha, limit, autocast_type(x),
    )  # fmt: skip
    return _operator(*arguments) if is_traced_whole() else _compute(*arguments)


def _compute(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    w_down: torch.Tensor,
    chosen: torch.Tensor,
    routing_weights: torch.Tensor | None,
    activation: str,
    weights: str,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    alpha: float,
    limit: float,
    autocast: torch.dtype | None,
    *,
    is_traced: bool = False,
) -> torch.Tensor:
    """Computes `routed_experts`, called directly or traced in its operator's place."""
    _check(x, w_down, chosen, routing_weights)
    routing = sort_by_expert(chosen, w_down.shape[0])
    if routing_weights is not None:
        routing_weights = routing_weights.reshape(-1).index_select(0, routing.order)
    operands = ExpertOperands(
        x, w_gate, w_up, w_down, routing.offsets, None, activation, weights, gate_bias, up_bias,
        down_bias, routing.indices, routing.token_rows, routing_weights, True, alpha, limit,
        autocast,
    )  # fmt: skip
    return compute_experts(operands, is_traced=is_traced)


def _check(
    x: torch.Tensor,
    w_down: torch.Tensor,
    chosen: torch.Tensor,
    routing_weights: torch.Tensor | None,
) -> None:
    """Checks arguments that `experts` would report under other names."""
    needed = {"x": (x, 2), "w_down": (w_down, 3), "chosen": (chosen, 2)}
    if routing_weights is not None:
        needed["routing_weights"] = (routing_weights, 2)
    for name, (tensor, dimensions) in needed.items():
        check_tensor("routed_experts", name, tensor, None if tensor is x else x.device)
        if tensor.dim() != dimensions:
            raise ValueError(
                f"routed_experts: {name} is {tuple(tensor.shape)}, must have {dimensions} "
                "dimensions"
            )
    if chosen.shape[0] != x.shape[0]:
        raise ValueError(
            f"routed_experts: chosen is {tuple(chosen.shape)}, must be [tokens, k] with the "
            f"{x.shape[0]} tokens of x"
        )
    if routing_weights is not None and routing_weights.shape != chosen.shape:
        raise ValueError(
            f"routed_experts: routing_weights is {tuple(routing_weights.shape)}, must have the "
            f"shape of chosen, {tuple(chosen.shape)}"
        )
    if 0 in w_down.shape:
        raise ValueError(f"routed_experts: w_down is {tuple(w_down.shape)}; no size may be 0")


_operator = define_whole(
    "routed_experts",
    "Tensor x, Tensor w_up, Tensor? w_ups, Tensor w_down, Tensor chosen, Tensor? routing_weights, "
    "str activation, str weights, Tensor? up_bias, Tensor? bias_of_ups, Tensor? down_bias, "
    "float alpha, float limit",
    functools.partial(_compute, is_traced=True),
)
