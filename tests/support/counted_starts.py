"""Bounds how many worker processes a pool may start, so that a pool that never gives up fails."""

from __future__ import annotations

from typing import Any

import pytest

from nvgemm_aot.pipeline import workers

Starts = list[None]


def bound_starts(monkeypatch: pytest.MonkeyPatch, most: int) -> Starts:
    """Make starting one process more than ``most`` an error, instead of starting for ever.

    Returns:
        One entry for each process that was started.
    """
    starts: Starts = []

    class Counted(workers._Worker[Any, Any]):
        def __init__(self, *arguments: Any) -> None:
            starts.append(None)
            assert len(starts) <= most, f"{len(starts)} processes were started, at most {most} may"
            super().__init__(*arguments)

    monkeypatch.setattr(workers, "_Worker", Counted)
    return starts
