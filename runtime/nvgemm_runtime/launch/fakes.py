"""Fake implementations of the operators: result shapes and dtypes for tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..gemm.operand_checks import RANKS
from ..gemm.problem import Op

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Form:
    """Kernel operation and gating for an operator."""

    op: Op
    is_gated: bool = False


OPERATORS = {
    "mm": Form(op=Op.MM),
    "bmm": Form(op=Op.BMM),
    "addmm": Form(op=Op.MM),
    "baddbmm": Form(op=Op.BMM),
    "scaled_mm": Form(op=Op.MM),
    "grouped_mm": Form(op=Op.GROUPED_MM),
    "scaled_grouped_mm": Form(op=Op.GROUPED_MM),
    "k_grouped_mm": Form(op=Op.K_GROUPED_MM),
    "gathered_mm": Form(op=Op.GATHERED_MM),
    "gated_mm": Form(op=Op.MM, is_gated=True),
    "grouped_gated_mm": Form(op=Op.GROUPED_MM, is_gated=True),
    "gathered_grouped_mm": Form(op=Op.GATHERED_GROUPED_MM),
    "gathered_grouped_gated_mm": Form(op=Op.GATHERED_GROUPED_MM, is_gated=True),
}
"""Operators by name; runtime/csrc/torch/torch_ops.cpp defines each, with an ``out`` form."""


def register_fakes(out_dtype: Callable[[str], Any]) -> None:
    """Registers each operator's fake implementation."""
    import torch

    for name, form in OPERATORS.items():
        schema = getattr(torch.ops.nvgemm_aot, name).default._schema
        names = tuple(argument.name for argument in schema.arguments)
        torch.library.register_fake(f"nvgemm_aot::{name}", _fake(names, form, out_dtype))
        torch.library.register_fake(f"nvgemm_aot::{name}.out", _fake_out)


def _fake(
    names: tuple[str, ...], form: Form, out_dtype: Callable[[str], Any]
) -> Callable[..., torch.Tensor]:
    import torch

    ranks = RANKS[form.op]

    def fake(*arguments: Any, **keywords: Any) -> torch.Tensor:
        by_name = {**dict(zip(names, arguments)), **keywords}
        a, b = by_name["a"], by_name["b"]
        torch._check(
            (a.dim(), b.dim()) == ranks,
            lambda: (
                f"a and b have {a.dim()} and {b.dim()} dimensions; must have {ranks[0]} and "
                f"{ranks[1]}"
            ),
        )
        torch._check(
            form.op is Op.GATHERED_MM or a.shape[-1] == b.shape[-2],
            lambda: f"a is {tuple(a.shape)} and b is {tuple(b.shape)}; k must agree",
        )
        columns = b.shape[-1]
        if form.is_gated:
            torch._check(columns % 2 == 0, lambda: f"b has {columns} columns; must have pairs")
            columns = columns // 2
        dtype = getattr(torch, str(out_dtype(by_name["kernel"])))
        groups = by_name["offsets"].shape if form.op is Op.K_GROUPED_MM else ()
        leading = a.shape[:-1]
        if form.op is Op.GATHERED_GROUPED_MM:
            leading = by_name["rows"].shape
            torch._check(len(leading) == 1, lambda: f"rows are {tuple(leading)}; must be [m]")
        result: torch.Tensor = a.new_empty((*groups, *leading, columns), dtype=dtype)
        return result

    return fake


def _fake_out(*operands: object, **keywords: object) -> None:
    """Does nothing: an ``out`` form changes values, not shapes or dtypes."""
