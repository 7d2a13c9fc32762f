"""Chooses between a fused kernel for a gated MLP and Inductor's own code.

The torch names used here are private and were run on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.kernel.mm_common import mm_args
from torch._inductor.select_algorithm import realize_inputs
from torch.nn import functional

from ...gemm.aten import AtenGemm, read_inputs
from ...gemm.epilogues import Epilogue, WeightOrder
from ...gemm.operands import Operand
from ..autotuning.choices import StockCall
from ..reading import operand, operand_of
from . import measured_gates
from .graph import is_autotuning
from .unfused import Unfused, choose


def lower(epilogue: Epilogue, a: Any, b: Any, bias: Any = None, *, was_apart: bool) -> Any:
    """Lowers ``a @ b``, or ``a @ b + bias``, with a gated epilogue to the result's node.

    ``a`` is [m, k], ``b`` is [k, n], ``bias`` has n values or is None, and the result is [m, n /
    2]. ``was_apart`` is True if the graph had separate products for gates and ups.
    """
    biases = [] if bias is None else [bias]
    operands = [*biases, a, b]
    _, _, _, product, a, b = mm_args(a, b)
    nodes = [*(realize_inputs(tensor) for tensor in biases), a, b]
    m, n = product.size
    half = n // 2
    layout = ir.FixedLayout(product.device, product.dtype, [m, half], [half, 1])
    op = "addmm" if biases else "mm"
    separate = _apart(epilogue) if was_apart else _in_one(epilogue)

    def stock(gemm: str) -> StockCall:
        return StockCall(op=op, gemm=gemm, inputs=nodes, layout=layout, gated=epilogue)

    def fused() -> AtenGemm:
        tensors = [operand(node) for node in nodes]
        return read_inputs(op, tensors, {}, operand_of(layout, 0), gated=epilogue)

    def gemms() -> list[AtenGemm]:
        tensors = [operand(node) for node in nodes]
        out = operand_of(layout if was_apart else product, 0)
        if not was_apart:
            return [read_inputs(op, tensors, {}, out)]
        *_, x, weights = tensors
        return [read_inputs("mm", [x, _weight_half(weights, index)], {}, out) for index in range(2)]

    if not is_autotuning():
        return measured_gates.lower(stock, operands, separate, fused(), gemms())
    unfused = Unfused(
        operands, nodes, layout, description=f"{op} and {epilogue.name}", function=separate
    )
    return choose(unfused, fused=fused, stock=stock, gemms=gemms)


def _weight_half(weights: Operand, index: int) -> Operand:
    """Returns the first or second half of the weights' columns."""
    k, n = weights.shape
    offset = index * (n // 2) * weights.strides[1] * weights.element_size()
    return replace(weights, shape=(k, n // 2), address=weights.address + offset)


def join(
    epilogue: Epilogue,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns the function that combines gates and ups, rounding after each operation."""
    gate = epilogue.gate
    assert gate is not None

    def clamped(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
        limit = gate.row.limit
        assert limit is not None
        gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
        return (ups + 1) * (gates * torch.sigmoid(gates * gate.row.alpha))

    def plain(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
        row = gate.row.activation.row
        activated: torch.Tensor = getattr(functional, row.torch_name)(gates, **row.torch_options)
        return activated * ups

    return plain if gate.row.limit is None else clamped


def _in_one(epilogue: Epilogue) -> Callable[..., torch.Tensor]:
    joined = join(epilogue)
    in_halves = epilogue.order is WeightOrder.HALVES

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        product = torch.addmm(*tensors) if len(tensors) == 3 else torch.mm(*tensors)
        half = product.shape[-1] // 2
        if in_halves:
            return joined(product[:, :half], product[:, half:])
        return joined(product[:, ::2], product[:, 1::2])

    return function


def _apart(epilogue: Epilogue) -> Callable[..., torch.Tensor]:
    joined = join(epilogue)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        half = b.shape[1] // 2
        return joined(a @ b[:, :half], a @ b[:, half:])

    return function
