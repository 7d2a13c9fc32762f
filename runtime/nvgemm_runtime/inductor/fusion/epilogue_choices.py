"""Chooses between a fused kernel for a sum with its activation and Inductor's own code.

The torch names used here are private and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.kernel.mm_common import mm_args
from torch._inductor.select_algorithm import realize_inputs
from torch._inductor.utils import is_gpu
from torch.nn import functional

from ...gemm.aten import AtenGemm, read_inputs
from ...gemm.epilogues import Activation
from ..autotuning.choices import StockCall
from ..reading import operand, operand_of
from .unfused import Unfused, choose


def _activation_function(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    row = activation.row
    return partial(getattr(functional, row.torch_name), **row.torch_options)


def lower(activation: Activation, bias: Any, a: Any, b: Any, *, was_apart: bool) -> Any:
    """Lowers ``activation(a @ b + bias)`` to the node of the result [m, n].

    ``a`` is [m, k], ``b`` is [k, n], and ``bias`` is a row. ``was_apart`` is True if the graph had
    a product and a sum instead of ``addmm``.
    """
    operands = [bias, a, b]
    _, _, _, layout, a, b = mm_args(a, b)
    nodes = [realize_inputs(bias), a, b]
    is_apart = _sums_apart(layout, was_apart)
    unfused = Unfused(
        operands,
        nodes,
        layout,
        description=f"addmm and {activation.value}",
        function=_sum_and(activation, is_apart),
    )

    def stock(gemm: str) -> StockCall:
        return StockCall(op="addmm", gemm=gemm, inputs=nodes, layout=layout, activation=activation)

    return choose(
        unfused,
        fused=lambda: _read(unfused, activation),
        stock=stock,
        gemms=lambda: [_read(unfused, is_apart=is_apart)],
    )


def _read(
    unfused: Unfused, activation: Activation | None = None, *, is_apart: bool = False
) -> AtenGemm:
    """Reads the GEMM with its activation, or the GEMM that Inductor lowers unfused."""
    tensors = [operand(node) for node in unfused.input_nodes]
    out = operand_of(unfused.layout, 0)
    if is_apart:
        return read_inputs("mm", tensors[1:], {}, out)
    return read_inputs("addmm", tensors, {}, out, activation)


def _sum_and(activation: Activation, is_apart: bool) -> Callable[..., torch.Tensor]:
    function = _activation_function(activation)

    def in_one(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function(torch.addmm(bias, a, b))

    def apart(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function(a @ b + bias)

    return apart if is_apart else in_one


def _sums_apart(layout: ir.Layout, was_apart: bool) -> bool:
    """Returns True if Inductor separates a sum from its product before an activation.

    It does so on GPUs, where sum and activation then become one kernel. From torch 2.13 on it can
    keep addmm for half precision.
    """
    if not is_gpu(layout.device.type):
        return False
    half = layout.dtype in (torch.bfloat16, torch.float16)
    return was_apart or not (half and getattr(config, "keep_addmm_fused_for_half_dtypes", False))
