"""Expert forms from tokens to tokens: sort, gather, compute, weight and add.

Torch's forms are those of torchtitan 0.3 without expert parallelism and of transformers 5.23 (its
implementation ``grouped_mm``), written here with torch's operators. Torchtitan has two weights and
fp32 routing weights; it adds rounded rows by ``scatter_add``, here by torch's own, which is faster
than torchtitan's deterministic one. Transformers has one weight and routing weights in the
operands' type, as its routers of Qwen3-MoE and gpt-oss return them; it restores the order of tokens
and adds there. Bundled experts take fp32 routing weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.moe.models import SEED, TOKENS, Model, in_two, oai, one_exactly, operands, shares
from benchmarks.moe.turns import (
    OURS,
    OURS_OF_TWO,
    TORCH,
    TORCH_ONE,
    Way,
    also_compiled,
    exact_results,
    measure_ways,
)

if TYPE_CHECKING:
    import torch


def chosen_experts(model: Model) -> torch.Tensor:
    """Draws different experts for each token, int64 [tokens, k].

    Each is drawn by `shares`, as in `rows.routed`, and without those drawn for the token before, so
    rows are spread with less skew than there, most of all where experts are few.
    """
    import torch

    drawn = torch.Generator().manual_seed(SEED)
    of_token = shares(model, drawn).expand(TOKENS, -1)
    chosen = torch.multinomial(of_token, model.chosen, replacement=False, generator=drawn)
    return chosen.cuda()


def ways(model: Model, chosen: torch.Tensor, given: Mapping[str, torch.Tensor]) -> dict[str, Way]:
    """Returns the forms that take turns, by name."""
    import torch

    from nvgemm_runtime.moe import routed_experts

    silu, count = torch.nn.functional.silu, model.experts
    kind = "swiglu_oai" if model.is_oai else "swiglu"

    def ours(x: Any, up: Any, down: Any, scores: Any, **biases: Any) -> torch.Tensor:
        return routed_experts(x, up, down, chosen, scores, activation=kind, **biases)

    def ours_of_two(x: Any, gate: Any, other: Any, down: Any, scores: Any) -> torch.Tensor:
        return routed_experts(x, (gate, other), down, chosen, scores)

    def sorted_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.histc(flat.int(), bins=count, min=0, max=count - 1)
        return order, counts, counts.cumsum(0, dtype=torch.int32)

    def product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch._grouped_mm(rows, weight.mT, offs=ends)
        return found

    def scattered(x: Any, rows: Any, of_rows: Any, tokens: torch.Tensor) -> torch.Tensor:
        weighted = (rows.float() * of_rows[:, None]).to(rows.dtype)
        places = tokens[:, None].expand(-1, x.shape[1])
        return torch.zeros_like(x).scatter_add(0, places, weighted)

    def titan(x: Any, gate: Any, other: Any, down: Any, scores: Any) -> torch.Tensor:
        order, _, ends = sorted_rows()
        tokens = order // model.chosen
        rows = x[tokens]
        hidden = silu(product(rows, gate, ends)) * product(rows, other, ends)
        return scattered(x, product(hidden, down, ends), scores.view(-1)[order], tokens)

    def titan_oai(
        x: Any, up: Any, down: Any, scores: Any, up_bias: Any, down_bias: Any
    ) -> torch.Tensor:
        order, counts, ends = sorted_rows()
        tokens = order // model.chosen
        up_rows, down_rows = (
            one.repeat_interleave(counts.long(), dim=0, output_size=model.rows)
            for one in (up_bias, down_bias)
        )
        gate, other = (product(x[tokens], up, ends) + up_rows).chunk(2, dim=-1)
        rows = product(oai(gate, other), down, ends) + down_rows
        return scattered(x, rows, scores.view(-1)[order], tokens)

    def transformers(x: Any, up: Any, down: Any, scores: Any, **biases: Any) -> torch.Tensor:
        order, _, ends = sorted_rows()
        owner = chosen.reshape(-1)[order]
        both = product(x[order // model.chosen], up, ends)
        if biases:
            both = both + biases["up_bias"][owner]
        gate, other = both.chunk(2, dim=-1)
        rows = product(oai(gate, other) if biases else silu(gate) * other, down, ends)
        if biases:
            rows = rows + biases["down_bias"][owner]
        weighted = rows * scores.to(rows.dtype).view(-1)[order][:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(model.rows, device=order.device)
        return weighted[back].view(TOKENS, model.chosen, -1).sum(1)

    found = also_compiled(OURS, ours, given)
    if model.is_oai:
        return {
            **found,
            **also_compiled(TORCH, titan_oai, given),
            **also_compiled(TORCH_ONE, transformers, given),
        }
    two = {**in_two(given), "scores": given["scores"]}
    return {
        **found,
        **also_compiled(OURS_OF_TWO, ours_of_two, two),
        **also_compiled(TORCH, titan, two),
        **also_compiled(TORCH_ONE, transformers, given),
    }


def exactly(model: Model, chosen: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Computes the same in fp32, one expert after the other."""
    import torch

    x, scores = given["x"], given["scores"]
    sums = torch.zeros_like(x)
    for expert in range(model.experts):
        tokens, choice = torch.nonzero(chosen == expert, as_tuple=True)
        result = one_exactly(model, expert, x[tokens], given)
        sums = sums.index_add(0, tokens, result * scores[tokens, choice, None])
    return sums


def measure_model(model: Model, rounds: int) -> dict[str, Any]:
    """Returns milliseconds, megabytes and errors, by form."""
    import torch

    torch._dynamo.reset()  # or sizes of another model would make these dynamic
    chosen, given = chosen_experts(model), operands(model, TOKENS)
    drawn = torch.Generator("cuda").manual_seed(SEED)
    scores = torch.rand((TOKENS, model.chosen), device="cuda", generator=drawn)
    given["scores"] = (scores / scores.sum(1, keepdim=True)).requires_grad_()
    grad = torch.randn_like(given["x"])
    wanted = exact_results(functools.partial(exactly, model, chosen), given, grad)
    return measure_ways(model, ways(model, chosen, given), grad, wanted, rounds)
