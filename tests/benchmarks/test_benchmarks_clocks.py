"""benchmarks/additive/clocks.py: its table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.additive import clocks
from imitated_gpu import imitate


def test_a_product_that_slows_down_differs_from_itself_but_not_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = imitate(monkeypatch)
    machine.boost = 0.8
    monkeypatch.setattr(clocks.time, "sleep", lambda _: setattr(machine, "worked_us", 0.0))
    monkeypatch.setattr(torch, "mm", lambda *_, **__: machine.run(host_us=10.0, gpu_us=2000.0))
    made: dict[str, Any] = {"T": None, "bfloat16": lambda: SimpleNamespace(T=None)}
    monkeypatch.setattr(torch, "randn", lambda *_, **__: SimpleNamespace(**made))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    size = (8192, 24576, 4096)
    head, line = clocks.table([(size, *clocks.measure(*size))])
    assert head.split()[:3] == ["m", "n", "k"]
    assert line.split()[3:] == ["1.6000", "1.000", "to", "1.250", "1.000", "to", "1.000"]
