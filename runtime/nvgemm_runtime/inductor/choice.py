"""A bundled kernel as one of Inductor's choices: how it is timed, and what it writes if it wins.

The names of torch that are used here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import ir
from torch._inductor import select_algorithm as autotuning
from torch._inductor.virtualized import V

from ..counters import COUNTERS
from .nodes import GemmNode, name_of
from .packages import was_logged

if TYPE_CHECKING:
    from .fallbacks import StockCall
    from .offers import Offer

_log = logging.getLogger(__name__)


def can_settle(node: Any) -> bool:
    """Whether an operand may keep the strides that our choice is made for.

    Inductor leaves the strides of what it computes open for as long as it can. Two extern choices
    for a buffer whose strides change afterwards end in a KeyError on torch 2.13 to 2.15.
    """
    if isinstance(getattr(node, "data", node), ir.ReinterpretView):
        return True
    wanted = V.graph.buffer_layout_constraints.get(node.get_name())
    layout = node.get_layout()
    return wanted is None or (
        list(wanted.size) == list(layout.size) and list(wanted.stride) == list(layout.stride)
    )


def settle(node: Any) -> None:
    """Fix an operand's strides as they are."""
    is_view = isinstance(getattr(node, "data", node), ir.ReinterpretView)
    if not is_view and isinstance(node.get_layout(), ir.FlexibleLayout):
        node.freeze_layout()


def _benchmarked(
    *tensors: torch.Tensor,
    kernel: str,
    order: tuple[int, ...],
    split: bool,
    out: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """What Inductor times: the kernel, and never ATen in its place."""
    from ..launch.select import load_kernel

    a, b, *extras = (tensors[place] for place in order)
    if not split:
        load_kernel(kernel).launch(a, b, out, *extras)
        return out
    product = torch.empty_like(out, dtype=torch.float32)
    load_kernel(kernel).launch(a, b, product)
    return torch.add(product, *extras, out=out)


_CHOICE = autotuning.ExternKernelChoice(_benchmarked, name="nvgemm_aot")
"""Inductor finds the function by this name, in processes that autotune for this one too."""


class GemmChoice(autotuning.ExternKernelCaller):  # type: ignore[misc]
    """A bundled kernel as one of Inductor's choices.

    Args:
        stock: What it stands in for.
        offer: The kernel.
    """

    def __init__(self, stock: StockCall, offer: Offer) -> None:
        # Results are cached by these.
        kwargs = {
            **stock.options,
            "kernel": offer.kernel.id,
            "order": stock.order,
            "split": stock.is_split,
        }
        super().__init__(_CHOICE, stock.inputs, stock.layout, kwargs)
        self.stock = stock
        self.offer = offer
        self.name = name_of(stock, offer)
        self.description = offer.kernel.operator

    def benchmark(self, *args: torch.Tensor, out: torch.Tensor) -> float:
        """Milliseconds of a launch; infinite where the kernel cannot be launched."""
        try:
            with COUNTERS.spending("timing"):
                return float(super().benchmark(*args, out=out))
        except Exception as error:
            known = was_logged(error) or _is_known(self.offer.origin, type(error))
            level = logging.DEBUG if known else logging.WARNING
            _log.log(level, "%s of %s is not offered: %s", self.name, self.offer.origin, error)
            return math.inf

    def output_node(self) -> Any:
        """The node that Inductor schedules when this choice has won."""
        return ir.TensorBox.create(GemmNode(self.stock, self.offer))

    def __str__(self) -> str:
        return f"GemmChoice({self.name}, {self.offer.kernel.operator})"


_known_failures: set[tuple[str, type[Exception]]] = set()


def _is_known(origin: str, kind: type[Exception]) -> bool:
    """Whether kernels of a wheel have failed like this before; from now on they have."""
    known = (origin, kind) in _known_failures
    _known_failures.add((origin, kind))
    return known
