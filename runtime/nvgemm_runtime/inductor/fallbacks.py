"""What computes a GEMM where its kernel cannot: ATen, by the call that stock torch makes.

The function that generated Python calls is an expression, for it stands in the generated module,
which must do without this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..gemm.aten import kernel_order
from ..gemm.epilogue import Activation

_OF_OPERATOR = {
    "mm": "torch.mm",
    "bmm": "torch.bmm",
    "addmm": "torch.addmm",
    "baddbmm": "torch.baddbmm",
    "_int_mm": "torch._int_mm",
    "_scaled_mm": "torch._scaled_mm",
    "_scaled_mm_v2": (
        "lambda a, b, s, t, c=None, *, recipe_a, swizzle_a, recipe_b, swizzle_b, out_dtype, "
        "use_fast_accum, out: torch.ops.aten._scaled_mm_v2.out(a, b, [s], [recipe_a], "
        "[swizzle_a], [t], [recipe_b], [swizzle_b], c, out_dtype, [], use_fast_accum, out=out)"
    ),
    "_grouped_mm": "lambda *a, out, **o: out.copy_(torch._grouped_mm(*a, **o))",
}
"""By ATen's name of an operator: what is called with its tensors and options, and ``out``."""

_WITH_ACTIVATION = {
    Activation.RELU: "lambda *a, out: torch.addmm(*a, out=out).relu_()",
    Activation.GELU_TANH: (
        "lambda *a, out: out.copy_(torch.nn.functional.gelu(torch.addmm(*a), approximate='tanh'))"
    ),
    Activation.SILU: "lambda *a, out: out.copy_(torch.nn.functional.silu(torch.addmm(*a)))",
}
"""By what follows the sum: addmm and the activation, which rounds in between, as eager does."""

_WITHOUT_CPP = frozenset({"_grouped_mm", "_scaled_mm_v2"})
"""Operators that no stock line of generated C++ calls with a result which is there already."""


def has_cpp_call(op: str) -> bool:
    """Whether generated C++ can call ATen where a kernel cannot compute."""
    return op not in _WITHOUT_CPP


@dataclass(frozen=True, kw_only=True)
class StockCall:
    """ATen's call that a kernel stands in for.

    Attributes:
        op: ATen's name of the operator.
        gemm: Its problem's key, for reports.
        inputs: Inductor's nodes of its tensors, in the order of the operator's schema.
        layout: Inductor's layout of the result.
        options: Its other arguments.
        activation: What follows besides.
        is_split: Whether a kernel has the product alone, into fp32, and torch adds the rest.
        cpp_kernel_name, op_overload: As Inductor's choice for it has them.
    """

    op: str
    gemm: str
    inputs: Sequence[Any]
    layout: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    activation: Activation | None = None
    is_split: bool = False
    cpp_kernel_name: str | None = None
    op_overload: Any = None

    @classmethod
    def of_choice(cls, op: str, gemm: str, choice: Any, *, is_split: bool = False) -> StockCall:
        """The call of Inductor's choice."""
        return cls(
            op=op,
            gemm=gemm,
            inputs=choice.input_nodes,
            layout=choice.layout,
            options=choice.kwargs,
            is_split=is_split,
            cpp_kernel_name=choice.choice.cpp_kernel_name,
            op_overload=choice.choice.op_overload,
        )

    @property
    def order(self) -> tuple[int, ...]:
        """Which of the inputs a kernel takes, as it takes them."""
        return kernel_order(self.op, len(self.inputs))

    @property
    def name(self) -> str:
        """What is computed, as a part of names."""
        name = self.op.lstrip("_")
        if self.activation is not None:
            name += f"_{self.activation.value}"
        return f"{name}_split" if self.is_split else name

    @property
    def expression(self) -> str:
        """A function, in the text of a module that has imported torch."""
        if self.activation is not None:
            return _WITH_ACTIVATION[self.activation]
        return _OF_OPERATOR[self.op]
