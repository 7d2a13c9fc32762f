"""Operators for torch.compile graphs that launch kernels with a gate, or with two weights.

``gated_rows``, ``paired_rows``, ``paired_gated_rows``, ``gate_gradient`` and ``gate_gradient_sums``
look up the kernel at run time, once per problem, and compute without one if none serves the call.
`traced` decides where a graph uses them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gemm.epilogues import Epilogue, GateForm
from ..gemm.moe_operators import (
    GATE_GRADIENT,
    GATE_GRADIENT_SUMS,
    GATED_ROWS,
    PAIRED_GATED_ROWS,
    PAIRED_ROWS,
)
from . import gate_products
from .activations import Activation, GatedActivation
from .gate_products import rows_into, ups_into
from .gates import Plan, UpProjection, activated
from .gradients import Backward, gradients_by_operators
from .launching import define
from .operators import count_taken, taken_rows
from .products import rows


def _gated_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    parsed = Epilogue(epilogue)
    stored = gate_products.gated_rows(a, b, offsets, bias, parsed, indices, warns=True)
    if stored is not None:
        return stored
    plan = _plan_of(parsed)
    product = rows(taken_rows(a, indices), b, offsets, bias)
    joined = activated(plan, *plan.split(product))
    return joined if parsed.form is GateForm.JOINED else torch.cat((product, joined), 1)


def _paired_gated_rows(
    a: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    offsets: torch.Tensor,
    epilogue: str,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    parsed, hidden = Epilogue(epilogue), b_gate.shape[2]
    stored = a.new_empty((count_taken(a, indices), 3 * hidden))
    gates, ups, joined = stored.split(hidden, dim=1)
    _fill(gates, a, b_gate, offsets, None, indices)
    if not ups_into(stored[:, hidden:], a, b_up, offsets, gates, parsed, indices, warns=True):
        _fill(ups, a, b_up, offsets, None, indices)
        joined.copy_(activated(_plan_of(parsed), gates, ups))
    return stored


def _fill(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor | None = None,
) -> None:
    """Computes `rows` into a matrix that may have gaps between rows."""
    if not rows_into(out, a, b, offsets, bias, indices):
        out.copy_(rows(taken_rows(a, indices), b, offsets, bias))


def _paired_rows(
    a: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    offsets: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
) -> torch.Tensor:
    hidden = b_gate.shape[2]
    both = a.new_empty((a.shape[0], 2 * hidden))
    halves = both[:, :hidden], both[:, hidden:]
    for half, b, bias in zip(halves, (b_gate, b_up), (bias_gate, bias_up)):
        _fill(half, a, b, offsets, bias)
    return both


def _gate_gradient(
    grad: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    product: torch.Tensor,
    epilogue: str,
) -> torch.Tensor:
    parsed = Epilogue(epilogue)
    gradients = gate_products.gate_gradients(grad, b, offsets, product, parsed, warns=True)
    if gradients is None:
        gradients = _by_operators(grad, b, offsets, product, parsed, for_routing_weights=False)
    return gradients[0]


def _gate_gradient_sums(
    grad: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    product: torch.Tensor,
    epilogue: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    parsed = Epilogue(epilogue)
    gradients = gate_products.gate_gradients(grad, b, offsets, product, parsed, warns=True)
    if gradients is None:
        gradients = _by_operators(grad, b, offsets, product, parsed, for_routing_weights=True)
    return gradients


def _by_operators(
    grad: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    product: torch.Tensor,
    epilogue: Epilogue,
    *,
    for_routing_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the gate and up gradients, and the routing weights' gradients if requested."""
    task = Backward(
        grad=grad, routing_weights=None, w_down=b, down_bias=None, offsets=offsets,
        for_down=False, for_gates=True, for_routing_weights=for_routing_weights, weighs_gates=False,
    )  # fmt: skip
    gradients = gradients_by_operators(_plan_of(epilogue), UpProjection(gates=product), task)
    assert gradients.gates is not None
    return gradients.gates, gradients.routing_weights


def _plan_of(epilogue: Epilogue) -> Plan:
    """Returns the plan that computes an epilogue without a kernel."""
    gate = epilogue.gate
    assert gate is not None
    return Plan(
        activation=GatedActivation(
            kind=Activation(gate.value), alpha=gate.row.alpha, limit=gate.row.limit or 0.0
        ),
        order=epilogue.row.order,
        combine=False,
        wants_grad=False,
        kernels=None,
        is_compiled=True,
    )


def _fake_gated_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    form = Epilogue(epilogue).form
    assert form is not None
    columns = b.shape[2] // form.row.product_columns * form.row.out_columns
    return a.new_empty((count_taken(a, indices), columns))


def _fake_paired_rows(a: torch.Tensor, b_gate: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], 2 * b_gate.shape[2]))


def _fake_paired_gated_rows(
    a: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    offsets: torch.Tensor,
    epilogue: str,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    return a.new_empty((count_taken(a, indices), 3 * b_gate.shape[2]))


def _fake_gate_gradient(grad: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return grad.new_empty((grad.shape[0], 2 * b.shape[2]))


def _fake_gate_gradient_sums(
    grad: torch.Tensor, b: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = grad.new_empty(grad.shape[0], dtype=torch.float32)
    return _fake_gate_gradient(grad, b), sums


gated_rows = define(
    GATED_ROWS,
    "Tensor a, Tensor b, Tensor offsets, Tensor? bias, str epilogue, Tensor? indices",
    _gated_rows,
    _fake_gated_rows,
)
paired_rows = define(
    PAIRED_ROWS,
    "Tensor a, Tensor b_gate, Tensor b_up, Tensor offsets, Tensor? bias_gate, Tensor? bias_up",
    _paired_rows,
    _fake_paired_rows,
)
paired_gated_rows = define(
    PAIRED_GATED_ROWS,
    "Tensor a, Tensor b_gate, Tensor b_up, Tensor offsets, str epilogue, Tensor? indices",
    _paired_gated_rows,
    _fake_paired_gated_rows,
)
_GRADIENT = "Tensor grad, Tensor b, Tensor offsets, Tensor product, str epilogue"
gate_gradient = define(GATE_GRADIENT, _GRADIENT, _gate_gradient, _fake_gate_gradient)
gate_gradient_sums = define(
    GATE_GRADIENT_SUMS,
    _GRADIENT,
    _gate_gradient_sums,
    _fake_gate_gradient_sums,
    gives="(Tensor, Tensor)",
)
