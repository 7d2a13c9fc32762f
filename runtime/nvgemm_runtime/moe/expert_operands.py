"""Operands for experts, as one value from the call to the computation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertOperands(NamedTuple):
    """Arguments of `experts`, in the order of its operator.

    A pair of weights or biases is split.

    Attributes:
        x: Rows, or tokens if there are indices.
        w_gate: Gate weights, or gate and up weights in one matrix for each expert.
        w_up: Up weights; None if ``w_gate`` has both.
        w_down: Down projection weights.
        offsets, counts: Ends, or numbers, of each expert's rows.
        activation, weights: Names for the activation and the order of gates and ups.
        gate_bias, up_bias, down_bias: Biases, split as their weights.
        indices, token_rows: Each row's token, and each token's rows.
        routing_weights: Factor for each row's result.
        combine: True to add the results of each token's rows.
        alpha, limit: ``swiglu_oai`` constants.
        autocast: The call's `autocast_type`.
    """

    x: torch.Tensor
    w_gate: torch.Tensor
    w_up: torch.Tensor | None
    w_down: torch.Tensor
    offsets: torch.Tensor | None
    counts: torch.Tensor | None
    activation: str
    weights: str
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    indices: torch.Tensor | None
    token_rows: torch.Tensor | None
    routing_weights: torch.Tensor | None
    combine: bool
    alpha: float
    limit: float
    autocast: torch.dtype | None

    def floating(self) -> dict[str, torch.Tensor | None]:
        """Returns the operands with one dtype, by argument name, x first."""
        if self.w_up is None:
            up = {"w_up": self.w_gate, "up_bias": self.gate_bias}
        else:
            up = {
                "w_up[0]": self.w_gate, "w_up[1]": self.w_up,
                "up_bias[0]": self.gate_bias, "up_bias[1]": self.up_bias,
            }  # fmt: skip
        return {"x": self.x, **up, "w_down": self.w_down, "down_bias": self.down_bias}

    def others(self) -> dict[str, torch.Tensor | None]:
        """Returns integers and routing weights by argument name."""
        ends = {"offsets": self.offsets} if self.counts is None else {"counts": self.counts}
        return {
            **ends,
            "indices": self.indices,
            "token_rows": self.token_rows,
            "routing_weights": self.routing_weights,
        }

    def cast(self, dtype: torch.dtype) -> ExpertOperands:
        """Returns the operands after autocast, which keeps fp64."""
        names = ("x", "w_gate", "w_up", "w_down", "gate_bias", "up_bias", "down_bias")
        operands = zip(names, (getattr(self, name) for name in names))
        return self._replace(
            **{
                name: operand.to(dtype)
                for name, operand in operands
                if operand is not None and operand.dtype is not torch.float64
            }
        )
