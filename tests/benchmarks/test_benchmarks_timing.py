"""Timing of GEMMs on a simulated GPU: turns and arithmetic."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

from benchmarks.shared import measuring
from nvgemm_runtime.bundle.ranking_entries import APART
from simulated_cuda import SimulatedCuda

OVERHEAD_MS = 1.0
"""Host time per launch that the GPU does not wait for, which must not count."""


class SimulatedGpu(SimulatedCuda):
    """Clock that launches advance, with a log in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def do(self, what: str, milliseconds: float) -> None:
        def run() -> None:
            self.now_ms += milliseconds
            self.log.append(what)

        self.submit(run)

    def way(self, name: str, milliseconds: float, sets: int = 3) -> Any:
        return measuring.Contender(
            launch=lambda a, b, out: self.do(f"{name} {a}", milliseconds),
            sets=[(number, None, None) for number in range(sets)],
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    simulated = SimulatedGpu()

    simulated.install(monkeypatch)
    for name, fake in {
        "synchronize": lambda: None,
        "_sleep": lambda cycles: simulated.do("spin", OVERHEAD_MS),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    flushed = SimpleNamespace(zero_=lambda: simulated.do("flush", 0.5))
    monkeypatch.setattr(measuring, "_flushing_memory", lambda: flushed)
    monkeypatch.setattr(measuring.time, "sleep", lambda seconds: simulated.do("gap", seconds * 1e3))
    return simulated


def test_windows_are_flushed_shuffled_and_divided_by_their_launches(gpu: SimulatedGpu) -> None:
    ways = {"slow": gpu.way("slow", 0.5), "fast": gpu.way("fast", 0.1), "long": gpu.way("long", 7)}
    times = measuring.offline_ns(ways, 12, 1e6, random.Random(1))
    for name, expected in (("slow", 5e5), ("fast", 1e5), ("long", 7e6)):
        assert times[name] == pytest.approx([expected] * 12)
    between = (window.split("spin")[0] for window in " ".join(gpu.log).split("flush"))
    windows = [window for window in between if window.strip()]
    assert len(windows) == 3 * 12
    launches = {window.split()[0]: len(window.split()) // 2 for window in windows}
    assert launches == {"slow": 2, "fast": 10, "long": 1}
    fast = next(window for window in windows if " fast" in window)
    assert fast.split()[1::2] == [str(number % 3) for number in range(10)]
    rounds = [
        tuple(window.split()[0] for window in windows[first : first + 3])
        for first in range(0, len(windows), 3)
    ]
    assert all(sorted(one) == ["fast", "long", "slow"] for one in rounds)
    assert len(set(rounds)) > 3


def test_launches_apart_have_a_kernel_between_whose_time_does_not_count(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "small_kernel", lambda: lambda: gpu.do("between", 0.002))
    ways = {"slow": gpu.way("slow", 0.5), "fast": gpu.way("fast", 0.1)}
    times = measuring.offline_ns(ways, 12, 1e6, random.Random(1), launches=APART)
    assert times.keys() == {"slow", "fast"}
    assert times["slow"] == pytest.approx([5e5] * 12)
    assert times["fast"] == pytest.approx([1e5] * 12)
    windows = [one.split("spin")[0].split() for one in " ".join(gpu.log).split("flush")]
    for window in (one for one in windows if "fast" in one and len(one) > 2):
        assert window[::3] == ["between"] * (len(window) // 3), "one before each launch"


def test_gaps_are_random_and_not_counted(gpu: SimulatedGpu) -> None:
    ways = {"one": gpu.way("one", 0.2), "two": gpu.way("two", 0.3)}
    times = measuring.server_ns(ways, 8, 1e-3, random.Random(1))
    assert times["one"] == pytest.approx([2e5] * 8)
    assert times["two"] == pytest.approx([3e5] * 8)
    assert gpu.log.count("gap") == 16
    assert gpu.log[6:9] == ["gap", "flush", "spin"]
    assert gpu.log[9] in ("one 0", "two 0")
    used = Counter(gpu.log[6:])
    assert [used[f"one {number}"] for number in range(3)] == [3, 3, 2]


def test_a_launch_that_the_host_sent_late_is_timed_again_behind_a_longer_wait(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)
    gpu.late = 2
    assert measuring.launch_ns(gpu.way("one", 0.25)) == pytest.approx(2.5e5)
    assert gpu.log == ["flush", "one 0"] * 3
    assert waits == [waits[0], 2 * waits[0], 4 * waits[0]]
    gpu.late = measuring.MOST_WAITS
    with pytest.raises(click.ClickException, match=f"too late in {measuring.MOST_WAITS} tries"):
        measuring.launch_ns(gpu.way("one", 0.25))


def test_a_quick_look_takes_turns_and_gives_medians(gpu: SimulatedGpu) -> None:
    ways = {"one": gpu.way("one", 0.02), "two": gpu.way("two", 5)}
    times = measuring.tuned(ways, 3, 2e5, random.Random(1))
    assert times == {"one": pytest.approx(2e4), "two": pytest.approx(5e6)}
    counts = Counter(entry.split()[0] for entry in gpu.log)
    assert counts["one"] == 2 + 3 * 10
    assert counts["two"] == 2 + 3
