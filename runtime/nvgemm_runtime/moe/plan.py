"""Plans for experts: the computation to run, and its means."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from ..gemm.epilogues import Epilogue, GateForm, WeightOrder, find_gated
from .activations import GatedActivation
from .kernels import is_served, is_sum_served
from .operators import dense_like, pieces, widen
from .routing import weighted_rows


class KernelUse(enum.Enum):
    """Use of a kernel where a product has several ways to be computed.

    Attributes:
        LAUNCHED: Launch a kernel, invisible to observers of operators.
        TRACED: Call the product's operator, for a graph, if a kernel serves the traced operands.
    """

    LAUNCHED = enum.auto()
    TRACED = enum.auto()


@dataclass(frozen=True, kw_only=True)
class ExpertsPlan:
    """Computation to run, and its means.

    Attributes:
        order: Column order for gates and ups; None for two products, which lie in halves.
        kernels: Use of kernels with gates, and for sums; None if operators compute these.
        is_compiled: True if operators compute any activation in fp32.
        in_pieces: True if operators compute a few rows at a time.
    """

    activation: GatedActivation
    order: WeightOrder | None
    combine: bool
    wants_grad: bool
    kernels: KernelUse | None
    is_compiled: bool = False
    in_pieces: bool = True

    def split(
        self, first: torch.Tensor, second: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gates and ups in one product, as views, or in two."""
        if second is not None:
            return first, second
        if self.order is WeightOrder.INTERLEAVED:
            return first[..., ::2], first[..., 1::2]
        half = first.shape[-1] // 2
        return first[..., :half], first[..., half:]

    def sums_rows(self, matrix: torch.Tensor, count: int, each: int) -> bool:
        """Returns True if `routing.gathered_rows` adds such rows, ``each`` for ``count`` sums.

        Otherwise operators add them, which Inductor fuses.
        """
        if self.kernels is KernelUse.TRACED:
            return is_sum_served(matrix, count, each)
        return self.kernels is not None or not self.is_compiled

    def adds_rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> bool:
        """Returns True if `products.added_rows` adds this product to another, in place.

        In eager code torch adds in place without a kernel.
        """
        if self.kernels is KernelUse.TRACED:
            other = a.new_empty((a.shape[0], b.shape[2]))  # shaped like the other product
            return is_served(a, b, offsets, other, None, adds_matrix=True)
        return self.kernels is not None

    def weighted(
        self,
        matrix: torch.Tensor,
        indices: torch.Tensor | None,
        routing_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes `routing.weighted_rows` in the fastest way."""
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
        if (self.order is None and not of_two) or not self.activation.has_kernels:
            return None
        gate = self.activation.kind
        if form is GateForm.UPS and gate.row.is_biased:
            return None  # the gates take the place of its bias
        return find_gated(gate, self.order or WeightOrder.HALVES, form)


@dataclass(frozen=True, kw_only=True)
class UpProjection:
    """Result of the up projection.

    Attributes:
        first: Product for gates, or for gates and ups in one matrix; None if a kernel applied the
            activation and no gradient is needed.
        second: Product for ups; None if there is no separate matrix.
        activated: Activation result; None if it is not computed yet.
    """

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    activated: torch.Tensor | None = None


def activate(plan: ExpertsPlan, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Applies the activation to gates and ups. The result is contiguous.

    In eager code, ``swiglu`` and ``geglu`` use two operators in the gates' dtype, as torchtitan
    does. Otherwise the activation is computed in fp32 and rounded once.
    """
    if not plan.activation.clamps and not plan.is_compiled:
        return plan.activation.apply(gate, up).contiguous()
    result = dense_like(gate)
    for piece in pieces_of(plan, gate):
        result[piece] = plan.activation.apply(widen(gate[piece]), up[piece])
    return result


def pieces_of(plan: ExpertsPlan, matrix: torch.Tensor) -> list[slice]:
    """Returns the row slices to compute at a time."""
    return pieces(*matrix.shape) if plan.in_pieces else [slice(None)]
