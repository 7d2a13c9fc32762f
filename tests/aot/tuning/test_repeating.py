"""Measuring problems a second time, in another process and minutes later."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from tuner import Tuner

from nvgemm_aot.rankings.agreement import ATEN
from nvgemm_aot.tuning.measuring.gpu import Bench, GpuState
from nvgemm_aot.tuning.state import tuning_state as state_module
from nvgemm_aot.tuning.state.journal import state_path
from nvgemm_aot.tuning.state.tuning_state import KILLED
from nvgemm_aot.tuning.tune_bundles import Tuned
from nvgemm_runtime.bundle.ranking_entries import LEAST_REPEAT_S, Measured
from tuning_bench import SLOW_FIRST, DictatedTimer, Sleeper, bench

BUSY = GpuState(utilization_percent=90, slowdowns=())
"""Of a GPU that other processes use."""

BEGIN_S = 1_000_000.0


class Machine:
    """One GPU, whose clock goes on when something sleeps or a test says so."""

    def __init__(self, timer: DictatedTimer) -> None:
        self.timer = timer
        self.passed_s = 0.0
        self.sleeper = Sleeper()

    def bench(self, uuid: str | None = "GPU-1", *states: GpuState) -> Bench:
        made = bench(self.timer, sleep=self.sleeper)
        if states:
            made.watch.states = list(states)  # type: ignore[attr-defined]
        return replace(
            made,
            uuid=uuid,
            now_s=lambda: BEGIN_S + self.passed_s + sum(self.sleeper.naps),
        )


@pytest.fixture
def machine(tuner: Tuner) -> Machine:
    return Machine(tuner.timer)


@pytest.fixture
def next_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What follows is done by another process, as far as states of tunings say."""
    names = iter("abcdefgh")
    return lambda: monkeypatch.setattr(state_module, "PROCESS", next(names))


def measured(tuner: Tuner) -> list[Measured]:
    found = [ranking.measured for ranking in tuner.header.rankings]
    return [one for one in found if one is not None]


def standings(tuner: Tuner) -> list[str]:
    return [one.standing for one in measured(tuner)]


@pytest.fixture
def first(tuner: Tuner, machine: Machine) -> Tuned:
    """The first pass over all problems."""
    return tuner(on=machine.bench())


def test_a_process_does_not_repeat_what_it_measured_itself(tuner: Tuner, first: Tuned) -> None:
    assert (first.unrepeated, first.is_complete) == (3, False)
    assert standings(tuner) == ["measured once"] * 3
    again = tuner(on=Machine(tuner.timer).bench())
    assert (again.measured_now, again.unrepeated) == (0, 3)


def test_another_process_measures_the_fastest_and_aten_again(
    tuner: Tuner, machine: Machine, first: Tuned, next_process: Callable[[], None]
) -> None:
    next_process()
    machine.passed_s = 500.0
    tuned = tuner(on=machine.bench())
    assert tuner.timer.prepared == ["Cpu_8x32", ATEN] * 3
    assert (tuned.measured_now, tuned.unrepeated, tuned.is_complete) == (3, 0, True)
    assert standings(tuner) == ["repeated"] * 3
    assert all(500 <= (one.repeated or 0) < 600 for one in measured(tuner))
    assert [len(one.spreads_ns) for one in measured(tuner)] == [3] * 3  # of the first measurement


def test_problems_are_measured_again_no_earlier_than_two_minutes_later(
    tuner: Tuner,
    machine: Machine,
    first: Tuned,
    next_process: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    next_process()
    machine.passed_s, slept_s = 20.0, sum(machine.sleeper.naps)
    seen: list[tuple[int, int]] = []
    tuner(on=machine.bench(), again=lambda *step: seen.append(step))
    assert LEAST_REPEAT_S - 20 <= sum(machine.sleeper.naps) - slept_s < LEAST_REPEAT_S
    assert max(machine.sleeper.naps) <= 5  # nothing is silent for long
    assert seen.count((0, 3)) > 50
    assert seen[-1] == (3, 3)
    assert all((one.repeated or 0) >= LEAST_REPEAT_S for one in measured(tuner))
    (said,) = [one for one in caplog.messages if "waiting" in one]
    assert "a problem's second measurement starts 120 s or more after its first" in said


def test_a_clock_that_was_set_back_delays_by_two_minutes_and_repeats_nothing(
    tuner: Tuner, machine: Machine, first: Tuned, next_process: Callable[[], None]
) -> None:
    next_process()
    machine.passed_s = -1e6
    tuned = tuner(on=machine.bench())
    assert standings(tuner) == ["measured once"] * 3
    assert tuned.unrepeated == 0


def test_a_budget_that_ends_before_is_not_waited_for(
    tuner: Tuner, machine: Machine, first: Tuned, next_process: Callable[[], None]
) -> None:
    next_process()
    slept_s = sum(machine.sleeper.naps)
    tuned = tuner(on=machine.bench(), budget_s=50.0)
    assert (tuned.unrepeated, tuned.is_complete) == (3, False)
    assert sum(machine.sleeper.naps) - slept_s < 20
    assert standings(tuner) == ["measured once"] * 3


def test_repeating_can_be_left_out(
    tuner: Tuner, machine: Machine, first: Tuned, next_process: Callable[[], None]
) -> None:
    next_process()
    machine.passed_s = 500.0
    tuned = tuner(on=machine.bench(), repeats=False)
    assert (tuned.unrepeated, tuned.is_complete, tuned.measured_now) == (0, True, 0)
    assert standings(tuner) == ["measured once"] * 3


def test_times_that_contradict_the_first_put_the_ranking_in_doubt(
    tuner: Tuner, machine: Machine, first: Tuned, next_process: Callable[[], None]
) -> None:
    next_process()
    machine.passed_s = 500.0
    tuner.timer.times = {**SLOW_FIRST, "Cpu_8x32": [220.0]}
    tuned = tuner(on=machine.bench())
    assert standings(tuner) == ["doubtful"] * 3
    assert all("two runs disagree" in one.doubts[0] for one in measured(tuner))
    assert tuned.is_complete  # measuring it a third time would settle nothing


def test_another_verdict_within_the_noise_repeats_nothing(
    tuner: Tuner, machine: Machine, next_process: Callable[[], None]
) -> None:
    tuner.timer.times = {**SLOW_FIRST, "Cpu_8x32": [248.0]}
    tuner(on=machine.bench())
    next_process()
    machine.passed_s = 500.0
    tuner.timer.times = {**SLOW_FIRST, "Cpu_8x32": [251.0]}
    tuner(on=machine.bench())
    assert standings(tuner) == ["measured once"] * 3


def test_a_disturbed_repetition_is_made_again_by_the_next_process(
    tuner: Tuner, machine: Machine, first: Tuned, next_process: Callable[[], None]
) -> None:
    next_process()
    machine.passed_s = 500.0
    tuned = tuner(on=machine.bench("GPU-1", BUSY))
    assert (tuned.unrepeated, tuned.is_complete) == (3, False)
    assert standings(tuner) == ["measured once"] * 3, "the first measurement is as good as before"
    next_process()
    assert tuner(on=machine.bench()).unrepeated == 0
    assert standings(tuner) == ["repeated"] * 3


@pytest.mark.parametrize(("then", "now"), [("GPU-1", "GPU-2"), (None, None), (None, "GPU-1")])
def test_only_what_this_very_gpu_measured_is_repeated(
    tuner: Tuner,
    machine: Machine,
    next_process: Callable[[], None],
    then: str | None,
    now: str | None,
) -> None:
    tuner(on=machine.bench(then))
    next_process()
    machine.passed_s = 500.0
    tuned = tuner(on=machine.bench(now))
    assert (tuned.measured_now, tuned.unrepeated) == (0, 0)
    assert standings(tuner) == ["measured once"] * 3


def test_what_another_gpu_confirms_is_not_repeated(
    tuner: Tuner, machine: Machine, next_process: Callable[[], None]
) -> None:
    tuner(on=machine.bench("GPU-2"), output=tuner.beside("other.nvgemm"))
    tuned = tuner(tuner.beside("other.nvgemm"), on=machine.bench())
    assert standings(tuner) == ["confirmed by 2 GPUs"] * 3
    assert (tuned.unrepeated, tuned.is_complete) == (0, True)


def test_a_kernel_that_is_wrong_the_second_time_is_thrown_out(
    tuner: Tuner,
    machine: Machine,
    first: Tuned,
    next_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nvgemm_aot.tuning.measuring import problem_times as measuring

    next_process()
    machine.passed_s = 500.0
    monkeypatch.setattr(
        measuring,
        "_find_contender_fault",
        lambda name, run, checks: None if name == ATEN else "it is wrong now",
    )
    tuner(on=machine.bench())
    assert "Cpu_8x32" not in tuner.kernels
    assert {one.repeated for one in measured(tuner)} == {None}


def test_an_interrupted_second_pass_goes_on_where_it_was(
    tuner: Tuner, machine: Machine, first: Tuned, next_process: Callable[[], None]
) -> None:
    next_process()
    machine.passed_s = 500.0
    tuner.interrupt(3, on=machine.bench())  # in the second problem
    next_process()
    tuned = tuner(on=machine.bench())
    assert tuner.timer.prepared == ["Cpu_8x32", ATEN] * 2
    assert tuned.is_complete
    assert standings(tuner) == ["repeated"] * 3


def test_repetitions_that_no_look_for_other_work_confirmed_are_made_again(
    tuner: Tuner, machine: Machine, first: Tuned, next_process: Callable[[], None]
) -> None:
    next_process()
    machine.passed_s = 500.0
    tuner(on=machine.bench())
    path = state_path(tuner.path)
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [one for one in lines if b'"written"' not in one or b'"confirmed"' in one]
    assert b"confirmed" in kept.pop()  # as if it had been killed before
    path.write_bytes(b"".join(kept))
    tuner.path.unlink()
    next_process()
    tuned = tuner(on=machine.bench())
    assert tuned.measured_now == 3
    doubts = [
        json.loads(one).get("confirmed")
        for one in path.read_bytes().splitlines()
        if KILLED.encode() in one
    ]
    assert doubts == [KILLED]
    assert standings(tuner) == ["repeated"] * 3
