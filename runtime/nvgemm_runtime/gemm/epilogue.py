"""Epilogues: what a kernel does with a product before it rounds and stores it.

An epilogue computes in the accumulator's type, and rounds once: ``out = round(f(A @ B + addend))``.
"""

from __future__ import annotations

import enum

from .element_types import DType


class Addend(enum.Enum):
    """What an epilogue adds."""

    ROW = "row"
    """A vector of n values, added to each row."""
    MATRIX = "matrix"
    """A matrix (or a batch of them) of the result's shape."""


class Activation(str, enum.Enum):
    """What an epilogue applies after its sum."""

    RELU = "relu"
    GELU_TANH = "gelu_tanh"
    """``torch.nn.functional.gelu(x, approximate="tanh")``."""
    SILU = "silu"


class Epilogue(str, enum.Enum):
    """What is added to the product, and the activation that follows."""

    BIAS = "bias"
    BIAS_RELU = "bias_relu"
    BIAS_GELU_TANH = "bias_gelu_tanh"
    BIAS_SILU = "bias_silu"
    ADD = "add"

    @property
    def addend(self) -> Addend:
        """What is added."""
        return _FACTS[self][0]

    @property
    def activation(self) -> Activation | None:
        """What follows the sum."""
        return _FACTS[self][1]


_FACTS = {
    Epilogue.BIAS: (Addend.ROW, None),
    Epilogue.BIAS_RELU: (Addend.ROW, Activation.RELU),
    Epilogue.BIAS_GELU_TANH: (Addend.ROW, Activation.GELU_TANH),
    Epilogue.BIAS_SILU: (Addend.ROW, Activation.SILU),
    Epilogue.ADD: (Addend.MATRIX, None),
}


def epilogue_of(addend: Addend, activation: Activation | None = None) -> Epilogue | None:
    """The epilogue that adds and applies these; None where there is none."""
    return next((one for one, facts in _FACTS.items() if facts == (addend, activation)), None)


def addend_dtype(out: DType) -> DType:
    """Element type of what is added: the result's, or bf16 where that is too coarse for a sum."""
    return DType.BF16 if out.is_fp8 else out
