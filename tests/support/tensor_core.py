"""What tensor cores with a short accumulator make of a product, on the CPU.

Per step of k, products and the sum so far are aligned to the largest of them and cut, and their sum
is cut again: as Hopper does with fp8, by what is known of it (arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch

HOPPER_FP8_BITS = 13
"""Bits behind the leading one."""

STEP = 32
"""Of k, of one instruction for fp8."""


def product(
    a: torch.Tensor, b: torch.Tensor, bits: int = HOPPER_FP8_BITS, step: int = STEP
) -> torch.Tensor:
    """``a @ b`` as such a tensor core sums it, in fp64."""
    a, b = a.double(), b.double()
    total = torch.zeros((*a.shape[:-1], b.shape[-1], 1), dtype=torch.float64)
    for first in range(0, a.shape[-1], step):
        some = slice(first, first + step)
        terms = a[..., some].unsqueeze(-2) * b[..., some, :].mT.unsqueeze(-3)
        terms = torch.cat((total, terms), -1)
        total = cut(cut(terms, bits, terms).sum(-1, keepdim=True), bits)
    return total.squeeze(-1)


def cut(values: torch.Tensor, bits: int, aligned_to: torch.Tensor | None = None) -> torch.Tensor:
    """Values without what lies so many bits below the largest of the last dimension."""
    largest = (values if aligned_to is None else aligned_to).abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1, 0)
    exponent = torch.where(largest.isfinite(), exponent, 0)
    return torch.ldexp(torch.ldexp(values, bits - exponent).trunc(), exponent - bits)
