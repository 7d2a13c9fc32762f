"""Gated epilogue results in fp64, and error bounds for kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nvgemm_runtime.gemm.epilogues import Activation, GateForm, WeightOrder
from nvgemm_runtime.gemm.problem import Signature

if TYPE_CHECKING:
    import torch


def pairs(product: torch.Tensor, signature: Signature) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a gated product's columns into gates and ups."""
    assert signature.epilogue is not None
    if signature.epilogue.order is WeightOrder.HALVES:
        gates, ups = product.chunk(2, dim=-1)
        return gates, ups
    return product[..., ::2], product[..., 1::2]


def stored(
    product: torch.Tensor, signature: Signature, gate_input: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns a gated signature's result, in its epilogue's form.

    Args:
        product: Product in fp64, with any bias added.
        signature: Gated signature.
        gate_input: Tensor that the epilogue reads: the saved product for a gradient, or gates.
    """
    import torch

    if signature.is_gradient:
        assert gate_input is not None
        return _join_pairs(*_gradients(product, gate_input, signature), signature)
    if signature.form is GateForm.UPS:
        assert gate_input is not None
        gated, ups = _gated_and_up_factors(gate_input.double(), product, signature)
        return torch.cat((product, gated * ups), -1)
    gated, ups = _gated_and_ups(product, signature)
    joined = gated * ups
    return joined if signature.form is GateForm.JOINED else torch.cat((product, joined), -1)


def stored_error(
    error: torch.Tensor,
    product: torch.Tensor,
    signature: Signature,
    gate_input: torch.Tensor | None = None,
    *,
    slope: float,
    curve: float,
) -> torch.Tensor:
    """Returns the largest error of `stored` if every product column may be off by ``error``.

    With e as a gate's error, its activation is off by at most ``slope * e + curve * |gate|``;
    clamping makes no error larger. The result multiplies two factors: each error counts times the
    other factor, and both errors once together. The fp32 multiplication loses far less than
    ``curve``.

    Args:
        error: Error with the product's shape, or one number for all.
        product: Product in fp64, with any bias added.
        signature: Gated signature.
        gate_input: Tensor that the epilogue reads, as in `stored`.
        slope: Largest activation slope.
        curve: Activation error, relative to its input.
    """
    import torch

    error = error.expand_as(product)
    if signature.is_gradient:
        assert gate_input is not None
        factors = _gradients(torch.ones_like(product), gate_input, signature)
        errors = _slope_errors(gate_input.double(), signature, curve)
        # A clamped value has neither gradient nor error, even for a NaN product.
        of_gates, of_ups = (
            (error * factor.abs() + product.abs() * of_factor + error * of_factor).nan_to_num(0.0)
            for factor, of_factor in zip(factors, errors)
        )
        return _join_pairs(of_gates, of_ups, signature)
    if signature.form is GateForm.UPS:
        assert gate_input is not None
        gates = gate_input.double()
        gated, _ = _gated_and_up_factors(gates, product, signature)
        of_gated = curve * gates.abs()  # gates are read, so they have no error
        joined = of_gated * product.abs() + gated.abs() * error + of_gated * error
        return torch.cat((error, joined), -1)
    of_gates, of_ups = pairs(error, signature)
    gates, _ = pairs(product, signature)
    gated, ups = _gated_and_ups(product, signature)
    of_gated = slope * of_gates + curve * gates.abs()
    joined = of_gated * ups.abs() + gated.abs() * of_ups + of_gated * of_ups
    return joined if signature.form is GateForm.JOINED else torch.cat((error, joined), -1)


def row_sums(
    error: torch.Tensor, product: torch.Tensor, signature: Signature, gate_input: torch.Tensor, *,
    curve: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns each row's sum of gate result times gradient, and its largest error.

    A kernel adds in fp32, in any order. Takes the same arguments as `stored_error`.
    """
    gates, ups = pairs(gate_input.double(), signature)
    gated, factors = _gated_and_up_factors(gates, ups, signature)
    joined, of_joined = gated * factors, curve * (gates * factors).abs()
    terms = product * joined
    errors = error * (joined.abs() + of_joined) + product.abs() * of_joined
    errors = errors + terms.abs() * (product.shape[-1] + _STEPS_BEFORE_SUM) * 2.0**-24
    return terms.sum(-1), errors.sum(-1)


_STEPS_BEFORE_SUM = 4
"""Upper bound for the fp32 multiplications in each summed term."""


def _join_pairs(gates: torch.Tensor, ups: torch.Tensor, signature: Signature) -> torch.Tensor:
    """Joins gate and up columns in the signature's order; inverts `pairs`."""
    import torch

    assert signature.epilogue is not None
    if signature.epilogue.order is WeightOrder.HALVES:
        return torch.cat((gates, ups), -1)
    return torch.stack((gates, ups), -1).flatten(-2)


def _gradients(
    grad: torch.Tensor, gate_input: torch.Tensor, signature: Signature
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gate and up gradients from the gate result's; 0 where they are clamped."""
    import torch

    gates, ups = (
        tensor.clone().requires_grad_() for tensor in pairs(gate_input.double(), signature)
    )
    with torch.enable_grad():
        gated, factors = _gated_and_up_factors(gates, ups, signature)
        of_gates, of_ups = torch.autograd.grad(gated * factors, (gates, ups), grad)
    return of_gates, of_ups


def _slope_errors(
    gate_input: torch.Tensor, signature: Signature, curve: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bounds for slope errors in a kernel whose sigmoid or tanh is off by ``curve``.

    Silu's slope is s + x s (1 - s) with the sigmoid s, whose error counts at most 1 + |x| times.
    Gelu's slope is (1 + t) / 2 + x (1 - t t) f / 2 with f = 0.8 + 0.11 x x and the tanh t, whose
    error counts at most 1 / 2 + |x| f times.
    """
    assert signature.epilogue is not None
    assert signature.epilogue.gate is not None
    row = signature.epilogue.gate.row
    gates, _ = pairs(gate_input, signature)
    _, factors = _gated_and_ups(gate_input, signature)
    size = row.alpha * gates.abs()
    count = 1 + size
    if row.activation is Activation.GELU_TANH:
        count = 0.5 + size * (0.8 + 0.11 * size**2)
    return curve * count * factors.abs(), curve * gates.abs()


def _gated_and_ups(
    product: torch.Tensor, signature: Signature
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result's two factors: activated gates, and ups."""
    return _gated_and_up_factors(*pairs(product, signature), signature)


def _gated_and_up_factors(
    gates: torch.Tensor, ups: torch.Tensor, signature: Signature
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch
    from torch.nn import functional

    assert signature.epilogue is not None
    assert signature.epilogue.gate is not None
    row = signature.epilogue.gate.row
    if row.limit is not None:
        gates = _clamp(gates, -math.inf, row.limit)
        return gates * torch.sigmoid(row.alpha * gates), _clamp(ups, -row.limit, row.limit) + 1
    activation = row.activation.row
    function = getattr(functional, activation.torch_name)
    return function(gates, **activation.torch_options), ups


def _clamp(values: torch.Tensor, least: float, most: float) -> torch.Tensor:
    """Clamps values; those at a limit keep their gradient, as in kernels.

    ``torch.clamp`` passes the gradient at a limit up to torch 2.13 and drops it from 2.14 on.
    """
    return values.masked_fill(values < least, least).masked_fill(values > most, most)
