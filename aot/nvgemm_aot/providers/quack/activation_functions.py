"""Activations in fp32, in the language of quack's kernels: one row each.

All functions give NaN for NaN, as torch's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvgemm_runtime.gemm.epilogues import Activation

_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715
"""Constants in gelu's tanh form (Hendrycks and Gimpel, 2016)."""


@dataclass(frozen=True, kw_only=True)
class ActivationFunctions:
    """Functions that kernels compute an activation with, on one fp32 value.

    Attributes:
        of_sum: Activates a sum, in an epilogue without a gate.
        of_gate: Activates a gate; None if no gate has the activation.
        gradients: Takes gate, up and the gradient of their result. Returns the gradients for gate
            and up, and the result times its gradient. None if no gate has the activation.
    """

    of_sum: Callable[[Any], Any]
    of_gate: Callable[[Any], Any] | None = None
    gradients: Callable[[Any, Any, Any], tuple[Any, Any, Any]] | None = None


def sigmoid(x: Any) -> Any:
    """Computes the logistic function."""
    from cutlass import cute

    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -math.log2(math.e), fastmath=True))


def _relu(x: Any) -> Any:
    """Returns the larger of x and 0; NaN for NaN, unlike the library's."""
    from cutlass import Float32
    from cutlass._mlir.dialects import arith

    return Float32(arith.maximumf(x.ir_value(), Float32(0.0).ir_value()))


def _gelu_tanh(x: Any) -> Any:
    from quack.activation import tanh

    return 0.5 * x * (1.0 + tanh(_GELU_SCALE * (x + _GELU_CUBIC * x * x * x)))


def _gelu_tanh_of_gate(gate: Any) -> Any:
    from cutlass import cute

    inner = _GELU_SCALE * (gate + _GELU_CUBIC * gate * gate * gate)
    return 0.5 * gate * (1.0 + cute.math.tanh(inner, fastmath=True))


def _gelu_tanh_gradients(gate: Any, up: Any, grad: Any) -> tuple[Any, Any, Any]:
    # (1 + tanh(x)) / 2 is sigmoid(2 x), whose difference from 1 keeps more digits.
    square = gate * gate
    share = sigmoid(2.0 * _GELU_SCALE * (gate + _GELU_CUBIC * square * gate))
    slope = 2.0 * _GELU_SCALE * (1.0 + 3.0 * _GELU_CUBIC * square)
    of_up = grad * gate * share
    return grad * up * share * (1.0 + gate * slope * (1.0 - share)), of_up, of_up * up


def _silu(x: Any) -> Any:
    from quack.activation import sigmoid as library_sigmoid

    return x * library_sigmoid(x)


def _silu_of_gate(gate: Any) -> Any:
    return gate * sigmoid(gate)


def _silu_gradients(gate: Any, up: Any, grad: Any) -> tuple[Any, Any, Any]:
    share = sigmoid(gate)
    of_up = grad * gate * share
    return grad * up * share * (1.0 + gate * (1.0 - share)), of_up, of_up * up


FUNCTIONS = {
    Activation.RELU: ActivationFunctions(of_sum=_relu),
    Activation.GELU_TANH: ActivationFunctions(
        of_sum=_gelu_tanh, of_gate=_gelu_tanh_of_gate, gradients=_gelu_tanh_gradients
    ),
    Activation.SILU: ActivationFunctions(
        of_sum=_silu, of_gate=_silu_of_gate, gradients=_silu_gradients
    ),
}
