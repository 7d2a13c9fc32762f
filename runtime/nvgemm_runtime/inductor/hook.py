"""Bundled kernels join the choices of Inductor's autotuning.

Inductor calls a preprocessing function with the choices for every GEMM. Ours finds the ATen choice
among them, reads the GEMM off its operands, and adds a choice for each kernel that bundles offer. A
choice that wins writes a call into the generated module, together with a header that finds the
kernel again, or ATen in its place, in whatever process the module is run.

With `reading`, `choice`, `nodes`, `modes`, `options`, `report` and `cache_key` it knows torch's
insides. The names that are used here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.callback import callback_handler
from torch._inductor import config, ir
from torch._inductor import select_algorithm as autotuning
from torch._inductor.virtualized import V

from ..errors import RequiredError
from ..gemm.aten import UNSERVED
from ..gemm.problem import Problem
from ..matching.index import Basis
from ..recording.text import gemm_line
from ..settings import MODE_VARIABLE, Mode, max_choices, trusts_rankings
from . import report, torch_nvgemm
from .alternatives import is_alternative
from .choice import GemmChoice, can_settle, settle
from .failures import log_failure, survive
from .fallbacks import StockCall, has_cpp_call
from .gpu_time import time_on_gpu
from .modes import OPTION, current_mode
from .reading import (
    backends_beside_aten,
    find_aten_gemm,
    find_operator,
    find_usual_aten,
    gemms_of_graph,
    read_choice,
)
from .recording import record_choices

if TYPE_CHECKING:
    from .offers import Found

_log = logging.getLogger(__name__)


def install() -> None:
    """Make Inductor ask us for choices."""
    cache = autotuning.get_algorithm_selector_cache()
    # First, so that a user's own functions see our choices too, and may filter them.
    cache.preprocessing_fns.insert(0, join)
    cache.feedback_saver_fns.append(_report_times)


def join(choices: list[Any]) -> list[Any]:
    """Inductor's preprocessing function: the choices, with ours behind them.

    Raises:
        RequiredError: If prebuilt kernels are required and none serves the GEMM.
        RecordError: If GEMMs are to be recorded and cannot be.
        SettingError: If the mode is none.
    """
    if any(isinstance(choice, GemmChoice) for choice in choices):
        return choices  # they were joined before, where a lowering of ours asks for choices
    record_choices(choices)
    try:
        return _with_ours(choices)
    except Exception as error:
        survive(error)
        return _after_failure(choices, error)


def _after_failure(choices: list[Any], failure: Exception) -> list[Any]:
    """The choices as they came; what is no more than a miss, unless kernels are required."""
    try:
        found = find_operator(choices)
    except Exception:  # whatever has broken the one may have broken the other
        found = None
    if found is not None:
        op, _ = found
        reason = f"a mistake of nvgemm-aot: {type(failure).__name__}: {failure}"
        _miss(f"{op} into {_text_of(choices[0].layout)}", [reason])
    return choices


def _with_ours(choices: list[Any]) -> list[Any]:
    if not (config.max_autotune or config.max_autotune_gemm) or current_mode() is Mode.OFF:
        return choices
    _summarize_at_the_end()
    served = _find_served(choices)
    if served is None:
        return choices
    ours = _choices_for(served)
    if served.found.is_final:
        return ours or [find_usual_aten(choices, served.aten)]  # one choice is not timed
    if not ours:
        return choices
    if current_mode() is Mode.REQUIRED:
        return on_equal_terms([*torch_nvgemm.without_any(choices), *ours])
    operators = {choice.offer.kernel.operator for choice in ours}
    return on_equal_terms([*torch_nvgemm.without_doubles(choices, operators), *ours])


def on_equal_terms(choices: list[Any]) -> list[Any]:
    """The choices for a GEMM, bundled kernels among them, to be timed by their time on the GPU."""
    if choices[0].layout.device.type == "cuda":
        time_on_gpu(choices)
    return choices


@dataclass(frozen=True, kw_only=True)
class _Served:
    """A GEMM that bundles have something for.

    Attributes:
        op: ATen's name of its operator.
        aten: ATen's choice.
        found: The kernels; none where ATen was measured to be faster.
        is_split: Whether they have the product alone.
    """

    op: str
    aten: Any
    found: Found
    is_split: bool


def _find_served(choices: list[Any]) -> _Served | None:
    """What bundles have for a GEMM; None for a miss, which is reported."""
    found_aten = find_aten_gemm(choices)
    if found_aten is None:
        _report_unserved(choices)
        return None
    # Imported here, so that compiling without max-autotune pays nothing for us.
    from .offers import find_offers, find_split_offers, start_compiling

    op, aten = found_aten
    gemm = read_choice(op, aten)
    obstacles = why_not_here(op, aten.input_nodes, aten.layout)
    may_compile = (
        current_mode() is Mode.AUTO
        and not obstacles
        and not is_alternative()
        and not torch_nvgemm.compiles_itself(choices)
    )
    if may_compile and not torch_nvgemm.is_on() and _is_first_of_graph():
        start_compiling(gemms_of_graph())
    found = find_offers(
        gemm,
        max_choices(),
        may_compile=may_compile,
        trusts=trusts_rankings(),
        needs_kernel=current_mode() is Mode.REQUIRED,
        beside=backends_beside_aten(choices),
    )
    aten.nvgemm_aot_gemm = found.gemm
    is_split = False
    if found.basis == "miss" and not config.cpp_wrapper:
        split = find_split_offers(gemm, max_choices())
        if split is not None:
            is_split = bool(split.offers)
            found = _with_split(found, split)
    if found.basis == "miss":
        _miss(found.gemm, found.reasons, found.problem)
        return None
    if obstacles:
        _miss(found.gemm, obstacles)
        return None
    return _Served(op=op, aten=aten, found=found, is_split=is_split)


def _with_split(found: Found, split: Found) -> Found:
    """What there is for a sum that no kernel computes, with what there is for its product."""
    if split.offers:
        # The sum itself is declared nowhere, whether its product is or not.
        return replace(found, offers=split.offers, basis=Basis.SIGNATURE.value)
    news = [reason for reason in split.reasons if reason not in found.reasons]
    return replace(
        found,
        reasons=(*found.reasons, *(f"for the product alone, {split.gemm}: {one}" for one in news)),
    )


def _choices_for(served: _Served) -> list[GemmChoice]:
    """Our choices for a GEMM; none where ATen was measured to be faster."""
    aten, found = served.aten, served.found
    _log.debug("%s: %d bundled kernels join (%s)", found.gemm, len(found.offers), found.basis)
    stock = StockCall.of_choice(served.op, found.gemm, aten, is_split=served.is_split)
    ours = [GemmChoice(stock, offer) for offer in found.offers]
    if ours:
        for node in aten.input_nodes:
            settle(node)
    offered = {choice.name: choice.offer.kernel.operator for choice in ours}
    if not is_alternative():
        report.met(found.gemm, basis=found.basis, offered=offered, measured=found.measured)
    return ours


def _is_first_of_graph() -> bool:
    """Whether no GEMM of Inductor's graph came up yet; from now on one has."""
    known = V.graph.__dict__.setdefault("nvgemm_aot_known", False)
    V.graph.nvgemm_aot_known = True
    return not known


def why_not_here(op: str, inputs: Sequence[Any], layout: Any) -> list[str]:
    """Why kernels that there are cannot join the choices."""
    if config.cpp_wrapper and not has_cpp_call(op):
        return [f"generated C++ cannot call ATen's {op} on a result that is there already"]
    if getattr(config, "distributed_max_autotune_gemm", False):
        return ["distributed_max_autotune_gemm passes no extern choices but ATen's on"]
    if op == "_scaled_mm" and not all(_has_examples(node.get_dtype()) for node in inputs):
        return ["this torch makes no numbers of fp4, with which choices could be timed"]
    if not isinstance(layout, ir.FixedLayout):
        return ["the strides of the result are still open"]
    if not all(can_settle(node) for node in inputs):
        return ["an operand's strides must become others"]
    return []


@functools.cache
def _has_examples(dtype: torch.dtype) -> bool:
    """Whether torch can make numbers of a type: up to 2.12 it cannot of fp4, and fails."""
    from torch._dynamo.testing import rand_strided

    try:
        rand_strided((2,), (1,), dtype=dtype)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def _report_unserved(choices: list[Any]) -> None:
    """Say of a GEMM that no kernel computes, or that ATen may not compute, why it is a miss."""
    found = find_operator(choices)
    if found is None:
        return  # something else is being chosen
    op, choice = found
    no_aten = "ATEN is not among max_autotune_gemm_backends, and is needed beside our kernels"
    choice.nvgemm_aot_gemm = f"{op} into {_text_of(choice.layout)}"
    _miss(choice.nvgemm_aot_gemm, [UNSERVED[op].reason if op in UNSERVED else no_aten])


def _text_of(layout: Any) -> str:
    return f"{layout.dtype}{[str(extent) for extent in layout.size]}".replace("'", "")


def _miss(gemm: str, reasons: Sequence[str], problem: Problem | None = None) -> None:
    _log.debug("%s: no bundled kernel: %s", gemm, "; ".join(reasons))
    if is_alternative():
        return  # the GEMM came up itself as well
    report.met(gemm, basis="miss", reasons=reasons)
    if current_mode() is Mode.REQUIRED:
        raise RequiredError(_required_text(gemm, reasons, problem), tuple(reasons))


def _required_text(gemm: str, reasons: Sequence[str], problem: Problem | None) -> str:
    lines = [
        f"{gemm}: no prebuilt kernel, and {MODE_VARIABLE}=required (or {OPTION}) allows nothing "
        "else:",
        *(f"  {reason}" for reason in reasons),
    ]
    if problem is None:
        lines.append("no manifest line helps here; compile this model in mode auto")
    else:
        lines += [
            "this line under gemms: of a manifest declares it; build its wheel and install that:",
            f"  {gemm_line(problem)}",
        ]
    return "\n".join(lines)


def _report_times(timings: dict[Any, float], *_: object) -> None:
    """Inductor's feedback function: what each choice took, in milliseconds."""
    try:
        if is_alternative():
            return  # a part of what is timed as a whole
        gemm = next(
            (met for choice in timings if (met := getattr(choice, "nvgemm_aot_gemm", None))), None
        )
        if gemm is not None:
            report.timed(gemm, {choice.name: float(time) for choice, time in timings.items()})
    except Exception as error:
        log_failure(error)


def _summarize_at_the_end() -> None:
    """Have a line logged when the compilation is over. Resetting Dynamo forgets who wants that."""
    if report.summarize not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(report.summarize)
