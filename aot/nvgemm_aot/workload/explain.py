"""Runs a command and tells what torch.compile did with each GEMM in it."""

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

from nvgemm_runtime.settings import EXPLAIN_VARIABLE

from .process import run_to_end

NO_CACHES_VARIABLE = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
"""Torch's own: what comes from its caches is not compiled, and so not met."""

_FIELDS: dict[str, dict[str, type]] = {
    "met": {"basis": str, "reasons": list, "offered": dict},
    "tried": {"basis": str, "reasons": list, "offered": dict},
    "timed": {"times_ms": dict},
    "used": {"name": str},
}
"""By event of `nvgemm_runtime.inductor.report`: what it holds beside the GEMM."""


@dataclass(kw_only=True)
class MetGemm:
    """What happened to one GEMM, over all graphs and processes of a run.

    Attributes:
        gemm: Its problem's key, or a text where no problem describes it.
        basis: ``declared``, ``signature`` or ``jit`` where it was offered kernels, however often it
            was not; otherwise ``miss``.
        reasons: Why it was a miss, whenever it was one.
        offered: By name in generated code, the operators that joined the choices.
        measured: What a measured ranking says of it; empty where there is none.
        graphs: How often it was met; not at all where kernels for it and an activation were tried
            and lost: then the GEMM was met without the activation.
        times_ms: By choice, milliseconds, of the last time it was timed.
        used: By name in generated code, how often a bundled kernel is called there.
    """

    gemm: str
    basis: str = "miss"
    reasons: list[str] = field(default_factory=list)
    offered: dict[str, str] = field(default_factory=dict)
    measured: str = ""
    graphs: int = 0
    times_ms: dict[str, float] = field(default_factory=dict)
    used: Counter[str] = field(default_factory=Counter)

    @property
    def fastest(self) -> str | None:
        """The choice that took the least time; None where none was timed."""
        finite = {name: time for name, time in self.times_ms.items() if math.isfinite(time)}
        return min(finite, key=finite.__getitem__, default=None)

    def add(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        if event["event"] in ("met", "tried"):
            self.graphs += event["event"] == "met"
            if event["basis"] != "miss":
                self.basis = event["basis"]
            self.offered |= event["offered"]
            self.measured = event.get("measured") or self.measured
            self.reasons += [reason for reason in event["reasons"] if reason not in self.reasons]
        elif event["event"] == "timed":
            self.times_ms = event["times_ms"]
        elif event["event"] == "used":
            self.used[event["name"]] += 1

    def to_json(self) -> dict[str, Any]:
        """As one object of JSON; times that are not finite are null."""
        return {
            "gemm": self.gemm,
            "basis": self.basis,
            "reasons": self.reasons,
            "offered": self.offered,
            "measured": self.measured,
            "graphs": self.graphs,
            "times_ms": {
                name: time if math.isfinite(time) else None for name, time in self.times_ms.items()
            },
            "fastest": self.fastest,
            "used": dict(self.used),
        }


@dataclass(frozen=True, kw_only=True)
class ExplainedProgram:
    """What came of a command.

    Attributes:
        status: Its exit status, as shells give it: 128 + N where signal N ended it.
        gemms: What it met, in the order in which they came up.
        unreadable_lines: How many events are left out because their lines could not be read.
    """

    status: int
    gemms: Sequence[MetGemm]
    unreadable_lines: int

    def to_json(self) -> dict[str, Any]:
        """As one object of JSON."""
        return {
            "status": self.status,
            "unreadable_lines": self.unreadable_lines,
            "gemms": [gemm.to_json() for gemm in self.gemms],
        }


def explain_program(command: Sequence[str], *, quiet: bool = False) -> ExplainedProgram:
    """Run a command without torch's compile caches and collect the GEMMs that it met.

    Args:
        command: The program and its arguments.
        quiet: Whether what the command prints goes to standard error.

    Raises:
        OSError: If the command cannot be started.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events.jsonl"
        environment = {**os.environ, EXPLAIN_VARIABLE: str(path), NO_CACHES_VARIABLE: "1"}
        status = run_to_end(command, environment, quiet=quiet)
        text = path.read_bytes() if path.exists() else b""
    events = [_event(line) for line in text.splitlines()]
    return ExplainedProgram(
        status=status,
        gemms=collect(event for event in events if event is not None),
        unreadable_lines=events.count(None),
    )


def _event(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None where it is none, as when its process was killed meanwhile."""
    try:
        event = json.loads(line)
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
