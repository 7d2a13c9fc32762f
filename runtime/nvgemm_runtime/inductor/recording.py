"""Keeps the GEMMs that Inductor compiles, where the user asked for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..gemm.aten import AtenGemm
from ..gemm.problem import Problem
from ..recording.recorder import recorder
from .failures import survive

# What reads GEMMs is imported below, so that compiling without recording pays nothing for it.


def record_choices(choices: list[Any]) -> None:
    """Keep the GEMM that choices are for, whether or not they are timed.

    Raises:
        RecordError: If it is to be recorded and cannot be.
    """

    def read() -> tuple[Problem | str, str] | None:
        from .met import what_was_met

        return what_was_met(choices)

    _record(read)


def record_gemm(read: Callable[[], AtenGemm]) -> None:
    """Keep a GEMM that Inductor asks no choices for.

    Args:
        read: Gives it; not called where nothing is recorded.

    Raises:
        RecordError: As `record_choices`.
    """

    def read_declared() -> tuple[Problem | str, str]:
        from .met import declared_as

        return declared_as(read())

    _record(read_declared)


def _record(read: Callable[[], tuple[Problem | str, str] | None]) -> None:
    try:
        kept_by = recorder()
        found = None if kept_by is None else read()
        if kept_by is not None and found is not None:
            kept_by.add(*found)
    except Exception as error:
        survive(error)
