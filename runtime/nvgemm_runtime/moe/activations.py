"""Gated activations and their derivatives, in the gates' dtype."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch.nn import functional

_aten = torch.ops.aten


class Activation(enum.Enum):
    """Function that combines an expert's gate and up values."""

    SWIGLU = "swiglu"
    SWIGLU_OAI = "swiglu_oai"
    GEGLU = "geglu"


@dataclass(frozen=True, kw_only=True)
class GatedActivation:
    """Gated activation with its constants: a function of gates times a function of ups.

    Methods take gates in the dtype to compute in, and other tensors in that or a narrower dtype.

    Attributes:
        kind: Function.
        alpha: ``swiglu_oai``'s gate factor inside the sigmoid.
        limit: ``swiglu_oai``'s upper bound for gates, and for ups' absolute values.
    """

    kind: Activation
    alpha: float
    limit: float

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
        if self.kind is Activation.GEGLU:
            return _aten.gelu_backward(grad_gate, gate, approximate="tanh"), grad_up
        if self.kind is Activation.SWIGLU:
            return _aten.silu_backward(grad_gate, gate), grad_up
        # The derivative of silu(alpha * gate) / alpha is silu's derivative at alpha * gate.
        slopes = _aten.silu_backward(grad_gate, self.alpha * gate.clamp(max=self.limit))
        beyond = gate > self.limit, up.abs() > self.limit
        return slopes.masked_fill(beyond[0], 0), grad_up.masked_fill(beyond[1], 0)

    def _activate_gates(self, gate: torch.Tensor) -> torch.Tensor:
        if self.kind is Activation.GEGLU:
            return functional.gelu(gate, approximate="tanh")
        if self.kind is Activation.SWIGLU:
            return functional.silu(gate)
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate)

    def _activate_ups(self, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.kind is not Activation.SWIGLU_OAI:
            return up
        return up.to(dtype).clamp(min=-self.limit, max=self.limit) + 1
