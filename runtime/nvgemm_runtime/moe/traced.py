"""Operators of experts' gates, and of the sum of two products, in the graphs of torch.compile.

To Dynamo, `experts` and `routed_experts` are an operator each, which AOTAutograd replaces by what
they compute: that traces ``up_joined``, ``up_kept``, ``up_pair``, ``up_gradients`` and
``traced_added_rows``. When AOTAutograd or a dispatcher comes to one, it is replaced: by an operator
that launches a kernel with the gate or the sum, where installed bundles have one, and else by the
products and the other operators, which Inductor fuses as if there were no such kernels. So Dynamo's
graphs do not depend on what is installed, and what torch caches behind it does, for which
`nvgemm_runtime.inductor.cache_key` has the bundles.

The operators that launch are in `gate_operators`, but for ``added_rows``, which is in `products`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..gemm.epilogues import GateForm
from .gate_operators import plan_for
from .gate_products import narrow
from .gates import Plan, UpProjection, activated, adds
from .gradients import Backward, Gradients, behind_kernel, gradients_by_operators
from .launching import library
from .operators import count_taken, taken_rows
from .products import added_rows, rows, weight_gradient
from .served import is_served

_operators = torch.ops.nvgemm_moe


def is_traceable() -> bool:
    """Whether the graph being traced may have the operators: not one of torch.export.

    That is read and run by programs of any version of nvgemm-aot, and torch keeps operators there
    that others are to replace.
    """
    # Dynamo of torch 2.11 takes is_exporting() for true whenever it traces.
    return not getattr(torch.compiler, "_is_exporting_flag", False)


def is_traced_whole() -> bool:
    """Whether a call becomes one operator of the graph being traced.

    Of that, Dynamo sees no function of experts: to look into them took most of the time of a warm
    start, and for each that it had seen, guards asked something at each call.
    """
    return torch.compiler.is_compiling() and is_traceable()


def _up_by_kernel(
    plan: Plan,
    form: GateForm,
    a: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor | None,
) -> torch.Tensor | None:
    epilogue = plan.epilogue(form)
    if epilogue is None or not adds(epilogue, bias):
        return None
    if not is_served(a, w.mT, offsets, bias, epilogue, indices=indices):
        return None
    named = None if indices is None else narrow(indices)
    found: torch.Tensor = _operators.gated_rows(a, w.mT, offsets, bias, epilogue.value, named)
    return found


def _up_joined(
    a: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    order: str,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    plan = plan_for(activation, order, in_pieces=False)
    for form in (GateForm.JOINED, GateForm.KEPT):  # with indices, either before a copy
        stored = _up_by_kernel(plan, form, a, w, offsets, bias, indices)
        if stored is not None:
            return stored if form is GateForm.JOINED else stored[:, w.shape[1] :]
    if indices is not None:
        return _up_joined(taken_rows(a, indices), w, offsets, bias, activation, order)
    return _up_kept(a, w, offsets, bias, activation, order)[1]


def _up_kept(
    a: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    order: str,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = plan_for(activation, order, in_pieces=False)
    stored = _up_by_kernel(plan, GateForm.KEPT, a, w, offsets, bias, indices)
    if stored is not None:
        n = w.shape[1]
        return stored[:, :n], stored[:, n:]
    if indices is not None:
        return _up_kept(taken_rows(a, indices), w, offsets, bias, activation, order)
    product = rows(a, w.mT, offsets, bias)
    return product, activated(plan, *plan.split(product))


def _up_pair(
    a: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    offsets: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str,
    wants_grad: bool,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates, ups and what the activation makes of them.

    They lie side by side where a kernel has the gate, or is to read both for the gradient.
    """
    plan = plan_for(activation, None, in_pieces=False)
    hidden = w_gate.shape[1]
    weights, biases = (w_gate.mT, w_up.mT), (gate_bias, up_bias)

    def are_served(pitch: int) -> bool:
        return all(
            is_served(a, one, offsets, bias, None, pitch=pitch, indices=indices)
            for one, bias in zip(weights, biases)
        )

    joining = plan.epilogue(GateForm.UPS) if gate_bias is None and up_bias is None else None
    gates = a.new_empty((count_taken(a, indices), hidden))
    if (
        joining is not None
        and is_served(a, weights[1], offsets, gates, joining, pitch=3 * hidden, indices=indices)
        and are_served(3 * hidden)
    ):
        named = None if indices is None else narrow(indices)
        stored = _operators.paired_gated_rows(a, *weights, offsets, joining.value, named)
        return stored[:, :hidden], stored[:, hidden : 2 * hidden], stored[:, 2 * hidden :]
    if indices is not None:
        return _up_pair(
            taken_rows(a, indices), w_gate, w_up, offsets, gate_bias, up_bias, w_down, activation,
            wants_grad,
        )  # fmt: skip
    both = a.new_empty((a.shape[0], 2 * hidden))
    # The gradient of what is not computed yet has the shape of rows of a, as the result has.
    gradient = plan.epilogue(GateForm.GRADIENT)
    if wants_grad and is_served(a, w_down, offsets, both, gradient) and are_served(2 * hidden):
        both = _operators.paired_rows(a, *weights, offsets, *biases)
        gates, ups = both[:, :hidden], both[:, hidden:]
    else:
        gates, ups = (rows(a, one, offsets, bias) for one, bias in zip(weights, biases))
    return gates, ups, activated(plan, gates, ups)


def _up_gradients(
    grad: torch.Tensor,
    w_down: torch.Tensor,
    down_bias: torch.Tensor | None,
    offsets: torch.Tensor,
    gates: torch.Tensor,
    ups: torch.Tensor | None,
    joined: torch.Tensor | None,
    scores: torch.Tensor | None,
    activation: str,
    order: str | None,
    for_down: bool,
    for_gates: bool,
    for_scores: bool,
    weighs_gates: bool,
) -> list[torch.Tensor]:
    """Those that are asked for, in order: of w_down, gates, ups if they are apart, and scores."""
    plan = plan_for(activation, order, in_pieces=False)
    projected = UpProjection(gates=gates, ups=ups, joined=joined)
    task = Backward(
        grad=grad, scores=scores, w_down=w_down, down_bias=down_bias, offsets=offsets,
        for_down=for_down, for_gates=for_gates, for_scores=for_scores, weighs_gates=weighs_gates,
    )  # fmt: skip
    found = _gradients_by_kernel(plan, projected, task) if for_gates else None
    if found is None:
        found = gradients_by_operators(plan, projected, task)
    wanted = []
    if found.joined is not None:
        wanted.append(weight_gradient(found.grad, found.joined, offsets, w_down))
    wanted += [one for one in (found.gates, found.ups, found.scores) if one is not None]
    return wanted


def _gradients_by_kernel(plan: Plan, projected: UpProjection, task: Backward) -> Gradients | None:
    gates, ups = projected.gates, projected.ups
    assert gates is not None
    product = gates if ups is None else gates.new_empty((gates.shape[0], 2 * gates.shape[1]))
    w_down, offsets = task.w_down, task.offsets
    forms = (GateForm.GRADIENT_SUMS, GateForm.GRADIENT) if task.for_scores else (GateForm.GRADIENT,)
    for form in forms:
        epilogue = plan.epilogue(form)
        if epilogue is None or not is_served(task.grad, w_down, offsets, product, epilogue):
            continue
        given = task.of_kernel(plan)
        operands = (given, w_down, offsets, gates, ups, epilogue.value)
        sums = None
        if form.row.has_sums:
            found, sums = _operators.gate_gradient_sums(*operands)
        else:
            found = _operators.gate_gradient(*operands)
        all_of_them = behind_kernel(plan, projected, task, found, sums, given=given)
        return all_of_them if ups is None else all_of_them.with_parts(*plan.split(found))
    return None


def _traced_added_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    other_a: torch.Tensor,
    other_b: torch.Tensor,
) -> torch.Tensor:
    other = a.new_empty((a.shape[0], b.shape[2]))  # as the other product will be
    if is_served(a, b, offsets, other, None, adds_matrix=True):
        return added_rows(a, b, offsets, other_a, other_b)
    return rows(other_a, other_b, offsets) + rows(a, b, offsets)


def _define_replaced(schema: str, run: Callable[..., Any]) -> None:
    library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(schema.partition("(")[0], run, "CompositeImplicitAutograd")


def define_whole(schema: str, run: Callable[..., torch.Tensor]) -> None:
    """Define the operator that `is_traced_whole` speaks of, which ``run`` is to replace."""
    _define_replaced(schema, functools.partial(run, is_traced=True))


_UP = (
    "Tensor a, Tensor w, Tensor offsets, Tensor? bias, str activation, str order, "
    "Tensor? indices=None"
)
_define_replaced(f"up_joined({_UP}) -> Tensor", _up_joined)
_define_replaced(f"up_kept({_UP}) -> (Tensor, Tensor)", _up_kept)
_define_replaced(
    "up_pair(Tensor a, Tensor w_gate, Tensor w_up, Tensor offsets, Tensor? gate_bias, "
    "Tensor? up_bias, Tensor w_down, str activation, bool wants_grad, Tensor? indices=None) "
    "-> (Tensor, Tensor, Tensor)",
    _up_pair,
)
_define_replaced(
    "traced_added_rows(Tensor a, Tensor b, Tensor offsets, Tensor other_a, Tensor other_b) "
    "-> Tensor",
    _traced_added_rows,
)
_define_replaced(
    "up_gradients(Tensor grad, Tensor w_down, Tensor? down_bias, Tensor offsets, Tensor gates, "
    "Tensor? ups, Tensor? joined, Tensor? scores, str activation, str? order, bool for_down, "
    "bool for_gates, bool for_scores, bool weighs_gates) -> Tensor[]",
    _up_gradients,
)
