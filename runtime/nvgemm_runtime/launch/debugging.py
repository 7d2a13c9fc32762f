"""Whether to run the checks that are too slow for every call."""

from __future__ import annotations

import os

DEBUG_VARIABLE = "NVGEMM_AOT_DEBUG"
"""Set to 1: `grouped_mm`, and compiled code that is loaded then, copy offsets from the device and
check them, which waits for the device. Operators of torch's dispatcher and generated C++ do not."""


def is_debugging() -> bool:
    """Whether the user asks for checks that wait for the device."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
