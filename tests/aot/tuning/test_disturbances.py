"""Tuning on a GPU that is busy, hot or not seen, and runs that disagree."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuner import Tuner

from nvgemm_aot.pipeline.linker import c_compiler
from nvgemm_aot.rankings.agreement import ATEN, DISAGREEMENT
from nvgemm_aot.tuning import outcome
from nvgemm_aot.tuning.measuring import gpu
from nvgemm_aot.tuning.measuring import problem_times as measuring
from nvgemm_aot.tuning.measuring.gpu import (
    UNKNOWN_DRIVER,
    GpuState,
    NvmlWatch,
    Watch,
    slowdowns,
    watch_gpu,
)
from nvgemm_aot.tuning.measuring.problem_times import UNDECIDED
from nvgemm_aot.tuning.measuring.race import LEAST_SAMPLES, MOST_ROUNDS
from nvgemm_runtime.errors import TuningError
from tuning_bench import IDLE, PROBLEMS, SLOW_FIRST, Sleeper, bench, doubts, header_of

ROUNDS = len(PROBLEMS) * LEAST_SAMPLES
"""Of all problems, where their times are told apart at once."""

NOISE = [200.0, 280.0, 240.0, 310.0, 220.0, 260.0, 330.0]

BUSY = GpuState(utilization_percent=40, slowdowns=())
HOT = GpuState(utilization_percent=0, slowdowns=("hardware thermal slowdown",))

WORK = "the GPU was 40 % busy with other work"


def of_all(*texts: str) -> dict[int, tuple[str, ...]]:
    return {problem.m: texts for problem in PROBLEMS}


def test_a_busy_gpu_is_waited_for_and_then_doubted(
    tuner: Tuner, caplog: pytest.LogCaptureFixture
) -> None:
    sleep = Sleeper()
    tuner(on=tuner.at(BUSY, sleep=sleep))
    assert tuner.doubts == of_all(WORK)
    assert sleep.naps.count(measuring.PAUSE_S) == measuring.ATTEMPTS
    assert WORK in caplog.text


def test_a_gpu_that_becomes_free_is_not_doubted(tuner: Tuner) -> None:
    tuner(on=tuner.at(BUSY, BUSY, IDLE))
    assert tuner.doubts == of_all()


def test_others_that_come_meanwhile_make_what_was_measured_uncertain(tuner: Tuner) -> None:
    tuner(on=tuner.at(IDLE, *[IDLE] * ROUNDS, BUSY))
    assert tuner.doubts == of_all(f"{WORK} afterwards")


@pytest.mark.parametrize(("waits", "after"), [(1, ()), (3, ()), (4, (WORK,))])
def test_others_are_looked_for_now_and_then(
    tuner: Tuner, waits: int, after: tuple[str, ...]
) -> None:
    # A look before; after two problems of 40 s each, others are there, and for so many waits.
    while_waiting = [*[BUSY] * (waits - 1), IDLE] if waits <= measuring.ATTEMPTS else [BUSY] * 4
    begin = [IDLE, *[IDLE] * (2 * ROUNDS // 3), BUSY]
    sleep = Sleeper()
    on = tuner.at(*begin, *while_waiting, *[IDLE] * (ROUNDS // 3), IDLE, sleep=sleep)
    tuned = tuner(on=on, ticks=[0.0, 0.0, 40.0, 80.0])
    before = f"{WORK} afterwards"
    assert tuner.doubts == {8: (before,), 16: (before,), 32: after}
    assert sleep.naps.count(measuring.PAUSE_S) == waits - 1
    assert not tuned.is_complete


@pytest.mark.parametrize("state", [BUSY, HOT, IDLE])
def test_what_was_disturbed_is_measured_again_by_the_same_command(
    tuner: Tuner, state: GpuState
) -> None:
    if state is IDLE:  # but undecided
        tuner.timer.times = {**SLOW_FIRST, "Cpu_8x32": NOISE, "aten": NOISE[::-1]}
    tuner(on=tuner.at(state), budget_s=9.0, ticks=[0.0, 0.0, 0.0, 99.0])
    measured = [ranking.measured for ranking in tuner.header.rankings]
    assert [one and len(one.doubts) for one in measured] == [1, 1, None]
    tuner.timer.times = SLOW_FIRST
    tuned = tuner(budget_s=9.0, ticks=[0.0, 0.0, 99.0, 99.0])
    assert (tuned.measured_now, tuned.is_complete) == (1, False)
    assert tuner.doubts[32] == (), "what was not measured yet comes first"
    tuned = tuner()
    assert (tuned.measured_now, tuned.is_complete) == (2, True)
    assert tuner.doubts == of_all()


@pytest.mark.parametrize("ends_by", [KeyboardInterrupt, TuningError])
def test_others_are_looked_for_at_an_early_end_too(
    tuner: Tuner, ends_by: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise measuring.BrokenDeviceError(ATEN, "an illegal memory access")

    races = iter([measuring.race])
    on = tuner.at(IDLE, *[IDLE] * (ROUNDS // 3), BUSY)
    if ends_by is KeyboardInterrupt:
        tuner.interrupt(4, on=on)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(measuring, "race", lambda *a: next(races, broken)(*a))
            with pytest.raises(TuningError):
                tuner(on=on)
    tuner(budget_s=9.0, ticks=[0.0, 1.0, 2.0, 99.0])
    assert tuner.doubts == {8: (f"{WORK} afterwards",), 16: (), 32: ()}


def test_a_slowdown_in_any_round_is_seen(tuner: Tuner) -> None:
    # Idle before; of the first problem's attempts each is disturbed in its second round.
    disturbed = [IDLE, HOT, *[IDLE] * (LEAST_SAMPLES - 2)]
    sleep = Sleeper()
    tuner(on=tuner.at(IDLE, *disturbed * measuring.ATTEMPTS, IDLE, sleep=sleep))
    assert tuner.doubts == {8: ("hardware thermal slowdown",), 16: (), 32: ()}
    assert sleep.naps.count(measuring.PAUSE_S) == measuring.ATTEMPTS - 1


def test_a_throttled_gpu_is_measured_anew(tuner: Tuner) -> None:
    sleep = Sleeper()
    tuner(on=tuner.at(IDLE, *[HOT] * LEAST_SAMPLES, IDLE, sleep=sleep))
    assert tuner.doubts == of_all()
    assert sleep.naps.count(measuring.PAUSE_S) == 1


def test_what_nobody_looked_for_is_said_and_doubted(
    tuner: Tuner, caplog: pytest.LogCaptureFixture
) -> None:
    sleep = Sleeper()
    tuner(on=replace(bench(tuner.timer, sleep=sleep), watch=Watch()))
    assert tuner.doubts == of_all(outcome.UNSEEN_SLOWDOWNS, outcome.UNSEEN_WORK)
    assert outcome.UNSEEN_WORK in caplog.text
    assert measuring.PAUSE_S not in sleep.naps, "no waiting makes it see, nor measuring anew"
    assert tuner.timer.sampled.count("aten") == len(PROBLEMS) * LEAST_SAMPLES


def test_times_that_vary_are_measured_anew_and_then_doubted(tuner: Tuner) -> None:
    tuner.timer.times = {**SLOW_FIRST, "Cpu_8x32": NOISE, "aten": NOISE[::-1]}
    tuner()
    assert tuner.doubts == of_all(UNDECIDED)
    of_aten = tuner.timer.sampled.count("aten")
    assert of_aten == len(PROBLEMS) * measuring.ATTEMPTS * MOST_ROUNDS


def tuned_again(tuner: Tuner, times: dict[str, list[float]], **on: Any) -> Path:
    """The bundle of a second run, of what a first one wrote."""
    second = tuner.beside("second.nvgemm")
    tuner()
    tuner.timer.times = {**tuner.timer.times, **times}
    tuner(tuner.path, second, on=bench(tuner.timer, **on))
    return second


def test_two_runs_that_agree_are_certain(tuner: Tuner) -> None:
    second = tuned_again(tuner, {"Cpu_8x32": [206.0]}, today="2026-11-22")
    assert doubts(second) == of_all()
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
    tuner: Tuner, times: dict[str, list[float]], said: str
) -> None:
    second, third = tuned_again(tuner, times), tuner.beside("third.nvgemm")
    assert all(said in text for (text,) in doubts(second).values())
    tuner(second, third)
    assert doubts(third) == of_all(), "it agrees with the second"


def test_equals_may_change_places(tuner: Tuner) -> None:
    others = {"": [50000.0], "Cpu_16x16": [30000.0]}
    tuner.timer.times = {**others, "Cpu_8x32": [20000.0], "aten": [20100.0]}
    assert doubts(tuned_again(tuner, {"Cpu_8x32": [20150.0]})) == of_all()


def test_runs_on_other_gpus_are_not_compared(tuner: Tuner) -> None:
    facts = replace(bench().facts, name="another CPU")
    second = tuned_again(tuner, {"Cpu_8x32": [400.0]}, facts=facts)
    assert doubts(second) == of_all()
    assert header_of(second).products == (bench().facts.name, "another CPU")


def test_atens_time_is_compared_for_one_torch_alone(tuner: Tuner) -> None:
    second = tuned_again(tuner, {"aten": [180.0]})
    assert all(DISAGREEMENT in text for (text,) in doubts(second).values())
    on = bench(tuner.timer)
    for change in ({"torch": "2.99.0"}, {"cuda": "14.0"}):
        output = tuner.beside(f"{[*change]}.nvgemm")
        tuner(tuner.path, output, on=replace(on, versions=replace(on.versions, **change)))
        assert doubts(output) == of_all()


def test_a_run_that_was_disturbed_is_not_compared(tuner: Tuner) -> None:
    second = tuner.beside("second.nvgemm")
    tuner.timer.times = {**SLOW_FIRST, "Cpu_8x32": [400.0]}
    tuner(on=tuner.at(BUSY))
    tuner.timer.times = SLOW_FIRST
    tuner(tuner.path, second)
    assert doubts(second) == of_all()


def test_a_cap_on_power_is_no_slowdown() -> None:
    assert slowdowns(0x04 | 0x01) == ()
    assert slowdowns(0x04 | 0x40 | 0x80) == ("hardware thermal slowdown", "hardware power brake")


def test_a_machine_without_a_driver_is_measured_blindly() -> None:
    watch = watch_gpu("GPU-00000000-0000-0000-0000-000000000000")
    if not torch.cuda.is_available():
        assert (watch.driver, watch.look()) == (UNKNOWN_DRIVER, GpuState())


NVML = """
#include <string.h>
typedef struct { unsigned gpu, memory; } utilization_t;
static int device;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **found) {
  *found = &device;
  return strcmp(uuid, "GPU-1234") ? 6 : 0;  /* NVML_ERROR_NOT_FOUND */
}
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  if (length < 10) return 7;
  strcpy(version, "580.95.05");
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *asked, utilization_t *rates) {
  if (asked != &device) return 2;
  rates->gpu = 63; rates->memory = 7;
  return STATUS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *asked, unsigned long long *reasons) {
  if (asked != &device) return 2;
  *reasons = 0x100000044ull;
  return STATUS;
}
"""


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (0, GpuState(utilization_percent=63, slowdowns=("hardware thermal slowdown",))),
        (3, GpuState()),  # NVML_ERROR_NOT_SUPPORTED
    ],
)
def test_reads_what_the_drivers_library_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, state: GpuState
) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    command = [*c_compiler(), f"-DSTATUS={status}", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", library, tmp_path / "nvml.c"], check=True)
    monkeypatch.setattr(gpu, "_LIBRARY", str(library))
    watch = watch_gpu("GPU-1234")
    assert (watch.driver, watch.look()) == ("580.95.05", state)
    assert not isinstance(watch_gpu("GPU-5678"), NvmlWatch)
