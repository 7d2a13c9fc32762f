"""Adds bundled kernels to the choices that Inductor autotunes.

Inductor calls a preprocessing function with the choices for every GEMM (`entry_point`). `join`
reads the GEMM from ATen's choice and adds a choice for each kernel that `offers` finds. A winning
choice writes a call into the generated module, with a header that finds the kernel, or falls back
to ATen, in any process that runs the module.

The torch names used here are private and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch._dynamo.callback import callback_handler
from torch._inductor import config
from torch._inductor import select_algorithm as autotuning
from torch._inductor.virtualized import V

from ..errors import RequiredError
from ..gemm.aten import UNSERVED, AtenGemm
from ..gemm.problem import Problem
from ..installed.digest import has_bundles
from ..recording.recorder import recorded_target, recorder
from ..recording.text import gemm_line
from ..settings import (
    MODE_VARIABLE,
    Mode,
    max_choices,
    records_graphs,
    serves_default_mode,
    trusts_rankings,
)
from . import report
from .autotuning import torch_nvgemm
from .autotuning.choice_timing import time_against_inductor, time_on_gpu, time_over_sizes
from .autotuning.choices import BundledChoice, StockCall, gemm_choices
from .autotuning.obstacles import obstacles
from .configuration.modes import OPTION, current_mode
from .reading import (
    AutotunedGemm,
    backends_beside_aten,
    find_eager_aten,
    find_gemm,
    gemms_of_graph,
    is_alternative,
    is_symbolic,
)
from .report import DATA_DEPENDENT, is_data_dependent, log_failure, raise_or_log

if TYPE_CHECKING:
    from .default_mode.dynamic_sizes import DispatchResult, TimedDispatch
    from .offers import Offers

_log = logging.getLogger(__name__)


def join(choices: list[Any]) -> list[Any]:
    """Appends bundled kernels to a GEMM's choices; see `entry_point.join`."""
    if any(isinstance(choice, BundledChoice) for choice in choices):
        _refuse_unopened()
        return choices  # a lowering in this package has added them already
    gemm = None
    try:
        gemm = find_gemm(choices)
        if gemm is None:
            return choices
        if not is_alternative():
            record_gemm(lambda: gemm.call)
        if not (config.max_autotune or config.max_autotune_gemm):
            return _join_in_default_mode(choices, gemm)
        if current_mode() is Mode.OFF:
            return choices
        _register_summary()
        _refuse_unopened()
        return _join_kernels(choices, gemm)
    except Exception as error:
        raise_or_log(error)
        if gemm is not None:
            # A miss, which is an error only in mode required.
            mistake = f"internal error in nvgemm-aot: {type(error).__name__}: {error}"
            _report_miss(str(gemm), [DATA_DEPENDENT if is_data_dependent(error) else mistake])
        return choices


def _join_in_default_mode(choices: list[Any], gemm: AutotunedGemm) -> list[Any]:
    """Joins kernels without max-autotune: there is one choice, and nothing is timed."""
    if not serves_default_mode() or current_mode() is Mode.OFF:
        return choices
    if is_alternative() or not has_bundles():
        return choices
    # Imported here, so that compiling without bundles stays cheap.
    from .default_mode.default_choices import join_measured

    _register_summary()
    _refuse_unopened()
    return join_measured(choices, gemm)


def _refuse_unopened() -> None:
    if current_mode() is Mode.REQUIRED:
        from ..installed.required import require_opened

        require_opened()


def record_gemm(read: Callable[[], AtenGemm]) -> None:
    """Records a GEMM if recording is on. The mode and autotuning do not matter.

    Raises:
        RecordError: If it should be recorded and cannot be.
    """
    try:
        active_recorder = recorder()
        if active_recorder is None:
            return
        # Imported here, so that compiling without recording stays cheap.
        from ..matching.device import device_facts
        from ..recording.declarable import declarable_for
        from ..recording.text import target_entry

        gemm = read()
        device = gemm.a.device
        facts = device_facts(device.type, device.index or 0)
        target = recorded_target(facts.capability, facts.platform, facts.cuda)
        active_recorder.add(declarable_for(gemm, target.arch), target_entry(target))
    except Exception as error:
        raise_or_log(error)


def _join_kernels(choices: list[Any], gemm: AutotunedGemm) -> list[Any]:
    offers = _find_offers(choices, gemm)
    if offers.is_miss:
        _report_miss(offers.gemm, offers.reasons, offers.problem)
        return choices
    _log.debug("%s: %d bundled kernels join (%s)", offers.gemm, len(offers.kernels), offers.basis)
    stock = StockCall.of_choice(gemm.op, offers.gemm, gemm.choice, is_split=offers.is_split)
    kernels = gemm_choices(stock, offers.kernels)
    operators = {choice.name: choice.offer.kernel.operator for choice in kernels}
    dispatch = _find_dispatch_choice(gemm, stock)
    timed = None if dispatch is None else dispatch.choice
    measured = offers.measured
    if offers.is_final and dispatch is not None and dispatch.is_left_to_aten:
        kernels, operators = [], {}
        measured = "ATen at every m in the graph"
    if not is_alternative():
        offered = {} if offers.is_final and timed is not None else operators
        if timed is not None:
            offered = {**offered, timed.choice.name: timed.description}
        report.met(
            offers.gemm,
            basis=offers.basis,
            offered=offered,
            measured=measured,
            doubtful=[*offers.doubtful, *(dispatch.doubtful if dispatch else ())],
        )
    if offers.is_final:  # Inductor does not time a single choice
        if timed is not None:
            return [timed.choice]
        return kernels or [find_eager_aten(choices, gemm.choice)]
    new_choices = [*kernels, *([] if timed is None else [timed.choice])]
    if not new_choices:
        return choices
    if current_mode() is Mode.REQUIRED:
        stock_choices = torch_nvgemm.without_any(choices)
    else:
        stock_choices = torch_nvgemm.without_doubles(choices, set(operators.values()))
    joined = time_fairly(stock_choices, new_choices)
    return joined if timed is None else join_dispatch(joined, timed)


def _find_dispatch_choice(gemm: AutotunedGemm, stock: StockCall) -> DispatchResult | None:
    """Finds a choice that dispatches by m for a graph with dynamic m, or None if none may join."""
    if is_alternative() or stock.is_split or not is_symbolic(gemm):
        return None
    # Imported here, so that compiling for fixed sizes stays cheap.
    from .default_mode.dynamic_sizes import find_dispatch_choice

    return find_dispatch_choice(gemm, stock, needs_kernel=current_mode() is Mode.REQUIRED)


def join_dispatch(choices: list[Any], dispatch: TimedDispatch) -> list[Any]:
    """Makes Inductor time the last choice, which dispatches by m, at several sizes."""
    extern = (autotuning.ExternKernelCaller,)
    time_over_sizes(
        choices[:-1], dispatch.choice, lambda choice: isinstance(choice, extern), dispatch.sizes
    )
    return choices


def time_fairly(others: list[Any], kernels: list[Any]) -> list[Any]:
    """Appends bundled kernels to Inductor's choices, all timed fairly.

    They are timed by GPU time. Inductor's own choice is left as it is only if its choices differ in
    launch cost and the program may wait for launches.
    """
    choices = [*others, *kernels]
    if choices[0].layout.device.type == "cuda":
        in_graphs = config.triton.cudagraphs or records_graphs()
        launches_differ = len(others) > 1 and bool(backends_beside_aten(others))
        if launches_differ and not in_graphs and _are_timed_here(others):
            time_against_inductor(others, kernels)
        else:
            time_on_gpu(others, kernels)
    return choices


def _are_timed_here(choices: list[Any]) -> bool:
    """Returns True if Inductor times all choices in this process, in sequence.

    With CUTLASS among the backends, it times choices other than extern calls in another process.
    """
    elsewhere = config.autotune_in_subproc or _is_pipelined()
    names = backends_beside_aten(choices)
    return not elsewhere and not any(name.startswith(("CUTLASS", "CUDA")) for name in names)


def _is_pipelined() -> bool:
    """Returns True if Inductor times choices in another process while it compiles on."""
    return bool(getattr(config, "pipeline_max_autotune_gemm", False))


def _find_offers(choices: list[Any], gemm: AutotunedGemm) -> Offers:
    """Finds the bundles' offers for a GEMM. Returns a miss if kernels cannot join these choices."""
    # Imported here, so that compiling without max-autotune stays cheap.
    from .offers import Offers, find_offers, start_compiling

    if not gemm.is_served:
        no_aten = (
            "max_autotune_gemm_backends lacks ATEN, which bundled kernels need as their fallback"
        )
        reason = UNSERVED[gemm.op].reason if gemm.op in UNSERVED else no_aten
        gemm.choice.nvgemm_aot_gemm = str(gemm)
        return Offers(gemm=str(gemm), basis="miss", reasons=(reason,))
    reasons_against = obstacles(gemm.op, gemm.choice.input_nodes, gemm.choice.layout)
    if _is_pipelined() and len(choices) == 1:
        # In this mode torch has no times outside multi-template buffers, and fails.
        reasons_against = [
            "pipeline_max_autotune_gemm cannot compare kernels with ATen's only choice"
        ]
    may_compile = (
        current_mode() is Mode.AUTO
        and not reasons_against
        and not is_alternative()
        and not torch_nvgemm.compiles_itself(choices)
    )
    if may_compile and not torch_nvgemm.is_on() and _mark_graph():
        start_compiling(gemms_of_graph())
    offers = find_offers(
        gemm.call,
        max_choices(),
        may_compile=may_compile,
        may_split=not config.cpp_wrapper,
        trusts_measurements=trusts_rankings(),
        needs_kernel=current_mode() is Mode.REQUIRED,
        other_backends=backends_beside_aten(choices),
    )
    gemm.choice.nvgemm_aot_gemm = offers.gemm
    if reasons_against and not offers.is_miss:
        return Offers(gemm=offers.gemm, basis="miss", reasons=reasons_against)
    return offers


def _mark_graph() -> bool:
    """Marks a graph. Returns True at its first GEMM."""
    was_marked = V.graph.__dict__.setdefault("nvgemm_aot_known", False)
    V.graph.nvgemm_aot_known = True
    return not was_marked


def _report_miss(gemm: str, reasons: Sequence[str], problem: Problem | None = None) -> None:
    _log.debug("%s: no bundled kernel: %s", gemm, "; ".join(reasons))
    if is_alternative():
        return  # Inductor also asks for the GEMM itself
    report.met(gemm, basis="miss", reasons=reasons)
    if current_mode() is Mode.REQUIRED:
        raise RequiredError(_required_text(gemm, reasons, problem), tuple(reasons))


def _required_text(gemm: str, reasons: Sequence[str], problem: Problem | None) -> str:
    lines = [
        f"{gemm}: no prebuilt kernel serves it, but {MODE_VARIABLE}=required (or {OPTION}) demands "
        "one:",
        *(f"  {reason}" for reason in reasons),
    ]
    if problem is None:
        lines.append("a manifest cannot declare it; compile this model in mode auto")
    else:
        lines += [
            "add this line under gemms: in a manifest, build its wheel and install the wheel:",
            f"  {gemm_line(problem)}",
        ]
    return "\n".join(lines)


def report_times(timings: dict[Any, float]) -> None:
    """Reports each choice's milliseconds for a GEMM."""
    try:
        if is_alternative():
            return  # this GEMM belongs to a choice that is timed as a whole
        gemms = (getattr(choice, "nvgemm_aot_gemm", None) for choice in timings)
        gemm = next(filter(None, gemms), None)
        if gemm is not None:
            report.timed(gemm, {choice.name: float(time) for choice, time in timings.items()})
    except Exception as error:
        log_failure(error)


def _register_summary() -> None:
    """Logs a line when compilation ends.

    Checks the registration each time, because resetting Dynamo drops its callbacks.
    """
    if report.summarize not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(report.summarize)
