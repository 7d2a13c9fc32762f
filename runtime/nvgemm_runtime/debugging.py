"""Checks that cost too much for every call."""

from __future__ import annotations

import os

DEBUG_VARIABLE = "NVGEMM_AOT_DEBUG"
"""Set to 1: `grouped_mm` copies its offsets from the device and checks them, for which it waits."""


def is_debugging() -> bool:
    """Whether the user asks for checks that wait for the device."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
