"""Digests of a process' choices, which should be equal in all processes of a mode."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.compiling import gemm_calls

LENGTH = 12
"""Hexadecimal digits of a digest."""

MEASURED = frozenset({"time_taken_ms", "triton_cache_hash"})
"""Keys in Inductor's files of tuned reductions that are no part of the choice."""


def digest(value: Any) -> str:
    """Returns the digest of a value that JSON can hold."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def gemms_below(directory: Path) -> dict[str, int]:
    """Counts the GEMM calls in all generated code below a directory, by call name.

    The name of a bundled kernel's call, or of a dispatching one, follows from its kernels and the
    bounds between them.
    """
    calls: Counter[str] = Counter()
    codes = set()
    for path in sorted(directory.rglob("*.py")):
        text = path.read_text("utf-8", errors="replace")
        if "AsyncCompile()" in text and text not in codes:  # caches can keep code twice
            codes.add(text)
            calls += gemm_calls(text)
    return dict(sorted(calls.items()))


def reductions_below(directory: Path) -> dict[str, Mapping[str, Any]]:
    """Returns Inductor's choices for its own kernels, by file name; each process times them."""
    found = {}
    for path in sorted(directory.rglob("*.best_config")):
        try:
            config = json.loads(path.read_text("utf-8"))
        except ValueError:
            continue
        if isinstance(config, dict):
            found[path.name] = {key: one for key, one in config.items() if key not in MEASURED}
    return found
