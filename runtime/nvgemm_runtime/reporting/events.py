"""Appends events to the file named in NVGEMM_AOT_EXPLAIN, for ``nvgemm-aot explain``.

Each event is a line of JSON, so several processes can share the file.
"""

from __future__ import annotations

import functools
import json
import logging
import os

from ..settings import EXPLAIN_VARIABLE, printable_path
from .counters import COUNTERS
from .generated_choices import note_failure

_log = logging.getLogger(__name__)


def write(event: dict[str, object]) -> None:
    """Appends an event, or drops it; warns once if the named file cannot be written."""
    path = os.environ.get(EXPLAIN_VARIABLE)
    if not path:
        return
    line = json.dumps(event) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # One call, so that lines of several processes do not mix.
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        _warn_once(
            f"{EXPLAIN_VARIABLE}={printable_path(path)}: {error.strerror}; events are not written"
        )


def kernel_failed(kernel_id: str, reason: str) -> bool:
    """Counts and writes a kernel failure, after which ATen computes the kernel's GEMMs.

    Returns:
        True for the kernel's first failure; later reasons are dropped.
    """
    note_failure(kernel_id)
    is_first = COUNTERS.fail(kernel_id, reason)
    if is_first:
        write({"event": "failed", "kernel": kernel_id, "reason": reason})
    return is_first


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)
