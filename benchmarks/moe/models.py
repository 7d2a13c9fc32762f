"""Models whose experts are measured, and one GPU's part of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TOKENS = 24_576
SEED = 18


@dataclass(frozen=True)
class Model:
    """Experts that one GPU computes.

    Attributes:
        experts: Expert count.
        rows: Rows routed to them, over all tokens.
        dim, hidden: Weight extents.
        is_oai: True for gpt-oss' activation and biases.
    """

    experts: int
    rows: int
    dim: int
    hidden: int
    is_oai: bool = False

    @property
    def chosen(self) -> int:
        """Rows per token."""
        return self.rows // TOKENS

    @property
    def flops(self) -> int:
        """Forward operations; the backward has twice as many."""
        return 6 * self.rows * self.dim * self.hidden


MODELS = {
    "gpt-oss-20b": Model(32, 4 * TOKENS, 2880, 2880, is_oai=True),
    "Qwen3-30B-A3B": Model(128, 8 * TOKENS, 2048, 768),
    "Mixtral-8x7B": Model(8, 2 * TOKENS, 4096, 14336),
    "DeepSeek-V3, 1 of 8": Model(32, TOKENS, 7168, 2048),
}
"""Sizes from the models' public configs. A rank has 32 of DeepSeek-V3's 256 experts, and an eighth
of each token's eight rows."""


def shares(model: Model, drawn: torch.Generator) -> torch.Tensor:
    """Returns shares of rows: the k-th expert's is 1 / (k + 3), in a random order."""
    import torch

    share = 1 / (torch.arange(model.experts) + 3.0)
    return share[torch.randperm(model.experts, generator=drawn)]


def operands(model: Model, count: int) -> dict[str, torch.Tensor]:
    """Returns rows or tokens, gate and up weights in halves, down weights, and two biases."""
    import torch

    drawn = torch.Generator("cuda").manual_seed(SEED)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        made = torch.randn(shape, device="cuda", generator=drawn) * scale
        return made.bfloat16().requires_grad_()

    experts, dim, hidden = model.experts, model.dim, model.hidden
    found = {
        "x": draw(count, dim, scale=1),
        "up": draw(experts, 2 * hidden, dim, scale=dim**-0.5),
        "down": draw(experts, dim, hidden, scale=hidden**-0.5),
    }
    if model.is_oai:
        found["up_bias"] = draw(experts, 2 * hidden, scale=0.1)
        found["down_bias"] = draw(experts, dim, scale=0.1)
    return found


def in_two(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits the gate and up weight into two."""
    gates, ups = (one.detach().contiguous().requires_grad_() for one in given["up"].chunk(2, dim=1))
    return {"x": given["x"], "gate": gates, "other": ups, "down": given["down"]}


def oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Applies gpt-oss' activation."""
    import torch

    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def one_exactly(
    model: Model, expert: int, rows: torch.Tensor, given: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Returns one expert's results, in its rows' type."""
    import torch

    both = rows @ given["up"][expert].T
    if model.is_oai:
        both = both + given["up_bias"][expert]
    gate, other = both.chunk(2, dim=-1)
    hidden = oai(gate, other) if model.is_oai else torch.nn.functional.silu(gate) * other
    result = hidden @ given["down"][expert].T
    return result + given["down_bias"][expert] if model.is_oai else result
