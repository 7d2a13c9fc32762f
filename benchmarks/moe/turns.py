"""Times, memory and errors of expert forms that take turns.

A hot GPU lowers its clock, so forms take turns in an order drawn for each round, with a large dense
product among them. A time is the median over rounds between two GPU events, behind a step that
keeps the GPU busy; the dense product's is over, and behind, as many products as take about as long.
TFLOP/s count products alone. An error is the norm of the difference from fp32 on the same operands
over the norm in fp32: the largest over the result and all gradients.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.moe.models import MODELS, SEED, Model
from benchmarks.shared.compiling import WITHOUT_BUNDLES
from benchmarks.shared.summaries import geomean, median

if TYPE_CHECKING:
    import torch

    Call = Callable[..., torch.Tensor]

OURS, OURS_OF_TWO = "experts", "experts, 2 weights"
TORCH, TORCH_ONE = "torch", "torch, 1 product"
COMPILED = ", compiled"
"""Suffix for forms under torch.compile."""

PARTS = ("forward_ms", "backward_ms")
"""A form's timed parts."""

DENSE = "dense"
DENSE_EXTENT = 8192
DENSE_FLOPS = 2 * DENSE_EXTENT**3


@dataclass(frozen=True)
class Way:
    """Expert form that takes turns.

    Attributes:
        call: Computes rows from the operands.
        given: The operands, by the names that `call` takes them by.
    """

    call: Call
    given: Mapping[str, torch.Tensor]

    def __call__(self) -> torch.Tensor:
        """Computes the form."""
        return self.call(**self.given)


def also_compiled(name: str, call: Call, given: Mapping[str, torch.Tensor]) -> dict[str, Way]:
    """Returns a form as called and compiled; torch's forms have no bundled kernels there."""
    import torch

    options = None if name in (OURS, OURS_OF_TWO) else WITHOUT_BUNDLES
    compiled = torch.compile(call, options=options)
    return {name: Way(call, given), name + COMPILED: Way(compiled, given)}


def results_of(
    call: Callable[[], torch.Tensor], given: Mapping[str, torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the result and all gradients; those of gates and ups are in one matrix."""
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
    call: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    given: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
) -> list[torch.Tensor]:
    """Returns `results_of` the same operands, computed in fp32."""
    wide = {name: one.detach().float().requires_grad_() for name, one in given.items()}
    return results_of(lambda: call(wide), wide, grad)


def measure_ways(
    model: Model,
    found_ways: Mapping[str, Way],
    grad: torch.Tensor,
    wanted: list[torch.Tensor],
    rounds: int,
) -> dict[str, Any]:
    """Returns milliseconds, megabytes and errors, by form.

    Args:
        model: Model whose experts are computed.
        found_ways: Forms that take turns, by name.
        grad: Result gradient.
        wanted: Results in fp32, as `results_of` returns them.
        rounds: Turns per form.
    """
    import torch

    entry = dict[str, Any]()
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
    """Returns the difference's norm over the right result's norm."""
    return float((found.float() - wanted).norm() / wanted.norm())


def step(way: Way, grad: torch.Tensor) -> None:
    """Runs one forward and one backward."""
    way().backward(grad)
    for one in way.given.values():
        one.grad = None


def timed(way: Way, grad: torch.Tensor) -> tuple[float, float]:
    """Returns milliseconds of one forward and one backward, behind a step that keeps the GPU busy.

    The host is ahead, as in training, so the first launch's host time does not count.
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
    """Returns TFLOP/s of this many large dense products, behind as many."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for mark in (start, end):
        for _ in range(products):
            torch.mm(*matrices)
        mark.record()
    torch.cuda.synchronize()
    return float(DENSE_FLOPS * products / start.elapsed_time(end) / 1e9)


def table(entries: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row for each model and form, and speed-ups over torch's."""
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
    """Yields forward and backward speed-ups of each bundled form over two of torch's.

    The first is torchtitan's as called, the second torch's fastest over forward and backward.
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
