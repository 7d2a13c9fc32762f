"""How fast are the experts of a mixture, forward and backward, beside torch's grouped products?

For four models at 24,576 tokens, routed with skew by a fixed seed, through autograd and with all
allocations:

- ``experts``: `nvgemm_runtime.moe.experts`, with the bundled kernels that are installed;
- ``experts, compiled``: the same by torch.compile;
- ``torch``: three products of ``torch._grouped_mm`` and the activation between, as torchtitan's
  experts compute them; of gpt-oss two products, each with a bias for each row;
- ``torch, compiled``: this by torch.compile.

The ways take turns. A time is the median over rounds, of the GPU between two events, with a step
before it that keeps the GPU busy. TFLOP/s are those of the products alone, beside those of one
large dense product in the same run. Errors are norms of differences from fp32 on the same operands,
over the norm of what fp32 gives: the largest of the result and of the gradients of rows and of
weights.

    nvgemm-aot build benchmarks/moe/manifest.yaml  # anywhere
    NVGEMM_AOT_BUNDLES=moe-sm_90a-linux_x86_64-cu13.nvgemm python -m benchmarks.moe measure moe.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.shared.bundled import environment
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import Results, measuring_options
from benchmarks.shared.summaries import geomean, median

if TYPE_CHECKING:
    import torch

    Call = Callable[..., torch.Tensor]

WHAT = "moe"
TOKENS = 24_576
SEED = 18
OURS, OURS_COMPILED, TORCH, COMPILED = "experts", "experts, compiled", "torch", "torch, compiled"
DENSE = 8192
"""Extent of the dense product."""


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


def routed(model: Model) -> torch.Tensor:
    """Rows of each expert: the k-th has a share of 1 / (k + 3), in an order drawn by lot."""
    import torch

    drawn = torch.Generator().manual_seed(SEED)
    share = 1 / (torch.arange(model.experts) + 3.0)
    share = share[torch.randperm(model.experts, generator=drawn)]
    chosen = torch.multinomial(share, model.rows, replacement=True, generator=drawn)
    return torch.bincount(chosen, minlength=model.experts).to("cuda", torch.int32)


def operands(model: Model) -> list[torch.Tensor]:
    """Rows, weights of gates and ups in halves, weights of down projections, and two biases."""
    import torch

    drawn = torch.Generator("cuda").manual_seed(SEED)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        made = torch.randn(shape, device="cuda", generator=drawn) * scale
        return made.bfloat16().requires_grad_()

    experts, dim, hidden = model.experts, model.dim, model.hidden
    found = [
        draw(model.rows, dim, scale=1),
        draw(experts, 2 * hidden, dim, scale=dim**-0.5),
        draw(experts, dim, hidden, scale=hidden**-0.5),
    ]
    if model.is_oai:
        found += [draw(experts, 2 * hidden, scale=0.1), draw(experts, dim, scale=0.1)]
    return found


def ways(model: Model, counts: torch.Tensor) -> dict[str, Call]:
    """What takes turns, each a function of `operands`."""
    import torch

    from nvgemm_runtime.moe import experts

    ends = counts.cumsum(0, dtype=torch.int32)
    kind = "swiglu_oai" if model.is_oai else "swiglu"

    def ours(x: Any, up: Any, down: Any, *biases: Any) -> torch.Tensor:
        named = dict(zip(("up_bias", "down_bias"), biases))
        return experts(x, up, down, ends, activation=kind, **named)

    def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch._grouped_mm(x, weight.mT, offs=ends)
        return product

    def stock(x: Any, up: Any, down: Any, *biases: Any) -> torch.Tensor:
        if not biases:
            gate, other = up.chunk(2, dim=1)
            hidden = torch.nn.functional.silu(grouped(x, gate)) * grouped(x, other)
            return grouped(hidden, down)
        by_row = [bias.repeat_interleave(counts, dim=0, output_size=model.rows) for bias in biases]
        gate, other = (grouped(x, up) + by_row[0]).chunk(2, dim=-1)
        return grouped(oai(gate, other), down) + by_row[1]

    return {
        OURS: ours,
        OURS_COMPILED: torch.compile(ours),
        TORCH: stock,
        COMPILED: torch.compile(stock),
    }


def oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation of gpt-oss."""
    import torch

    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def exactly(model: Model, counts: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same in fp32, an expert after the other."""
    import torch

    x, up, down, *biases = given
    parts = []
    for expert, rows in enumerate(x.split(counts.tolist())):
        both = rows @ up[expert].T
        if biases:
            both = both + biases[0][expert]
        gate, other = both.chunk(2, dim=-1)
        hidden = oai(gate, other) if biases else torch.nn.functional.silu(gate) * other
        result = hidden @ down[expert].T
        parts.append(result + biases[1][expert] if biases else result)
    return torch.cat(parts)


def results_of(
    call: Callable[[], torch.Tensor], given: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """The result, and the gradients of all operands."""
    for one in given:
        one.grad = None
    out = call()
    out.backward(grad.to(out.dtype))
    found = [out.detach(), *(one.grad for one in given)]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def exact_results(
    model: Model, counts: torch.Tensor, given: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """`results_of` what is computed in fp32."""
    wide = [one.detach().float().requires_grad_() for one in given]
    return results_of(lambda: exactly(model, counts, wide), wide, grad)


def measure_model(model: Model, rounds: int) -> dict[str, Any]:
    """Milliseconds, megabytes and errors, by way."""
    import torch

    counts, given = routed(model), operands(model)
    grad = torch.randn_like(given[0])
    wanted = exact_results(model, counts, given, grad)
    calls, entry = ways(model, counts), dict[str, Any]()
    for name, call in calls.items():
        results_of(lambda call=call: call(*given), given, grad)  # type: ignore[misc]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = results_of(lambda call=call: call(*given), given, grad)  # type: ignore[misc]
        entry[name] = {
            "peak_mb": (torch.cuda.max_memory_allocated() - before) / 1e6,
            "error": max(error_of(one, right) for one, right in zip(found, wanted)),
        }
        del found
    del wanted
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, given, grad))
    for name, both in times.items():
        forward, backward = zip(*both)
        entry[name] |= {"forward_ms": median(forward), "backward_ms": median(backward)}
    return {"ways": entry, "dense_tflops": dense_tflops()}


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    return float((found.float() - wanted).norm() / wanted.norm())


def timed(call: Call, given: Sequence[torch.Tensor], grad: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of one forward and one backward, behind another that keeps the GPU busy.

    So the host is ahead, as in training, and what it takes to make the first launch is not counted.
    """
    import torch

    call(*given).backward(grad)
    for one in given:
        one.grad = None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    marks[0].record()
    out = call(*given)
    marks[1].record()
    out.backward(grad)
    marks[2].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])


def dense_tflops() -> float:
    """TFLOP/s of one large dense product, the median of ten, each behind another."""
    import torch

    a, b = (torch.randn(DENSE, DENSE, device="cuda").bfloat16() for _ in range(2))
    found = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(a, b)
        start.record()
        torch.mm(a, b)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return float(2 * DENSE**3 / median(found) / 1e9)


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """A row a model and way."""
    yield (
        f"{'model':<20} {'way':<17} {'forward, ms':>11} {'backward':>9} {'TFLOP/s':>8} {'':>7} "
        f"{'of dense':>8} {'peak, MB':>9} {'error':>9}"
    )
    gains: dict[tuple[str, str], list[tuple[float, float]]] = {
        (own, other): [] for other in (TORCH, COMPILED) for own in (OURS, OURS_COMPILED)
    }
    for name, model in MODELS.items():
        if name not in entries:
            continue
        ways_, dense = entries[name]["ways"], entries[name]["dense_tflops"]
        for way, one in ways_.items():
            rates = [
                flops / one[part] / 1e9
                for part, flops in (
                    ("forward_ms", model.flops),
                    ("backward_ms", 2 * model.flops),
                )
            ]
            yield (
                f"{name:<20} {way:<17} {one['forward_ms']:11.2f} {one['backward_ms']:9.2f} "
                f"{rates[0]:8.0f} {rates[1]:7.0f} {min(rates) / dense:8.2f} {one['peak_mb']:9.0f} "
                f"{one['error']:9.2e}"
            )
        for (own, other), found in gains.items():
            if own not in ways_:  # of a file of before it was measured
                continue
            forward, backward = (
                ways_[other][part] / ways_[own][part] for part in ("forward_ms", "backward_ms")
            )
            found.append((forward, backward))
            yield (
                f"{'':<20} {own} over {other}: {forward:.3f} times as fast, backward {backward:.3f}"
            )
    for (own, other), found in gains.items():
        if found:
            means = [geomean(of_a_part) for of_a_part in zip(*found)]
            yield (
                f"geometric means, {own} over {other}: {means[0]:.3f} times as fast, backward "
                f"{means[1]:.3f}"
            )


@click.group()
def main() -> None:
    """Measure experts."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print the table of a file."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@measuring_options
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=3))
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)))
def measure(
    path: Path, resume: bool, budget: float | None, rounds: int, models: Sequence[str]
) -> None:
    """Measure, keeping results in PATH, and print the table."""
    require_gpu()
    results = Results.begin(
        path, what=WHAT, environment=environment(), settings={"rounds": rounds}, resume=resume
    )

    def work(name: str) -> Callable[[], dict[str, Any]]:
        return lambda: measure_model(MODELS[name], rounds)

    left = [(name, work(name)) for name in models or MODELS if name not in results.entries]
    try:
        results.fill(left, budget, lambda entry: f"{entry['ways'][OURS]['forward_ms']:.2f} ms")
    finally:
        results.end(table)


if __name__ == "__main__":
    main()
