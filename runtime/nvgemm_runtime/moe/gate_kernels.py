"""How experts use kernels, but for products by themselves: here, by launching them.

That is for gates, what a kernel with one reads, and sums: of two products, and of rows. In the
graphs of torch.compile, `traced` has the other way, by operators.
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
    """Products by kernels, where some serve; else None, and nothing is computed.

    ``a`` is a matrix [m, k], ``b`` and ``weights`` matrices [groups, k, n], ``offsets`` ends of
    groups along m. With ``indices``, int32 [m], the rows are those of ``a`` that these name.
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
        """What a gated epilogue stores, of the width that its form says."""

    def gates_and_ups(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        epilogue: Epilogue,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Gates, ups and what the activation makes of them [m, 3 * n]; the epilogue is of ups."""

    def side_by_side(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        biases: Biases,
        reader: tuple[torch.Tensor, Epilogue] | None,
    ) -> torch.Tensor | None:
        """Gates and ups [m, 2 * n].

        The reader is what takes their gradient: weights of the down projection, and an epilogue;
        None where none does.
        """

    def gate_gradients(
        self,
        grad: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor,
        product: torch.Tensor,
        epilogue: Epilogue,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """`gate_products.gate_gradients`."""

    def adds_rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> bool:
        """Whether `products.added_rows` is to add the product, rather than torch."""

    def sums_rows(self, matrix: torch.Tensor, count: int, each: int) -> bool:
        """Whether `row_sums.gathered_rows` is to give so many sums, each of so many rows.

        They are rows as those of the matrix. Else operators add them, which Inductor joins.
        """


class Launched:
    """Kernels that are launched, which nothing sees that observes operators."""

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
        """See `GateKernels`: the first launch gives gates, the second the rest."""
        w_gate, w_up = weights
        hidden = w_gate.shape[2]
        stored = a.new_empty((count_taken(a, indices), 3 * hidden))
        gates, behind = stored[:, :hidden], stored[:, hidden:]
        given = (behind, a, w_up, offsets, gates, epilogue, indices)
        if not serves_ups(*given) or not rows_into(gates, a, w_gate, offsets, None, indices):
            return None
        return stored if ups_into(*given) else None

    def side_by_side(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        biases: Biases,
        reader: tuple[torch.Tensor, Epilogue] | None,
    ) -> torch.Tensor | None:
        """See `GateKernels`: also without a reader, which costs nothing."""
        hidden = weights[0].shape[2]
        both = a.new_empty((a.shape[0], 2 * hidden))
        halves = both[:, :hidden], both[:, hidden:]
        for half, weight, bias in zip(halves, weights, biases):
            if not rows_into(half, a, weight, offsets, bias):
                return None
        return both

    def adds_rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> bool:
        """See `GateKernels`: always, for where no kernel adds, torch adds in the same memory."""
        return True

    def sums_rows(self, matrix: torch.Tensor, count: int, each: int) -> bool:
        """See `GateKernels`: always, for nothing joins operators."""
        return True


LAUNCHED = Launched()
