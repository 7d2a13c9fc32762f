"""The experts of a MoE layer as one differentiable function.

Saved for the backward are the tokens, the weights and the result of the up projection; what the
activation made of it is computed again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from ..gemm.moe_operators import BIAS_COLUMNS
from .activations import Activation, GatedActivation
from .checks import check_dtypes, check_kinds, check_shapes, named
from .products import columns, rows


class WeightOrder(enum.Enum):
    """How gates and ups lie in an up projection."""

    INTERLEAVED = "interleaved"
    HALVES = "halves"


_ACTIVATIONS = {one.value: one for one in Activation}
_ORDERS = {one.value: one for one in WeightOrder}


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
    routing_weights: torch.Tensor | None = None,
    combine: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """Send each group of rows through its expert: up projection, gated activation, down projection.

    Differentiable once, in x, all weights and biases, and routing weights; a weight that requires
    no grad costs no product. May be traced by torch.compile with ``fullgraph=True``. Under autocast
    all floating operands but routing weights are cast to autocast's type. The activation is
    computed in fp32 from the rounded up projection, and rounded once.

    Ends of groups are on the device, so a call does not see them: ends that fall, or pass the last
    row, make kernels read and write memory outside their tensors. With NVGEMM_AOT_DEBUG=1 they are
    copied and checked, for which each product waits for the device.

    Args:
        x: Rows [rows, dim], those of the first expert first; with ``indices`` tokens [tokens, dim]
            in any order.
        w_up: Gate and up weights [experts, 2 * hidden, dim], of any strides (quickest if one of the
            last two is 1), or a pair of weights [experts, hidden, dim]: gate, up.
        w_down: Weights [experts, dim, hidden], likewise.
        offsets: End of each expert's rows, rising: int32 or int64 of shape [experts]. Without
            ``combine``, the result and the gradient of x are undefined in rows past the last end.
        counts: Instead of offsets: the number of each expert's rows, integers of shape [experts].
        activation: ``swiglu``: ``silu(gate) * up``; ``geglu``: ``gelu(gate) * up`` with gelu's tanh
            form; ``swiglu_oai``: ``gate * sigmoid(alpha * gate) * (up + 1)`` of gates cut off above
            at ``limit`` and ups at both ends.
        weights: ``halves`` if all gates stand before all ups in ``w_up`` and ``up_bias``,
            ``interleaved`` if each stands before its up. Of no effect for a pair.
        up_bias: Bias [experts, 2 * hidden], or a pair [experts, hidden] if the weights are one.
        down_bias: Bias [experts, dim].
        indices: The token of each row: int32 or int64 of shape [rows].
        routing_weights: Factor of each row's result: floating, of shape [rows].
        combine: Add the results of each token's rows, in fp32, instead of returning rows. Needs
            ``indices``. Rows past the last end add nothing.
        alpha: Constant of ``swiglu_oai``.
        limit: Constant of ``swiglu_oai``.

    Returns:
        Results [rows, dim], or with ``combine`` [tokens, dim], of the operands' type.

    Raises:
        ValueError: If shapes, devices or names do not fit; under NVGEMM_AOT_DEBUG=1 also if offsets
            fall or pass the last row.
        TypeError: If types differ, or a tensor is a DTensor: pass its ``to_local()``.
        RuntimeError: In a backward with ``create_graph=True``: there is no second derivative.
    """
    names = GatedActivation(
        kind=named("activation", _ACTIVATIONS, activation), alpha=alpha, limit=limit
    )
    pair = isinstance(w_up, tuple)
    order = None if pair else named("weights", _ORDERS, weights)
    if isinstance(up_bias, tuple) != pair and up_bias is not None:
        raise ValueError("experts: up_bias must be a pair exactly where w_up is one")
    gate, up = w_up if isinstance(w_up, tuple) else (w_up, None)
    gate_bias, second_bias = up_bias if isinstance(up_bias, tuple) else (up_bias, None)
    floating = {
        "x": x,
        "w_up": gate,
        "w_up[1]": up,
        "w_down": w_down,
        "up_bias": gate_bias,
        "up_bias[1]": second_bias,
        "down_bias": down_bias,
    }
    if (offsets is None) == (counts is None):
        raise ValueError("experts: give either offsets or counts")
    ends = offsets if offsets is not None else counts
    assert ends is not None
    integers = {"offsets" if counts is None else "counts": ends, "indices": indices}
    check_kinds(floating, {**integers, "routing_weights": routing_weights})
    check_shapes(floating, ends, indices, routing_weights, combine)
    if counts is not None:
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        wanted = torch.get_autocast_dtype(kind)
        floating = {
            name: one if one is None or one.dtype is torch.float64 else one.to(wanted)
            for name, one in floating.items()
        }
    check_dtypes(floating)
    plan = _Plan(activation=names, order=order, combine=combine)
    result: torch.Tensor = _Experts.apply(
        plan, ends.to(torch.int32), indices, routing_weights, *floating.values()
    )
    return result


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What to compute; ``order`` is None where gates and ups are two products."""

    activation: GatedActivation
    order: WeightOrder | None
    combine: bool

    def split(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the gates and ups among columns."""
        if self.order is WeightOrder.INTERLEAVED:
            return both[..., ::2], both[..., 1::2]
        half = both.shape[-1] // 2
        return both[..., :half], both[..., half:]

    def join(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Columns of which `split` gives these."""
        if self.order is WeightOrder.INTERLEAVED:
            return torch.stack((gate, up), -1).flatten(-2)
        return torch.cat((gate, up), -1)


class _Experts(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        offsets: torch.Tensor,
        indices: torch.Tensor | None,
        scores: torch.Tensor | None,
        x: torch.Tensor,
        w_gate: torch.Tensor,
        w_up: torch.Tensor | None,
        w_down: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        taken = x if indices is None else x.index_select(0, indices)
        gate_rows = rows(taken, w_gate.mT, offsets)
        up_rows = None if w_up is None else rows(taken, w_up.mT, offsets)
        has_bias = gate_bias is not None or down_bias is not None
        owner = _owner_of_rows(offsets, taken.shape[0]) if has_bias else None
        gate, up = _gate_and_up(plan, gate_rows, up_rows, gate_bias, up_bias, owner)
        hidden = plan.activation.apply(gate, up).to(x.dtype)
        result = rows(hidden, w_down.mT, offsets)
        ctx.plan, ctx.tokens = plan, x.shape[0]
        ctx.save_for_backward(
            offsets, indices, scores, x, w_gate, w_up, w_down, gate_bias, up_bias, down_bias,
            gate_rows, up_rows, owner,
        )  # fmt: skip
        if down_bias is None and scores is None and not plan.combine:
            return result
        exact = _widen(result)
        if down_bias is not None:
            exact = exact + down_bias.index_select(0, owner)
        if scores is not None:
            exact = exact * scores[:, None]
        if not plan.combine:
            return exact.to(x.dtype)
        exact = torch.where(_is_owned(offsets, exact), exact, 0)
        sums = exact.new_zeros(x.shape)
        return sums.index_add_(0, indices, exact.to(sums.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # While compiling, AOTAutograd refuses a second backward itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "experts: its backward has no derivative; call backward() or grad() without "
                "create_graph=True"
            )
        (
            offsets, indices, scores, x, w_gate, w_up, w_down, gate_bias, up_bias, down_bias,
            gate_rows, up_rows, owner,
        ) = ctx.saved_tensors  # fmt: skip
        plan: _Plan = ctx.plan
        (for_scores, for_x, for_gate, for_up, for_down, for_gate_bias, for_up_bias, for_down_bias
         ) = ctx.needs_input_grad[3:]  # fmt: skip
        for_gates = for_x or for_gate or for_up or for_gate_bias or for_up_bias
        found: dict[str, torch.Tensor] = {}
        grad = grad.to(x.dtype)
        grad = grad.index_select(0, indices) if plan.combine else grad.contiguous()
        gate, up = _gate_and_up(plan, gate_rows, up_rows, gate_bias, up_bias, owner)
        joined = plan.activation.apply(gate, up)
        if for_down:  # the factor is on the narrower of the two
            scaled = joined if scores is None else joined * scores[:, None]
            found["w_down"] = _weight_grad(grad, scaled.to(x.dtype), offsets, w_down)
        if for_down_bias:
            weighted = grad if scores is None else (_widen(grad) * scores[:, None]).to(x.dtype)
            found["down_bias"] = _bias_grad(weighted, offsets)
        if for_gates or for_scores:
            grad_joined = _widen(rows(grad, w_down, offsets))
            if for_scores:
                by_row = (grad_joined * joined).sum(-1)
                if down_bias is not None:
                    by_row = by_row + (_widen(grad) * down_bias.index_select(0, owner)).sum(-1)
                owned = _is_owned(offsets, by_row[:, None])[:, 0]
                found["scores"] = torch.where(owned, by_row, 0).to(scores.dtype)
            if scores is not None:
                grad_joined = grad_joined * scores[:, None]
        if for_gates:
            grad_gate, grad_up = (
                one.to(x.dtype) for one in plan.activation.gradients(gate, up, grad_joined)
            )
            taken = x if indices is None else x.index_select(0, indices)
            if w_up is None:
                grad_gate = plan.join(grad_gate, grad_up)
            if for_gate:
                found["gate"] = _weight_grad(grad_gate, taken, offsets, w_gate)
            if for_gate_bias:
                found["gate_bias"] = _bias_grad(grad_gate, offsets)
            if for_up:
                found["up"] = _weight_grad(grad_up, taken, offsets, w_up)
            if for_up_bias:
                found["up_bias"] = _bias_grad(grad_up, offsets)
            if for_x:
                grad_x = rows(grad_gate, w_gate, offsets)
                if w_up is not None:
                    grad_x = grad_x + rows(grad_up, w_up, offsets)
                if indices is not None:
                    exact = torch.where(_is_owned(offsets, grad_x), _widen(grad_x), 0)
                    sums = exact.new_zeros(x.shape)
                    grad_x = sums.index_add_(0, indices, exact).to(x.dtype)
                found["x"] = grad_x
        order = ("scores", "x", "gate", "up", "w_down", "gate_bias", "up_bias", "down_bias")
        return (None, None, None, *(found.get(name) for name in order))


def _gate_and_up(
    plan: _Plan,
    gate_rows: torch.Tensor,
    up_rows: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    owner: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups in fp32, biases added."""
    gates = _widen(gate_rows)
    if gate_bias is not None:
        gates = gates + gate_bias.index_select(0, owner)
    if up_rows is None:
        return plan.split(gates)
    ups = _widen(up_rows)
    return gates, ups if up_bias is None else ups + up_bias.index_select(0, owner)


def _weight_grad(
    grad: torch.Tensor, taken: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Gradient of weights [experts, columns of grad, columns of taken], as they lie in memory."""
    if weight.stride(-1) != 1 and weight.stride(-2) == 1:
        return columns(taken, grad, offsets).mT
    return columns(grad, taken, offsets)


def _bias_grad(grad: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums of each group's rows: a product with ones, summed in fp32 in a fixed order."""
    ones = grad.new_ones((grad.shape[0], BIAS_COLUMNS))
    return columns(grad, ones, offsets)[..., 0]


def _owner_of_rows(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """The expert of each row; the last one of rows past the last end."""
    places = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True).clamp(max=offsets.shape[0] - 1)


def _is_owned(offsets: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Which rows an expert has, as a column."""
    places = torch.arange(matrix.shape[0], device=offsets.device, dtype=offsets.dtype)
    return (places < offsets[-1])[:, None]


def _widen(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix in fp32, or in fp64 where it is that."""
    return matrix if matrix.dtype is torch.float64 else matrix.float()
