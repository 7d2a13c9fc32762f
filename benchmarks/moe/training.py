r"""Trains a small mixture of experts with bundled and with torch's experts.

A decoder of four layers learns seeded text, from the same weights and batches each time:

- ``fp32``: experts one after the other in fp32, all else as in the other forms: the reference for
  rounding;
- ``torch``: three products of ``torch._grouped_mm`` and the activation between;
- ``torch, moved``: the same from weights that differ by 1e-6 of their size: the reference for two
  runs of one form, since routing soon turns small differences into large ones;
- ``experts``: `nvgemm_runtime.moe.routed_experts` with installed kernels;
- ``torch, compiled`` and ``experts, compiled``: the layer's experts alone by torch.compile.

Each form gets the experts of each token, and sorts and adds rows itself. Everything else runs in
bf16 by autocast, with fp32 weights. The table has losses along the way, their mean distance from
``fp32``'s, and the step time.

    nvgemm-aot build benchmarks/moe/training.yaml  # anywhere
    NVGEMM_AOT_BUNDLES=moe-training-sm_90a-linux_x86_64-cu13.nvgemm \
        python -m benchmarks.moe.training measure training.json
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch.nn import functional

from benchmarks.shared.bundled import environment
from benchmarks.shared.compiling import WITHOUT_BUNDLES
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import Results, measuring_options
from benchmarks.shared.summaries import median

WHAT = "moe-training"
SEED = 18
LEARNING_RATE = 1e-3
NOISE = 0.1
"""Share of random tokens, which do not follow from the two before."""

EXACT, TORCH, MOVED, OURS = "fp32", "torch", "torch, moved", "experts"
COMPILED = ", compiled"
WAYS = (EXACT, TORCH, MOVED, OURS, TORCH + COMPILED, OURS + COMPILED)

Experts = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Extents of the decoder and its batches."""

    layers: int = 4
    dim: int = 1024
    heads: int = 16
    experts: int = 32
    chosen: int = 4
    hidden: int = 512
    vocabulary: int = 256
    batch: int = 32
    length: int = 256


@dataclass(frozen=True)
class Routing:
    """Each token's experts.

    Attributes:
        chosen: Each token's experts [tokens, chosen].
        weights: Routing weights, fp32 [tokens, chosen].
    """

    chosen: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Routing sorted by expert.

    Attributes:
        ends: Row ends by expert, int32 [experts].
        tokens: Each row's token [rows].
        weights: Each row's routing weight, fp32 [rows].
    """

    ends: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor


def rows_of(routing: Routing, experts: int) -> Rows:
    """Sorts by expert, with torch's operators."""
    owners, order = routing.chosen.reshape(-1).sort(stable=True)
    places = torch.arange(experts, device=owners.device)
    ends = torch.searchsorted(owners, places, right=True).to(torch.int32)
    chosen = routing.chosen.shape[1]
    return Rows(ends, order // chosen, routing.weights.reshape(-1)[order])


def by_torch(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Computes experts by ``torch._grouped_mm`` in bf16, added in fp32."""
    rows = rows_of(routing, w_up.shape[0])
    taken = x.bfloat16().index_select(0, rows.tokens)
    gate, up = w_up.bfloat16().chunk(2, dim=1)

    def product(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch._grouped_mm(left, weight.mT, offs=rows.ends)
        return found

    hidden = functional.silu(product(taken, gate)) * product(taken, up)
    return _combined(x, product(hidden, w_down.bfloat16()), rows)


def by_bundles(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Computes experts by `nvgemm_runtime.moe.routed_experts` in bf16."""
    from nvgemm_runtime.moe import routed_experts

    return routed_experts(
        x.bfloat16(), w_up.bfloat16(), w_down.bfloat16(), routing.chosen, routing.weights
    )


def exactly(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Computes experts one after the other, in fp32."""
    with torch.autocast(x.device.type, enabled=False):
        rows = rows_of(routing, w_up.shape[0])
        taken = x.float().index_select(0, rows.tokens)
        counts = rows.ends.diff(prepend=rows.ends.new_zeros(1)).tolist()
        results = []
        for expert, given in enumerate(taken.split(counts)):
            gate, up = (given @ w_up[expert].T).chunk(2, dim=-1)
            results.append((functional.silu(gate) * up) @ w_down[expert].T)
        return _combined(x, torch.cat(results), rows)


def _combined(x: torch.Tensor, results: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Weights and adds each token's results, in fp32."""
    weighted = results.float() * rows.weights[:, None]
    sums = torch.zeros(x.shape, device=x.device)
    return sums.index_add_(0, rows.tokens, weighted).to(x.dtype)


def experts_of(way: str) -> Experts:
    """Returns the function that computes experts in a form."""
    plain = way.removesuffix(COMPILED)
    found = {EXACT: exactly, TORCH: by_torch, MOVED: by_torch, OURS: by_bundles}[plain]
    if not way.endswith(COMPILED):
        return found
    return torch.compile(found, options=None if plain == OURS else WITHOUT_BUNDLES)


class Layer(nn.Module):  # type: ignore[misc]
    """Causal attention, then experts."""

    def __init__(self, size: Size, experts: Experts) -> None:
        super().__init__()
        self.size, self.experts = size, experts
        self.norms = nn.ModuleList(nn.RMSNorm(size.dim) for _ in range(2))
        self.attention = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.router = nn.Linear(size.dim, size.experts, bias=False)
        shape = (size.experts, 2 * size.hidden, size.dim)
        self.w_up = nn.Parameter(torch.randn(shape) * size.dim**-0.5)
        shape = (size.experts, size.dim, size.hidden)
        self.w_down = nn.Parameter(torch.randn(shape) * size.hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute tokens [batch, length, dim]."""
        batch, length, dim = x.shape
        parts = self.attention(self.norms[0](x)).view(batch, length, 3, self.size.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        tokens = self.norms[1](x).reshape(-1, dim)
        done = self.experts(tokens, self.w_up, self.w_down, self.route(tokens))
        return x + done.view(x.shape)

    def route(self, tokens: torch.Tensor) -> Routing:
        """Sends each token to its likeliest experts."""
        likely = functional.softmax(self.router(tokens).float(), dim=-1)
        weights, chosen = likely.topk(self.size.chosen, dim=-1)
        return Routing(chosen, weights / weights.sum(dim=-1, keepdim=True))


class Decoder(nn.Module):  # type: ignore[misc]
    """Embedding, layers and head."""

    def __init__(self, size: Size, experts: Experts) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.layers = nn.Sequential(*(Layer(size, experts) for _ in range(size.layers)))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, length, vocabulary] of tokens [batch, length]."""
        return self.head(self.norm(self.layers(self.embedding(tokens))))


def batches(size: Size, steps: int, device: str) -> Iterator[torch.Tensor]:
    """Yields seeded text: a token follows from the two before it, except for `NOISE`."""
    drawn = torch.Generator().manual_seed(SEED)
    follows = torch.randint(size.vocabulary, (size.vocabulary, 4), generator=drawn)
    for _ in range(steps):
        text = torch.randint(size.vocabulary, (size.batch, size.length + 1), generator=drawn)
        is_drawn = torch.rand(text.shape, generator=drawn) < NOISE
        for place in range(2, size.length + 1):
            next_one = follows[text[:, place - 1], text[:, place - 2] % 4]
            text[:, place] = torch.where(is_drawn[:, place], text[:, place], next_one)
        yield text.to(device)


def train(way: str, steps: int, size: Size, device: str) -> dict[str, Any]:
    """Returns losses and milliseconds of each step, and peak megabytes."""
    torch.manual_seed(SEED)
    model = Decoder(size, experts_of(way)).to(device)
    if way == MOVED:
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(1 + 1e-6 * torch.randn_like(one))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=device == "cuda")
    losses, times_ms = [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for text in [*batches(size, steps, device)]:
        begun = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))  # waits for the GPU
        times_ms.append(1e3 * (time.perf_counter() - begun))
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else 0.0
    return {"losses": losses, "step_ms": times_ms, "peak_mb": peak}


def distance(losses: Sequence[float], exact: Sequence[float]) -> float:
    """Returns the mean distance between two curves."""
    return sum(abs(one - other) for one, other in zip(losses, exact)) / len(exact)


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row for each form: losses at eight evenly spaced steps, and the last."""
    steps = len(next(iter(entries.values()))["losses"])
    shown = sorted({*range(0, steps, max(1, steps // 8)), steps - 1})
    yield (
        f"{'loss at step':<20}"
        + "".join(f"{step + 1:8}" for step in shown)
        + (f"{'from fp32':>11}{'step, ms':>10}{'peak, MB':>10}")
    )
    for way in WAYS:
        if way not in entries:
            continue
        one = entries[way]
        away = (
            f"{distance(one['losses'], entries[EXACT]['losses']):11.4f}"
            if EXACT in entries
            else f"{'':11}"
        )
        yield (
            f"{way:<20}" + "".join(f"{one['losses'][step]:8.4f}" for step in shown) + away
            + f"{median(one['step_ms'][steps // 2 :]):10.2f}{one['peak_mb']:10.0f}"
        )  # fmt: skip


@click.group()
def main() -> None:
    """Train a small mixture of experts."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's table."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@measuring_options
@click.option("--steps", default=200, show_default=True, type=click.IntRange(min=2))
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS))
def measure(
    path: Path, resume: bool, budget: float | None, steps: int, ways: Sequence[str]
) -> None:
    """Train in each way, keeping curves in PATH, and print the table."""
    require_gpu()
    results = Results.begin(
        path, what=WHAT, environment=environment(), settings={"steps": steps}, resume=resume
    )

    def work(way: str) -> Callable[[], dict[str, Any]]:
        return lambda: train(way, steps, Size(), "cuda")

    left = [(way, work(way)) for way in ways or WAYS if way not in results.entries]
    try:
        results.fill(left, budget, lambda entry: f"loss {entry['losses'][-1]:.4f}")
    finally:
        results.end(table)


if __name__ == "__main__":
    main()
