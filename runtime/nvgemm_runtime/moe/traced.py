"""Experts in torch.compile graphs, with kernels as operators.

`experts` and `routed_experts` are an operator each for Dynamo. AOTAutograd replaces it with its
computation. Products with a gate, and the products that such kernels read, then become operators
that launch a kernel if installed bundles have one. Otherwise they are plain products and operators,
which Inductor fuses as usual. So Dynamo's graphs do not depend on installed bundles. Torch's later
caches do: if the plug-in is active, `nvgemm_runtime.inductor.configuration.cache_key` adds the
bundles to their keys.

The launching operators are in `gate_operators`, except ``added_rows`` in `products`.
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
    """Kernels that operators launch, for traced graphs."""

    def gated_rows(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor,
        bias: torch.Tensor | None,
        epilogue: Epilogue,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Implements `GateKernels`."""
        if not is_served(a, b, offsets, bias, epilogue, indices=indices):
            return None
        stored: torch.Tensor = gated_rows(a, b, offsets, bias, epilogue.value, indices)
        return stored

    def gates_and_ups(
        self,
        a: torch.Tensor,
        weights: Pair,
        offsets: torch.Tensor,
        epilogue: Epilogue,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Implements `GateKernels`."""
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
        """Implements `GateKernels`, but only for a reader.

        Without one, Inductor fuses operators with two products.
        """
        if reader is None:
            return None
        w_down, gradient = reader
        pitch = 2 * weights[0].shape[2]
        both = a.new_empty((a.shape[0], pitch))
        # `a` stands in for the result's gradient, which has its shape.
        if not is_served(a, w_down, offsets, both, gradient):
            return None
        for weight, bias in zip(weights, biases):
            if not is_served(a, weight, offsets, bias, None, pitch=pitch):
                return None
        products: torch.Tensor = paired_rows(a, *weights, offsets, *biases)
        return products

    def gate_gradients(
        self,
        grad: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor,
        product: torch.Tensor,
        epilogue: Epilogue,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Implements `GateKernels`."""
        if not is_served(grad, b, offsets, product, epilogue):
            return None
        arguments = (grad, b, offsets, product, epilogue.value)
        if epilogue.form is not None and epilogue.form.row.has_sums:
            gradients, sums = gate_gradient_sums(*arguments)
            return gradients, sums
        return gate_gradient(*arguments), None

    def adds_rows(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> bool:
        """Implements `GateKernels`."""
        other = a.new_empty((a.shape[0], b.shape[2]))  # shaped like the other product
        return is_served(a, b, offsets, other, None, adds_matrix=True)

    def sums_rows(self, matrix: torch.Tensor, count: int, each: int) -> bool:
        """Implements `GateKernels`."""
        return is_sum_served(matrix, count, each)


TRACED = Traced()


def define_whole(
    name: str, operands: str, run: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Defines an operator that traces as ``run``. Returns a function that calls either.

    The function calls the operator in a graph, and ``run`` otherwise. The operator hides the
    experts' functions from Dynamo. Tracing them took most of a warm start, and each had guards to
    check at every call.

    The operator takes nvgemm-aot's version before its operands, and autocast's dtype as the last
    one. Torch's cache keys get both only from the operator's arguments: autocast's dtype in torch
    2.11, and the version if torch.compile runs without the plug-in.
    """

    def replace(_: str, *arguments: Any) -> torch.Tensor:
        return run(*arguments, is_traced=True)

    schema = f"{name}(str version, {operands}, ScalarType? wanted) -> Tensor"
    library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, replace, "CompositeImplicitAutograd")
    operator: Callable[..., torch.Tensor] = getattr(torch.ops.nvgemm_moe, name)

    def call(*arguments: Any) -> torch.Tensor:
        return operator(__version__, *arguments) if _is_traced_whole() else run(*arguments)

    return call


def _is_traced_whole() -> bool:
    """Returns True while torch.compile traces, except under torch.export.

    Programs with any version of nvgemm-aot read and run an exported graph, and torch keeps
    operators in it that should be replaced.
    """
    # Dynamo in torch 2.11 treats is_exporting() as True whenever it traces.
    is_exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    return torch.compiler.is_compiling() and not is_exporting
