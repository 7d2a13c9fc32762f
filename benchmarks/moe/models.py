"""The models whose experts are measured, and what one GPU computes of them."""

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
    """The experts that one GPU computes.

    Attributes:
        experts: How many.
        rows: What is routed to them, of all tokens.
        dim, hidden: Extents of a weight.
        is_oai: Whether the activation is gpt-oss', with biases.
    """

    experts: int
    rows: int
    dim: int
    hidden: int
    is_oai: bool = False

    @property
    def chosen(self) -> int:
        """Rows of a token."""
        return self.rows // TOKENS

    @property
    def flops(self) -> int:
        """Of the forward's products; the backward's have twice as many."""
        return 6 * self.rows * self.dim * self.hidden


MODELS = {
    "gpt-oss-20b": Model(32, 4 * TOKENS, 2880, 2880, is_oai=True),
    "Qwen3-30B-A3B": Model(128, 8 * TOKENS, 2048, 768),
    "Mixtral-8x7B": Model(8, 2 * TOKENS, 4096, 14336),
    "DeepSeek-V3, 1 of 8": Model(32, TOKENS, 7168, 2048),
}
"""Sizes of the models' public configs. Of DeepSeek-V3's 256 experts a rank has 32, and an eighth of
the eight rows of each token."""


def shares(model: Model, drawn: torch.Generator) -> torch.Tensor:
    """Shares of rows: the k-th expert's is 1 / (k + 3), in an order drawn by lot."""
    import torch

    share = 1 / (torch.arange(model.experts) + 3.0)
    return share[torch.randperm(model.experts, generator=drawn)]


def operands(model: Model, count: int) -> dict[str, torch.Tensor]:
    """So many rows or tokens, weights of gates and ups in halves, those of downs, two biases."""
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
    """Operands with a weight of its own for gates and for ups."""
    gates, ups = (one.detach().contiguous().requires_grad_() for one in given["up"].chunk(2, dim=1))
    return {"x": given["x"], "gate": gates, "other": ups, "down": given["down"]}


def oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation of gpt-oss."""
    import torch

    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def one_exactly(
    model: Model, expert: int, rows: torch.Tensor, given: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """What an expert makes of rows, in their type."""
    import torch

    both = rows @ given["up"][expert].T
    if model.is_oai:
        both = both + given["up_bias"][expert]
    gate, other = both.chunk(2, dim=-1)
    hidden = oai(gate, other) if model.is_oai else torch.nn.functional.silu(gate) * other
    result = hidden @ given["down"][expert].T
    return result + given["down_bias"][expert] if model.is_oai else result
