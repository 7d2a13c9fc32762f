"""Reports the outcome for each compiled GEMM, and internal errors.

Events go to the process's counters, to torch's trace log (``TORCH_TRACE``) as artifacts named
``nvgemm_aot``, and to the file of `reporting.events`, which `nvgemm-aot explain` shows as a table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch._logging import trace_structured
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..errors import NvgemmError
from ..reporting import events
from ..reporting.counters import COUNTERS

if TYPE_CHECKING:
    from ..matching.dispatch import TunedTogether

_log = logging.getLogger(__name__)


def met(
    gemm: str,
    *,
    basis: str,
    reasons: Sequence[str] = (),
    offered: Mapping[str, str] | None = None,
    measured: str = "",
    doubtful: Sequence[TunedTogether] = (),
    unconfirmed: Sequence[TunedTogether] = (),
) -> None:
    """Reports a GEMM for which Inductor requested choices.

    Args:
        gemm: Problem key, or the ATen operator if no problem describes the GEMM.
        basis: ``declared``, ``signature``, ``jit`` or ``miss``.
        reasons: Reasons for a miss. The first is counted.
        offered: Operators that join the choices, by name in generated code.
        measured: Decision of a measured ranking, as text.
        doubtful: Bundles whose measured rankings are in doubt or contradict each other: the files
            for each ``nvgemm-aot tune`` run that would settle them.
        unconfirmed: Bundles whose measured rankings would count if repeated or confirmed by another
            GPU, in the same form.
    """
    if basis == "miss":
        COUNTERS.miss(reasons[0])
    else:
        COUNTERS.hit(basis)
    _report({"event": "met", "gemm": gemm, "basis": basis, "reasons": list(reasons),
            "offered": dict(offered or {}), "measured": measured,
            "doubtful": [list(files) for files in dict.fromkeys(doubtful)],
            "unconfirmed": [list(files) for files in dict.fromkeys(unconfirmed)]})  # fmt: skip


def tried(
    gemm: str,
    *,
    basis: str,
    offered: Mapping[str, str] | None = None,
    measured: str = "",
    doubtful: Sequence[TunedTogether] = (),
    unconfirmed: Sequence[TunedTogether] = (),
) -> None:
    """Reports that kernels for a GEMM with its activation lost to the separate operations.

    The GEMM among those operations is reported and counted separately. Arguments are those of
    `met`.
    """
    _report({"event": "tried", "gemm": gemm, "basis": basis, "reasons": [],
           "offered": dict(offered or {}), "measured": measured,
           "doubtful": [list(files) for files in dict.fromkeys(doubtful)],
           "unconfirmed": [list(files) for files in dict.fromkeys(unconfirmed)]})  # fmt: skip


def timed(gemm: str, times_ms: Mapping[str, float]) -> None:
    """Reports the times of a GEMM's choices.

    Args:
        gemm: As passed to `met`.
        times_ms: Milliseconds by choice; not finite if one failed.
    """
    _report({"event": "timed", "gemm": gemm, "times_ms": dict(times_ms)})


def used(gemm: str, name: str, kernel_id: str) -> None:
    """Reports that a call of a bundled kernel was generated. ``name`` is its name in the code."""
    COUNTERS.win(kernel_id)
    _report({"event": "used", "gemm": gemm, "name": name})


def used_by_m(gemm: str, name: str, kernel_ids: Sequence[str], table: str) -> None:
    """Reports that a call was generated which dispatches by A's row count.

    Args:
        gemm: As passed to `met`.
        name: Name in the code.
        kernel_ids: Kernels.
        table: Dispatch table as text.
    """
    COUNTERS.dispatch(f"{gemm}: {table}")
    for kernel_id in kernel_ids:
        COUNTERS.win(kernel_id)
    _report({"event": "used", "gemm": gemm, "name": name, "kernels": list(kernel_ids)})


def summarize(_: object) -> None:
    """Logs one line of counts since the last such line, if any GEMM was met."""
    counts = COUNTERS.news()
    if counts.met:
        _log.info("compiled %s", counts.summary)


def _report(event: dict[str, object]) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "nvgemm_aot", "encoding": "json"},
        payload_fn=lambda: json.dumps(event),
        expect_trace_id=False,  # packages are compiled outside frames
    )
    events.write(event)


_logged: set[str] = set()


DATA_DEPENDENT = "a size that kernels depend on is known only when the graph runs"
"""Miss reason for a GEMM whose reading fails with an `is_data_dependent` error."""


def raise_or_log(error: Exception) -> None:
    """Raises an error that must stop the compilation. Logs any other."""
    if isinstance(error, NvgemmError) and error.stops_compilation:
        raise error
    if is_data_dependent(error):
        _log.debug("%s: %s", DATA_DEPENDENT, error)
    else:
        log_failure(error)


def is_data_dependent(error: Exception) -> bool:
    """Returns True if a decision failed because a size is known only when the graph runs."""
    return isinstance(error, GuardOnDataDependentSymNode)


def log_failure(error: Exception) -> None:
    """Logs an internal error once. An error for one GEMM usually repeats for all."""
    failure = f"{type(error).__name__}: {error}"
    if failure in _logged:
        return
    _logged.add(failure)
    _log.warning(
        "skipped bundled kernels: %s; this is an internal error in nvgemm-aot, please report it",
        failure,
        exc_info=True,
    )
