"""Fake implementations of the operators: shapes and dtypes of results, for tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..gemm.operands import RANKS
from ..gemm.problem import Op

if TYPE_CHECKING:
    import torch

OPERATORS = {
    "mm": Op.MM,
    "bmm": Op.BMM,
    "addmm": Op.MM,
    "baddbmm": Op.BMM,
    "scaled_mm": Op.MM,
    "grouped_mm": Op.GROUPED_MM,
}
"""By name of an operator, as runtime/csrc/torch_ops.cpp defines it with an ``out`` form: what it
multiplies."""


def register_fakes(out_dtype: Callable[[str], Any]) -> None:
    """Register the fake implementation of each operator."""
    import torch

    for name, op in OPERATORS.items():
        schema = getattr(torch.ops.nvgemm_aot, name).default._schema
        names = tuple(argument.name for argument in schema.arguments)
        torch.library.register_fake(f"nvgemm_aot::{name}", _fake(names, RANKS[op], out_dtype))
        torch.library.register_fake(f"nvgemm_aot::{name}.out", _fake_out)


def _fake(
    names: tuple[str, ...], ranks: tuple[int, int], out_dtype: Callable[[str], Any]
) -> Callable[..., torch.Tensor]:
    import torch

    def fake(*arguments: Any, **named: Any) -> torch.Tensor:
        given = {**dict(zip(names, arguments)), **named}
        a, b = given["a"], given["b"]
        torch._check(
            (a.dim(), b.dim()) == ranks,
            lambda: (
                f"a and b have {a.dim()} and {b.dim()} dimensions; must have {ranks[0]} and "
                f"{ranks[1]}"
            ),
        )
        torch._check(
            a.shape[-1] == b.shape[-2],
            lambda: f"a is {tuple(a.shape)} and b is {tuple(b.shape)}; k must agree",
        )
        dtype = getattr(torch, str(out_dtype(given["kernel"])))
        result: torch.Tensor = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)
        return result

    return fake


def _fake_out(*operands: object, **named: object) -> None:
    """Do nothing: an ``out`` form writes values; shapes and dtypes stay."""
