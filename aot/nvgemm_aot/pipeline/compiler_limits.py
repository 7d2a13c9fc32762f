"""Number of compiler processes that fit on this machine, and the time limit per kernel."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from pathlib import Path

from nvgemm_runtime.settings import COMPILE_TIMEOUT_VARIABLE, MOST_DIGITS, printable

_log = logging.getLogger(__name__)

DEFAULT_LIMIT_SECONDS = 300.0
"""Hundreds of times the usual compile time, which is 0.35 to 1.5 s per kernel on one core."""


_MOST_SECONDS = 1e9
"""Longest limit, in seconds. Longer values mean no limit, because timers take no larger numbers."""


def default_jobs() -> int:
    """Returns the number of workers for this machine: one per core, fewer if memory is short."""
    return max(1, min(len(os.sched_getaffinity(0)), _free_memory_bytes() // _WORKER_BYTES))


_WORKER_BYTES = 1_500_000_000
"""Memory budget per worker: a compiler process takes about 1 GB."""


_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Memory limit and usage files of a container, for cgroups v2 and v1."""


def _free_memory_bytes() -> int:
    free = _meminfo_available_bytes()
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):
            # The page cache counts as used but is reclaimed on demand.
            page_cache = _read_number(used.parent / "memory.stat", r"(?:total_)?inactive_file") or 0
            free = min(free, int(limit.read_text()) - int(used.read_text()) + page_cache)
    return max(0, free)


def _meminfo_available_bytes() -> int:
    kilobytes = _read_number(Path("/proc/meminfo"), "MemAvailable:")
    return _WORKER_BYTES if kilobytes is None else kilobytes * 1024


def _read_number(file: Path, name: str) -> int | None:
    match = re.search(rf"^{name} +([0-9]+)", file.read_text(), re.MULTILINE)
    return None if match is None else int(match[1])


def compile_limit_seconds() -> float:
    """Returns the user's time limit per kernel, or the default; warns of an invalid value."""
    text = os.environ.get(COMPILE_TIMEOUT_VARIABLE)
    if not text:
        return DEFAULT_LIMIT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if seconds > 0 and len(text) <= MOST_DIGITS:
        return seconds if seconds <= _MOST_SECONDS else math.inf
    _log.warning(
        "%s=%s: must be a number of seconds above 0; taken as %g",
        *(COMPILE_TIMEOUT_VARIABLE, printable(text), DEFAULT_LIMIT_SECONDS),
    )
    return DEFAULT_LIMIT_SECONDS
