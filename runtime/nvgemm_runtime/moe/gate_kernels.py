"""Kernels for gates and sums, launched directly in eager code.

They compute gate epilogues and the products that these read, and add products and rows. `traced`
has the variant for torch.compile graphs, which uses operators.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..gemm.epilogues import Epilogue
from .gate_products import (
    gate_gradients,
    gated_rows,
    rows_into,
    serves_ups,
    ups_into,
)
from .operators import count_taken

Pair = tuple[torch.Tensor, torch.Tensor]
Biases = tuple[torch.Tensor | None, torch.Tensor | None]


class GateKernels(Protocol):
    """Products by kernels. Methods return None and compute nothing if no kernel serves.

    ``a`` is a matrix [m, k], ``b`` and ``weights`` are matrices [groups, k, n], and ``offsets`` are
    group ends along m. ``indices``, int32 [m], selects ``a``'s rows.
    """

    def gated_rows(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor,
        bias: torch.Tensor | None,
        epilogue: Epilogue,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Returns a gated epilogue's output, whose width depends on its form."""

    def gates_and_ups(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        epilogue: Epilogue,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Returns gates, ups and the activation's result [m, 3 * n], by an UPS epilogue."""

    def side_by_side(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        biases: Biases,
        reader: tuple[torch.Tensor, Epilogue] | None,
    ) -> torch.Tensor | None:
        """Returns gates and ups [m, 2 * n].

        ``reader`` takes their gradient: the down projection's weights and an epilogue, or None.
        """

    def gate_gradients(
        self,
        grad: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor,
        product: torch.Tensor,
        epilogue: Epilogue,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns the gate and up gradients; see `gate_products.gate_gradients`."""

    def adds_rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> bool:
        """Returns True if `products.added_rows` should add the product instead of torch."""

    def sums_rows(self, matrix: torch.Tensor, count: int, each: int) -> bool:
        """Returns True if `row_sums.gathered_rows` should add ``each`` rows for each sum.

        There are ``count`` sums, and the rows are like the matrix's. Otherwise operators add them,
        which Inductor fuses.
        """


class Launched:
    """Kernels launched directly, invisible to observers of operators."""

    gated_rows = staticmethod(gated_rows)
    gate_gradients = staticmethod(gate_gradients)

    def gates_and_ups(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        epilogue: Epilogue,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Implements `GateKernels`: the first launch computes gates, the second the rest."""
        w_gate, w_up = weights
        hidden = w_gate.shape[2]
        stored = a.new_empty((count_taken(a, indices), 3 * hidden))
        gates, behind = stored[:, :hidden], stored[:, hidden:]
        operands = (behind, a, w_up, offsets, gates, epilogue, indices)
        if not serves_ups(*operands) or not rows_into(gates, a, w_gate, offsets, None, indices):
            return None
        return stored if ups_into(*operands) else None

    def side_by_side(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        biases: Biases,
        reader: tuple[torch.Tensor, Epilogue] | None,
    ) -> torch.Tensor | None:
        """Implements `GateKernels`, also without a reader, because it costs nothing."""
        hidden = weights[0].shape[2]
        both = a.new_empty((a.shape[0], 2 * hidden))
        halves = both[:, :hidden], both[:, hidden:]
        for half, weight, bias in zip(halves, weights, biases):
            if not rows_into(half, a, weight, offsets, bias):
                return None
        return both

    def adds_rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> bool:
        """Returns True: without a kernel, torch adds in place."""
        return True

    def sums_rows(self, matrix: torch.Tensor, count: int, each: int) -> bool:
        """Returns True, because nothing fuses operators in eager code."""
        return True


LAUNCHED = Launched()
