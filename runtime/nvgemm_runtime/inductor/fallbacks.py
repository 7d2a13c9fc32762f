"""What computes a GEMM where its kernel cannot: ATen, by the call that stock torch makes.

The function that generated Python calls is an expression, for it stands in the generated module,
which must do without this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..gemm.aten import OPERATORS, kernel_order
from ..gemm.types import Activation


def has_cpp_call(op: str) -> bool:
    """Whether generated C++ can call ATen where a kernel cannot compute."""
    return OPERATORS[op].has_cpp_call


def _with_activation(activation: Activation) -> str:
    """Addmm and what follows it, which rounds in between, as eager does."""
    row = activation.row
    if row.commutes_with_rounding:
        return f"lambda *a, out: torch.addmm(*a, out=out).{row.torch_name}_()"
    options = "".join(f", {name}={value!r}" for name, value in row.torch_options.items())
    call = f"torch.nn.functional.{row.torch_name}(torch.addmm(*a){options})"
    return f"lambda *a, out: out.copy_({call})"


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
            return _with_activation(self.activation)
        return OPERATORS[self.op].stock_call
