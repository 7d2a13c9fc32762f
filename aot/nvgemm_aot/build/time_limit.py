"""How long the compilation of one kernel may take."""

from __future__ import annotations

import logging
import math
import os

LIMIT_VARIABLE = "NVGEMM_AOT_COMPILE_TIMEOUT"
"""Environment variable: seconds after which the compiler of a kernel is killed."""

DEFAULT_LIMIT_SECONDS = 300.0
"""Hundreds of times what kernels were seen to take (0.35 to 1.5 s on one core)."""

_log = logging.getLogger(__name__)


def compile_limit_seconds() -> float:
    """The limit that the user has set, or the default; a value that is no number is warned of."""
    text = os.environ.get(LIMIT_VARIABLE)
    if not text:
        return DEFAULT_LIMIT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if seconds > 0:
        return seconds
    _log.warning(
        "%s=%s: must be a number of seconds above 0; taken as %g",
        *(LIMIT_VARIABLE, text, DEFAULT_LIMIT_SECONDS),
    )
    return DEFAULT_LIMIT_SECONDS
