"""Gated activations of experts and their derivatives, in fp32 (fp64 for fp64)."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715
"""Constants of gelu's tanh form, as in ``torch.nn.functional.gelu``."""


class Activation(enum.Enum):
    """How an expert joins a gate and an up value."""

    SWIGLU = "swiglu"
    SWIGLU_OAI = "swiglu_oai"
    GEGLU = "geglu"


@dataclass(frozen=True, kw_only=True)
class GatedActivation:
    """A gated activation with its constants.

    Attributes:
        kind: The function.
        alpha: Factor of the gate inside the sigmoid of ``swiglu_oai``.
        limit: Where ``swiglu_oai`` cuts gates off above, and ups on both sides.
    """

    kind: Activation
    alpha: float
    limit: float

    def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Join gates and ups of one shape, without rounding."""
        if self.kind is Activation.SWIGLU_OAI:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
            return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        if self.kind is Activation.SWIGLU:
            return gate * torch.sigmoid(gate) * up
        return 0.5 * gate * (1 + _gelu_tanh(gate)) * up

    def gradients(
        self, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of gates and ups, from that of `apply`'s result."""
        if self.kind is Activation.SWIGLU_OAI:
            kept_gate, kept_up = gate <= self.limit, up.abs() <= self.limit
            gate = gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit) + 1
            sigmoid = torch.sigmoid(self.alpha * gate)
            slope = sigmoid * (1 + self.alpha * gate * (1 - sigmoid))
            return grad * up * slope * kept_gate, grad * gate * sigmoid * kept_up
        if self.kind is Activation.SWIGLU:
            sigmoid = torch.sigmoid(gate)
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            return grad * up * slope, grad * gate * sigmoid
        tanh = _gelu_tanh(gate)
        inner = _GELU_SCALE * (1 + 3 * _GELU_CUBIC * gate * gate)
        slope = 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * inner
        return grad * up * slope, grad * 0.5 * gate * (1 + tanh)


def _gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    return torch.tanh(_GELU_SCALE * (gate + _GELU_CUBIC * gate * gate * gate))
