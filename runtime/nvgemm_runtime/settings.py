"""What a user sets by environment variables."""

from __future__ import annotations

import enum
import functools
import logging
import os


class Mode(str, enum.Enum):
    """How torch.compile may use bundled kernels."""

    AUTO = "auto"
    """Bundled kernels join the choices; a GEMM that none serves may be compiled at run time."""
    REQUIRED = "required"
    """A GEMM that no bundled kernel covers is an error, and nothing is compiled."""
    OFF = "off"
    """The plug-in does nothing."""


MODE_VARIABLE = "NVGEMM_AOT"
"""The `Mode` of a process; ``auto`` if not set."""

MAX_CHOICES_VARIABLE = "NVGEMM_AOT_MAX_CHOICES"
"""Most kernels that join the choices for one GEMM."""

DEFAULT_MAX_CHOICES = 4

TRUST_VARIABLE = "NVGEMM_AOT_TRUST_RANKING"
"""1: kernels that were measured on this GPU product are not timed again; see `trust`."""

RECORD_VARIABLE = "NVGEMM_AOT_RECORD"
"""Names the file that records every GEMM torch.compile asks choices for; see `recorder`."""

TARGET_VARIABLE = "NVGEMM_AOT_RECORD_TARGET"
"""The target of that recording, whatever device its GEMMs run on."""

KEEP_VARIABLE = "NVGEMM_AOT_KEEP_NVGEMM"
"""1 keeps the choices of torch's NVGEMM backend beside bundled kernels of the same operators."""

EXPLAIN_VARIABLE = "NVGEMM_AOT_EXPLAIN"
"""Names the file that `report` appends events to; nothing is written where it is not set."""

_log = logging.getLogger(__name__)


def default_mode() -> Mode:
    """The mode that the environment asks for; a value that is none counts as not set."""
    text = os.environ.get(MODE_VARIABLE) or Mode.AUTO.value
    try:
        return Mode(text)
    except ValueError:
        allowed = ", ".join(mode.value for mode in Mode)
        _warn_once(f"{MODE_VARIABLE}={text}: allowed are {allowed}; taken as {Mode.AUTO.value}")
        return Mode.AUTO


def is_off() -> bool:
    """Whether the user has turned the plug-in off for the whole process."""
    return default_mode() is Mode.OFF


def max_choices() -> int:
    """Most kernels to offer for one GEMM; a value that is no number counts as not set."""
    text = os.environ.get(MAX_CHOICES_VARIABLE)
    if not text:
        return DEFAULT_MAX_CHOICES
    if not text.isdecimal():
        _warn_once(
            f"{MAX_CHOICES_VARIABLE}={text}: must be a number, 0 or more; "
            f"taken as {DEFAULT_MAX_CHOICES}"
        )
        return DEFAULT_MAX_CHOICES
    return int(text)


def trusts_rankings() -> bool:
    """Whether measured rankings decide alone; a value that is neither 0 nor 1 counts as 0."""
    text = os.environ.get(TRUST_VARIABLE) or "0"
    if text not in ("0", "1"):
        _warn_once(f"{TRUST_VARIABLE}={text}: allowed are 0, 1; taken as 0")
    return text == "1"


def keeps_nvgemm() -> bool:
    """Whether torch's NVGEMM choices stay beside bundled kernels of the same operators."""
    return os.environ.get(KEEP_VARIABLE) == "1"


def choosing_key() -> str:
    """The settings that change which choices there are for a GEMM, as part of a cache's key."""
    return f"{max_choices()} {int(trusts_rankings())} {int(keeps_nvgemm())}"


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)
