"""Runs a program and collects what torch.compile did with each of its GEMMs."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvgemm_runtime.settings import EXPLAIN_VARIABLE, default_mode

from .interpreter import find_interpreter
from .process import run_to_end

NO_CACHES_VARIABLE = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
"""Torch's own variable: a graph from its caches is not compiled again, so its GEMMs would be
missed."""

_MET: dict[str, type] = {
    "basis": str, "reasons": list, "offered": dict, "measured": str, "doubtful": list,
    "unconfirmed": list,
}  # fmt: skip

_FIELDS: dict[str, dict[str, type]] = {
    "met": _MET,
    "tried": _MET,
    "timed": {"times_ms": dict},
    "used": {"name": str},
}
"""By event of a GEMM, of `nvgemm_runtime.inductor.report`: its fields besides it, and their types.
"""

_FAILED = "failed"
"""Event of a kernel, of `nvgemm_runtime.events`."""


@dataclass(kw_only=True)
class MetGemm:
    """What happened to one GEMM in all graphs and processes of a run.

    Attributes:
        gemm: Its problem's key, or a text where no problem describes it.
        basis: ``declared``, ``signature`` or ``jit`` if kernels were ever offered for it; otherwise
            ``miss``.
        reasons: Why it was a miss, where it was.
        offered: By name in generated code, the operators of the kernels that joined the choices.
        measured: What its measured ranking says; empty without one.
        doubtful: The bundles whose measured rankings are in doubt or contradict each other: of each
            run of ``nvgemm-aot tune`` that would settle them, the files.
        unconfirmed: Likewise those whose measured rankings default mode would use if another GPU
            confirmed them, or if they were repeated.
        graphs: How often Inductor lowered it; 0 if an epilogue fusion of it was tried and lost, as
            the GEMM was then lowered without its activation.
        times_ms: By choice, milliseconds of the last autotuning.
        used: By name in generated code, the number of calls of bundled kernels.
    """

    gemm: str
    basis: str = "miss"
    reasons: list[str] = field(default_factory=list)
    offered: dict[str, str] = field(default_factory=dict)
    measured: str = ""
    doubtful: list[list[str]] = field(default_factory=list)
    unconfirmed: list[list[str]] = field(default_factory=list)
    graphs: int = 0
    times_ms: dict[str, float] = field(default_factory=dict)
    used: Counter[str] = field(default_factory=Counter)

    @property
    def fastest(self) -> str | None:
        """The choice of least time; None where none was timed."""
        finite = {name: time for name, time in self.times_ms.items() if math.isfinite(time)}
        return min(finite, key=finite.__getitem__, default=None)

    def add(self, event: dict[str, Any]) -> None:
        """Add one event."""
        if event["event"] in ("met", "tried"):
            self.graphs += event["event"] == "met"
            if event["basis"] != "miss":
                self.basis = event["basis"]
            self.offered |= event["offered"]
            self.measured = event["measured"] or self.measured
            for known, new in (
                (self.doubtful, event["doubtful"]),
                (self.unconfirmed, event["unconfirmed"]),
            ):
                known += [files for files in new if files not in known]
            self.reasons += [reason for reason in event["reasons"] if reason not in self.reasons]
        elif event["event"] == "timed":
            self.times_ms = event["times_ms"]
        elif event["event"] == "used":
            self.used[event["name"]] += 1

    def to_json(self) -> dict[str, Any]:
        """The JSON object; times that are not finite are null."""
        return {
            **vars(self),
            "times_ms": {
                name: time if math.isfinite(time) else None for name, time in self.times_ms.items()
            },
            "fastest": self.fastest,
        }


def explain_program(command: Sequence[str], *, quiet: bool = False) -> dict[str, Any]:
    """Run a program without torch's compile caches and describe its GEMMs.

    With ``quiet``, the program's output goes to standard error.

    Returns:
        A document: ``status`` is the program's exit status, as shells give it; ``gemms`` are in the
        order in which they came up; ``failed`` says by id why kernels failed, so that ATen computes
        their GEMMs; ``unreadable_lines`` is how many events are missing because
        their lines could not be read; ``interpreter`` names the program's Python if it met no GEMM.

    Raises:
        CannotStartError: If the command cannot be started.
        SettingError: If NVGEMM_AOT names no mode.
    """
    default_mode()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events.jsonl"
        environment = {**os.environ, EXPLAIN_VARIABLE: str(path), NO_CACHES_VARIABLE: "1"}
        status = run_to_end(command, environment, quiet=quiet)
        text = path.read_bytes() if path.exists() else b""
    events = [_event(line) for line in text.splitlines()]
    read = [event for event in events if event is not None]
    gemms = collect(event for event in read if event["event"] != _FAILED)
    failed = {one["kernel"]: one["reason"] for one in read if one["event"] == _FAILED}
    interpreter = None if gemms else find_interpreter(command)
    return {
        "status": status,
        "interpreter": None if interpreter is None else str(interpreter),
        "unreadable_lines": events.count(None),
        "gemms": [gemm.to_json() for gemm in gemms],
        "failed": failed,
    }


def _event(line: bytes) -> dict[str, Any] | None:
    """Parse an event; None if the line is malformed, as from a process killed while writing."""
    try:
        event = json.loads(line)
        if event["event"] == _FAILED:
            fields: dict[str, type] = {"kernel": str, "reason": str}
        else:
            fields = {"gemm": str, **_FIELDS[event["event"]]}
        is_whole = all(isinstance(event[name], kind) for name, kind in fields.items())
    except (ValueError, TypeError, KeyError):
        return None
    return event if is_whole else None


def collect(events: Iterable[dict[str, Any]]) -> list[MetGemm]:
    """Gather the events of `nvgemm_runtime.inductor.report` by GEMM."""
    gemms: dict[str, MetGemm] = {}
    for event in events:
        gemms.setdefault(event["gemm"], MetGemm(gemm=event["gemm"])).add(event)
    return list(gemms.values())
