"""The experts of a MoE layer as one differentiable function.

Where kernels have the gate in their epilogue, one computes the up projection, and stores it in
front of what the activation makes of it; both are saved for the backward, where another takes the
gradient through the down projection and the gate. Of two weights, one launch gives gates, and one
ups and the rest. Else the activation is computed by operators, and
again in the backward: as in the forward where that kernel has its gradient, and otherwise in fp32
and for some rows at a time, so that its tensors stay small.
While torch.compile traces, a call is one operator, and in place of it the same kernels are in the
graph, as operators. Where none serves, the activation is computed by operators in fp32 and for all
rows at once, since Inductor fuses them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..gemm.epilogues import WeightOrder
from ..gemm.moe_operators import BIAS_COLUMNS
from ..settings import is_debugging
from .activations import Activation, GatedActivation
from .checks import check_dtypes, check_kinds, check_shapes, check_values, named, parts_of_pairs
from .gate_kernels import LAUNCHED
from .gates import Plan, UpProjection, activated, project_up
from .gradients import Backward, gradients_by_kernel, gradients_by_operators
from .operators import autocast_type, is_watched
from .products import (
    added_rows,
    columns,
    rows,
    weight_gradient,
)
from .tokens import owned_rows, sum_rows_of_tokens
from .traced import TRACED, define_whole

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
    token_rows: torch.Tensor | None = None,
    routing_weights: torch.Tensor | None = None,
    combine: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """Send each group of rows through its expert: up projection, gated activation, down projection.

    Differentiable once, in x, all weights and biases, and routing weights; a weight that requires
    no grad costs no product. May be traced by torch.compile with ``fullgraph=True``. Under autocast
    all floating operands but routing weights are cast to autocast's type. Where a kernel has the
    activation in its epilogue, it is computed in fp32 from the unrounded up projection (of two
    weights, from rounded gates and unrounded ups), and rounded once. Else it is computed from the
    rounded one, compiled and for ``swiglu_oai`` in fp32, and otherwise by torch's operators in the
    operands' type, as torchtitan's experts do.

    Ends of groups are on the device, so a call does not see them: with ends that fall, or pass the
    last row, results are undefined, and kernels of torch or of other providers than quack may read
    and write memory outside their tensors. With NVGEMM_AOT_DEBUG=1 ends and indices are copied
    and checked, for which the call waits for the device, and compiled code for its ends alone.

    Args:
        x: Rows [rows, dim], those of the first expert first; with ``indices`` tokens [tokens, dim]
            in any order.
        w_up: Gate and up weights [experts, 2 * hidden, dim], of any strides (quickest if one of the
            last two is 1), or a pair of weights [experts, hidden, dim]: gate, up.
        w_down: Weights [experts, dim, hidden], likewise.
        offsets: End of each expert's rows, rising: int32 or int64 of shape [experts]. Without
            ``combine``, the result and the gradient of x are undefined in rows past the last end.
        counts: Instead of offsets: the number of each expert's rows, int32 or int64 [experts].
        activation: ``swiglu``: ``silu(gate) * up``; ``geglu``: ``gelu(gate) * up`` with gelu's tanh
            form; ``swiglu_oai``: ``gate * sigmoid(alpha * gate) * (up + 1)`` of gates cut off above
            at ``limit`` and ups at both ends.
        weights: ``halves`` if all gates stand before all ups in ``w_up`` and ``up_bias``,
            ``interleaved`` if each stands before its up. Of no effect for a pair.
        up_bias: Bias [experts, 2 * hidden], or a pair [experts, hidden] if the weights are one.
        down_bias: Bias [experts, dim].
        indices: The token of each row: int32 or int64 of shape [rows]. For one that ``x`` does not
            have, the result is undefined where a kernel takes rows where they are; else it is
            torch's error.
        token_rows: The rows of each token, where each has k: int32 or int64 of shape [tokens, k],
            all of ``indices`` the other way round (`sort_by_expert` gives both). With it, rows of a
            token are added in its order, and without it in no order, which takes longer.
        routing_weights: Factor of each row's result: floating, of shape [rows].
        combine: Add the results of each token's rows, in fp32, instead of returning rows. Needs
            ``indices``. Rows past the last end add nothing.
        alpha: Constant of ``swiglu_oai``.
        limit: Constant of ``swiglu_oai``.

    Returns:
        Results [rows, dim], or with ``combine`` [tokens, dim], of the operands' type.

    Raises:
        ValueError: If shapes, devices or names do not fit; under NVGEMM_AOT_DEBUG=1 also if offsets
            fall or pass the last row, a count is negative, or an index is out of range.
        TypeError: If types differ or cannot be computed, or a tensor is a DTensor: pass its
            ``to_local()``.
        RuntimeError: In a backward with ``create_graph=True``: there is no second derivative.
    """
    first, second, first_bias, second_bias = parts_of_pairs(w_up, up_bias)
    given = (
        x, first, second, w_down, offsets, counts, activation, weights, first_bias, second_bias,
        down_bias, indices, token_rows, routing_weights, combine, alpha, limit, autocast_type(x),
    )  # fmt: skip
    return _trace_or_compute(*given)


def compute_experts(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_ups: torch.Tensor | None,
    w_down: torch.Tensor,
    offsets: torch.Tensor | None,
    counts: torch.Tensor | None,
    activation: str,
    weights: str,
    up_bias: torch.Tensor | None,
    bias_of_ups: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    indices: torch.Tensor | None,
    token_rows: torch.Tensor | None,
    routing_weights: torch.Tensor | None,
    combine: bool,
    alpha: float,
    limit: float,
    wanted: torch.dtype | None,
    *,
    is_traced: bool = False,
) -> torch.Tensor:
    """`experts`, or what is traced in place of its operator.

    Args are its own, with pairs in their parts, and ``wanted``, the `autocast_type` of the call.
    """
    names = GatedActivation(
        kind=named("activation", _ACTIVATIONS, activation), alpha=alpha, limit=limit
    )
    is_pair = w_ups is not None
    order = None if is_pair else named("weights", _ORDERS, weights)
    if (offsets is None) == (counts is None):
        raise ValueError("experts: give either offsets or counts")
    floating: dict[str, torch.Tensor | None] = {"x": x}
    if is_pair:
        floating |= {"w_up[0]": w_up, "w_up[1]": w_ups}
        floating |= {"up_bias[0]": up_bias, "up_bias[1]": bias_of_ups}
    else:
        floating |= {"w_up": w_up, "up_bias": up_bias}
    floating |= {"w_down": w_down, "down_bias": down_bias}
    others = {"offsets": offsets} if counts is None else {"counts": counts}
    others |= {
        "indices": indices, "token_rows": token_rows, "routing_weights": routing_weights,
    }  # fmt: skip
    check_kinds(floating, others)
    check_shapes(floating, others, combine)
    is_seen = is_watched(*floating.values(), *others.values())
    if not is_seen and is_debugging():
        check_values(others, x.shape[0])
    ends = offsets if counts is None else torch.cumsum(counts, 0, dtype=torch.int32)
    assert ends is not None
    if wanted is not None:
        floating = {
            name: one if one is None or one.dtype is torch.float64 else one.to(wanted)
            for name, one in floating.items()
        }
    check_dtypes(floating)
    first = "[0]" if is_pair else ""
    names_of_operands = (
        "x", f"w_up{first}", "w_up[1]", "w_down", f"up_bias{first}", "up_bias[1]", "down_bias",
    )  # fmt: skip
    operands = [floating.get(name) for name in names_of_operands]
    wants_grad = torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (*operands, routing_weights)
    )
    is_compiling = is_traced or torch.compiler.is_compiling()
    plan = Plan(
        activation=names,
        order=order,
        combine=combine,
        wants_grad=wants_grad,
        kernels=TRACED if is_traced else None if is_seen else LAUNCHED,
        is_compiled=is_compiling,
        in_pieces=not is_compiling,
    )
    result: torch.Tensor = _Experts.apply(
        plan, ends.to(torch.int32), indices, token_rows, routing_weights, *operands
    )
    return result


class _Experts(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        offsets: torch.Tensor,
        indices: torch.Tensor | None,
        token_rows: torch.Tensor | None,
        scores: torch.Tensor | None,
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
        by_choice, sums_rows = None, False
        if token_rows is not None and (plan.combine or plan.wants_grad):
            by_choice = None if scores is None else scores[token_rows]
            sums_rows = plan.sums_rows(x, *token_rows.shape)
            if sums_rows:
                token_rows = owned_rows(token_rows, offsets)
        ctx.plan, ctx.sums_rows = plan, sums_rows
        ctx.save_for_backward(
            offsets, indices, token_rows, scores, by_choice, x, w_gate, w_up, w_down, down_bias,
            projected.gates, projected.ups, projected.joined,
        )  # fmt: skip
        result = rows(hidden, w_down.mT, offsets, down_bias)
        if not plan.combine:
            return plan.weighted(result, None, scores)
        return sum_rows_of_tokens(
            result, offsets, indices, token_rows, scores if token_rows is None else by_choice,
            x.shape[0], is_compiled=plan.is_compiled, by_kernel=sums_rows,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # While compiling, AOTAutograd refuses a second backward itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "experts: its backward has no derivative; call backward() or grad() without "
                "create_graph=True"
            )
        (
            offsets, indices, token_rows, scores, by_choice, x, w_gate, w_up, w_down, down_bias,
            *saved,
        ) = ctx.saved_tensors  # fmt: skip
        plan: Plan = ctx.plan
        # Which a compiled backward of a call, by compiled autograd, could not trace.
        if plan.kernels is LAUNCHED and not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        (for_scores, for_x, for_gate, for_up, for_down, for_gate_bias, for_up_bias, for_down_bias
         ) = ctx.needs_input_grad[4:]  # fmt: skip
        for_gates = for_x or for_gate or for_up or for_gate_bias or for_up_bias
        found: dict[str, torch.Tensor] = {}
        grad = grad.to(x.dtype)
        grad = grad.index_select(0, indices) if plan.combine else grad.contiguous()

        # Weighing what is gathered anyway takes no pass of its own; else, the narrower is weighed.
        weighs_gates = indices is None and 2 * w_down.shape[2] < w_down.shape[1]
        projected = UpProjection(**dict(zip(("gates", "ups", "joined"), saved)))
        task = Backward(
            grad=grad, scores=scores, w_down=w_down, down_bias=down_bias, offsets=offsets,
            for_down=for_down, for_gates=for_gates, for_scores=for_scores,
            weighs_gates=weighs_gates,
        )  # fmt: skip
        if for_down and projected.joined is not None and (for_scores or scores is None):
            # Before gradients of gates, which take more memory than this does.
            weighed = task.of_down(plan, projected.joined)
            found["w_down"] = weight_gradient(*weighed, offsets, w_down)
            del weighed
            task = replace(task, for_down=False)
        of_activation = gradients_by_kernel(plan, projected, task) if for_gates else None
        if of_activation is None:
            of_activation = gradients_by_operators(plan, projected, task)
        grad_gate_rows, grad_up_rows = of_activation.gates, of_activation.ups
        if w_up is not None and grad_up_rows is None and grad_gate_rows is not None:
            grad_gate_rows, grad_up_rows = plan.split(grad_gate_rows)
        if of_activation.joined is not None:
            found["w_down"] = weight_gradient(
                of_activation.grad, of_activation.joined, offsets, w_down
            )
        by_row = of_activation.scores
        if for_down_bias:
            found["down_bias"] = _bias_grad(grad, offsets, scores)
        del of_activation, projected, saved, task, grad  # their memory is free for what follows
        if by_row is not None:
            found["scores"] = by_row.to(scores.dtype)
        if grad_gate_rows is not None:
            factors = summed = None
            if for_scores and not weighs_gates:
                factors, summed = scores, scores if token_rows is None else by_choice
            if for_gate or for_up:
                taken = plan.weighted(x, indices, factors)
                if for_gate:
                    found["gate"] = weight_gradient(grad_gate_rows, taken, offsets, w_gate)
                if for_up:
                    found["up"] = weight_gradient(grad_up_rows, taken, offsets, w_up)
                del taken  # whose memory is free for the gradient of rows
            if for_gate_bias:
                found["gate_bias"] = _bias_grad(grad_gate_rows, offsets, factors)
            if for_up_bias:
                found["up_bias"] = _bias_grad(grad_up_rows, offsets, factors)
            if for_x:
                grad_x = _gradient_of_rows(
                    plan, grad_gate_rows, grad_up_rows, w_gate, w_up, offsets
                )
                if indices is not None:
                    grad_x = sum_rows_of_tokens(
                        grad_x, offsets, indices, token_rows, summed, x.shape[0],
                        is_compiled=plan.is_compiled, by_kernel=ctx.sums_rows,
                    )  # fmt: skip
                else:
                    grad_x = plan.weighted(grad_x, None, factors)
                found["x"] = grad_x
        order = ("scores", "x", "gate", "up", "w_down", "gate_bias", "up_bias", "down_bias")
        return (None, None, None, None, *(found.get(name) for name in order))


def _gradient_of_rows(
    plan: Plan,
    of_gates: torch.Tensor,
    of_ups: torch.Tensor | None,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """The gradient of rows, of one product or two.

    The second product is added to the first, in its memory: by one kernel, where one serves.
    """
    if of_ups is None:
        return rows(of_gates, w_gate, offsets)
    assert w_up is not None
    second = (of_ups, w_up, offsets)
    if plan.kernels is not None and plan.kernels.adds_rows(*second):
        return added_rows(*second, of_gates, w_gate)
    return rows(of_gates, w_gate, offsets) + rows(*second)


def _bias_grad(
    grad: torch.Tensor, offsets: torch.Tensor, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums of each group's rows, times their factors: a product, in a fixed order.

    Its columns have ones; or the first the factors, and the second what rounding takes off them, of
    which each gives a sum in fp32 that is rounded.
    """
    if factors is None:
        ones = grad.new_ones((grad.shape[0], BIAS_COLUMNS))
        return columns(grad, ones, offsets)[..., 0]
    near = factors.to(grad.dtype)
    zeros = grad.new_zeros((grad.shape[0], BIAS_COLUMNS - 2))
    parts = (near[:, None], (factors - near).to(grad.dtype)[:, None], zeros)
    return columns(grad, torch.cat(parts, 1), offsets)[..., :2].sum(-1)


_trace_or_compute = define_whole(
    "experts",
    "Tensor x, Tensor w_up, Tensor? w_ups, Tensor w_down, Tensor? offsets, Tensor? counts, "
    "str activation, str weights, Tensor? up_bias, Tensor? bias_of_ups, Tensor? down_bias, "
    "Tensor? indices, Tensor? token_rows, Tensor? routing_weights, bool combine, float alpha, "
    "float limit",
    compute_experts,
)
