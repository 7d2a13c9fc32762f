"""Training steps of `nvgemm_runtime.moe.experts`, with weights as libraries keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nvgemm_runtime.moe import experts

KEPT = ("one", "pair", "transposed")
"""Ways to keep gate and up: one weight [out, in] for each expert, two, or one [in, out]."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of one GPU, and the rows that reach them all."""

    count: int
    rows: int
    dim: int
    hidden: int
    kept: str = "one"
    biased: bool = False


def operands(sizes: Experts) -> list[torch.Tensor]:
    """Rows, the weights of gate and up, those of down, and biases, all of which need gradients."""
    count, dim, hidden = sizes.count, sizes.dim, sizes.hidden

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

    up, down = {
        "one": ([(count, 2 * hidden, dim)], (count, dim, hidden)),
        "pair": ([(count, hidden, dim)] * 2, (count, dim, hidden)),
        "transposed": ([(count, dim, 2 * hidden)], (count, hidden, dim)),
    }[sizes.kept]
    biases = [*((count, shape[-2]) for shape in up), (count, dim)] if sizes.biased else []
    if sizes.biased and sizes.kept == "transposed":
        biases[0] = (count, 2 * hidden)
    return [leaf(*shape) for shape in ((sizes.rows, dim), *up, down, *biases)]


def forward(sizes: Experts) -> Callable[..., torch.Tensor]:
    """The experts as a function of `operands`, rows spread as evenly as they can be."""
    ends = [(place + 1) * sizes.rows // sizes.count for place in range(sizes.count)]
    offsets = torch.tensor(ends, dtype=torch.int32)

    def run(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        count = 3 if sizes.kept == "pair" else 2
        *up, down = (one.mT if sizes.kept == "transposed" else one for one in given[:count])
        named: dict[str, Any] = {}
        if sizes.biased:
            *up_bias, named["down_bias"] = given[count:]
            named["up_bias"] = tuple(up_bias) if len(up) == 2 else up_bias[0]
        return experts(x, (up[0], up[1]) if len(up) == 2 else up[0], down, offsets, **named)

    return run


def step(sizes: Experts) -> None:
    """Forward and backward."""
    out = forward(sizes)(*operands(sizes))
    out.backward(torch.empty_like(out))


def problems_of(sizes: Experts) -> Counter[str]:
    """The problems of a step and how often it has them, by hand."""
    count, rows, dim, hidden = sizes.count, sizes.rows, sizes.dim, sizes.hidden
    forward, backward = ("tt", "tn") if sizes.kept == "transposed" else ("tn", "tt")
    up = [(hidden, dim)] * 2 if sizes.kept == "pair" else [(2 * hidden, dim)]
    found: Counter[str] = Counter()
    for n, k in (*up, (dim, hidden)):
        p, q = (k, n) if sizes.kept == "transposed" else (n, k)
        sum_ = "/bias" if sizes.biased else ""
        found[f"grouped_mm/{forward}/bf16xbf16/fp32/bf16{sum_}/g{count}m{rows}n{n}k{k}"] += 1
        found[f"grouped_mm/{backward}/bf16xbf16/fp32/bf16/g{count}m{rows}n{k}k{n}"] += 1
        found[f"k_grouped_mm/nt/bf16xbf16/fp32/bf16/g{count}m{p}n{q}k{rows}"] += 1
        if sizes.biased:
            found[f"k_grouped_mm/nt/bf16xbf16/fp32/bf16/g{count}m{n}n8k{rows}"] += 1
    return found
