"""Tuning on a GPU that is busy, hot or not seen, and runs that disagree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvgemm_aot.tuning import measuring, outcome
from nvgemm_aot.tuning.contenders import ATEN
from nvgemm_aot.tuning.gpu import Blind, GpuState
from nvgemm_aot.tuning.measuring import UNDECIDED
from nvgemm_aot.tuning.outcome import DISAGREEMENT
from nvgemm_aot.tuning.race import LEAST_SAMPLES, MOST_ROUNDS
from nvgemm_runtime.errors import TuningError
from tuning_bench import (
    IDLE,
    PROBLEMS,
    SLOW_FIRST,
    DictatedTimer,
    DictatedWatch,
    Sleeper,
    bench,
    doubts,
    header_of,
    run,
)

ROUNDS = len(PROBLEMS) * LEAST_SAMPLES
"""Of all problems, where their times are told apart at once."""

NOISE = [200.0, 280.0, 240.0, 310.0, 220.0, 260.0, 330.0]

WORK = "the GPU was 40 % busy with other work"


def test_a_busy_gpu_is_waited_for_and_then_doubted(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, caplog: pytest.LogCaptureFixture
) -> None:
    busy, sleep = GpuState(utilization_percent=63, slowdowns=()), Sleeper()
    run(tunable, tuned_path, bench(dictated, DictatedWatch([busy]), sleep))
    told = "the GPU was 63 % busy with other work"
    assert doubts(tuned_path) == {problem.m: (told,) for problem in PROBLEMS}
    waited = [nap for nap in sleep.naps if nap == measuring.PAUSE_S]
    assert len(waited) == measuring.ATTEMPTS
    assert told in caplog.text


def test_a_gpu_that_becomes_free_is_not_doubted(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    busy = GpuState(utilization_percent=63, slowdowns=())
    run(tunable, tuned_path, bench(dictated, DictatedWatch([busy, busy, IDLE])))
    assert set(doubts(tuned_path).values()) == {()}


def test_others_that_come_meanwhile_make_what_was_measured_uncertain(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    busy = GpuState(utilization_percent=40, slowdowns=())
    run(tunable, tuned_path, bench(dictated, DictatedWatch([IDLE, *[IDLE] * ROUNDS, busy])))
    told = "the GPU was 40 % busy with other work afterwards"
    assert doubts(tuned_path) == {problem.m: (told,) for problem in PROBLEMS}


def test_others_are_looked_for_now_and_then(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    busy = GpuState(utilization_percent=40, slowdowns=())

    # A look before; after two problems of 40 s each, others are there, and for so many waits.
    def states(waits: int) -> DictatedWatch:
        while_waiting = [*[busy] * (waits - 1), IDLE] if waits <= measuring.ATTEMPTS else [busy] * 4
        begin = [IDLE, *[IDLE] * (2 * ROUNDS // 3), busy]
        return DictatedWatch([*begin, *while_waiting, *[IDLE] * (ROUNDS // 3), IDLE])

    before = f"{WORK} afterwards"
    for waits, after in ((1, ()), (3, ()), (4, (WORK,))):
        ticks, sleep = iter([0.0, 0.0, 40.0, 80.0]), Sleeper()
        path = tuned_path.with_name(f"{waits}.nvgemm")
        on = bench(dictated, states(waits), sleep)
        tuned = run(tunable, path, on, clock=lambda ticks=ticks: next(ticks))
        assert doubts(path) == {8: (before,), 16: (before,), 32: after}
        assert sleep.naps.count(measuring.PAUSE_S) == waits - 1
        assert not tuned.is_complete


@pytest.mark.parametrize("disturbed", ["busy", "hot", "undecided"])
def test_what_was_disturbed_is_measured_again_by_the_same_command(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, disturbed: str
) -> None:
    states = {
        "busy": GpuState(utilization_percent=40, slowdowns=()),
        "hot": GpuState(utilization_percent=0, slowdowns=("hardware thermal slowdown",)),
        "undecided": IDLE,
    }
    if disturbed == "undecided":
        dictated.times = {**SLOW_FIRST, "Cpu_8x32": NOISE, "aten": NOISE[::-1]}
    ticks = iter([0.0, 0.0, 0.0, 99.0])
    watch = DictatedWatch([states[disturbed]])
    run(tunable, tuned_path, bench(dictated, watch), budget_s=9.0, clock=lambda: next(ticks))
    measured = [ranking.measured for ranking in header_of(tuned_path).rankings]
    assert [one and len(one.doubts) for one in measured] == [1, 1, None]
    dictated.times = SLOW_FIRST
    dictated.prepared.clear()
    ticks = iter([0.0, 0.0, 99.0, 99.0])
    tuned = run(tunable, tuned_path, bench(dictated), budget_s=9.0, clock=lambda: next(ticks))
    assert (tuned.measured_now, tuned.is_complete) == (1, False)
    assert doubts(tuned_path)[32] == (), "what was not measured yet comes first"
    tuned = run(tunable, tuned_path, bench(dictated))
    assert (tuned.measured_now, tuned.is_complete) == (2, True)
    assert set(doubts(tuned_path).values()) == {()}


@pytest.mark.parametrize("ends_by", [KeyboardInterrupt, TuningError])
def test_others_are_looked_for_at_an_early_end_too(
    tunable: Path,
    tuned_path: Path,
    dictated: DictatedTimer,
    ends_by: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = GpuState(utilization_percent=40, slowdowns=())
    watch = DictatedWatch([IDLE, *[IDLE] * (ROUNDS // 3), busy])
    dictated.interrupt_at = 4

    def broken(*_: Any) -> Any:
        raise measuring.BrokenDeviceError(ATEN, "an illegal memory access")

    if ends_by is TuningError:
        dictated.interrupt_at = None
        race = measuring.race
        races = iter([race])
        monkeypatch.setattr(measuring, "race", lambda *a: next(races, broken)(*a))
    with pytest.raises(ends_by):
        run(tunable, tuned_path, bench(dictated, watch))
    dictated.interrupt_at = None
    monkeypatch.undo()
    dictated.watch_runs(monkeypatch)
    ticks = iter([0.0, 1.0, 2.0, 99.0])
    run(tunable, tuned_path, bench(dictated), budget_s=9.0, clock=lambda: next(ticks))
    assert doubts(tuned_path) == {8: (f"{WORK} afterwards",), 16: (), 32: ()}


def test_a_slowdown_in_any_round_is_seen(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, caplog: pytest.LogCaptureFixture
) -> None:
    hot = GpuState(utilization_percent=0, slowdowns=("hardware thermal slowdown",))
    # Idle before; of the first problem's attempts each is disturbed in its second round.
    disturbed = [IDLE, hot, *[IDLE] * (LEAST_SAMPLES - 2)]
    states = [IDLE, *disturbed * measuring.ATTEMPTS, IDLE]
    sleep = Sleeper()
    run(tunable, tuned_path, bench(dictated, DictatedWatch(states), sleep))
    assert doubts(tuned_path) == {8: ("hardware thermal slowdown",), 16: (), 32: ()}
    assert sleep.naps.count(measuring.PAUSE_S) == measuring.ATTEMPTS - 1


def test_a_throttled_gpu_is_measured_anew(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    hot = GpuState(utilization_percent=0, slowdowns=("hardware thermal slowdown",))
    states = [IDLE, *[hot] * LEAST_SAMPLES, IDLE]
    sleep = Sleeper()
    run(tunable, tuned_path, bench(dictated, DictatedWatch(states), sleep))
    assert set(doubts(tuned_path).values()) == {()}
    assert sleep.naps.count(measuring.PAUSE_S) == 1


def test_what_nobody_looked_for_is_said_and_doubted(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, caplog: pytest.LogCaptureFixture
) -> None:
    sleep = Sleeper()
    run(tunable, tuned_path, replace(bench(dictated, sleep=sleep), watch=Blind()))
    told = (outcome.UNSEEN_SLOWDOWNS, outcome.UNSEEN_WORK)
    assert doubts(tuned_path) == {problem.m: told for problem in PROBLEMS}
    assert outcome.UNSEEN_WORK in caplog.text
    assert measuring.PAUSE_S not in sleep.naps, "no waiting makes it see"
    assert dictated.sampled.count("aten") == len(PROBLEMS) * LEAST_SAMPLES, (
        "nor does measuring anew"
    )


def test_times_that_vary_are_measured_anew_and_then_doubted(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    dictated.times = {**SLOW_FIRST, "Cpu_8x32": NOISE, "aten": NOISE[::-1]}
    run(tunable, tuned_path, bench(dictated))
    assert set(doubts(tuned_path).values()) == {(UNDECIDED,)}
    of_aten = dictated.sampled.count("aten")
    assert of_aten == len(PROBLEMS) * measuring.ATTEMPTS * MOST_ROUNDS


def tuned_again(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer, times: dict[str, list[float]], **on: Any
) -> Path:
    first, second = tmp_path / "first.nvgemm", tmp_path / "second.nvgemm"
    run(tunable, first, bench(dictated))
    dictated.times = {**dictated.times, **times}
    run(first, second, bench(dictated, **on))
    return second


def test_two_runs_that_agree_are_certain(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer
) -> None:
    second = tuned_again(tunable, tmp_path, dictated, {"Cpu_8x32": [206.0]}, today="2026-11-22")
    assert set(doubts(second).values()) == {()}
    (source,) = header_of(second).sources
    assert source.conditions is not None
    assert source.conditions.date == "2026-11-22"


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"Cpu_8x32": [400.0]}, "ATen was fastest, and kernel"),
        ({"": [100.0]}, "was fastest, and kernel"),
        ({"Cpu_8x32": [150.0]}, "took 150 ns, and 200 ns in the run of 2026-11-21"),
    ],
)
def test_two_runs_that_contradict_each_other_are_doubted(
    tunable: Path,
    tmp_path: Path,
    dictated: DictatedTimer,
    times: dict[str, list[float]],
    said: str,
) -> None:
    second = tuned_again(tunable, tmp_path, dictated, times)
    assert all(said in text for (text,) in doubts(second).values())
    third = tmp_path / "third.nvgemm"
    run(second, third, bench(dictated))
    assert set(doubts(third).values()) == {()}, "it agrees with the second"


def test_equals_may_change_places(tunable: Path, tmp_path: Path, dictated: DictatedTimer) -> None:
    others = {"": [50000.0], "Cpu_16x16": [30000.0]}
    dictated.times = {**others, "Cpu_8x32": [20000.0], "aten": [20100.0]}
    second = tuned_again(tunable, tmp_path, dictated, {"Cpu_8x32": [20150.0]})
    assert set(doubts(second).values()) == {()}


def test_runs_on_other_gpus_are_not_compared(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer
) -> None:
    facts = replace(bench().facts, name="another CPU")
    second = tuned_again(tunable, tmp_path, dictated, {"Cpu_8x32": [400.0]}, facts=facts)
    assert set(doubts(second).values()) == {()}
    assert {source.gpu for source in header_of(second).sources} == {"another CPU"}


def test_atens_time_is_compared_for_one_torch_alone(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer
) -> None:
    versions = bench().versions
    first, second = tmp_path / "first.nvgemm", tmp_path / "second.nvgemm"
    run(tunable, first, bench(dictated))
    dictated.times = {**SLOW_FIRST, "aten": [180.0]}
    run(first, second, bench(dictated))
    assert all(DISAGREEMENT in text for (text,) in doubts(second).values())
    for name, change in (("torch", {"torch": "2.99.0"}), ("cuda", {"cuda": "14.0"})):
        tuned_path = tmp_path / f"{name}.nvgemm"
        run(first, tuned_path, replace(bench(dictated), versions=replace(versions, **change)))
        assert set(doubts(tuned_path).values()) == {()}


def test_a_run_that_was_disturbed_is_not_compared(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer
) -> None:
    busy = GpuState(utilization_percent=40, slowdowns=())
    first, second = tmp_path / "first.nvgemm", tmp_path / "second.nvgemm"
    dictated.times = {**SLOW_FIRST, "Cpu_8x32": [400.0]}
    run(tunable, first, bench(dictated, DictatedWatch([busy])))
    dictated.times = SLOW_FIRST
    run(first, second, bench(dictated))
    assert set(doubts(second).values()) == {()}
