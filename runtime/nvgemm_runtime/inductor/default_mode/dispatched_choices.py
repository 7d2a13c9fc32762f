"""Presents a dispatch table as an Inductor choice, and generates its call.

The torch names used here are private and were run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import ir
from torch._inductor import select_algorithm as autotuning

from ...matching.dispatch import Dispatch
from ...matching.thresholds import ATEN, DispatchTable
from .. import report
from ..autotuning.choice_timing import stock_benchmark
from ..autotuning.choices import BundledChoice, CallNode, StockCall, header, log_failed_timing
from ..codegen import cpp
from ..offers import Offer

if TYPE_CHECKING:
    from ...gemm.problem import Signature


@dataclass(frozen=True, kw_only=True)
class DispatchOffer:
    """Kernels that compute a GEMM, dispatched by m.

    Attributes:
        table: Kernel for each m.
        kernels: Offers by kernel id.
    """

    table: DispatchTable
    kernels: Mapping[str, Offer]

    @classmethod
    def of(cls, dispatch: Dispatch, table: DispatchTable) -> DispatchOffer:
        """Builds the offer from a dispatch decision and a part of its table."""
        kernels = {kernel_id: Offer.of(dispatch.measured[kernel_id]) for kernel_id in table.used}
        return cls(table=table, kernels=kernels)

    def without_aten(self, default: Offer) -> DispatchOffer:
        """Returns a copy with ``usual`` wherever the table has ATen."""
        table = self.table.without_aten(default.kernel.id)
        offers = {**self.kernels, default.kernel.id: default}
        return DispatchOffer(
            table=table, kernels={kernel_id: offers[kernel_id] for kernel_id in table.used}
        )

    @property
    def origins(self) -> dict[str, str]:
        """Source of each kernel, by kernel id."""
        return {kernel_id: offer.origin for kernel_id, offer in self.kernels.items()}

    def __str__(self) -> str:
        """Returns the table as text, e.g. ``ATen, from m 16 Cpu_8x32, from m 25 ATen``."""
        names = [
            "ATen" if kernel_id == ATEN else self.kernels[kernel_id].kernel.operator
            for kernel_id in self.table.kernels
        ]
        later = (f"from m {bound} {name}" for bound, name in zip(self.table.bounds, names[1:]))
        return ", ".join([names[0], *later])

    def python_definition(self, stock: StockCall) -> tuple[str, str]:
        """Returns a generated module's first lines, and an expression for the call's function."""
        data = f"{self.table.bounds}, {self.table.kernels}, {self.origins}, {stock.order}"
        return _HEADER, f"nvgemm_aot_dispatched({stock.fallback}, {data})"

    def name_for(self, stock: StockCall) -> str:
        """Returns a call's name in generated code. Each table gets its own."""
        text = repr((self.table.bounds, self.table.kernels, sorted(self.origins.items())))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"nvgemm_{stock.op.lstrip('_')}_by_m_{digest[:12]}"


def _benchmarked(
    *tensors: torch.Tensor,
    bounds: tuple[int, ...],
    kernels: tuple[str, ...],
    order: tuple[int, ...],
    out: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Runs the kernel for these operands, for Inductor's timing. Not called for ATen's sizes."""
    from ...launch.select import load_kernel

    a, b, *extras = (tensors[index] for index in order)
    kernel_id = DispatchTable(bounds=bounds, kernels=kernels).at(a.shape[-2])
    load_kernel(kernel_id).launch(a, b, out, *extras)
    return out


_CHOICE = autotuning.ExternKernelChoice(_benchmarked, name="nvgemm_aot_by_m")
"""Inductor finds the function by this name."""


class DispatchChoice(BundledChoice):
    """Dispatch table as an Inductor choice."""

    def __init__(self, stock: StockCall, offer: DispatchOffer, aten: Any) -> None:
        """Builds the choice. ``aten`` is Inductor's choice for the table's ATen sizes."""
        kwargs = {
            **stock.options,
            "bounds": offer.table.bounds,
            "kernels": offer.table.kernels,
            "order": stock.order,
        }
        super().__init__(_CHOICE, stock.inputs, stock.layout, kwargs)
        self.stock = stock
        self.offer = offer
        self.aten = aten
        self.name = offer.name_for(stock)
        self.description = str(offer)

    def benchmark(self, *args: torch.Tensor, out: torch.Tensor) -> float:
        """Returns milliseconds for these operands, or infinity if the kernel cannot be launched."""
        kernel_id = self.offer.table.at(args[self.stock.order[0]].shape[-2])
        try:
            if kernel_id == ATEN:
                return stock_benchmark(self.aten)(*args, out=out)
            return float(super().benchmark(*args, out=out))
        except Exception as error:
            if kernel_id != ATEN:
                offer = self.offer.kernels[kernel_id]
                log_failed_timing(self.name, kernel_id, offer.origin, error)
            return math.inf

    def output_node(self) -> Any:
        """Returns the node that Inductor schedules."""
        return ir.TensorBox.create(DispatchedNode(self.stock, self.offer))

    def __str__(self) -> str:
        return f"DispatchChoice({self.name}, {self.offer})"


_HEADER = header(
    "nvgemm_runtime.launch.dispatched",
    "dispatched",
    "bounds, kernels, origins, order",
    "*origins.values()",
)


class DispatchedNode(CallNode):
    """Call that dispatches by m."""

    def __init__(self, stock: StockCall, offer: DispatchOffer) -> None:
        self.offer = offer
        super().__init__(stock, offer.name_for(stock))

    def report_use(self) -> None:
        """Reports the kernels."""
        kernels = list(self.offer.kernels)
        report.used_by_m(self.stock.gemm, self.name_in_code, kernels, str(self.offer))

    def python_definition(self) -> tuple[str, str]:
        """Implements `CallNode.python_definition`."""
        return self.offer.python_definition(self.stock)

    def cpp_declaration(self) -> str:
        """Implements `CallNode.cpp_declaration`."""
        return cpp.table_declaration(self.name_in_code, self.offer.table, self.offer.origins)

    def cpp_condition(self, operands: cpp.Operands) -> str:
        """Implements `CallNode.cpp_condition`."""
        return cpp.table_condition(self.name_in_code, operands)

    @property
    def signature(self) -> Signature:
        """Signature that all its kernels share."""
        return next(iter(self.offer.kernels.values())).kernel.signature
