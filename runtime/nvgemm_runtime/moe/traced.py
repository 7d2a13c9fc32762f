"""Experts in the graphs of torch.compile, whose kernels are operators there.

To Dynamo, `experts` and `routed_experts` are an operator each. AOTAutograd replaces it by what they
compute, and products with a gate, and what such kernels read, are then operators that launch a
kernel, where installed bundles have one; else they are products and other operators, which Inductor
fuses as if there were no such kernels. So Dynamo's graphs do not depend on what is installed, and
what torch caches behind it does, for which `nvgemm_runtime.inductor.cache_key` has the bundles,
where the plug-in is not kept out.

The operators that launch are in `gate_operators`, but for ``added_rows``, which is in `products`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._version import __version__
from ..gemm.epilogues import Epilogue
from .gate_kernels import Biases, Pair
from .gate_operators import (
    gate_gradient,
    gate_gradient_sums,
    gated_rows,
    paired_gated_rows,
    paired_rows,
)
from .launching import library
from .operators import count_taken
from .served import is_served, is_sum_served


class Traced:
    """Kernels that operators launch, in the graph that is traced."""

    def gated_rows(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor,
        bias: torch.Tensor | None,
        epilogue: Epilogue,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """See `GateKernels`."""
        if not is_served(a, b, offsets, bias, epilogue, indices=indices):
            return None
        found: torch.Tensor = gated_rows(a, b, offsets, bias, epilogue.value, indices)
        return found

    def gates_and_ups(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        epilogue: Epilogue,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """See `GateKernels`."""
        w_gate, w_up = weights
        hidden = w_gate.shape[2]
        gates = a.new_empty((count_taken(a, indices), hidden))
        by_pitch = functools.partial(is_served, pitch=3 * hidden, indices=indices)
        if not by_pitch(a, w_up, offsets, gates, epilogue):
            return None
        if not by_pitch(a, w_gate, offsets, None, None):
            return None
        stored: torch.Tensor = paired_gated_rows(a, w_gate, w_up, offsets, epilogue.value, indices)
        return stored

    def side_by_side(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        biases: Biases,
        reader: tuple[torch.Tensor, Epilogue] | None,
    ) -> torch.Tensor | None:
        """See `GateKernels`: only for a reader, since Inductor fuses with two products."""
        if reader is None:
            return None
        w_down, gradient = reader
        pitch = 2 * weights[0].shape[2]
        both = a.new_empty((a.shape[0], pitch))
        # The gradient of what is not computed yet has the shape of rows of a, as the result has.
        if not is_served(a, w_down, offsets, both, gradient):
            return None
        for weight, bias in zip(weights, biases):
            if not is_served(a, weight, offsets, bias, None, pitch=pitch):
                return None
        found: torch.Tensor = paired_rows(a, *weights, offsets, *biases)
        return found

    def gate_gradients(
        self,
        grad: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor,
        product: torch.Tensor,
        epilogue: Epilogue,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """See `GateKernels`."""
        if not is_served(grad, b, offsets, product, epilogue):
            return None
        given = (grad, b, offsets, product, epilogue.value)
        if epilogue.form is not None and epilogue.form.row.has_sums:
            found, sums = gate_gradient_sums(*given)
            return found, sums
        return gate_gradient(*given), None

    def adds_rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> bool:
        """See `GateKernels`."""
        other = a.new_empty((a.shape[0], b.shape[2]))  # as the other product will be
        return is_served(a, b, offsets, other, None, adds_matrix=True)

    def sums_rows(self, matrix: torch.Tensor, count: int, each: int) -> bool:
        """See `GateKernels`."""
        return is_sum_served(matrix, count, each)


TRACED = Traced()


def define_whole(
    name: str, operands: str, run: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Define an operator that ``run`` is to replace; gives what calls it in a graph, and else that.

    Of the operator, Dynamo sees no function of experts: to look into them took most of the time of
    a warm start, and for each that it had seen, guards asked something at each call.

    Besides the operands, it has the version of nvgemm-aot; the last of them is the type that
    autocast wants. Keys of torch's caches have both by the operator's operands alone: autocast's
    type in torch 2.11, and the version where torch.compile does without the plug-in.
    """

    def replace(_: str, *given: Any) -> torch.Tensor:
        return run(*given, is_traced=True)

    schema = f"{name}(str version, {operands}, ScalarType? wanted) -> Tensor"
    library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, replace, "CompositeImplicitAutograd")
    operator: Callable[..., torch.Tensor] = getattr(torch.ops.nvgemm_moe, name)

    def call(*given: Any) -> torch.Tensor:
        return operator(__version__, *given) if _is_traced_whole() else run(*given)

    return call


def _is_traced_whole() -> bool:
    """Whether a graph is traced, but not one of torch.export.

    That is read and run by programs of any version of nvgemm-aot, and torch keeps operators there
    that others are to replace.
    """
    # Dynamo of torch 2.11 takes is_exporting() for true whenever it traces.
    is_exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    return torch.compiler.is_compiling() and not is_exporting
