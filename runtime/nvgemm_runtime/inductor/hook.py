"""Bundled kernels join the choices of Inductor's autotuning. With `nodes` it knows torch's insides.

Inductor calls a preprocessing function with the choices for every GEMM. Ours finds the ATen choice
among them, reads the GEMM off its operands, and adds a choice for each kernel that bundles offer. A
choice that wins writes a call into the generated module, together with a header that finds the
kernel again, or ATen in its place, in whatever process the module is run.

The names of torch that are used here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import config, ir
from torch._inductor import select_algorithm as autotuning
from torch._inductor.virtualized import V

from ..declarable import UNSERVED
from . import report
from .nodes import GemmNode, name_of
from .operand import Operand
from .settings import max_choices

if TYPE_CHECKING:
    from .offers import Offer

_log = logging.getLogger(__name__)

_ATEN_CHOICES = {"mm": "mm", "mm_dtype": "mm", "bmm": "bmm", "bmm_dtype": "bmm"}
"""By name of Inductor's ATen choice: the operation, which is the name of torch's function too."""

_BASE_ALIGNMENT_BYTES = 16
"""Alignment of buffers that Inductor allocates, and of inputs that it did not find unaligned."""


def install() -> None:
    """Make Inductor ask us for choices."""
    cache = autotuning.get_algorithm_selector_cache()
    # First, so that a user's own functions see our choices too, and may filter them.
    cache.preprocessing_fns.insert(0, join)
    cache.feedback_saver_fns.append(_report_times)


def join(choices: list[Any]) -> list[Any]:
    """Inductor's preprocessing function: the choices, with ours behind them."""
    try:
        return [*choices, *_our_choices(choices)]
    except Exception as error:
        _log_failure(error)
        return choices


_failures: set[str] = set()


def _log_failure(error: Exception) -> None:
    """Once for each failure: what went wrong with one GEMM mostly does with all."""
    failure = f"{type(error).__name__}: {error}"
    if failure in _failures:
        return
    _failures.add(failure)
    _log.warning(
        "bundled kernels stay out of the choices: %s; this is a mistake of nvgemm-aot, please "
        "report it",
        failure,
        exc_info=True,
    )


def _our_choices(choices: list[Any]) -> list[GemmChoice]:
    if not (config.max_autotune or config.max_autotune_gemm):
        return []
    if getattr(config, "distributed_max_autotune_gemm", False):
        return []  # it can pass no other extern choices than ATen's between its processes
    aten = next((choice for choice in choices if _is_aten_gemm(choice)), None)
    if aten is None:
        return _report_unserved(choices)
    if not isinstance(aten.layout, ir.FixedLayout):
        return []
    # Imported here, so that compiling without max-autotune pays nothing for us.
    from .offers import GemmOnDevice, find_offers

    gemm = GemmOnDevice(
        op=_ATEN_CHOICES[aten.choice.name],
        a=_operand(aten.input_nodes[0]),
        b=_operand(aten.input_nodes[1]),
        out=_operand_of(aten.layout, 0),
    )
    found = find_offers(gemm, max_choices())
    if not found.offers:
        return _miss(aten, found.gemm, found.reasons)
    if not all(_can_settle(node) for node in aten.input_nodes):
        return _miss(aten, found.gemm, ["an operand's strides must become others"])
    for node in aten.input_nodes:
        _settle(node)
    aten.nvgemm_aot_gemm = found.gemm
    _log.debug("%s: %d bundled kernels join (%s)", found.gemm, len(found.offers), found.basis)
    ours = [GemmChoice(aten, offer) for offer in found.offers]
    offered = {choice.name: choice.offer.kernel.operator for choice in ours}
    report.met(found.gemm, basis=found.basis, offered=offered)
    return ours


def _miss(aten: Any, gemm: str, reasons: Sequence[str]) -> list[GemmChoice]:
    aten.nvgemm_aot_gemm = gemm
    _log.debug("%s: no bundled kernel: %s", gemm, "; ".join(reasons))
    report.met(gemm, basis="miss", reasons=reasons)
    return []


def _report_unserved(choices: list[Any]) -> list[GemmChoice]:
    """Say of a GEMM that is neither mm nor bmm, or that ATen may not compute, why it is a miss."""
    extern = next((choice for choice in choices if _name_in_aten(choice) in UNSERVED), None)
    if extern is not None:
        name = extern.choice.name
        return _miss(extern, f"{name} into {_text_of(extern.layout)}", [UNSERVED[name]])
    target = V.graph.current_node.target
    if choices and target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        reason = "ATEN is not among max_autotune_gemm_backends, and is needed beside our kernels"
        return _miss(choices[0], f"{target} into {_text_of(choices[0].layout)}", [reason])
    return []


def _text_of(layout: Any) -> str:
    return f"{layout.dtype}{[str(extent) for extent in layout.size]}".replace("'", "")


def _report_times(timings: dict[Any, float], *_: object) -> None:
    """Inductor's feedback function: what each choice took, in milliseconds."""
    try:
        gemm = next(
            (met for choice in timings if (met := getattr(choice, "nvgemm_aot_gemm", None))), None
        )
        if gemm is not None:
            report.timed(gemm, {choice.name: float(time) for choice, time in timings.items()})
    except Exception as error:
        _log_failure(error)


def _is_aten_gemm(choice: Any) -> bool:
    return _name_in_aten(choice) in _ATEN_CHOICES and len(choice.input_nodes) == 2


def _name_in_aten(choice: Any) -> str | None:
    is_extern = type(choice) is autotuning.ExternKernelCaller
    return str(choice.choice.name) if is_extern else None


def _operand(node: Any) -> Operand:
    """An operand as Inductor knows it; sizes that are symbols count as their hints."""
    layout = node.get_layout()
    # Inductor asks for the alignment of inputs on GPUs only, and calls all others unaligned.
    known = layout.device.type == "cpu" or node.get_name() not in V.graph.unaligned_buffers
    return _operand_of(layout, _BASE_ALIGNMENT_BYTES if known else layout.dtype.itemsize)


def _operand_of(layout: Any, base_address: int) -> Operand:
    hint = V.graph.sizevars.optimization_hint
    return Operand(
        dtype=layout.dtype,
        device=layout.device,
        shape=tuple(int(hint(extent)) for extent in layout.size),
        strides=tuple(int(hint(stride)) for stride in layout.stride),
        address=base_address + int(hint(layout.offset)) * layout.dtype.itemsize,
    )


def _can_settle(node: Any) -> bool:
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


def _settle(node: Any) -> None:
    """Fix an operand's strides as they are."""
    is_view = isinstance(getattr(node, "data", node), ir.ReinterpretView)
    if not is_view and isinstance(node.get_layout(), ir.FlexibleLayout):
        node.freeze_layout()


def _benchmarked(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    kernel: str,
    out: torch.Tensor,
) -> torch.Tensor:
    """What Inductor times: the kernel, and never ATen in its place."""
    from ..api import load_kernel

    load_kernel(kernel).launch(a, b, out)
    return out


_CHOICE = autotuning.ExternKernelChoice(_benchmarked, name="nvgemm_aot")
"""Inductor finds the function by this name, in processes that autotune for this one too."""


class GemmChoice(autotuning.ExternKernelCaller):  # type: ignore[misc]
    """A bundled kernel as one of Inductor's choices.

    Args:
        aten: The ATen choice for the same GEMM.
        offer: The kernel.
    """

    def __init__(self, aten: Any, offer: Offer) -> None:
        kwargs = {**aten.kwargs, "kernel": offer.kernel.id}  # results are cached by these
        super().__init__(_CHOICE, aten.input_nodes, aten.layout, kwargs)
        self.aten = aten
        self.offer = offer
        self.name = name_of(offer)
        self.description = offer.kernel.operator

    def benchmark(self, *args: torch.Tensor, out: torch.Tensor) -> float:
        """Milliseconds of a launch; infinite where the kernel cannot be launched."""
        try:
            return float(super().benchmark(*args, out=out))
        except Exception as error:
            level = logging.DEBUG if _is_known(self.offer.origin, type(error)) else logging.WARNING
            _log.log(level, "%s of %s is not offered: %s", self.name, self.offer.origin, error)
            return math.inf

    def output_node(self) -> Any:
        """The node that Inductor schedules when this choice has won."""
        return ir.TensorBox.create(GemmNode(self.aten, self.offer))

    def __str__(self) -> str:
        return f"GemmChoice({self.name}, {self.offer.kernel.operator})"


_known_failures: set[tuple[str, type[Exception]]] = set()


def _is_known(origin: str, kind: type[Exception]) -> bool:
    """Whether kernels of a wheel have failed like this before; from now on they have."""
    known = (origin, kind) in _known_failures
    _known_failures.add((origin, kind))
    return known
