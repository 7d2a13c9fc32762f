"""Tuning in a process that is killed where a kernel does not return."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tuner import Tuner

from nvgemm_aot.cli.main import main
from nvgemm_aot.tuning import watchdog
from nvgemm_aot.tuning.state.journal import state_path
from nvgemm_aot.tuning.tune_bundles import Tuned, TuningOptions
from nvgemm_runtime.errors import TuningError
from tuning_bench import PROBLEMS, Behaving, header_of
from watched_benches import HANGING

HANG_S = 3.0

KEYS = [problem.key for problem in PROBLEMS]


class Spinning(Behaving):
    """One never returns where m is 16: it spins in its own code, and holds the interpreter."""

    name = "test_watchdog:Spinning"
    behaviours = {HANGING: "if (out->shape[RANK - 2] == 16) for (volatile int i = 0;; ++i) ;"}  # noqa: RUF012


def watched(tuner: Tuner, bench: str, path: Path | None = None, **options: Any) -> Tuned:
    shown, again = options.pop("progress", None), options.pop("again", None)
    return watchdog.tune_watched(
        [path or tuner.tunable],
        tuner.path,
        TuningOptions(**options),
        bench=f"watched_benches:{bench}",
        hang_s=HANG_S,
        progress=shown,
        again=again,
    )


@pytest.mark.slow
def test_another_process_measures_again_what_the_first_one_did(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHED_BENCH_UUID", "GPU-1")
    steps: list[tuple[int, int]] = []
    tuned = watched(tuner, "sound", again=lambda *step: steps.append(step))
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert (tuned.measured_now, tuned.unrepeated, tuned.is_complete) == (6, 0, True)
    found = [one.measured for one in header_of(tuner.path).rankings]
    assert all(one is not None and one.is_repeated for one in found)
    assert watched(tuner, "sound").measured_now == 0


def operators_of(tuner: Tuner) -> dict[str, str]:
    return {kernel.id: kernel.operator for kernel in header_of(tuner.tunable).kernels}


@pytest.mark.slow
def test_without_a_hang_the_bundle_is_that_of_one_process(tuner: Tuner) -> None:
    steps: list[tuple[int, int]] = []
    tuned = watched(tuner, "sound", progress=lambda *step: steps.append(step))
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert (tuned.hanging, tuned.broken, tuned.unmeasured) == ((), {}, {})
    here = tuner.beside("here.nvgemm")
    tuner(output=here)
    assert tuner.path.read_bytes() == here.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["hangs_when_timed", "hangs_back_to_back"])
def test_a_kernel_that_hangs_is_named_dropped_and_recorded(
    tuner: Tuner, bench: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = operators_of(tuner)
    steps: list[tuple[int, int]] = []
    tuned = watched(tuner, bench, progress=lambda *step: steps.append(step))
    ((hanging, said),) = tuned.hanging
    assert names[hanging] == HANGING
    assert said == f"{KEYS[0]}: it hangs: it has not returned for 3 s"
    assert tuned.broken == {hanging: said}
    assert [record.message for record in caplog.records if "hangs" in record.message] == [
        f"{KEYS[0]}: kernel {hanging[:12]}: it hangs: it has not returned for 3 s; continuing "
        "in a new process"
    ]
    assert [*tuned.outcomes] == KEYS, "the others are measured"
    assert tuner.kernels == {*names.values()} - {HANGING}
    assert tuner.orders == [["Cpu_16x16", "Cpu_1x1"]] * 3
    assert steps[-1] == (3, 3)
    if bench == "hangs_when_timed":
        again = watched(tuner, bench)
        assert (again.measured_now, again.hanging) == (0, tuned.hanging), "it does not run again"


@pytest.mark.slow
def test_a_kernel_that_spins_in_its_own_code_is_killed(tuner: Tuner) -> None:
    tunable = tuner.build(provider=Spinning())
    tuned = watched(tuner, "sound", tunable)
    ((hanging, said),) = tuned.hanging
    assert said.startswith(KEYS[1])
    assert HANGING not in tuner.kernels
    assert [*tuned.outcomes] == KEYS
    lines = [json.loads(line) for line in state_path(tuner.path).read_text().splitlines()]
    assert not any("killed" in line for line in lines), "it is no kill by a time limit"
    assert [line["hangs"] for line in lines if "hangs" in line] == [hanging]


@pytest.mark.slow
def test_aten_is_left_out_only_where_it_hangs(tuner: Tuner) -> None:
    tuned = watched(tuner, "aten_hangs")
    assert tuned.hanging == (("aten", f"{KEYS[0]}: it hangs: it has not returned for 3 s"),)
    assert tuned.broken == {}
    assert [tuned.outcomes[key].aten is None for key in KEYS] == [True, False, False]


@pytest.mark.slow
def test_many_hangs_end_the_run_and_what_is_known_stays(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "MOST_ENDS", 2)
    with pytest.raises(
        TuningError, match=r"2 measuring processes hung or died.* the last: .*hangs"
    ):
        watched(tuner, "everything_hangs")
    assert not tuner.path.exists()
    assert state_path(tuner.path).read_text().count('"hangs"') == 2


@pytest.mark.slow
def test_a_kernel_that_ends_its_process_while_timed_is_left_out_after_the_second_time(
    tuner: Tuner, caplog: pytest.LogCaptureFixture
) -> None:
    tuned = watched(tuner, "dies_when_timed")
    ((broken, said),) = tuned.broken.items()
    assert operators_of(tuner)[broken] == HANGING
    reason = "the measuring process died by SIGKILL while it ran"
    assert said == f"{KEYS[0]}: {reason} (time 2 of 2)"
    assert caplog.text.count(reason) == 2
    assert (tuned.hanging, [*tuned.outcomes]) == ((), KEYS)
    assert HANGING not in tuner.kernels
    lines = [json.loads(line) for line in state_path(tuner.path).read_text().splitlines()]
    assert [line["died"] for line in lines if "died" in line] == [broken] * 2


@pytest.mark.slow
def test_where_all_end_their_processes_the_next_command_does_not_begin_anew(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "MOST_ENDS", 2)
    for deaths in (2, 4):
        with pytest.raises(TuningError, match="2 measuring processes hung or died"):
            watched(tuner, "always_dies")
        assert state_path(tuner.path).read_text().count('"died"') == deaths
    lines = [json.loads(line) for line in state_path(tuner.path).read_text().splitlines()]
    died = [line["died"] for line in lines if "died" in line]
    assert all(died.count(one) <= 2 for one in died), "none runs a third time"


@pytest.mark.slow
def test_a_process_that_is_silent_while_nothing_runs_is_ended(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "IDLE_FACTOR", 1)
    with pytest.raises(TuningError, match="silent for 3 s while no kernel ran: the GPU or its dri"):
        watched(tuner, "silent")
    assert not tuner.path.exists()


@pytest.mark.slow
def test_a_kernel_that_breaks_the_device_is_dropped_and_another_process_goes_on(
    tuner: Tuner,
) -> None:
    tuned = watched(tuner, "breaks_the_device")
    ((broken, said),) = tuned.broken.items()
    assert operators_of(tuner)[broken] == HANGING
    assert "it leaves the GPU unusable" in said
    assert (tuned.hanging, [*tuned.outcomes]) == ((), KEYS)


@pytest.mark.slow
def test_the_budget_is_that_of_all_processes(tuner: Tuner) -> None:
    ticks = itertools.chain([0.0, 1.0], itertools.repeat(200.0))
    tuned = watchdog.tune_watched(
        [tuner.tunable],
        tuner.path,
        TuningOptions(budget_s=100.0),
        bench="watched_benches:hangs_when_timed",
        hang_s=HANG_S,
        clock=ticks.__next__,
    )
    assert tuned.unmeasured.keys() == {*KEYS}
    assert len(tuned.hanging) == 1


@pytest.mark.slow
def test_errors_and_messages_come_through(tuner: Tuner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(ZeroDivisionError, match="made by a test") as raised:
        watched(tuner, "raises")
    assert "in raises" in str(raised.value.__cause__)
    with pytest.raises(TuningError, match="no problem is declared"):
        watched(tuner, "sound", write_bare(tuner))


@pytest.mark.slow
def test_a_process_that_nobody_listens_to_ends_and_blames_no_kernel(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(done: int, total: int) -> None:
        if done == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watched(tuner, "sound", progress=failing)
    assert b"broken" not in state_path(tuner.path).read_bytes()
    tuned = watched(tuner, "sound")
    assert ([*tuned.outcomes], tuned.broken) == (KEYS, {})


def write_bare(tuner: Tuner) -> Path:
    return tuner.change(lambda content: replace(content, rankings=()))


@pytest.mark.slow
def test_the_command_says_what_hangs_and_succeeds(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_watched = watchdog.tune_watched
    monkeypatch.setattr(
        watchdog,
        "tune_watched",
        lambda *given, **how: tune_watched(*given, **how, bench="watched_benches:hangs_when_timed"),
    )
    command = ["tune", str(tuner.tunable), "-o", str(tuner.path), "--hang-after", "3s"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("HANGS: kernel"))
    assert line.endswith(f"is dropped: {KEYS[0]}: it hangs: it has not returned for 3 s")
    assert "WRONG" not in result.stdout
    assert "written, 3 of 3 problems measured, 2 kernels" in result.stdout
    document = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert [said for _, said in document["hanging"]] == [line.split(" is dropped: ")[1]]


PROGRAM = """
import sys
from nvgemm_aot.cli.main import main
from nvgemm_aot.tuning import watchdog
import functools
watchdog.tune_watched = functools.partial(
    watchdog.tune_watched, bench="watched_benches:hangs_when_timed"
)
main(prog_name="nvgemm-aot")
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind_by_an_end_from_outside(tuner: Tuner, by: signal.Signals) -> None:
    command = ["tune", str(tuner.tunable), "-o", str(tuner.path), "--hang-after", "600s"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *command],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    state = state_path(tuner.path)
    while not (state.exists() and state.read_bytes().count(b"\n") >= 1):
        assert process.poll() is None
        time.sleep(0.02)
    (child,) = children(process.pid)
    time.sleep(0.3)
    process.send_signal(by)
    _, errors = process.communicate(timeout=60)
    limit = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()
    if by is not signal.SIGKILL:
        assert process.returncode == 130, errors
        assert "interrupted; nothing was measured yet; to continue, run the same command" in errors
        assert "Traceback" not in errors


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(one) for one in text.split()]
