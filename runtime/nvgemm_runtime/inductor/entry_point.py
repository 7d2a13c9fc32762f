"""Inductor's entry point for every GEMM, in every process that compiles.

Imports `hook` and its dependencies only if GEMMs are autotuned or recorded, or a bundle is
installed.

The torch names used here are private and were run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch._inductor import select_algorithm as autotuning

from ..settings import RECORD_VARIABLE
from .autoload import log_broken
from .configuration.cache_key import may_have_kernels
from .configuration.modes import current_mode

_HOOK = f"{__package__}.hook"


def install() -> None:
    """Makes Inductor call `join` for every GEMM's choices, and report their times."""
    cache = autotuning.get_algorithm_selector_cache()
    # First, so that a user's own functions see bundled kernels and may filter them.
    cache.preprocessing_fns.insert(0, join)
    cache.feedback_saver_fns.append(_report_times)


def join(choices: list[Any]) -> list[Any]:
    """Inductor preprocessing function that appends bundled kernels to the choices.

    Raises:
        RequiredError: If prebuilt kernels are required, and none serves the GEMM or a bundle cannot
            be opened.
        RecordError: If GEMMs should be recorded and cannot be.
        SettingError: If the mode has an unknown value.
    """
    current_mode()
    try:
        if not _has_work():
            return choices
        from . import hook
    except Exception as error:
        log_broken("hook", error)
        return choices
    return hook.join(choices)


def _has_work() -> bool:
    """Returns True if `hook` must offer or require kernels, or record the GEMM."""
    return bool(os.environ.get(RECORD_VARIABLE)) or may_have_kernels()


def _report_times(timings: dict[Any, float], *_: object) -> None:
    """Inductor feedback function that reports each choice's milliseconds."""
    hook = sys.modules.get(_HOOK)
    if hook is not None:
        hook.report_times(timings)
