"""Reports what happens to each GEMM that is compiled, and internal errors.

Events go to the process' counters; to torch's trace log (``TORCH_TRACE``), as artifacts named
``nvgemm_aot``; and to the file of `nvgemm_runtime.events`, of which `nvgemm-aot explain` makes a
table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch._logging import trace_structured
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .. import events
from ..counters import COUNTERS
from ..errors import NvgemmError

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
    """Report that Inductor asked choices for a GEMM.

    Args:
        gemm: Its problem's key, or the ATen operator where no problem describes it.
        basis: ``declared``, ``signature``, ``jit`` or ``miss``.
        reasons: Why it is a miss; the first is the one that counts.
        offered: By name in generated code, the operators that join the choices.
        measured: What a measured ranking decided, in words.
        doubtful: The bundles whose measured rankings are in doubt or contradict each other: of each
            run of ``nvgemm-aot tune`` that would settle them, the files.
        unconfirmed: Likewise those whose measured rankings would count if another GPU confirmed
            them, or if they were repeated.
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
) -> None:
    """Report that kernels for a GEMM with its activation lost to the separate operations.

    The GEMM among those is met by itself, and counts there. Arguments are those of `met`.
    """
    _report({"event": "tried", "gemm": gemm, "basis": basis, "reasons": [],
           "offered": dict(offered or {}), "measured": measured,
           "doubtful": [list(files) for files in dict.fromkeys(doubtful)],
           "unconfirmed": []})  # fmt: skip


def timed(gemm: str, times_ms: Mapping[str, float]) -> None:
    """Report the times of a GEMM's choices.

    Args:
        gemm: As given to `met`.
        times_ms: By choice, milliseconds; not finite where one failed.
    """
    _report({"event": "timed", "gemm": gemm, "times_ms": dict(times_ms)})


def used(gemm: str, name: str, kernel_id: str) -> None:
    """Report that a call of a bundled kernel was generated; ``name`` is its name in the code."""
    COUNTERS.win(kernel_id)
    _report({"event": "used", "gemm": gemm, "name": name})


def used_by_m(gemm: str, name: str, kernel_ids: Sequence[str], table: str) -> None:
    """Report that a call was generated which chooses among kernels by the rows of A.

    Args:
        gemm: As given to `met`.
        name: Its name in the code.
        kernel_ids: The kernels.
        table: Sizes and what computes them, in words.
    """
    COUNTERS.dispatch(f"{gemm}: {table}")
    for kernel_id in kernel_ids:
        COUNTERS.win(kernel_id)
    _report({"event": "used", "gemm": gemm, "name": name, "kernels": list(kernel_ids)})


def summarize(_: object) -> None:
    """Log one line of what was counted since the last such line, if any GEMM was met."""
    news = COUNTERS.news()
    if news.met:
        _log.info("compiled %s", news.summary)


def _report(event: dict[str, object]) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "nvgemm_aot", "encoding": "json"},
        payload_fn=lambda: json.dumps(event),
        expect_trace_id=False,  # packages are compiled outside of any frame
    )
    events.write(event)


_logged: set[str] = set()


DATA_DEPENDENT = "a size on which kernels depend is known only when the graph runs"
"""Why a GEMM gets no kernel where reading it would end in `is_data_dependent`."""


def survive(error: Exception) -> None:
    """Raise an error that must stop the compilation; log others but those of its graph."""
    if isinstance(error, NvgemmError) and error.stops_compilation:
        raise error
    if is_data_dependent(error):
        _log.debug("%s: %s", DATA_DEPENDENT, error)
    else:
        log_failure(error)


def is_data_dependent(error: Exception) -> bool:
    """Whether a decision failed for a size that is known only when the graph runs."""
    return isinstance(error, GuardOnDataDependentSymNode)


def log_failure(error: Exception) -> None:
    """Log an internal error, once: what fails for one GEMM mostly fails for all."""
    failure = f"{type(error).__name__}: {error}"
    if failure in _logged:
        return
    _logged.add(failure)
    _log.warning(
        "bundled kernels stay out of the choices: %s; this is a mistake of nvgemm-aot, please "
        "report it",
        failure,
        exc_info=True,
    )
