"""Counts the Linears in an engine's model that bundled kernels serve."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import NoKernelError

if TYPE_CHECKING:
    import torch


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
    for weight, bias in find_linears(model):
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


def find_linears(
    model: torch.nn.Module, *, only_heads: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yields weight [n, k] and bias of each unquantised Linear, the head included.

    Args:
        model: Model in an engine.
        only_heads: True for its heads alone, which are the layers named ``lm_head``.
    """
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
