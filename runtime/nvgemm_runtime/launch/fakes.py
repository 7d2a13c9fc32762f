"""Fake implementations of the operators: shapes and dtypes of results, for tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OPERATORS = ("mm", "bmm", "addmm", "baddbmm", "scaled_mm", "grouped_mm")
"""Names of the operators, each with an ``out`` form, as runtime/csrc/torch_ops.cpp defines them."""


def register_fakes(out_dtype: Callable[[str], Any]) -> None:
    """Register the fake implementation of each operator.

    Args:
        out_dtype: `nvgemm_runtime.launch.native.Native.out_dtype`.
    """
    import torch

    def result(
        a: torch.Tensor, b: torch.Tensor, kernel: str, rank: int, b_rank: int
    ) -> torch.Tensor:
        torch._check(
            a.dim() == rank and b.dim() == b_rank,
            lambda: (
                f"a and b have {a.dim()} and {b.dim()} dimensions; must have "
                + (f"{rank}" if rank == b_rank else f"{rank} and {b_rank}")
            ),
        )
        torch._check(
            a.shape[-1] == b.shape[-2],
            lambda: f"a is {tuple(a.shape)} and b is {tuple(b.shape)}; k must agree",
        )
        dtype = getattr(torch, str(out_dtype(kernel)))
        return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)

    def mm(a: torch.Tensor, b: torch.Tensor, kernel: str) -> torch.Tensor:
        return result(a, b, kernel, 2, 2)

    def bmm(a: torch.Tensor, b: torch.Tensor, kernel: str) -> torch.Tensor:
        return result(a, b, kernel, 3, 3)

    def addmm(input: torch.Tensor, a: torch.Tensor, b: torch.Tensor, kernel: str) -> torch.Tensor:
        return result(a, b, kernel, 2, 2)

    def baddbmm(input: torch.Tensor, a: torch.Tensor, b: torch.Tensor, kernel: str) -> torch.Tensor:
        return result(a, b, kernel, 3, 3)

    def scaled_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        kernel: str,
        *,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return result(a, b, kernel, 2, 2)

    def grouped_mm(
        a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, kernel: str
    ) -> torch.Tensor:
        return result(a, b, kernel, 2, 3)

    def out_form(*operands: object, **named: object) -> None:
        pass  # it writes values; shapes and dtypes stay

    functions = (mm, bmm, addmm, baddbmm, scaled_mm, grouped_mm)
    by_name = {function.__name__: function for function in functions}
    for name in OPERATORS:
        torch.library.register_fake(f"nvgemm_aot::{name}", by_name[name])
        torch.library.register_fake(f"nvgemm_aot::{name}.out", out_form)
