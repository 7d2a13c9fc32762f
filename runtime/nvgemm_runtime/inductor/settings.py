"""What a user sets by environment variables."""

from __future__ import annotations

import functools
import logging
import os

MODE_VARIABLE = "NVGEMM_AOT"
"""``auto``, the default, offers bundled kernels to torch.compile; ``off`` leaves torch alone."""

MAX_CHOICES_VARIABLE = "NVGEMM_AOT_MAX_CHOICES"
"""Most kernels that join the choices for one GEMM."""

DEFAULT_MAX_CHOICES = 4

RECORD_VARIABLE = "NVGEMM_AOT_RECORD"
"""Names the file in which every GEMM is kept that torch.compile meets; see `recorder`."""

TARGET_VARIABLE = "NVGEMM_AOT_RECORD_TARGET"
"""What that file is to be built for, whatever device GEMMs are met on."""

_log = logging.getLogger(__name__)


def is_off() -> bool:
    """Whether the user has turned the plug-in off."""
    mode = os.environ.get(MODE_VARIABLE, "auto")
    if mode == "required":
        _warn_once(
            f"{MODE_VARIABLE}=required: not there yet; taken as auto, which requires nothing"
        )
    elif mode not in ("auto", "off"):
        _warn_once(f"{MODE_VARIABLE}={mode}: allowed are auto and off; taken as auto")
    return mode == "off"


def max_choices() -> int:
    """Most kernels to offer for one GEMM; a value that is no number counts as not set."""
    text = os.environ.get(MAX_CHOICES_VARIABLE)
    if text is None:
        return DEFAULT_MAX_CHOICES
    if not text.isdecimal():
        _warn_once(
            f"{MAX_CHOICES_VARIABLE}={text}: must be a number, 0 or more; "
            f"taken as {DEFAULT_MAX_CHOICES}"
        )
        return DEFAULT_MAX_CHOICES
    return int(text)


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)
