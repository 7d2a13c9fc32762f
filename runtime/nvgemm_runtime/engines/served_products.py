"""Counts the Linears in an engine's model that bundled kernels serve, and reports them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import NoKernelError, RequiredError
from ..settings import Mode, default_mode

if TYPE_CHECKING:
    import torch

    from ..installed.registry import FoundBundle
    from .seams import Engine

_LINEAR_METHODS = ("UnquantizedLinearMethod",)
_HEAD_METHODS = ("UnquantizedEmbeddingMethod",)
_HEAD = "lm_head"
"""Name of the head in a model; a tied one is an embedding layer, which is named twice."""

_WRAPPED = ".base_layer"
"""End of a layer's name inside vLLM's wrapper for LoRA."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Share of a model's products that bundled kernels serve.

    Attributes:
        layers: Number of Linears, with the head.
        served_layers: Number of those that a loaded kernel serves at any size.
        shapes: Number of different products among them.
        served_shapes: Number of those that a loaded kernel serves at any size.
        sizes: Numbers of rows that were asked about, ascending.
        share: Part of all calls, one of each Linear at each size, that a kernel computes; 0 to 1.
    """

    layers: int
    served_layers: int
    shapes: int
    served_shapes: int
    sizes: tuple[int, ...]
    share: float

    def __str__(self) -> str:
        range_text = f"m {self.sizes[0]} to {self.sizes[-1]}" if self.sizes else "m 1"
        return (
            f"bundled kernels serve {self.served_layers} of {self.layers} unquantised Linears "
            f"({self.served_shapes} of {self.shapes} shapes), {self.share:.0%} of their calls at "
            f"{max(len(self.sizes), 1)} sizes, {range_text}"
        )


def load_kernels(model: torch.nn.Module) -> None:
    """Loads the kernels in the tables for a model's heads, and those in compiled graphs so far."""
    import torch

    from .. import linear, preload

    for weight, _ in _products(model, only_heads=True):
        with torch.inference_mode():  # looks up the table
            linear(weight.new_zeros(1, weight.shape[1]), weight)
    preload()


def measure_coverage(model: torch.nn.Module, sizes: Sequence[int]) -> Coverage:
    """Counts the products in a model for which this process has loaded a kernel.

    Args:
        model: Model in an engine.
        sizes: Numbers of rows to ask about; 1 if there are none.
    """
    import torch

    from ..gemm.extra_operands import ExtraOperands
    from ..launch.compiled import named_kernels
    from ..launch.dispatch_table import dispatch_table
    from ..launch.loading.loader import LOADER
    from ..matching.thresholds import DispatchTable

    loaded = {kernel_id for kernel_id in named_kernels() if LOADER.get(kernel_id) is not None}
    counts: dict[tuple[object, ...], int] = {}
    tables: dict[tuple[object, ...], DispatchTable] = {}
    for weight, bias in _products(model):
        key = (*weight.shape, weight.dtype, weight.stride(), bias is not None)
        counts[key] = counts.get(key, 0) + 1
        if key not in tables:
            rows = torch.empty(2, weight.shape[1], dtype=weight.dtype, device=weight.device)
            with contextlib.suppress(NoKernelError, ValueError):
                tables[key] = dispatch_table(
                    rows, weight.detach().t(), extras=ExtraOperands(addend=bias)
                ).decided.table
    asked = tuple(sorted(set(sizes))) or (1,)
    calls = {
        key: sum(table.at(m) in loaded for m in asked) * counts[key]
        for key, table in tables.items()
    }
    layers = sum(counts.values())
    return Coverage(
        layers=layers,
        served_layers=sum(counts[key] for key, served in calls.items() if served),
        shapes=len(counts),
        served_shapes=sum(served > 0 for served in calls.values()),
        sizes=tuple(sorted(set(sizes))),
        share=sum(calls.values()) / (layers * len(asked)) if layers else 0.0,
    )


def report(engine: Engine, model: torch.nn.Module, sizes: Sequence[int], spent_s: float) -> None:
    """Loads what this process may call and is not loaded yet, and logs one line.

    Args:
        engine: Engine that shows the line.
        model: Its model.
        sizes: Numbers of rows for which it captured graphs.
        spent_s: Seconds that the plug-in has taken before.

    Raises:
        RequiredError: If a kernel cannot be loaded in mode ``required``.
    """
    from .. import __version__, bundles, preload

    begin = time.perf_counter()
    found = bundles()
    if not found:
        engine.log.info("nvgemm-aot %s: no kernel wheel is installed", __version__)
        return
    loaded = preload()
    coverage = measure_coverage(model, sizes)
    described = ", ".join(dict.fromkeys(map(_describe, found)))
    engine.log.info(
        "nvgemm-aot %s: %s; %d kernels are loaded; the plug-in took %.2f s; %s%s",
        __version__,
        coverage,
        loaded.kernels,
        spent_s + time.perf_counter() - begin,
        described,
        "" if coverage.served_layers else "; the reason: nvgemm-aot doctor",
    )
    if loaded.failures:
        kernel_id, reason = next(iter(loaded.failures.items()))
        message = f"{len(loaded.failures)} kernels cannot be loaded: {kernel_id[:12]}: {reason}"
        if default_mode() is Mode.REQUIRED:
            raise RequiredError(message, tuple(loaded.failures.values()))
        engine.warn_once(message)


def _describe(bundle: FoundBundle) -> str:
    """Returns a bundle's origin, and why this device cannot use it, if so."""
    from ..launch.compiled import default_device
    from ..matching.device import device_facts

    device = default_device()
    refusal = bundle.refusal(device_facts(device.type, device.index or 0))
    return bundle.origin if refusal is None else f"{bundle.origin} (unusable: {refusal})"


def _products(
    model: torch.nn.Module, *, only_heads: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yields weight [n, k] and bias of each unquantised Linear, the head included."""
    import torch

    seen: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if (
            not isinstance(weight, torch.Tensor)
            or weight.dim() != 2
            or not weight.is_floating_point()
        ):
            continue
        method = type(getattr(module, "quant_method", None)).__name__
        is_head = name.removesuffix(_WRAPPED).split(".")[-1] == _HEAD and method in _HEAD_METHODS
        if id(module) in seen or not (is_head or (method in _LINEAR_METHODS and not only_heads)):
            continue
        seen.add(id(module))
        bias = getattr(module, "bias", None)
        adds = isinstance(bias, torch.Tensor) and not getattr(module, "skip_bias_add", False)
        yield weight, bias if adds else None
