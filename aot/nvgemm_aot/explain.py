"""Runs a command and tells what torch.compile did with each GEMM in it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvgemm_runtime.inductor.report import EXPLAIN_VARIABLE

NO_CACHES_VARIABLE = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
"""Torch's own: what comes from its caches is not compiled, and so not met."""


@dataclass(kw_only=True)
class MetGemm:
    """What happened to one GEMM, over all graphs and processes of a run.

    Attributes:
        gemm: Its problem's key.
        basis: ``declared``, ``signature`` or ``miss``.
        reasons: Why it is a miss.
        offered: By name in generated code, the operators that joined the choices.
        graphs: How often it was met.
        times_ms: By choice, milliseconds, of the last time it was timed.
        used: By name in generated code, how often a bundled kernel is called there.
    """

    gemm: str
    basis: str = "miss"
    reasons: list[str] = field(default_factory=list)
    offered: dict[str, str] = field(default_factory=dict)
    graphs: int = 0
    times_ms: dict[str, float] = field(default_factory=dict)
    used: Counter[str] = field(default_factory=Counter)

    @property
    def fastest(self) -> str | None:
        """The choice that took the least time; None where none was timed."""
        finite = {name: time for name, time in self.times_ms.items() if math.isfinite(time)}
        return min(finite, key=finite.__getitem__, default=None)

    def to_json(self) -> dict[str, Any]:
        """As one object of JSON; times that are not finite are null."""
        return {
            "gemm": self.gemm,
            "basis": self.basis,
            "reasons": self.reasons,
            "offered": self.offered,
            "graphs": self.graphs,
            "times_ms": {
                name: time if math.isfinite(time) else None for name, time in self.times_ms.items()
            },
            "fastest": self.fastest,
            "used": dict(self.used),
        }


def explain(command: Sequence[str]) -> tuple[int, list[MetGemm]]:
    """Run a command without torch's compile caches and collect the GEMMs that it met.

    Returns:
        The command's exit status, and the GEMMs in the order in which they came up.

    Raises:
        OSError: If the command cannot be started.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events.jsonl"
        environment = {**os.environ, EXPLAIN_VARIABLE: str(path), NO_CACHES_VARIABLE: "1"}
        status = subprocess.run(command, env=environment, check=False).returncode
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return status, collect(json.loads(line) for line in lines)


def collect(events: Iterable[dict[str, Any]]) -> list[MetGemm]:
    """Gather the events of `nvgemm_runtime.inductor.report` by GEMM."""
    gemms: dict[str, MetGemm] = {}
    for event in events:
        gemm = gemms.setdefault(event["gemm"], MetGemm(gemm=event["gemm"]))
        if event["event"] == "met":
            gemm.graphs += 1
            gemm.basis, gemm.reasons = event["basis"], event["reasons"]
            gemm.offered = event["offered"]
        elif event["event"] == "timed":
            gemm.times_ms = event["times_ms"]
        elif event["event"] == "used":
            gemm.used[event["name"]] += 1
    return list(gemms.values())
