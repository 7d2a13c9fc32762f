"""Up projections and their gated activation.

Kernels with the gate as their epilogue compute both if one serves. Operators compute them if no
kernel serves, or if a dispatch mode or a tensor subclass observes operators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..gemm.epilogues import Epilogue, Gate, GateForm, WeightOrder, find_gated
from ..gemm.moe_operators import GATHERED_MAX_N
from .activations import Activation, GatedActivation
from .gate_kernels import GateKernels
from .gate_products import narrow
from .operators import dense_like, pieces, taken_rows, widen
from .products import rows
from .tokens import weighted_rows

_GATES = {activation: Gate(activation.value) for activation in Activation}
_OAI_CONSTANTS = (Gate.SWIGLU_OAI.row.alpha, Gate.SWIGLU_OAI.row.limit)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Computation to run, and its means.

    Attributes:
        order: Column order for gates and ups; None for two products, which lie in halves.
        kernels: Kernels for gates and sums; None if operators compute these.
        is_compiled: True if operators compute any activation in fp32.
        in_pieces: True if operators compute a few rows at a time.
    """

    activation: GatedActivation
    order: WeightOrder | None
    combine: bool
    wants_grad: bool
    kernels: GateKernels | None
    is_compiled: bool = False
    in_pieces: bool = True

    def split(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the gates and ups among columns."""
        if self.order is WeightOrder.INTERLEAVED:
            return both[..., ::2], both[..., 1::2]
        half = both.shape[-1] // 2
        return both[..., :half], both[..., half:]

    def parts(
        self, gate_rows: torch.Tensor, up_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the gates and ups in one product or two."""
        return self.split(gate_rows) if up_rows is None else (gate_rows, up_rows)

    def sums_rows(self, matrix: torch.Tensor, count: int, each: int) -> bool:
        """Returns True if `row_sums.gathered_rows` adds such rows, ``each`` for ``count`` sums."""
        if self.kernels is not None:
            return self.kernels.sums_rows(matrix, count, each)
        return not self.is_compiled

    def weighted(
        self,
        matrix: torch.Tensor,
        indices: torch.Tensor | None,
        routing_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes `tokens.weighted_rows` in the fastest way."""
        by_kernel = routing_weights is not None and self.sums_rows(
            matrix, routing_weights.shape[0], 1
        )
        return weighted_rows(matrix, indices, routing_weights, by_kernel=by_kernel)

    def epilogue(self, form: GateForm) -> Epilogue | None:
        """Returns the epilogue of a form that has the activation, or None.

        With two products, the second has the gate and reads the first. They lie in halves for the
        gradient.
        """
        of_two = form.is_gradient or form is GateForm.UPS
        if (self.order is None and not of_two) or not has_gate(self.activation):
            return None
        if form is GateForm.UPS and self.activation.kind is Activation.SWIGLU_OAI:
            return None  # models with this activation have one weight
        gate = _GATES[self.activation.kind]
        return find_gated(gate, self.order or WeightOrder.HALVES, form)


def has_gate(activation: GatedActivation) -> bool:
    """Returns True if an epilogue has the activation with its constants."""
    constants = (activation.alpha, activation.limit)
    return activation.kind is not Activation.SWIGLU_OAI or constants == _OAI_CONSTANTS


@dataclass(frozen=True, kw_only=True)
class UpProjection:
    """Result of the up projection.

    Attributes:
        gates: Product for gates, or for gates and ups in one matrix; None if a kernel applied the
            activation and no gradient is needed.
        ups: Product for ups; None if there is no separate matrix.
        joined: Activation result; None if it is not computed yet.
    """

    gates: torch.Tensor | None = None
    ups: torch.Tensor | None = None
    joined: torch.Tensor | None = None


def project_up(
    plan: Plan,
    x: torch.Tensor,
    indices: torch.Tensor | None,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    w_down: torch.Tensor,
) -> UpProjection:
    """Multiplies rows by the gate and up weights, in as few launches as possible.

    ``indices`` selects ``x``'s rows. For experts that are not wide, a kernel that gathers rows and
    applies the gate is preferred to a copy. Width decides, because a kernel serves any number of
    columns and may still be slower.
    """
    (w_gate, w_up), (gate_bias, up_bias) = weights, biases
    columns = w_gate.shape[1] + (0 if w_up is None else w_up.shape[1])
    if indices is not None and columns > GATHERED_MAX_N:
        x, indices = taken_rows(x, indices), None
    if plan.kernels is not None and indices is not None:
        projection = _with_gate(plan, plan.kernels, x, narrow(indices), offsets, weights, biases)
        if projection is not None:
            return projection
    gathered = taken_rows(x, indices)
    if plan.kernels is not None:
        projection = _with_gate(plan, plan.kernels, gathered, None, offsets, weights, biases)
        if projection is not None:
            return projection
        if w_up is not None:
            gradient = plan.epilogue(GateForm.GRADIENT) if plan.wants_grad else None
            reader = None if gradient is None else (w_down, gradient)
            pair = (w_gate.mT, w_up.mT)
            both = plan.kernels.side_by_side(gathered, pair, offsets, biases, reader)
            if both is not None:
                return UpProjection(gates=both)
    gates = rows(gathered, w_gate.mT, offsets, gate_bias)
    ups = None if w_up is None else rows(gathered, w_up.mT, offsets, up_bias)
    return UpProjection(gates=gates, ups=ups)


def _with_gate(
    plan: Plan,
    kernels: GateKernels,
    x: torch.Tensor,
    indices: torch.Tensor | None,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> UpProjection | None:
    """Computes the up projection with a gate in a kernel, or returns None if none serves."""
    w_gate, w_up = weights
    if w_up is None:
        return _joined_by_kernel(plan, kernels, x, indices, offsets, w_gate, biases[0])
    epilogue = plan.epilogue(GateForm.UPS)
    if epilogue is None or any(bias is not None for bias in biases):
        return None
    hidden, pair = w_gate.shape[1], (w_gate.mT, w_up.mT)
    stored = kernels.gates_and_ups(x, pair, offsets, epilogue, indices)
    if stored is None:
        return None
    # The gate's gradient reads the first two thirds.
    return UpProjection(gates=stored[:, : 2 * hidden], joined=stored[:, 2 * hidden :])


def _joined_by_kernel(
    plan: Plan,
    kernels: GateKernels,
    x: torch.Tensor,
    indices: torch.Tensor | None,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> UpProjection | None:
    """Computes the up projection by one kernel with the gate, or returns None if none serves.

    Bundles for training may only have the kernel that also stores the product.
    """
    for form in (GateForm.KEPT,) if plan.wants_grad else (GateForm.JOINED, GateForm.KEPT):
        epilogue = plan.epilogue(form)
        if epilogue is None or not _fits_bias(epilogue, bias):
            continue
        stored = kernels.gated_rows(x, weight.mT, offsets, bias, epilogue, indices)
        if stored is None:
            continue
        if form is GateForm.JOINED:
            return UpProjection(joined=stored)
        n = weight.shape[1]
        return UpProjection(gates=stored[:, :n], joined=stored[:, n:])
    return None


def _fits_bias(epilogue: Epilogue, bias: torch.Tensor | None) -> bool:
    """Returns True if the epilogue adds a bias and there is one, or neither."""
    return (epilogue.addend is None) is (bias is None)


def activated(plan: Plan, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Applies the activation to gates and ups. The result is contiguous.

    In eager code, ``swiglu`` and ``geglu`` use two operators in the gates' dtype, as torchtitan
    does. Otherwise the activation is computed in fp32 and rounded once.
    """
    is_product = plan.activation.kind is not Activation.SWIGLU_OAI
    if is_product and not plan.is_compiled:
        return plan.activation.apply(gate, up).contiguous()
    joined = dense_like(gate)
    for piece in pieces_of(plan, gate):
        joined[piece] = plan.activation.apply(widen(gate[piece]), up[piece])
    return joined


def pieces_of(plan: Plan, matrix: torch.Tensor) -> list[slice]:
    """Returns the row slices to compute at a time."""
    return pieces(*matrix.shape) if plan.in_pieces else [slice(None)]
