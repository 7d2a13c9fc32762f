"""benchmarks/gated/choice_timing.py: what it makes of times."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gated import __main__ as gated
from benchmarks.gated import choice_timing
from imitated_gpu import imitate


def test_a_kernel_that_is_fastest_on_an_idle_gpu_alone_is_taken_without_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = imitate(monkeypatch)
    monkeypatch.setattr(choice_timing.time, "sleep", lambda _: setattr(machine, "worked_us", 0.0))
    monkeypatch.setattr(torch, "mm", lambda *_, **__: machine.run(host_us=10.0, gpu_us=2500.0))

    def hungry(*_: torch.Tensor) -> None:
        machine.run(host_us=10.0, gpu_us=2200.0 if machine.worked_us < 100e3 else 2424.0)

    def steady(*_: torch.Tensor) -> None:
        machine.run(host_us=10.0, gpu_us=2400.0)

    sets = [(torch.empty(8, 4), torch.empty(8, 4))]
    monkeypatch.setattr(choice_timing, "operand_sets", lambda *_: sets)
    kernels = {"hungry": hungry, "steady": steady}
    monkeypatch.setattr(choice_timing, "bundled", lambda *_: kernels)
    lasting = {"hungry": 2424.0, "steady": 2400.0}
    monkeypatch.setattr(choice_timing, "_under_lasting_load", lambda *_: lasting)

    mlp = gated.MODELS["qwen3-8b"]
    losses = choice_timing.measure(mlp, 8)
    assert losses["alone"] == losses["0"] == [1.01] * choice_timing.TIMES
    assert losses["150"] == [1.0] * choice_timing.TIMES
    none_lost = {way: [1.0] for way in losses}
    *_, every, _ = choice_timing.table({("qwen3-8b", 8): losses, ("another", 8): none_lost})
    assert every.split()[:4] == ["all", "2", "1.007", "(1.010)"]
