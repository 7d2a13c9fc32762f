"""How fast are the experts of a mixture, forward and backward, beside torch's grouped products?

For four models at 24,576 tokens, routed with skew by a fixed seed, through autograd and with all
allocations:

- ``experts``: `nvgemm_runtime.moe.experts` of one weight for gates and ups, with the bundled
  kernels that are installed;
- ``experts, 2 weights``: the same of a weight for gates and one for ups, as torchtitan has them;
- ``torch``: torchtitan's way: three products of ``torch._grouped_mm`` of two weights, and the
  activation between; of gpt-oss, which has one weight, two products, each with a bias for each row;
- ``torch, 1 product``: of one weight, so of one product for gates and ups;
- each of these also by torch.compile.

The ways take turns, in an order drawn for each round, and a large dense product is one of them: the
GPU lowers its clock when it is hot, so all must be as hot. A time is the median over rounds, of the
GPU between two events, behind a step that keeps the GPU busy; of the dense product, behind and over
as many as take about as long. TFLOP/s are those of the products alone. Errors are norms of
differences from fp32 on the same operands, over the norm of what fp32 gives: the largest of the
result and of the gradients of rows and of weights.

    nvgemm-aot build benchmarks/moe/manifest.yaml  # anywhere
    NVGEMM_AOT_BUNDLES=moe-sm_90a-linux_x86_64-cu13.nvgemm python -m benchmarks.moe measure moe.json
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.shared.bundled import environment
from benchmarks.shared.compiling import WITHOUT_BUNDLES
from benchmarks.shared.records import require_gpu
from benchmarks.shared.resuming import Results, measuring_options
from benchmarks.shared.summaries import geomean, median

if TYPE_CHECKING:
    import torch

    Call = Callable[..., torch.Tensor]

WHAT = "moe"
TOKENS = 24_576
SEED = 18
OURS, OURS_OF_TWO = "experts", "experts, 2 weights"
TORCH, TORCH_ONE = "torch", "torch, 1 product"
COMPILED = ", compiled"
"""Behind the name of a way: the same by torch.compile."""

PARTS = ("forward_ms", "backward_ms")
"""What is timed of a way."""

DENSE = "dense"
DENSE_EXTENT = 8192
DENSE_FLOPS = 2 * DENSE_EXTENT**3


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


def operands(model: Model) -> dict[str, torch.Tensor]:
    """Rows, weights of gates and ups in halves, weights of down projections, and two biases."""
    import torch

    drawn = torch.Generator("cuda").manual_seed(SEED)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        made = torch.randn(shape, device="cuda", generator=drawn) * scale
        return made.bfloat16().requires_grad_()

    experts, dim, hidden = model.experts, model.dim, model.hidden
    found = {
        "x": draw(model.rows, dim, scale=1),
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


@dataclass(frozen=True)
class Way:
    """What takes turns.

    Attributes:
        call: Computes rows from the operands.
        given: The operands, by the names that `call` takes them by.
    """

    call: Call
    given: Mapping[str, torch.Tensor]

    def __call__(self) -> torch.Tensor:
        """Compute."""
        return self.call(**self.given)


def ways(model: Model, counts: torch.Tensor, given: Mapping[str, torch.Tensor]) -> dict[str, Way]:
    """What takes turns, by name."""
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

    def also_compiled(name: str, call: Call, of: Mapping[str, torch.Tensor]) -> dict[str, Way]:
        options = None if name in (OURS, OURS_OF_TWO) else WITHOUT_BUNDLES
        compiled = torch.compile(call, options=options)
        return {name: Way(call, of), name + COMPILED: Way(compiled, of)}

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


def oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation of gpt-oss."""
    import torch

    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def exactly(model: Model, counts: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same in fp32, an expert after the other."""
    import torch

    parts = []
    for expert, rows in enumerate(given["x"].split(counts.tolist())):
        both = rows @ given["up"][expert].T
        if model.is_oai:
            both = both + given["up_bias"][expert]
        gate, other = both.chunk(2, dim=-1)
        hidden = oai(gate, other) if model.is_oai else torch.nn.functional.silu(gate) * other
        result = hidden @ given["down"][expert].T
        parts.append(result + given["down_bias"][expert] if model.is_oai else result)
    return torch.cat(parts)


def results_of(
    call: Callable[[], torch.Tensor], given: Mapping[str, torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """The result, and the gradients of all operands; those of gates and ups in one matrix."""
    import torch

    for one in given.values():
        one.grad = None
    out = call()
    out.backward(grad.to(out.dtype))
    found = {name: one.grad for name, one in given.items()}
    assert all(one is not None for one in found.values())
    if "gate" in found:
        both = torch.cat((found.pop("gate"), found.pop("other")), 1)
        found = {"x": found.pop("x"), "up": both, **found}
    return [out.detach(), *(one for one in found.values() if one is not None)]


def exact_results(
    model: Model, counts: torch.Tensor, given: Mapping[str, torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """`results_of` what is computed in fp32."""
    wide = {name: one.detach().float().requires_grad_() for name, one in given.items()}
    return results_of(lambda: exactly(model, counts, wide), wide, grad)


def measure_model(model: Model, rounds: int) -> dict[str, Any]:
    """Milliseconds, megabytes and errors, by way."""
    import torch

    torch._dynamo.reset()  # or what another model made static would be compiled as dynamic
    counts, given = routed(model), operands(model)
    grad = torch.randn_like(given["x"])
    wanted = exact_results(model, counts, given, grad)
    found_ways, entry = ways(model, counts, given), dict[str, Any]()
    for name, way in found_ways.items():
        step(way, grad)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(way, grad)
        peak = torch.cuda.max_memory_allocated() - before
        found = results_of(way, way.given, grad)
        errors = [error_of(one, right) for one, right in zip(found, wanted)]
        entry[name] = {"peak_mb": peak / 1e6, "error": max(errors)}
        del found
        for one in way.given.values():
            one.grad = None
    del wanted
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found_ways}
    dense, products = [], math.ceil(3 * model.flops / DENSE_FLOPS)
    matrices = [torch.randn((DENSE_EXTENT,) * 2, device="cuda").bfloat16() for _ in range(2)]
    turns, drawn = [*found_ways, DENSE], random.Random(SEED)
    for _ in range(rounds):
        drawn.shuffle(turns)
        for name in turns:
            if name == DENSE:
                dense.append(dense_tflops(matrices, products))
            else:
                times[name].append(timed(found_ways[name], grad))
    for name, both in times.items():
        forward, backward = zip(*both)
        entry[name] |= {"forward_ms": median(forward), "backward_ms": median(backward)}
    return {"ways": entry, "dense_tflops": median(dense)}


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    return float((found.float() - wanted).norm() / wanted.norm())


def step(way: Way, grad: torch.Tensor) -> None:
    """One forward and one backward."""
    way().backward(grad)
    for one in way.given.values():
        one.grad = None


def timed(way: Way, grad: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of one forward and one backward, behind another that keeps the GPU busy.

    So the host is ahead, as in training, and what it takes to make the first launch is not counted.
    """
    import torch

    step(way, grad)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    marks[0].record()
    out = way()
    marks[1].record()
    out.backward(grad)
    marks[2].record()
    torch.cuda.synchronize()
    for one in way.given.values():
        one.grad = None
    return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])


def dense_tflops(matrices: Sequence[torch.Tensor], products: int) -> float:
    """TFLOP/s of so many large dense products, behind as many."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for mark in (start, end):
        for _ in range(products):
            torch.mm(*matrices)
        mark.record()
    torch.cuda.synchronize()
    return float(DENSE_FLOPS * products / start.elapsed_time(end) / 1e9)


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """A row a model and way, and what ours gain over torch's."""
    yield (
        f"{'model':<20} {'way':<28} {'forward, ms':>11} {'backward':>9} {'TFLOP/s':>8} {'':>7} "
        f"{'of dense':>8} {'':>6} {'peak, MB':>9} {'error':>9}"
    )
    means: dict[str, list[tuple[float, float]]] = {}
    for name, model in MODELS.items():
        if name not in entries:
            continue
        of_ways, dense = entries[name]["ways"], entries[name]["dense_tflops"]
        for way, one in of_ways.items():
            forward, backward = (
                flops / one[part] / 1e9
                for part, flops in zip(PARTS, (model.flops, 2 * model.flops))
            )
            yield (
                f"{name:<20} {way:<28} {one['forward_ms']:11.2f} {one['backward_ms']:9.2f} "
                f"{forward:8.0f} {backward:7.0f} {forward / dense:8.2f} {backward / dense:6.2f} "
                f"{one['peak_mb']:9.0f} {one['error']:9.2e}"
            )
        for line, gain in gains(of_ways):
            yield f"{'':<20} {line}: {gain[0]:.3f} times as fast, backward {gain[1]:.3f}"
            means.setdefault(line.partition(" (")[0], []).append(gain)
    for line, found in means.items():
        both = [geomean(of_a_part) for of_a_part in zip(*found)]
        yield (
            f"geometric means of {len(found)}, {line}: {both[0]:.3f} times as fast, backward "
            f"{both[1]:.3f}"
        )


def gains(of_ways: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, float]]]:
    """How many times as fast each of ours is, forward and backward, as two ways of torch.

    One is torchtitan's as called, the other torch's fastest, forward and backward together.
    """

    def step_ms(way: str) -> float:
        return float(sum(of_ways[way][part] for part in PARTS))

    torchs = [way for way in of_ways if way.startswith(TORCH)]
    fastest = min(torchs, key=step_ms)
    for own in of_ways:
        if own not in torchs:
            for other, words in ((TORCH, TORCH), (fastest, f"torch's fastest ({fastest})")):
                forward, backward = (of_ways[other][part] / of_ways[own][part] for part in PARTS)
                yield f"{own} over {words}", (forward, backward)


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
