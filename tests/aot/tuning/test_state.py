"""What a tuning keeps over interruptions and kills, may write, and leaves as it is."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuner import Tuner

from nvgemm_aot.storage.locks import acquire
from nvgemm_aot.tuning import session, tune_bundles
from nvgemm_aot.tuning.measuring import problem_times as measuring
from nvgemm_aot.tuning.session import OUT_OF_BUDGET
from nvgemm_aot.tuning.state.journal import Journal, Line, state_path
from nvgemm_aot.tuning.state.tuning_state import KILLED
from nvgemm_aot.tuning.tune_bundles import TuningOptions, tune
from nvgemm_runtime.errors import StorageError, TuningError
from nvgemm_runtime.gemm.problem import Problem
from tuning_bench import PROBLEMS, DictatedWatch, bench


def test_a_budget_ends_between_problems_and_the_same_call_goes_on(tuner: Tuner) -> None:
    tuned = tuner(budget_s=60.0, ticks=[0.0, 1.0, 2.0, 61.0])
    assert len(tuned.outcomes) == 2
    assert list(tuned.unmeasured.values()) == [OUT_OF_BUDGET]
    assert (tuned.state, tuned.is_complete) == (state_path(tuner.path), False)
    header = tuner.header
    kinds = [header.sources[ranking.source].kind for ranking in header.rankings]
    assert kinds == ["measurement", "measurement", "estimate"]
    tuned = tuner()
    assert len(tuner.timer.prepared) == 4, "one problem's contenders"
    assert (len(tuned.outcomes), tuned.measured_now, tuned.is_complete) == (3, 1, True)
    whole = tuner.path.read_bytes()
    tuned = tuner(budget_s=0.0)
    assert tuner.timer.prepared == [], "once more measures nothing and loses nothing"
    assert (len(tuned.outcomes), tuned.measured_now, tuned.is_complete) == (3, 0, True)
    assert tuner.path.read_bytes() == whole


def test_an_interruption_keeps_what_was_measured(tuner: Tuner) -> None:
    tuner.interrupt(6)
    assert not tuner.path.exists()
    assert len(tuner().outcomes) == 3
    assert len(tuner.timer.prepared) == 8, "two problems' contenders"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"facts": replace(bench().facts, name="another CPU")}, "GPU"),
        ({"watch": DictatedWatch(driver="1.0")}, "driver"),
    ],
)
def test_a_state_of_another_tuning_is_refused(
    tuner: Tuner, change: dict[str, Any], named: str
) -> None:
    tuner.interrupt(6)
    with pytest.raises(TuningError, match=f"another tuning: its {named} is"):
        tuner(on=bench(tuner.timer, **change))
    with pytest.raises(TuningError, match="its choice of kernels is ranked, here it is all"):
        tuner(all_kernels=True)


def test_what_did_not_fit_into_memory_is_tried_again_and_nothing_else(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sets = measuring.make_sets

    def lacking(problem: Problem, *arguments: Any, **options: Any) -> Any:
        if problem.m == 16:
            raise torch.OutOfMemoryError("tried to allocate 99 GiB")
        return make_sets(problem, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "make_sets", lacking)
        tuned = tuner()
    ((key, reason),) = tuned.unmeasured.items()
    assert key == PROBLEMS[1].key
    assert "99 GiB" in reason
    assert not tuned.is_complete
    unmeasured = [ranking.measured is None for ranking in tuner.header.rankings]
    assert unmeasured == [False, True, False], "it keeps its ranking"
    tuned = tuner()
    assert (len(tuner.timer.prepared), tuned.measured_now, tuned.is_complete) == (4, 1, True)
    assert tuner.all_doubts == {()}


def test_each_outcome_is_appended(tuner: Tuner) -> None:
    seen = [b""]

    def note(done: int, _: int) -> None:
        if done:
            seen.append(state_path(tuner.path).read_bytes())

    tune([tuner.tunable], tuner.path, bench(tuner.timer), TuningOptions(), progress=note)
    for before, after in itertools.pairwise(seen):
        assert after.startswith(before)
        assert after.count(b'"outcome"') == before.count(b'"outcome"') + 1


def kill(tuner: Tuner, after: int) -> None:
    """Kill a run when so many contenders were prepared: nobody looks or tidies up."""

    def kept(self: Journal, line: Line) -> AbstractContextManager[None]:
        self.append(line, sync=False)
        return contextlib.nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "meanwhile", kept)
        patch.setattr(session.OtherWork, "end", lambda _: None)
        tuner.interrupt(after)


def test_what_a_killed_run_measured_is_kept_and_measured_again_at_last(tuner: Tuner) -> None:
    kill(tuner, 4)
    tuned = tuner(budget_s=60.0, ticks=[0.0, 1.0, 2.0, 61.0])
    assert tuner.doubts == {8: (KILLED,), 16: (), 32: ()}
    assert (tuned.measured_now, tuned.is_complete, tuned.unmeasured) == (2, False, {})
    tuned = tuner()
    assert (tuned.measured_now, tuned.is_complete, len(tuner.timer.prepared)) == (1, True, 4)
    assert tuner.all_doubts == {()}


def test_a_kernel_in_whose_first_run_two_runs_were_killed_is_left_out(
    tuner: Tuner, caplog: pytest.LogCaptureFixture
) -> None:
    kill(tuner, 0)
    name = tuner.timer.last_run
    kill(tuner, 0)
    assert tuner.timer.last_run == name, "one kill may be anyone's"
    assert "was killed in its first run, perhaps by a time limit (time 1 of 2)" in caplog.text
    ((_, reason),) = tuner().broken.items()
    assert name not in tuner.timer.prepared
    assert reason.startswith(f"{PROBLEMS[0].key}: kernel")
    assert reason.endswith("first run, perhaps by a time limit (time 2 of 2)")
    assert name not in tuner.kernels


def test_an_aten_in_whose_first_run_two_runs_were_killed_is_left_out_of_that_problem_alone(
    tuner: Tuner,
) -> None:
    for _ in range(2):
        kill(tuner, 3)
        assert tuner.timer.last_run == "aten"
    tuned = tuner()
    assert not tuned.broken
    assert [outcome.aten is None for outcome in tuned.outcomes.values()] == [True, False, False]


def test_a_kill_is_counted_though_what_reads_it_is_killed_too(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(tuner, 5)  # one outcome is not confirmed
    append, appended = Journal.append, []

    def once(self: Journal, line: Line, *, sync: bool = True) -> None:
        if appended:
            raise KeyboardInterrupt
        appended.append(line)
        append(self, line, sync=sync)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", once)
        with pytest.raises(KeyboardInterrupt):
            tuner()
    tuner()
    lines = [json.loads(line) for line in state_path(tuner.path).read_bytes().splitlines()]
    assert sum("killed" in line for line in lines) == 1


def test_an_interrupted_first_run_is_no_kill(tuner: Tuner) -> None:
    for _ in range(3):
        tuner.interrupt(0)
        assert not state_path(tuner.path).exists(), "nothing is known"
    assert not tuner().broken


@pytest.fixture
def state(tuner: Tuner) -> Path:
    """That of a run that has measured one problem."""
    tuner.interrupt(6)
    return state_path(tuner.path)


def test_a_line_that_was_not_finished_is_left_out(tuner: Tuner, state: Path) -> None:
    whole = state.read_bytes()
    state.write_bytes(whole + b'{"problem": "mm/tt')
    tuner()
    assert len(tuner.timer.prepared) == 8, "two problems' contenders"
    assert state.read_bytes().startswith(whole + b'{"problem": "mm/tt/fp32xfp32/fp32/fp32/m')
    state.write_bytes(whole.splitlines()[0][:20])
    tuner.path.unlink()
    assert tuner().measured_now == 3


@pytest.mark.parametrize("data", [b"\n", b"[]\n", b"{}\n", b"\xff", b"\xff\n", b"[" * 100_000])
def test_what_is_no_state_is_named(tuner: Tuner, data: bytes) -> None:
    state_path(tuner.path).write_bytes(data)
    with pytest.raises(StorageError, match=r"tuning.jsonl: the tuning state .* damaged.*remove it"):
        tuner()
    assert state_path(tuner.path).read_bytes() == data


@pytest.mark.parametrize(
    ("place", "value"),
    [(("kernels", 0), []), (("kernels",), 5), (("aten",), [200]), (("conditions",), {}), ((), {})],
)
def test_what_is_no_outcome_is_damage(
    tuner: Tuner, state: Path, place: tuple[str | int, ...], value: Any
) -> None:
    first, line, *others = state.read_bytes().splitlines(keepends=True)
    parsed = json.loads(line)
    *way, last = ("outcome", *place)
    functools.reduce(lambda at, key: at[key], way, parsed)[last] = value
    state.write_bytes(b"".join([first, json.dumps(parsed).encode() + b"\n", *others]))
    with pytest.raises(StorageError, match="the tuning state is damaged"):
        tuner()
    assert tuner.timer.prepared == []


@pytest.mark.parametrize("version", [5, 7])
def test_a_state_of_another_version_is_refused(tuner: Tuner, state: Path, version: int) -> None:
    """Version 5 did not say when a problem was measured."""
    state.write_bytes(state.read_bytes().replace(b'"version": 6', b'"version": %d' % version))
    with pytest.raises(TuningError, match=f"state of version {version}, this release reads 6"):
        tuner()


@pytest.mark.parametrize("is_other", [False, True])
def test_measurements_that_the_state_does_not_know_are_not_overwritten(
    tuner: Tuner, is_other: bool
) -> None:
    """Its state is gone, or another tuning wrote them."""
    tuner()
    if is_other:
        tuner.timer.times = {"": [700.0]}
        tuner(output=tuner.beside("other.nvgemm")).path.replace(tuner.path)
    else:
        state_path(tuner.path).unlink()
    whole = tuner.path.read_bytes()
    with pytest.raises(TuningError, match=r"holds measurements.*name another output, or remove"):
        tuner(prunes=is_other, budget_s=0.0)
    assert tuner.path.read_bytes() == whole
    assert tuner.timer.prepared == []


def test_a_bundle_that_was_about_to_be_written_is_known(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state names it before it is there, so that no kill in between makes it another's."""
    tuner(budget_s=9.0, ticks=[0.0, 0.0, 99.0, 99.0])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tune_bundles, "write_bundle", killed)
        with pytest.raises(KeyboardInterrupt):
            tuner()
    assert tuner().is_complete


def test_an_output_without_measurements_is_written_over(tuner: Tuner) -> None:
    for data in (tuner.tunable.read_bytes(), b"no bundle"):
        output = tuner.beside(f"{len(data)}.nvgemm")
        output.write_bytes(data)
        assert tuner(output=output).is_complete


def test_two_tunings_do_not_share_an_output(tuner: Tuner) -> None:
    lock = acquire(tuner.path.with_name(f".{tuner.path.name}.lock"))
    assert lock is not None
    with pytest.raises(TuningError, match="another process is tuning into it"):
        tuner()
    assert tuner.timer.prepared == []
    lock.release()
    tuner.beside(f".{tuner.path.name}.abcdef.partial").write_bytes(b"of a writer that was killed")
    tuner()
    left = sorted(tuner.path.parent.iterdir())
    assert left == [tuner.path, state_path(tuner.path)], "neither lock nor partial file"


def test_an_output_that_cannot_be_written_is_said_at_once(tuner: Tuner) -> None:
    directory, file = tuner.beside("dir.nvgemm"), tuner.beside("file")
    directory.mkdir()
    file.write_bytes(b"")
    for output, said in (
        (directory, "cannot write"),
        (file / "tuned.nvgemm", "file: cannot be written: File exists"),
    ):
        with pytest.raises(StorageError, match=said):
            tuner(output=output)
    assert tuner.timer.prepared == []
