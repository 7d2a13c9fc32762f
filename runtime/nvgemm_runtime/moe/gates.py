"""Gates and ups: their products, what the activation makes of them, and their gradients.

Kernels with the gate in their epilogue compute them where one serves, unless a dispatch mode or a
tensor subclass observes operators; else operators do. While torch.compile traces, that is decided
by what `traced` defines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..gemm.epilogues import Epilogue, Gate, GateForm, WeightOrder, find_gated
from .activations import Activation, GatedActivation
from .products import gate_gradients, gated_rows, rows, rows_into, serves_ups, ups_into
from .rounding import dense_like, pieces, weighted, widen

_GATES = {one: Gate(one.value) for one in Activation}
_OAI_CONSTANTS = (Gate.SWIGLU_OAI.row.alpha, Gate.SWIGLU_OAI.row.limit)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to compute, and by what.

    Attributes:
        order: Where gates and ups stand; None where they are two products, which lie in halves.
        uses_kernels: Whether kernels may be launched directly, which nothing sees that observes
            operators.
        traces_gates: Whether operators with a gate may be traced, in place of those that they are
            made of.
        is_compiled: Whether operators compute the activation in fp32, whatever it is.
        in_pieces: Whether they compute some rows at a time.
    """

    activation: GatedActivation
    order: WeightOrder | None
    combine: bool
    wants_grad: bool
    uses_kernels: bool
    traces_gates: bool = False
    is_compiled: bool = False
    in_pieces: bool = True

    def split(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the gates and ups among columns."""
        if self.order is WeightOrder.INTERLEAVED:
            return both[..., ::2], both[..., 1::2]
        half = both.shape[-1] // 2
        return both[..., :half], both[..., half:]

    def parts(
        self, gate_rows: torch.Tensor, up_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the gates and ups of one product or two."""
        return self.split(gate_rows) if up_rows is None else (gate_rows, up_rows)

    def epilogue(self, form: GateForm) -> Epilogue | None:
        """The epilogue of this form that has the activation, if one does.

        Of two products, one has the gate where the other gave gates; they lie in halves for the
        gradient.
        """
        of_two = (GateForm.GRADIENT, GateForm.UPS)
        if (self.order is None and form not in of_two) or not has_gate(self.activation):
            return None
        if form is GateForm.UPS and self.activation.kind is Activation.SWIGLU_OAI:
            return None  # whose models have one weight
        gate = _GATES[self.activation.kind]
        return find_gated(gate, self.order or WeightOrder.HALVES, form)


def has_gate(activation: GatedActivation) -> bool:
    """Whether epilogues have the activation, with its constants."""
    constants = (activation.alpha, activation.limit)
    return activation.kind is not Activation.SWIGLU_OAI or constants == _OAI_CONSTANTS


@dataclass(frozen=True, kw_only=True)
class UpProjection:
    """What the up projection gave.

    Attributes:
        gates: The product of gates, or of gates and ups in one matrix; None where a kernel joined
            them and no gradient is wanted.
        ups: The product of ups; None where there is no matrix of its own.
        joined: What the activation makes of both; None where it is still to be computed.
    """

    gates: torch.Tensor | None = None
    ups: torch.Tensor | None = None
    joined: torch.Tensor | None = None


def project_up(
    plan: Plan,
    taken: torch.Tensor,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    w_down: torch.Tensor,
) -> UpProjection:
    """Multiply rows with the weights of gates and of ups, by the fewest launches that serve."""
    (w_gate, w_up), (gate_bias, up_bias) = weights, biases
    if plan.traces_gates:
        return _traced(plan, taken, offsets, weights, biases, w_down)
    if plan.uses_kernels:
        if w_up is None:
            found = _joined_by_kernel(plan, taken, offsets, w_gate, gate_bias)
        else:
            two = (w_gate, w_up)
            found = _with_gate_behind_ups(plan, taken, offsets, two, biases)
            found = found or _side_by_side(taken, offsets, two, biases)
        if found is not None:
            return found
    gates = rows(taken, w_gate.mT, offsets, gate_bias)
    ups = None if w_up is None else rows(taken, w_up.mT, offsets, up_bias)
    return UpProjection(gates=gates, ups=ups)


def _traced(
    plan: Plan,
    taken: torch.Tensor,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    w_down: torch.Tensor,
) -> UpProjection:
    """The up projection by an operator that becomes others when the graph is traced further."""
    (w_gate, w_up), (gate_bias, up_bias) = weights, biases
    operators, kind = torch.ops.nvgemm_moe, plan.activation.kind.value
    if w_up is not None:
        gates, ups, joined = operators.up_pair(
            taken, w_gate, w_up, offsets, gate_bias, up_bias, w_down, kind, plan.wants_grad
        )
        return UpProjection(gates=gates, ups=ups, joined=joined)
    assert plan.order is not None
    given = (taken, w_gate, offsets, gate_bias, kind, plan.order.value)
    if not plan.wants_grad:
        return UpProjection(joined=operators.up_joined(*given))
    gates, joined = operators.up_kept(*given)
    return UpProjection(gates=gates, joined=joined)


def _joined_by_kernel(
    plan: Plan,
    taken: torch.Tensor,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> UpProjection | None:
    """The up projection by a kernel with the gate, if one serves.

    Bundles for training may have no kernel but the one that also stores the product.
    """
    for form in (GateForm.KEPT,) if plan.wants_grad else (GateForm.JOINED, GateForm.KEPT):
        epilogue = plan.epilogue(form)
        if epilogue is None or not adds(epilogue, bias):
            continue
        stored = gated_rows(taken, weight.mT, offsets, bias, epilogue)
        if stored is None:
            continue
        if form is GateForm.JOINED:
            return UpProjection(joined=stored)
        n = weight.shape[1]
        return UpProjection(gates=stored[:, :n], joined=stored[:, n:])
    return None


def adds(epilogue: Epilogue, bias: torch.Tensor | None) -> bool:
    """Whether an epilogue adds a bias exactly where there is one."""
    return (epilogue.addend is None) is (bias is None)


def _with_gate_behind_ups(
    plan: Plan,
    taken: torch.Tensor,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> UpProjection | None:
    """Gates, ups and what the activation makes of them in one matrix, if kernels serve.

    The first launch gives gates, the second the rest. The gradient of the gate reads the front.
    """
    epilogue = plan.epilogue(GateForm.UPS)
    if epilogue is None or any(bias is not None for bias in biases):
        return None
    hidden = weights[0].shape[1]
    stored = taken.new_empty((taken.shape[0], 3 * hidden))
    gates, behind = stored[:, :hidden], stored[:, hidden:]
    w_gate, w_up = (weight.mT for weight in weights)
    given = (behind, taken, w_up, offsets, gates, epilogue)
    if not serves_ups(*given) or not rows_into(gates, taken, w_gate, offsets, None):
        return None
    if not ups_into(*given):
        return None
    return UpProjection(gates=stored[:, : 2 * hidden], joined=stored[:, 2 * hidden :])


def _side_by_side(
    taken: torch.Tensor,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> UpProjection | None:
    """Both products in one matrix, as the gradient of the gate reads them, if kernels serve."""
    hidden = weights[0].shape[1]
    both = taken.new_empty((taken.shape[0], 2 * hidden))
    halves = both[:, :hidden], both[:, hidden:]
    for half, weight, bias in zip(halves, weights, biases):
        if not rows_into(half, taken, weight.mT, offsets, bias):
            return None
    return UpProjection(gates=both)


def activated(plan: Plan, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What the activation makes of gates and ups, contiguous.

    Of two operators as torchtitan calls them, and not under torch.compile, in the type of gates;
    else in fp32, rounded once.
    """
    is_product = plan.activation.kind is not Activation.SWIGLU_OAI
    if is_product and not plan.is_compiled:
        return plan.activation.apply(gate, up).contiguous()
    joined = dense_like(gate)
    for piece in _pieces(plan, gate):
        joined[piece] = plan.activation.apply(widen(gate[piece]), up[piece])
    return joined


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What the backward needs of the activation; None for what is not asked for.

    Attributes:
        grad: The gradient of the down projection's result that goes with ``joined``.
        joined: What the activation gave, for the gradient of the down projection's weights.
        gates: The gradients of gates, or of gates and ups in one matrix.
        ups: Those of ups; None where there is no matrix of their own.
        scores: The gradient of each row's weight, in fp32.
        w_down: The gradient of the down projection's weights, where it is known already.
    """

    grad: torch.Tensor
    joined: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    ups: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    w_down: torch.Tensor | None = None

    def with_parts(self, gates: torch.Tensor, ups: torch.Tensor) -> Gradients:
        """The same, with the gradients of gates and ups apart."""
        return replace(self, gates=gates, ups=ups)


def gradients_by_kernel(
    plan: Plan,
    projected: UpProjection,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    w_down: torch.Tensor,
    offsets: torch.Tensor,
    *,
    for_down: bool,
    for_scores: bool,
) -> Gradients | None:
    """Take the gradient of the result to gates and ups by one kernel, if one serves."""
    # Before more is looked at: Dynamo of torch 2.11 does not iterate enumerations.
    if not plan.uses_kernels or projected.ups is not None:
        return None
    product, epilogue = projected.gates, plan.epilogue(GateForm.GRADIENT)
    if product is None or epilogue is None or is_watched(grad):
        return None
    given = grad if for_scores else weighted(grad, scores, is_compiled=plan.is_compiled)
    found = gate_gradients(given, w_down, offsets, product, epilogue)
    if found is None:
        return None
    return behind_kernel(
        plan, projected, found, grad, given, scores, w_down, offsets,
        for_down=for_down, for_scores=for_scores,
    )  # fmt: skip


def behind_kernel(
    plan: Plan,
    projected: UpProjection,
    found: torch.Tensor,
    grad: torch.Tensor,
    given: torch.Tensor,
    scores: torch.Tensor | None,
    w_down: torch.Tensor,
    offsets: torch.Tensor,
    *,
    for_down: bool,
    for_scores: bool,
) -> Gradients:
    """All that the backward needs, by what a kernel found.

    The gradient of a row's weight is the sum of what the activation gave times its gradient, and so
    of ups times theirs, where ups are a factor as they are. Where they are cut off, it is that of
    the down projection's result times the given gradient. That product is computed again, which
    moves a quarter of the memory that operators do: for 98,304 rows, 2880 columns in and out and
    32 experts (gpt-oss-20b), 1.6 TFLOP more and about 60 bytes for each of what the activation
    gives in place of about 280.

    Args:
        plan: What to compute.
        projected: What the up projection gave.
        found: Gradients of gates and ups in one matrix, which is overwritten: of ``given``.
        grad: The gradient of the result.
        given: The same, times the rows' weights unless their gradient is wanted.
        scores: The rows' weights.
        w_down: Weights of the down projection.
        offsets: End of each expert's rows.
        for_down: Whether the gradient of the down projection's weights is wanted.
        for_scores: Whether that of the rows' weights is.
    """
    assert projected.gates is not None
    gates, ups = plan.parts(projected.gates, projected.ups)
    ups_are_cut = plan.activation.kind is Activation.SWIGLU_OAI
    joined = projected.joined
    if joined is None and (for_down or (for_scores and ups_are_cut)):
        joined = activated(plan, gates, ups)
    by_row = None
    if for_scores:
        assert scores is not None
        if ups_are_cut:
            assert joined is not None
            by_row = _sums_of_products(plan, grad, rows(joined, w_down.mT, offsets))
        else:
            by_row = torch.sum(plan.split(found)[1] * ups, -1, dtype=torch.float32)
        found.mul_(scores[:, None])
        given = weighted(grad, scores, is_compiled=plan.is_compiled)
    return Gradients(grad=given, joined=joined if for_down else None, gates=found, scores=by_row)


def gradients_by_operators(
    plan: Plan,
    projected: UpProjection,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    w_down: torch.Tensor,
    offsets: torch.Tensor,
    *,
    for_down: bool,
    for_gates: bool,
    for_scores: bool,
) -> Gradients:
    """Take the gradient of the result to gates and ups by a product and operators, in fp32."""
    gate_rows, up_rows = projected.gates, projected.ups
    assert gate_rows is not None
    gate, up = plan.parts(gate_rows, up_rows)
    grad_hidden = rows(grad, w_down, offsets) if for_gates or for_scores else None
    hidden = dense_like(gate) if for_down else None
    grad_gate_rows = torch.empty_like(gate_rows) if for_gates else None
    grad_up_rows = None if up_rows is None or not for_gates else torch.empty_like(up_rows)
    by_row = widen(gate.new_empty(gate.shape[0])) if for_scores else None
    for piece in _pieces(plan, gate):
        gates, ups = widen(gate[piece]), up[piece]
        factor = None if scores is None else scores[piece, None]
        if for_down or for_scores:
            joined = plan.activation.apply(gates, ups)
        if hidden is not None:  # the factor is on the narrower of the two
            hidden[piece] = joined if factor is None else joined * factor
        if grad_hidden is not None:
            grads = widen(grad_hidden[piece])
        if by_row is not None:
            by_row[piece] = (grads * joined).sum(-1)
        if grad_gate_rows is not None:
            grads = grads if factor is None else grads * factor
            of_gates, of_ups = plan.parts(grad_gate_rows, grad_up_rows)
            of_gates[piece], of_ups[piece] = plan.activation.gradients(gates, ups, grads)
    return Gradients(
        grad=grad, joined=hidden, gates=grad_gate_rows, ups=grad_up_rows, scores=by_row
    )


def _sums_of_products(plan: Plan, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """For each row, the sum of two matrices' products, in fp32."""
    pieces = _pieces(plan, one)
    return torch.cat([(widen(one[piece]) * other[piece]).sum(-1) for piece in pieces])


def traced_gradients(
    plan: Plan,
    projected: UpProjection,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    w_down: torch.Tensor,
    offsets: torch.Tensor,
    *,
    for_down: bool,
    for_gates: bool,
    for_scores: bool,
) -> Gradients:
    """Take the gradient of the result by an operator that becomes others when traced further.

    The gradient of the down projection's weights is among its results: only the operator knows
    whether rows' weights belong to the gradient of rows, or to what the activation gave.
    """
    order = None if plan.order is None else plan.order.value
    found = list(
        torch.ops.nvgemm_moe.up_gradients(
            grad, w_down, offsets, projected.gates, projected.ups, projected.joined, scores,
            plan.activation.kind.value, order, for_down, for_gates, for_scores,
        )
    )  # fmt: skip
    down = found.pop(0) if for_down else None
    gates = found.pop(0) if for_gates else None
    ups = found.pop(0) if for_gates and projected.ups is not None else None
    by_row = found.pop(0) if for_scores else None
    return Gradients(grad=grad, gates=gates, ups=ups, scores=by_row, w_down=down)


def is_watched(*tensors: torch.Tensor | None) -> bool:
    """Whether a tracer, a dispatch mode or a tensor subclass observes operators."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return True
    plain = (torch.Tensor, torch.nn.Parameter, type(None))
    return any(type(one) not in plain for one in tensors)


def _pieces(plan: Plan, matrix: torch.Tensor) -> list[slice]:
    """Rows of a matrix to compute at a time."""
    return pieces(*matrix.shape) if plan.in_pieces else [slice(None)]
