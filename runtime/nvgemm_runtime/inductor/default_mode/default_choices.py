"""Uses kernels that were measured to beat ATen when max-autotune is off. Times nothing.

Uses only rankings that several GPUs of the same product confirm, or that one GPU repeated with a
large gain (`matching.evidence`). Uses only kernels that round where ATen's operator does: the
operator's own, without fused operations or a split sum.

The torch names used here are private and were run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ...errors import RequiredError
from ...gemm.aten import UNSERVED
from ...gemm.problem import Problem
from ...installed.registry import INSTALLATION
from ...launch.dispatch_table import find_dispatch
from ...matching.device import DeviceFacts
from ...matching.dispatch import CONFIRM_STEP, Dispatch, TunedTogether
from ...matching.evidence import REPEATED_GAIN
from ...matching.thresholds import ATEN, MIN_GAIN
from ...recording.declarable import read_requests
from ...reporting.counters import COUNTERS
from ...settings import (
    DEFAULT_MODE_VARIABLE,
    MAX_CHOICES_VARIABLE,
    MODE_VARIABLE,
    Mode,
    counts_repeated_rankings,
    max_choices,
)
from .. import report
from ..autotuning.choices import GemmChoice, StockCall
from ..autotuning.obstacles import cpp_obstacle
from ..configuration.modes import OPTION, current_mode
from ..offers import facts_for
from ..reading import AutotunedGemm, RowRange, rows_of
from .dispatched_choices import DispatchChoice, DispatchOffer

_log = logging.getLogger(__name__)


def join_measured(choices: list[Any], gemm: AutotunedGemm) -> list[Any]:
    """Returns one choice of measured kernels if they compute the GEMM, else ATen's choices.

    Raises:
        RequiredError: If kernels are required, the GEMM is declared, and its kernel cannot be used.
    """
    if not gemm.is_served:
        reason = (
            UNSERVED[gemm.op].reason if gemm.op in UNSERVED else "ATen is not among its choices"
        )
        return _report_miss(choices, str(gemm), reason)
    requests = read_requests(gemm.call)
    if isinstance(requests, str):
        return _report_miss(choices, str(gemm), requests)
    facts = facts_for(gemm.call)
    with COUNTERS.spending("matching"):
        request, dispatch = find_dispatch(requests, facts, is_precise=gemm.call.is_precise)
    problem = request.problem
    rows = rows_of(gemm)
    if rows is None:
        reason = "a size other than m is dynamic, but measured rankings have a fixed n and k"
        size_m = RowRange(least=problem.m, most=problem.m)
        require(problem, size_m, dispatch, facts, reason)
        return _report_miss(choices, problem.key, reason)
    table = dispatch.table.within(rows.least, rows.most)
    obstacle = find_obstacle(gemm.op) if table.has_kernels else None
    require(problem, rows, dispatch, facts, obstacle)
    if obstacle is not None:
        return _report_miss(choices, problem.key, obstacle)
    if not table.has_kernels:
        return _keep_aten(choices, problem, rows, dispatch, facts)
    stock = StockCall.of_choice(gemm.op, problem.key, gemm.choice)
    offer = DispatchOffer.of(dispatch, table)
    choice: GemmChoice | DispatchChoice
    if table.bounds:
        choice = DispatchChoice(stock, offer, gemm.choice)
    else:
        choice = GemmChoice(stock, offer.kernels[table.kernels[0]])
    report_kernels(problem, rows, dispatch, offer, {choice.name: str(choice.description)})
    return [choice]


def report_kernels(
    problem: Problem,
    rows: RowRange,
    dispatch: Dispatch,
    offer: DispatchOffer,
    offered: Mapping[str, str],
) -> None:
    """Reports that measured kernels compute a GEMM; ``offered`` describes the call by its name."""
    is_measured = any(size.m == problem.m for size in dispatch.sizes)
    is_declared = is_measured and problem.m in dispatch.declared
    _log.debug("%s: chosen by measurement: %s", problem.key, offer)
    report.met(
        problem.key,
        basis="declared" if is_declared else "signature",
        offered=offered,
        measured=f"dispatched by m: {offer}",
        **tune_arguments(rows, dispatch),
    )


class _TuneArguments(TypedDict, total=False):
    """Arguments of `report.met` and `report.tried` that name the bundles to tune."""

    doubtful: Sequence[TunedTogether]
    unconfirmed: Sequence[TunedTogether]


def tune_arguments(rows: RowRange, dispatch: Dispatch) -> _TuneArguments:
    """Returns the bundles that tuning could make usable for a graph's sizes."""
    return {
        "doubtful": dispatch.doubtful_within(rows.least, rows.most),
        "unconfirmed": dispatch.unconfirmed_within(rows.least, rows.most),
    }


def find_obstacle(op: str) -> str | None:
    """Returns the reason why a table's kernels cannot compute an operator's calls, or None."""
    if not max_choices():
        return f"{MAX_CHOICES_VARIABLE}=0 allows no kernels"
    return cpp_obstacle(op)


def _serves_declared(rows: RowRange, dispatch: Dispatch) -> bool:
    """Returns True if a kernel computes any declared and measured size in a graph."""
    return any(
        size.m in rows and size.m in dispatch.declared and dispatch.table.at(size.m) != ATEN
        for size in dispatch.sizes
    )


def _keep_aten(
    choices: list[Any], problem: Problem, rows: RowRange, dispatch: Dispatch, facts: DeviceFacts
) -> list[Any]:
    """Returns ATen's choices after a table that names no kernel, and reports the reason."""
    basis, decision = describe_aten(problem, rows, dispatch, facts)
    arguments = tune_arguments(rows, dispatch)
    if basis == "miss":
        return _report_miss(choices, problem.key, decision, arguments)
    _log.debug("%s: chosen by measurement: %s", problem.key, decision)
    report.met(problem.key, basis=basis, measured=decision, **arguments)
    return choices


def describe_aten(
    problem: Problem, rows: RowRange, dispatch: Dispatch, facts: DeviceFacts
) -> tuple[str, str]:
    """Returns the basis for a report and the reason why a table names no kernel.

    The basis is ``miss`` if no measurement decides.
    """
    why_open = _shortened(_open_reasons(problem, rows, dispatch, facts))
    if any(m in rows for m in dispatch.to_confirm):
        why_open.append(CONFIRM_STEP)
    aten_sizes = [
        size.m for size in dispatch.sizes if size.m in rows and size.m not in dispatch.open_reasons
    ]
    if aten_sizes:
        clear_sizes = [m for m in aten_sizes if m not in dispatch.held_back]
        held_back = [
            f"m {m}: {dispatch.held_back[m]}" for m in aten_sizes if m in dispatch.held_back
        ]
        faster = f"ATen was measured to be as fast or faster at m {_sizes_text(clear_sizes)}"
        basis = "signature" if dispatch.declared.isdisjoint(aten_sizes) else "declared"
        reasons = [*([faster] if clear_sizes else []), *_shortened(held_back), *why_open]
        return basis, "; ".join(reasons)
    ranked_sizes = sorted({*dispatch.open_reasons, *(size.m for size in dispatch.sizes)})
    if why_open:
        reason = "bundles have this n and k, but no usable ranking at any m that the graph can take"
    elif ranked_sizes:
        sizes = _sizes_text(ranked_sizes)
        reason = f"bundles rank this n and k at m {sizes}, none of which the graph takes"
    else:
        reason = "no bundle that serves this device declares this n and k"
    return "miss", "; ".join([reason, *why_open])


_MOST_REASONS = 3
"""Largest number of sizes for which a message gives reasons."""


def _shortened(reasons: list[str]) -> list[str]:
    """Returns the first `_MOST_REASONS` reasons, and a count of the rest."""
    rest_count = len(reasons) - _MOST_REASONS
    return [*reasons[:_MOST_REASONS], *([f"and {rest_count} more m"] if rest_count > 0 else [])]


_MOST_SIZES = 8
"""Largest number of sizes that a message names."""


def _sizes_text(sizes: Sequence[int]) -> str:
    """Returns ascending sizes as text, shortened if there are many. A bundle may have hundreds."""
    if len(sizes) <= _MOST_SIZES:
        return ", ".join(map(str, sizes))
    text = ", ".join(map(str, sizes[: _MOST_SIZES - 1]))
    return f"{text}, … {sizes[-1]} ({len(sizes)} sizes)"


def _open_reasons(
    problem: Problem,
    rows: RowRange,
    dispatch: Dispatch,
    facts: DeviceFacts,
    *,
    only_declared: bool = False,
) -> list[str]:
    """Returns the reasons why a graph's sizes have no usable ranking or no kernel."""
    left_out = INSTALLATION.index(facts).missing_sizes(problem)
    reasons = {
        m: why
        for m, why in dispatch.open_reasons.items()
        if not only_declared or m in dispatch.declared
    }
    return [f"m {m}: {why}" for m, why in sorted({**left_out, **reasons}.items()) if m in rows]


def require(
    problem: Problem, rows: RowRange, dispatch: Dispatch, facts: DeviceFacts, obstacle: str | None
) -> None:
    """Raises an error for declared problems without their kernels, if kernels are required.

    ``obstacle`` is the reason why no kernel of the table can be called, or None.

    Raises:
        RequiredError: If there are such problems.
    """
    if current_mode() is not Mode.REQUIRED:
        return
    if not _serves_declared(rows, dispatch):
        obstacle = None
    reasons = _open_reasons(problem, rows, dispatch, facts, only_declared=True)
    if obstacle is not None:
        reasons.append(obstacle)
    if not reasons:
        return
    steps = _next_steps(problem, rows, dispatch, facts)
    if obstacle is not None:
        steps.append("compile with max-autotune, which offers kernels in more cases")
    report.met(problem.key, basis="miss", reasons=reasons)
    lines = [
        f"{problem.key}: {MODE_VARIABLE}=required (or {OPTION}) forbids compiling this declared "
        "problem without its kernel:",
        *(f"  {reason}" for reason in reasons),
        "next steps (without max-autotune, a declared problem needs a ranking for this torch that "
        "two GPUs of this product confirm, or that one GPU repeated; its kernel is used from a "
        f"gain of {MIN_GAIN:.0%} on, or {_repeated_gain():.0%} if one GPU repeated it):",
        *(f"  {step}" for step in steps),
        f"to use ATen here, compile this model in mode auto ({OPTION}), or set "
        f"{DEFAULT_MODE_VARIABLE}=0, which limits mode required to max-autotune",
    ]
    raise RequiredError("\n".join(lines), tuple(reasons))


def _next_steps(
    problem: Problem, rows: RowRange, dispatch: Dispatch, facts: DeviceFacts
) -> list[str]:
    """Returns the next steps for a graph's declared sizes that lack their kernels."""
    steps: dict[str, None] = {}  # an ordered set
    if any(m in rows for m in INSTALLATION.index(facts).missing_sizes(problem)):
        steps[
            "if the kernels do not run here, install a wheel whose kernels do; if none was built, "
            "name more providers in the manifest (providers:), or none for all, and rebuild; or "
            "uninstall the wheel that declares the problem"
        ] = None
    with_kernels = {size.m for size in dispatch.sizes}
    for m in dispatch.open_reasons:
        if m not in rows or m not in dispatch.declared:
            continue
        if dispatch.mismatch is not None:
            step = "compile with max-autotune, which times kernels, or with operands and torch "
            steps[f"{step}settings like the measured ones"] = None
        elif m in with_kernels:
            step = "compile with max-autotune, which offers kernels whose results do not depend"
            steps[f"{step} on timing"] = None
        elif m in dispatch.doubtful:
            steps.update({_tune_step(files, "here"): None for files in dispatch.doubtful[m]})
        elif m in dispatch.unconfirmed:
            where = "on this GPU, or on another of this product"
            steps.update({_tune_step(files, where): None for files in dispatch.unconfirmed[m]})
        else:
            steps[f"{CONFIRM_STEP}; or compile with max-autotune"] = None
    return list(steps)


def _repeated_gain() -> float:
    """Returns the gain from which a kernel is used that one GPU's repeated ranking names."""
    return MIN_GAIN if counts_repeated_rankings() else REPEATED_GAIN


def _tune_step(files: Sequence[str], where: str) -> str:
    return f"measure again {where}: nvgemm-aot tune {shlex.join(files)} -o tuned.nvgemm"


def _report_miss(
    choices: list[Any],
    gemm: str,
    reason: str,
    tune_arguments: _TuneArguments | None = None,
) -> list[Any]:
    """Reports a miss and returns ATen's choices."""
    _log.debug("%s: no bundled kernel: %s", gemm, reason)
    report.met(gemm, basis="miss", reasons=[reason], **(tune_arguments or {}))
    return choices
