"""What computes a GEMM in generated Python where its kernel cannot: ATen, as its own choice would.

An expression each, for it stands in the generated module, which must do without this package.
"""

from __future__ import annotations

_OF_OPERATOR = {
    "mm": "torch.mm",
    "bmm": "torch.bmm",
    "addmm": "torch.addmm",
    "baddbmm": "torch.baddbmm",
    "_int_mm": "torch._int_mm",
    "_scaled_mm": "torch._scaled_mm",
    "_grouped_mm": "lambda *a, out, **o: out.copy_(torch._grouped_mm(*a, **o))",
}
"""By ATen's name of an operator: what is called with its tensors and options, and ``out``."""

_WITHOUT_CPP = frozenset({"_grouped_mm"})
"""Operators that ATen has no form of that writes into a result which is there already."""


def aten_expression(op: str) -> str:
    """A function, in the text of a module that has imported torch."""
    return _OF_OPERATOR[op]


def has_cpp_call(op: str) -> bool:
    """Whether generated C++ can call ATen where a kernel cannot compute."""
    return op not in _WITHOUT_CPP
