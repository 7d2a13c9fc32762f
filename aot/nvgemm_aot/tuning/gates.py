"""What a gated epilogue makes of a product, in fp64, and how far a kernel's result may be off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvgemm_runtime.gemm.epilogues import WeightOrder
from nvgemm_runtime.gemm.problem import Signature

if TYPE_CHECKING:
    import torch


def pairs(product: torch.Tensor, signature: Signature) -> tuple[torch.Tensor, torch.Tensor]:
    """The gates and the ups among the columns of a product of a gated signature."""
    assert signature.epilogue is not None
    if signature.epilogue.row.order is WeightOrder.HALVES:
        gates, ups = product.chunk(2, dim=-1)
        return gates, ups
    return product[..., ::2], product[..., 1::2]


def joined(product: torch.Tensor, signature: Signature) -> torch.Tensor:
    """The result of a gated signature, of a product to which any bias has been added."""
    gated, ups = _gated_and_ups(product, signature)
    return gated * ups


def joined_error(
    error: torch.Tensor, product: torch.Tensor, signature: Signature, *, slope: float, curve: float
) -> torch.Tensor:
    """Largest error of the result where every column of the product may be off by ``error``.

    With e as the error of a gate, its activation is off by at most ``slope * e + curve * |gate|``;
    cutting off makes no error larger. The result is a product of two factors, so the error of each
    counts times the other, and both once together. What fp32 loses in multiplying is far below
    ``curve``.

    Args:
        error: Of the product's shape, or one number for all.
        product: In fp64, with any bias added.
        signature: A gated one.
        slope: Largest slope of the activation.
        curve: Error of the activation itself, relative to its input.
    """
    of_gates, of_ups = pairs(error.expand_as(product), signature)
    gates, _ = pairs(product, signature)
    gated, ups = _gated_and_ups(product, signature)
    of_gated = slope * of_gates + curve * gates.abs()
    return of_gated * ups.abs() + gated.abs() * of_ups + of_gated * of_ups


def _gated_and_ups(
    product: torch.Tensor, signature: Signature
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of the result: gates behind their activation, and ups as they multiply."""
    import torch
    from torch.nn import functional

    assert signature.epilogue is not None
    assert signature.epilogue.gate is not None
    row = signature.epilogue.gate.row
    gates, ups = pairs(product, signature)
    if row.limit is not None:
        gates = gates.clamp(max=row.limit)
        return gates * torch.sigmoid(row.alpha * gates), ups.clamp(-row.limit, row.limit) + 1
    activation = row.activation.row
    function = getattr(functional, activation.torch_name)
    return function(gates, **activation.torch_options), ups
