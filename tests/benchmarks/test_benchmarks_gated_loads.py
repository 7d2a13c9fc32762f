"""benchmarks/gated/loads.py: its table."""

from __future__ import annotations

import itertools

import click
import pytest
import torch

from benchmarks.gated import __main__ as gated
from benchmarks.gated import loads
from imitated_gpu import Machine, imitate


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Simulates a GPU that is idle again after each pause."""
    machine = imitate(monkeypatch)
    monkeypatch.setattr(loads.time, "sleep", lambda _: setattr(machine, "worked_us", 0.0))
    return machine


def test_a_kernel_that_is_fastest_on_an_idle_gpu_alone_is_picked_without_a_load(
    machine: Machine,
) -> None:
    def hungry() -> None:
        machine.run(host_us=10.0, gpu_us=2200.0 if machine.worked_us < 100e3 else 2424.0)

    def steady() -> None:
        machine.run(host_us=10.0, gpu_us=2400.0)

    picked = loads.picks(
        {"hungry": hungry, "steady": steady}, lambda: machine.run(host_us=10.0, gpu_us=2500.0)
    )
    assert picked["alone"] == picked["0"] == ["hungry"] * loads.TIMES
    assert picked["150"] == ["steady"] * loads.TIMES


def test_samples_count_after_a_second_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=0.01)
    monkeypatch.setattr(loads.time, "perf_counter", lambda: next(clock))
    taken = {"first": 0, "second": 0}

    def sample(name: str, ns: float) -> float:
        taken[name] += 1
        return ns if taken[name] > 90 else ns / 2

    found = loads.under_lasting_load(
        {"first": lambda: sample("first", 2424.0), "second": lambda: sample("second", 2400.0)}
    )
    assert [one.report_ns for one in found.values()] == [2424.0, 2400.0]
    entry = {
        "picked": {"alone": ["first", "second"], "60": ["second", "second"]},
        "lasting": {name: one.to_json() for name, one in found.items()},
    }
    assert loads.losses(entry) == {"alone": [1.01, 1.0], "60": [1.0, 1.0]}
    *_, every, _ = loads.table({"qwen3-8b m512": entry, "another": entry})
    assert every.split() == ["all", "2", "1.005", "(1.010)", "1.000", "(1.000)"]


def test_products_without_a_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVGEMM_AOT_BUNDLES", raising=False)
    mlp = gated.MODELS["qwen3-8b"]
    with pytest.raises(click.ClickException, match="no bundled kernel"):
        gated.bundled(mlp, torch.empty(8, mlp.hidden), torch.empty(2 * mlp.half, mlp.hidden))
