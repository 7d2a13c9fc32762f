"""Gradients for gates and ups, the down projection's weights, and routing weights.

Operators compute them here, behind a product; `backward` has the way by a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .operators import dense_like, multiplies_into_fp32, sum_products, widen
from .plan import ExpertsPlan, UpProjection, pieces_of
from .products import owner_of_rows, rows
from .routing import is_owned


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Backward inputs and requested gradients.

    Attributes:
        grad: Each row's result gradient.
        routing_weights: Each row's routing weight, or None.
        w_down, down_bias: Down projection weights and bias.
        offsets: End of each expert's rows.
        for_down, for_gates, for_routing_weights: True if the gradients for the down projection's
            weights, gates and ups, and routing weights are needed.
        weighs_gates: True if routing weights multiply the gate and up gradients, in case the
            routing weights' gradient is needed. Otherwise they multiply rows, and the sums of row
            gradients.
    """

    grad: torch.Tensor
    routing_weights: torch.Tensor | None
    w_down: torch.Tensor
    down_bias: torch.Tensor | None
    offsets: torch.Tensor
    for_down: bool
    for_gates: bool
    for_routing_weights: bool
    weighs_gates: bool

    def weighted(self, plan: ExpertsPlan) -> torch.Tensor:
        """Returns the gradient times the routing weights."""
        return plan.weighted(self.grad, None, self.routing_weights)

    def kernel_gradient(self, plan: ExpertsPlan) -> torch.Tensor:
        """Returns the gradient that a kernel with a gate's gradient takes.

        It is without routing weights if their gradient is needed, which is computed from the
        kernel's output.
        """
        return self.grad if self.for_routing_weights else self.weighted(plan)

    def down_operands(
        self, plan: ExpertsPlan, activated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the operands of the down projection's weight gradient.

        They are the gradient and ``activated``, of which routing weights multiply the narrower.
        """
        if activated.shape[1] < self.grad.shape[1]:
            return self.grad, plan.weighted(activated, None, self.routing_weights)
        return self.weighted(plan), activated

    def mask_unowned(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the vector [rows] with 0 for rows that no expert has."""
        return torch.where(is_owned(self.offsets, vector.shape[0]), vector, 0)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients at the activation; None if not requested.

    Attributes:
        grad: Gradient for the down projection's result, to use with ``activated``.
        activated: Activation result, for the down projection's weight gradient. Either this or
            ``grad`` includes the routing weights.
        first: Gate gradients, or gate and up gradients in one matrix. If the routing weights'
            gradient is requested, they include routing weights only if `Backward.weighs_gates` is
            set.
        second: Up gradients, likewise; None if there is no separate matrix.
        routing_weights: Each routing weight's gradient, in fp32; 0 for a row that no expert has.
    """

    grad: torch.Tensor
    activated: torch.Tensor | None = None
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    routing_weights: torch.Tensor | None = None


def gradients_by_operators(plan: ExpertsPlan, projected: UpProjection, task: Backward) -> Gradients:
    """Takes the result's gradient to gates and ups by a product and operators, in fp32."""
    if not (task.for_down or task.for_gates or task.for_routing_weights):
        return Gradients(grad=task.grad)
    first, second, routing_weights = projected.first, projected.second, task.routing_weights
    assert first is not None
    gate, up = plan.split(first, second)
    grad_activated = None
    if task.for_gates or task.for_routing_weights:
        grad_activated = rows(task.grad, task.w_down, task.offsets)
    weighted = dense_like(gate) if task.for_down else None
    grad_first = torch.empty_like(first) if task.for_gates else None
    grad_second = None if second is None or not task.for_gates else torch.empty_like(second)
    routing_grads = widen(gate.new_empty(gate.shape[0])) if task.for_routing_weights else None
    for piece in pieces_of(plan, gate):
        gates, ups = widen(gate[piece]), up[piece]
        row_weights = None if routing_weights is None else routing_weights[piece, None]
        if task.for_down or task.for_routing_weights:
            activated = plan.activation.apply(gates, ups)
        if weighted is not None:  # apply routing weights in the same pass
            weighted[piece] = activated if row_weights is None else activated * row_weights
        if grad_activated is not None:
            grads = widen(grad_activated[piece])
        if routing_grads is not None:
            routing_grads[piece] = (grads * activated).sum(-1)
        if grad_first is not None:
            if row_weights is not None and (task.weighs_gates or not task.for_routing_weights):
                grads = grads * row_weights
            grad_gates, grad_ups = plan.split(grad_first, grad_second)
            grad_gates[piece], grad_ups[piece] = plan.activation.gradients(gates, ups, grads)
    if routing_grads is not None:
        routing_grads = task.mask_unowned(with_bias(plan, task, routing_grads))
    return Gradients(
        grad=task.grad,
        activated=weighted,
        first=grad_first,
        second=grad_second,
        routing_weights=routing_grads,
    )


def with_bias(plan: ExpertsPlan, task: Backward, routing_grads: torch.Tensor) -> torch.Tensor:
    """Adds the down projection bias's part to the routing weights' gradients.

    In eager code on a GPU, rows are multiplied with all experts' biases, which reads rows once. A
    bias row for each would be a matrix as large as they are.
    """
    if task.down_bias is None:
        return routing_grads
    owner = owner_of_rows(task.offsets, task.grad.shape[0])
    if not plan.is_compiled and multiplies_into_fp32(task.grad):
        by_expert = torch.mm(task.grad, task.down_bias.mT, out_dtype=torch.float32)
        return routing_grads + by_expert.gather(1, owner[:, None]).flatten()
    biases = task.down_bias.index_select(0, owner)
    return routing_grads + sum_products(task.grad, biases, is_compiled=plan.is_compiled)
