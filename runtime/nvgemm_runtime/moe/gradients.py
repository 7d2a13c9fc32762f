"""The gradients of gates and ups, of the down projection's weights, and of rows' weights.

By a kernel that takes the gradient of the result through the down projection and the gate, where
one serves, and else by that product and operators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..gemm.epilogues import GateForm
from .activations import Activation
from .gates import Plan, UpProjection, activated, has_gate, pieces_of
from .operators import dense_like, is_watched, multiplies_into_fp32, sum_products, widen
from .products import owner_of_rows, rows
from .tokens import is_owned


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The gradient of the result, what it is taken through, and which gradients are wanted of it.

    Attributes:
        grad: The gradient of each row's result.
        scores: The rows' weights; None without.
        w_down, down_bias: Weights of the down projection, and its bias.
        offsets: End of each expert's rows.
        for_down, for_gates, for_scores: Whether those of the down projection's weights, of gates
            and ups, and of the rows' weights are wanted.
        weighs_gates: Whether gradients of gates and ups get the rows' weights, where the gradient
            of these is wanted. Else rows get them, and the sums of rows' gradients.
    """

    grad: torch.Tensor
    scores: torch.Tensor | None
    w_down: torch.Tensor
    down_bias: torch.Tensor | None
    offsets: torch.Tensor
    for_down: bool
    for_gates: bool
    for_scores: bool
    weighs_gates: bool

    def weighted(self, plan: Plan) -> torch.Tensor:
        """The gradient times the rows' weights."""
        return plan.weighted(self.grad, None, self.scores)

    def of_kernel(self, plan: Plan) -> torch.Tensor:
        """What a kernel with the gradient of a gate is given.

        Without the rows' weights where their gradient is wanted, which is found behind it.
        """
        return self.grad if self.for_scores else self.weighted(plan)

    def of_down(self, plan: Plan, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the gradient of the down projection's weights multiplies: gradients, and ``joined``.

        One of both has the rows' weights, the narrower.
        """
        if joined.shape[1] < self.grad.shape[1]:
            return self.grad, plan.weighted(joined, None, self.scores)
        return self.weighted(plan), joined

    def of_owned(self, by_row: torch.Tensor) -> torch.Tensor:
        """The vector [rows] with 0 for rows that no expert has."""
        return torch.where(is_owned(self.offsets, by_row.shape[0]), by_row, 0)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What the backward needs of the activation; None for what is not asked for.

    Attributes:
        grad: The gradient of the down projection's result that goes with ``joined``.
        joined: What the activation gave, for the gradient of the down projection's weights. One
            of both has the rows' weights.
        gates: The gradients of gates, or of gates and ups in one matrix. Where the gradient of
            rows' weights is asked for, they have these weights only if the task `weighs_gates`.
        ups: Those of ups, likewise; None where there is no matrix of their own.
        scores: The gradient of each row's weight, in fp32; 0 of a row that no expert has.
    """

    grad: torch.Tensor
    joined: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    ups: torch.Tensor | None = None
    scores: torch.Tensor | None = None


def gradients_by_kernel(plan: Plan, projected: UpProjection, task: Backward) -> Gradients | None:
    """Take the gradient of the result to gates and ups by one kernel, if one serves."""
    # Before more is looked at: Dynamo of torch 2.11 does not iterate enumerations.
    kernels, product = plan.kernels, projected.gates
    if kernels is None or product is None or projected.ups is not None:
        return None
    if not has_gate(plan.activation) or (not plan.is_compiled and is_watched(task.grad)):
        return None
    given = task.of_kernel(plan)
    operands = (given, task.w_down, task.offsets, product)
    forms = (GateForm.GRADIENT_SUMS, GateForm.GRADIENT) if task.for_scores else (GateForm.GRADIENT,)
    for form in forms:
        epilogue = plan.epilogue(form)
        assert epilogue is not None  # every gate has both
        found = kernels.gate_gradients(*operands, epilogue)
        if found is not None:
            return behind_kernel(plan, projected, task, *found, given=given)
    return None


def behind_kernel(
    plan: Plan,
    projected: UpProjection,
    task: Backward,
    found: torch.Tensor,
    sums: torch.Tensor | None = None,
    *,
    given: torch.Tensor,
) -> Gradients:
    """All that the backward needs, by what a kernel found.

    The gradient of a row's weight is the sum of what the activation gave times its gradient, which
    a kernel may have found as well. Else it is that of ups times theirs, where ups are a factor as
    they are. Where they are cut off, it is that of the down projection's result times the given
    gradient. That product is computed again, which moves a quarter of the memory that operators do:
    for 98,304 rows, 2880 columns in and out and 32 experts (gpt-oss-20b), 1.6 TFLOP more and about
    60 bytes for each of what the activation gives in place of about 280.

    Args:
        plan: What to compute.
        projected: What the up projection gave.
        task: What it is computed of.
        found: Gradients of gates and ups in one matrix, which may be overwritten: of ``given``.
        sums: For each row, what the activation gave times its gradient; None to find it here.
            Called, they are a kernel's, and 0 for rows that no expert has.
        given: What the kernel was given.
    """
    assert projected.gates is not None
    gates, ups = plan.parts(projected.gates, projected.ups)
    ups_are_cut = plan.activation.kind is Activation.SWIGLU_OAI
    joined = projected.joined
    needs_result = task.for_scores and sums is None and ups_are_cut
    if joined is None and (task.for_down or needs_result):
        joined = activated(plan, gates, ups)
    by_row = None
    if task.for_scores:
        assert task.scores is not None
        is_of_owned = sums is not None and task.down_bias is None and not plan.is_compiled
        if needs_result:
            assert joined is not None
            result = rows(joined, task.w_down.mT, task.offsets, task.down_bias)
            by_row = sum_products(task.grad, result, is_compiled=plan.is_compiled)
        else:
            if sums is None:
                sums = sum_products(plan.split(found)[1], ups, is_compiled=plan.is_compiled)
            by_row = _with_bias(plan, task, sums)
        if not is_of_owned:
            by_row = task.of_owned(by_row)
        if task.weighs_gates:
            found.mul_(task.scores[:, None])
        if task.for_down:
            assert joined is not None
            given, joined = task.of_down(plan, joined)
    joined = joined if task.for_down else None
    return Gradients(grad=given, joined=joined, gates=found, scores=by_row)


def gradients_by_operators(plan: Plan, projected: UpProjection, task: Backward) -> Gradients:
    """Take the gradient of the result to gates and ups by a product and operators, in fp32."""
    if not (task.for_down or task.for_gates or task.for_scores):
        return Gradients(grad=task.grad)
    gate_rows, up_rows, scores = projected.gates, projected.ups, task.scores
    assert gate_rows is not None
    gate, up = plan.parts(gate_rows, up_rows)
    grad_hidden = None
    if task.for_gates or task.for_scores:
        grad_hidden = rows(task.grad, task.w_down, task.offsets)
    hidden = dense_like(gate) if task.for_down else None
    grad_gate_rows = torch.empty_like(gate_rows) if task.for_gates else None
    grad_up_rows = None if up_rows is None or not task.for_gates else torch.empty_like(up_rows)
    by_row = widen(gate.new_empty(gate.shape[0])) if task.for_scores else None
    for piece in pieces_of(plan, gate):
        gates, ups = widen(gate[piece]), up[piece]
        factor = None if scores is None else scores[piece, None]
        if task.for_down or task.for_scores:
            joined = plan.activation.apply(gates, ups)
        if hidden is not None:  # which gets the weights while it is computed
            hidden[piece] = joined if factor is None else joined * factor
        if grad_hidden is not None:
            grads = widen(grad_hidden[piece])
        if by_row is not None:
            by_row[piece] = (grads * joined).sum(-1)
        if grad_gate_rows is not None:
            if factor is not None and (task.weighs_gates or not task.for_scores):
                grads = grads * factor
            of_gates, of_ups = plan.parts(grad_gate_rows, grad_up_rows)
            of_gates[piece], of_ups[piece] = plan.activation.gradients(gates, ups, grads)
    if by_row is not None:
        by_row = task.of_owned(_with_bias(plan, task, by_row))
    return Gradients(
        grad=task.grad, joined=hidden, gates=grad_gate_rows, ups=grad_up_rows, scores=by_row
    )


def _with_bias(plan: Plan, task: Backward, by_row: torch.Tensor) -> torch.Tensor:
    """Gradients of rows' weights, with what the bias of the down projection adds to each.

    Called on a GPU, rows are multiplied with the biases of all experts, which reads them once; a
    row of the bias for each would be a matrix as large as they are.
    """
    if task.down_bias is None:
        return by_row
    owner = owner_of_rows(task.offsets, task.grad.shape[0])
    if not plan.is_compiled and multiplies_into_fp32(task.grad):
        by_expert = torch.mm(task.grad, task.down_bias.mT, out_dtype=torch.float32)
        return by_row + by_expert.gather(1, owner[:, None]).flatten()
    biases = task.down_bias.index_select(0, owner)
    return by_row + sum_products(task.grad, biases, is_compiled=plan.is_compiled)
