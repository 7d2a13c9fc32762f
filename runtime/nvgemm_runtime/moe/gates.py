"""Gates and ups: their products, what the activation makes of them, and their gradients.

Each by a kernel with the gate in its epilogue where one serves and nothing follows the operators
that run, else by operators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..gemm.epilogues import Epilogue, Gate, GateForm, WeightOrder, find_gated
from .activations import Activation, GatedActivation
from .products import gate_gradients, gated_rows, rows, rows_into

_PIECE = 1 << 24
"""Elements of each fp32 tensor between products, but while torch.compile traces."""

_GATES = {one: Gate(one.value) for one in Activation}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to compute, and by what.

    Attributes:
        order: Where gates and ups stand; None where they are two products, which lie in halves.
        uses_kernels: Whether kernels with the gate may run, which nothing sees that follows
            operators.
    """

    activation: GatedActivation
    order: WeightOrder | None
    combine: bool
    wants_grad: bool
    uses_kernels: bool

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

        Two products have none that joins them; they lie in halves for the gradient.
        """
        if self.order is None and form is not GateForm.GRADIENT:
            return None
        gate = _GATES[self.activation.kind]
        constants = (self.activation.alpha, self.activation.limit)
        if gate.row.limit is not None and constants != (gate.row.alpha, gate.row.limit):
            return None
        return find_gated(gate, self.order or WeightOrder.HALVES, form)


def project_up(
    plan: Plan,
    taken: torch.Tensor,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The products of gates and of ups, and what a kernel made of them.

    Where both are in the first, the second is None; where no kernel has the activation, the third
    is; and the first, where one has and no gradient is wanted.
    """
    (w_gate, w_up), (gate_bias, up_bias) = weights, biases
    if plan.uses_kernels and w_up is None:
        epilogue = plan.epilogue(GateForm.KEPT if plan.wants_grad else GateForm.JOINED)
        stored = None
        if epilogue is not None and (epilogue.addend is None) == (gate_bias is None):
            stored = gated_rows(taken, w_gate.mT, offsets, gate_bias, epilogue)
        if stored is not None:
            if not plan.wants_grad:
                return None, None, stored
            n = w_gate.shape[1]
            return stored[:, :n], None, stored[:, n:]
    elif plan.uses_kernels and w_up is not None:
        hidden = w_gate.shape[1]
        both = taken.new_empty((taken.shape[0], 2 * hidden))
        if rows_into(both[:, :hidden], taken, w_gate.mT, offsets, gate_bias) and rows_into(
            both[:, hidden:], taken, w_up.mT, offsets, up_bias
        ):
            return both, None, None
    gate_rows = rows(taken, w_gate.mT, offsets, gate_bias)
    return gate_rows, None if w_up is None else rows(taken, w_up.mT, offsets, up_bias), None


def activated(plan: Plan, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What the activation makes of gates and ups, contiguous."""
    if torch.compiler.is_compiling():
        return plan.activation.apply(widen(gate), up).to(gate.dtype)
    return plan.activation.apply(gate, up).contiguous()


def gradients_by_kernel(
    plan: Plan,
    grad: torch.Tensor,
    w_down: torch.Tensor,
    offsets: torch.Tensor,
    gate_rows: torch.Tensor,
    up_rows: torch.Tensor | None,
) -> torch.Tensor | None:
    """Gradients of gates and ups, from that of the result, if a kernel serves."""
    if not plan.uses_kernels or up_rows is not None or is_watched(grad):
        return None  # before more is looked at: Dynamo of torch 2.11 does not iterate enumerations
    epilogue = plan.epilogue(GateForm.GRADIENT)
    if epilogue is None:
        return None
    return gate_gradients(grad, w_down, offsets, gate_rows, epilogue)


def gradients_by_operators(
    plan: Plan,
    gate_rows: torch.Tensor,
    up_rows: torch.Tensor | None,
    grad_hidden: torch.Tensor | None,
    scores: torch.Tensor | None,
    *,
    for_down: bool,
    for_gates: bool,
    for_scores: bool,
) -> tuple[torch.Tensor | None, ...]:
    """What the backward needs of the activation, by operators; None for what is not asked for.

    Returns:
        What the activation gave, times the rows' weights; the gradients of gates and ups, as their
        products lie; and that of each row's weight.
    """
    gate, up = plan.parts(gate_rows, up_rows)
    hidden = _dense_like(gate) if for_down else None
    grad_gate_rows = torch.empty_like(gate_rows) if for_gates else None
    grad_up_rows = None if up_rows is None or not for_gates else torch.empty_like(up_rows)
    by_row = widen(gate.new_empty(gate.shape[0])) if for_scores else None
    for piece in _pieces(gate):
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
    return hidden, grad_gate_rows, grad_up_rows, by_row


def is_watched(*tensors: torch.Tensor | None) -> bool:
    """Whether something follows the operators that run: a tracer, a recording, a subclass."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return True
    plain = (torch.Tensor, torch.nn.Parameter, type(None))
    return any(type(one) not in plain for one in tensors)


def _pieces(matrix: torch.Tensor) -> list[slice]:
    """Rows of a matrix to compute at a time."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    count, step = matrix.shape[0], max(1, _PIECE // matrix.shape[1])
    return [slice(begin, begin + step) for begin in range(0, count, step)]


def _dense_like(matrix: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


def widen(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix in fp32, or in fp64 where it is that."""
    return matrix if matrix.dtype is torch.float64 else matrix.float()


def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in a type; itself where it has it.

    Compiled by torch 2.11, a function whose result is ``to`` of its own type has no gradients.
    """
    return matrix if matrix.dtype is dtype else matrix.to(dtype)
