"""Expert forms for sorted rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.moe.models import SEED, Model, in_two, oai, one_exactly, operands, shares
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


def routed(model: Model) -> torch.Tensor:
    """Returns each expert's rows, by `shares`."""
    import torch

    drawn = torch.Generator().manual_seed(SEED)
    chosen = torch.multinomial(shares(model, drawn), model.rows, replacement=True, generator=drawn)
    return torch.bincount(chosen, minlength=model.experts).to("cuda", torch.int32)


def ways(model: Model, counts: torch.Tensor, given: Mapping[str, torch.Tensor]) -> dict[str, Way]:
    """Returns the forms that take turns, by name."""
    import torch

    from nvgemm_runtime.moe import experts

    ends = counts.cumsum(0, dtype=torch.int32)
    kind = "swiglu_oai" if model.is_oai else "swiglu"
    silu = torch.nn.functional.silu

    def ours(x: Any, up: Any, down: Any, **biases: Any) -> torch.Tensor:
        return experts(x, up, down, ends, activation=kind, **biases)

    def ours_of_two(x: Any, gate: Any, other: Any, down: Any) -> torch.Tensor:
        return experts(x, (gate, other), down, ends)

    def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch._grouped_mm(x, weight.mT, offs=ends)
        return product

    def titan(x: Any, gate: Any, other: Any, down: Any) -> torch.Tensor:
        return grouped(silu(grouped(x, gate)) * grouped(x, other), down)

    def of_one(x: Any, up: Any, down: Any) -> torch.Tensor:
        gate, other = grouped(x, up).chunk(2, dim=-1)
        return grouped(silu(gate) * other, down)

    def titan_oai(x: Any, up: Any, down: Any, up_bias: Any, down_bias: Any) -> torch.Tensor:
        by_row = [
            bias.repeat_interleave(counts, dim=0, output_size=model.rows)
            for bias in (up_bias, down_bias)
        ]
        gate, other = (grouped(x, up) + by_row[0]).chunk(2, dim=-1)
        return grouped(oai(gate, other), down) + by_row[1]

    found = also_compiled(OURS, ours, given)
    if model.is_oai:
        return found | also_compiled(TORCH, titan_oai, given)
    two = in_two(given)
    return {
        **found,
        **also_compiled(OURS_OF_TWO, ours_of_two, two),
        **also_compiled(TORCH, titan, two),
        **also_compiled(TORCH_ONE, of_one, given),
    }


def exactly(model: Model, counts: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Computes the same in fp32, one expert after the other."""
    import torch

    of_experts = enumerate(given["x"].split(counts.tolist()))
    return torch.cat([one_exactly(model, expert, rows, given) for expert, rows in of_experts])


def measure_model(model: Model, rounds: int) -> dict[str, Any]:
    """Returns milliseconds, megabytes and errors, by form."""
    import torch

    torch._dynamo.reset()  # or sizes of another model would make these dynamic
    counts, given = routed(model), operands(model, model.rows)
    grad = torch.randn_like(given["x"])
    wanted = exact_results(functools.partial(exactly, model, counts), given, grad)
    return measure_ways(model, ways(model, counts, given), grad, wanted, rounds)
