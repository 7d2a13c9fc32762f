"""Gated activations and their derivatives, in the gates' dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ..gemm.epilogues import Gate

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class GatedActivation:
    """Gated activation with its constants: a function of gates times a function of ups.

    Methods take gates in the dtype to compute in, and other tensors in that or a narrower dtype.

    Attributes:
        kind: Gate, whose row has the function.
        alpha: Gate factor inside the sigmoid, if the gate clamps.
        limit: Upper bound for gates, and for ups' absolute values, if the gate clamps.
    """

    kind: Gate
    alpha: float
    limit: float

    @property
    def clamps(self) -> bool:
        """True if gates and ups are clamped and 1 is added to ups, as in ``swiglu_oai``."""
        return self.kind.row.limit is not None

    @property
    def has_kernels(self) -> bool:
        """True if epilogues have the gate with these constants."""
        row = self.kind.row
        return row.limit is None or (self.alpha, self.limit) == (row.alpha, row.limit)

    def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Combines gates and ups of one shape."""
        return self._activate_gates(gate) * self._activate_ups(up, gate.dtype)

    def gradients(
        self, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gate and up gradients, given the gradient of `apply`'s result."""
        grad = grad.to(gate.dtype)
        grad_up = grad * self._activate_gates(gate)
        grad_gate = grad * self._activate_ups(up, gate.dtype)
        if not self.clamps:
            row = self.kind.row.activation.row
            backward = getattr(_aten, f"{row.torch_name}_backward")
            return backward(grad_gate, gate, **row.torch_options), grad_up
        # The derivative of silu(alpha * gate) / alpha is silu's derivative at alpha * gate.
        slopes = _aten.silu_backward(grad_gate, self.alpha * gate.clamp(max=self.limit))
        beyond = gate > self.limit, up.abs() > self.limit
        return slopes.masked_fill(beyond[0], 0), grad_up.masked_fill(beyond[1], 0)

    def _activate_gates(self, gate: torch.Tensor) -> torch.Tensor:
        if not self.clamps:
            row = self.kind.row.activation.row
            activated: torch.Tensor = getattr(functional, row.torch_name)(gate, **row.torch_options)
            return activated
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate)

    def _activate_ups(self, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self.clamps:
            return up
        return up.to(dtype).clamp(min=-self.limit, max=self.limit) + 1
