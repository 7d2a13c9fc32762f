"""Handles torch's own NVGEMM backend, which compiles kernels for the same GEMMs at run time.

Torch has it from 2.14 on. It needs a Blackwell GPU, so it was read but never run here. Everything
that depends on it is in this module.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch._inductor import config

from ...settings import KEEP_VARIABLE, keeps_nvgemm

_CALLER = "NVUniversalGemmCaller"
"""Class of its choices. Their ``kernel.metadata.operator_name`` equals a bundle's
`Kernel.operator`."""

_log = logging.getLogger(__name__)


def compiles_itself(choices: list[Any]) -> bool:
    """Returns True if the backend has choices for a GEMM, and so compiles kernels for it."""
    return any(type(choice).__name__ == _CALLER for choice in choices)


def is_on() -> bool:
    """Returns True if the backend may have choices for some GEMM in a graph."""
    return "NVGEMM" in config.max_autotune_gemm_backends.upper().split(",")


def without_any(choices: list[Any]) -> list[Any]:
    """Returns the choices without that backend's, which need compiling before timing."""
    return [choice for choice in choices if type(choice).__name__ != _CALLER]


def without_doubles(choices: list[Any], operators: Collection[str]) -> list[Any]:
    """Returns the choices without those that would compile bundled kernels' operators again.

    A choice that computes the transposed product, or fuses a bias, is another kernel and stays.
    """
    if keeps_nvgemm():
        return choices
    remaining = [choice for choice in choices if _plain_operator(choice) not in operators]
    if len(remaining) < len(choices):
        _log.debug(
            "skipped %d choices of torch's NVGEMM backend: bundled kernels are the same operators "
            "(%s=1 keeps them)",
            len(choices) - len(remaining),
            KEEP_VARIABLE,
        )
    return remaining


def _plain_operator(choice: Any) -> str | None:
    """Returns the operator of a backend choice that computes exactly the GEMM, or None."""
    if type(choice).__name__ != _CALLER:
        return None
    if getattr(choice, "swap_ab", False) or getattr(choice, "bias_node", None) is not None:
        return None
    name: str | None = getattr(choice.kernel.metadata, "operator_name", None)
    return name
