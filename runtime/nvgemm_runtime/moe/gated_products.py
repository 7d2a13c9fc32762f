"""Grouped GEMMs for kernels with a gate, or for products that such a kernel reads.

Each function is the body of the operator with its name in ``torch.ops.nvgemm_moe``, except that
`gate_gradients` is the body of ``gate_gradient`` and ``gate_gradient_sums``. As an operator, it
looks up the kernel at run time and computes without one if none serves. With ``use``, which eager
code and traces pass, it returns None in that case, and the caller takes another way.

``a`` is a matrix [m, k], each ``b`` has matrices [groups, k, n], and ``offsets`` are group ends
along m, int32 [groups]. ``indices``, int32 [m], selects ``a``'s rows.
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
from ..gemm.operand_checks import check_shapes
from ..gemm.roles import sum_parts
from . import kernels
from .activations import GatedActivation
from .gradients import Backward, gradients_by_operators
from .kernels import (
    GATE_LOST,
    grouped_operands,
    has_kernel,
    is_served,
    op_of_rows,
    warn_once,
)
from .operators import count_taken, define, taken_rows
from .plan import ExpertsPlan, KernelUse, UpProjection, activate
from .products import rows

_operators = torch.ops.nvgemm_moe


def gated_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: Epilogue | str,
    indices: torch.Tensor | None = None,
    *,
    use: KernelUse | None = None,
) -> torch.Tensor | None:
    """Computes `rows` with a gated epilogue, whose form decides the result's width."""
    epilogue = Epilogue.parse(epilogue)
    if use is KernelUse.TRACED:
        if not is_served(a, b, offsets, bias, epilogue, indices=indices):
            return None
        traced: torch.Tensor = _operators.gated_rows(a, b, offsets, bias, epilogue.name, indices)
        return traced
    op, count = op_of_rows(indices), count_taken(a, indices)
    out = a.new_empty(check_shapes(op, a, b, form=epilogue.form, rows=count))
    reason = kernels.launch(*grouped_operands(out, a, b, offsets, bias, epilogue, indices=indices))
    if not reason:
        return out
    if use is not None:
        return None
    warn_once(GATE_LOST, reason)
    del out
    plan = _plan_of(epilogue)
    product = rows(taken_rows(a, indices), b, offsets, bias)
    activated = activate(plan, *plan.split(product))
    return activated if epilogue.form is GateForm.JOINED else torch.cat((product, activated), 1)


def paired_rows(
    a: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    offsets: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    *,
    use: KernelUse | None = None,
    reader: tuple[torch.Tensor, Epilogue] | None = None,
) -> torch.Tensor | None:
    """Computes gates and ups, side by side [m, 2 * n].

    ``reader`` takes their gradient: the down projection's weights and an epilogue. Without one, a
    trace does not use kernels, because Inductor fuses operators with two products.
    """
    hidden = b_gate.shape[2]
    pairs = (b_gate, bias_gate), (b_up, bias_up)
    both = a.new_empty((a.shape[0], 2 * hidden))
    if use is KernelUse.TRACED:
        # `a` stands in for the result's gradient, which has its shape.
        if reader is None or not is_served(a, reader[0], offsets, both, reader[1]):
            return None
        for b, bias in pairs:
            if not is_served(a, b, offsets, bias, None, pitch=2 * hidden):
                return None
        traced: torch.Tensor = _operators.paired_rows(a, b_gate, b_up, offsets, bias_gate, bias_up)
        return traced
    for half, (b, bias) in zip((both[:, :hidden], both[:, hidden:]), pairs):
        if kernels.launch(*grouped_operands(half, a, b, offsets, bias, None)):
            if use is not None:
                return None
            half.copy_(rows(a, b, offsets, bias))
    return both


def paired_gated_rows(
    a: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    offsets: torch.Tensor,
    epilogue: Epilogue | str,
    indices: torch.Tensor | None = None,
    *,
    use: KernelUse | None = None,
) -> torch.Tensor | None:
    """Computes gates, ups and the activation's result [m, 3 * n], by an epilogue of form UPS.

    The first launch computes gates, the second reads them and computes the rest.
    """
    epilogue, hidden = Epilogue.parse(epilogue), b_gate.shape[2]
    if use is KernelUse.TRACED:
        gates = a.new_empty((count_taken(a, indices), hidden))
        pitch = 3 * hidden
        if not is_served(
            a, b_up, offsets, gates, epilogue, pitch=pitch, indices=indices
        ) or not is_served(a, b_gate, offsets, None, None, pitch=pitch, indices=indices):
            return None
        traced: torch.Tensor = _operators.paired_gated_rows(
            a, b_gate, b_up, offsets, epilogue.name, indices
        )
        return traced
    stored = a.new_empty((count_taken(a, indices), 3 * hidden))
    gates, behind = stored[:, :hidden], stored[:, hidden:]
    with_gate = grouped_operands(behind, a, b_up, offsets, gates, epilogue, indices=indices)
    if use is not None and not has_kernel(*with_gate):  # before anything is written
        return None
    if kernels.launch(*grouped_operands(gates, a, b_gate, offsets, None, None, indices=indices)):
        if use is not None:
            return None
        gates.copy_(rows(taken_rows(a, indices), b_gate, offsets))
    reason = kernels.launch(*with_gate)
    if not reason:
        return stored
    if use is not None:
        return None
    warn_once(GATE_LOST, reason)
    ups, activated = behind[:, :hidden], behind[:, hidden:]
    if kernels.launch(*grouped_operands(ups, a, b_up, offsets, None, None, indices=indices)):
        ups.copy_(rows(taken_rows(a, indices), b_up, offsets))
    activated.copy_(activate(_plan_of(epilogue), gates, ups))
    return stored


def gate_gradients(
    grad: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    product: torch.Tensor,
    epilogue: Epilogue | str,
    *,
    use: KernelUse | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Computes the gate and up gradients.

    Args:
        grad: Gradient for the down projection's result, [m, dim].
        b: Down projection weights, [groups, dim, n].
        offsets: Group ends along m.
        product: Product with gates and ups, [m, 2 * n], in the epilogue's column order.
        epilogue: Gradient epilogue.
        use: Use of a kernel; None computes without one if none serves.

    Returns:
        Matrix [m, 2 * n] in the product's column order, and sums or None. For an epilogue with
        sums, these are a vector [m] in fp32: for each row, the sum over the gate's results times
        their gradients. It is 0 past the last end, because the launch zeroes sums and a kernel
        writes only rows in groups.
    """
    epilogue = Epilogue.parse(epilogue)
    has_sums = epilogue.form is not None and epilogue.form.row.has_sums
    if use is KernelUse.TRACED:
        if not is_served(grad, b, offsets, product, epilogue):
            return None
        operands = (grad, b, offsets, product, epilogue.name)
        if not has_sums:
            return _operators.gate_gradient(*operands), None
        gradients, sums = _operators.gate_gradient_sums(*operands)
        return gradients, sums
    parts = None
    if has_sums:
        parts = grad.new_empty((grad.shape[0], sum_parts(b.shape[2])), dtype=torch.float32)
    out = grad.new_empty(check_shapes(op_of_rows(None), grad, b, form=epilogue.form))
    reason = kernels.launch(*grouped_operands(out, grad, b, offsets, product, epilogue, sums=parts))
    if not reason:
        return out, None if parts is None else parts.sum(1)
    if use is not None:
        return None
    warn_once(GATE_LOST, reason)
    del out
    task = Backward(
        grad=grad, routing_weights=None, w_down=b, down_bias=None, offsets=offsets,
        for_down=False, for_gates=True, for_routing_weights=has_sums, weighs_gates=False,
    )  # fmt: skip
    computed = gradients_by_operators(_plan_of(epilogue), UpProjection(first=product), task)
    assert computed.first is not None
    return computed.first, computed.routing_weights


def _gate_gradient(*operands: Any) -> torch.Tensor:
    result = gate_gradients(*operands)
    assert result is not None
    return result[0]


def _plan_of(epilogue: Epilogue) -> ExpertsPlan:
    """Returns the plan that computes an epilogue without a kernel."""
    gate = epilogue.gate
    assert gate is not None
    return ExpertsPlan(
        activation=GatedActivation(kind=gate, alpha=gate.row.alpha, limit=gate.row.limit or 0.0),
        order=epilogue.order,
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
    form = Epilogue.parse(epilogue).form
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


define(
    GATED_ROWS,
    "Tensor a, Tensor b, Tensor offsets, Tensor? bias, str epilogue, Tensor? indices",
    gated_rows,
    _fake_gated_rows,
)
define(
    PAIRED_ROWS,
    "Tensor a, Tensor b_gate, Tensor b_up, Tensor offsets, Tensor? bias_gate, Tensor? bias_up",
    paired_rows,
    _fake_paired_rows,
)
define(
    PAIRED_GATED_ROWS,
    "Tensor a, Tensor b_gate, Tensor b_up, Tensor offsets, str epilogue, Tensor? indices",
    paired_gated_rows,
    _fake_paired_gated_rows,
)
_GRADIENT = "Tensor grad, Tensor b, Tensor offsets, Tensor product, str epilogue"
define(GATE_GRADIENT, _GRADIENT, _gate_gradient, _fake_gate_gradient)
define(
    GATE_GRADIENT_SUMS,
    _GRADIENT,
    gate_gradients,
    _fake_gate_gradient_sums,
    gives="(Tensor, Tensor)",
)
