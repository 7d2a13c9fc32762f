"""Runs a program and collects torch.compile's decisions for each GEMM."""

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
from .run_command import run_to_end

NO_CACHES_VARIABLE = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
"""Torch's own variable. With caches, torch does not compile a known graph again, so its GEMMs would
be missed."""

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
"""Fields and their types for each GEMM event in `nvgemm_runtime.inductor.report`."""

_FAILED = "failed"
"""Name for a kernel's failure event in `nvgemm_runtime.reporting.events`."""


@dataclass(kw_only=True)
class GemmReport:
    """One GEMM's history over all graphs and processes in a run.

    Attributes:
        gemm: Problem key, or a text if no problem describes it.
        basis: ``declared``, ``signature`` or ``jit`` if kernels were ever offered for it; otherwise
            ``miss``.
        reasons: Reasons for a miss.
        offered: Offered kernels' operators by name in generated code.
        measured: Description of its measured ranking; empty without one.
        doubtful: Bundles whose measured rankings are in doubt or contradict each other, as the
            files for each ``nvgemm-aot tune`` run that would settle them.
        unconfirmed: Likewise, bundles whose measured rankings default mode would use after
            confirmation by another GPU or a repeat.
        graphs: Number of lowerings in Inductor; 0 if an epilogue fusion was tried and lost, because
            the GEMM was then lowered without its activation.
        times_ms: Milliseconds by choice, from the last autotuning.
        used: Bundled kernel calls by name in generated code.
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
        """Fastest choice; None if none was timed."""
        finite = {name: time for name, time in self.times_ms.items() if math.isfinite(time)}
        return min(finite, key=finite.__getitem__, default=None)

    def add(self, event: dict[str, Any]) -> None:
        """Adds one event."""
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
        """Returns the JSON object; times that are not finite are null."""
        return {
            **vars(self),
            "times_ms": {
                name: time if math.isfinite(time) else None for name, time in self.times_ms.items()
            },
            "fastest": self.fastest,
        }


def explain_program(command: Sequence[str], *, quiet: bool = False) -> dict[str, Any]:
    """Runs a program without torch's compile caches and describes its GEMMs.

    With ``quiet``, the program's output goes to standard error.

    Returns:
        A document: ``status`` is the program's exit status, as in shells; ``gemms`` are in order of
            appearance; ``failed`` holds failure reasons by kernel id, for GEMMs that ATen computes
            instead; ``unreadable_lines`` counts events lost to unreadable lines; ``interpreter``
            names the program's Python if no GEMM appeared.

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
    events = [_parse_event(line) for line in text.splitlines()]
    read = [event for event in events if event is not None]
    gemms = collect(event for event in read if event["event"] != _FAILED)
    failed = {event["kernel"]: event["reason"] for event in read if event["event"] == _FAILED}
    interpreter = None if gemms else find_interpreter(command)
    return {
        "status": status,
        "interpreter": None if interpreter is None else str(interpreter),
        "unreadable_lines": events.count(None),
        "gemms": [gemm.to_json() for gemm in gemms],
        "failed": failed,
    }


def _parse_event(line: bytes) -> dict[str, Any] | None:
    """Parses an event; None if the line is malformed, for example after a kill during a write."""
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


def collect(events: Iterable[dict[str, Any]]) -> list[GemmReport]:
    """Groups `nvgemm_runtime.inductor.report` events by GEMM."""
    gemms: dict[str, GemmReport] = {}
    for event in events:
        gemms.setdefault(event["gemm"], GemmReport(gemm=event["gemm"])).add(event)
    return list(gemms.values())
