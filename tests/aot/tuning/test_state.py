"""What a tuning keeps over interruptions and kills."""

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

from nvgemm_aot.tuning import measuring, session
from nvgemm_aot.tuning.session import OUT_OF_BUDGET, TuningOptions, tune
from nvgemm_aot.tuning.state import KILLED, Journal, Line, state_path
from nvgemm_runtime.errors import StorageError, TuningError
from nvgemm_runtime.gemm.problem import Problem
from tuning_bench import (
    PROBLEMS,
    DictatedTimer,
    DictatedWatch,
    bench,
    doubts,
    header_of,
    run,
)


def test_a_budget_ends_between_problems_and_the_same_call_goes_on(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    ticks = iter([0.0, 1.0, 2.0, 61.0])
    tuned = run(tunable, tuned_path, bench(dictated), budget_s=60.0, clock=lambda: next(ticks))
    assert len(tuned.outcomes) == 2
    assert list(tuned.unmeasured.values()) == [OUT_OF_BUDGET]
    assert tuned.state == state_path(tuned_path)
    assert not tuned.is_complete
    header = header_of(tuned_path)
    kinds = [header.sources[ranking.source].kind for ranking in header.rankings]
    assert kinds == ["measurement", "measurement", "estimate"]
    dictated.prepared.clear()
    tuned = run(tunable, tuned_path, bench(dictated))
    assert len(dictated.prepared) == 4, "one problem's contenders"
    assert len(tuned.outcomes) == 3
    assert (tuned.measured_now, tuned.is_complete) == (1, True)
    assert all(ranking.measured is not None for ranking in header_of(tuned_path).rankings)


def test_an_interruption_keeps_what_was_measured(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    dictated.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        run(tunable, tuned_path, bench(dictated))
    assert not tuned_path.exists()
    dictated.interrupt_at = None
    dictated.prepared.clear()
    tuned = run(tunable, tuned_path, bench(dictated))
    assert len(tuned.outcomes) == 3
    assert len(dictated.prepared) == 8, "two problems' contenders"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"facts": replace(bench().facts, name="another CPU")}, "GPU"),
        ({"watch": DictatedWatch(driver="1.0")}, "driver"),
    ],
)
def test_a_state_of_another_tuning_is_refused(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, change: dict[str, Any], named: str
) -> None:
    dictated.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        run(tunable, tuned_path, bench(dictated))
    with pytest.raises(TuningError, match=f"another tuning: its {named} is"):
        run(tunable, tuned_path, bench(dictated, **change))
    with pytest.raises(TuningError, match="its choice of kernels is ranked, here it is all"):
        run(tunable, tuned_path, bench(dictated), all_kernels=True)


def lack_memory(patch: pytest.MonkeyPatch) -> None:
    """Have the operands of the second problem not fit."""
    make_sets = measuring.make_sets

    def lacking(problem: Problem, *arguments: Any, **options: Any) -> Any:
        if problem.m == 16:
            raise torch.OutOfMemoryError("tried to allocate 99 GiB")
        return make_sets(problem, *arguments, **options)

    patch.setattr(measuring, "make_sets", lacking)


def test_problems_that_do_not_fit_into_memory_keep_their_ranking(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack_memory(monkeypatch)
    tuned = run(tunable, tuned_path, bench(dictated))
    ((key, reason),) = tuned.unmeasured.items()
    assert key == PROBLEMS[1].key
    assert "99 GiB" in reason
    assert not tuned.is_complete
    assert [ranking.measured is None for ranking in header_of(tuned_path).rankings] == [
        False, True, False
    ]  # fmt: skip


def test_what_did_not_fit_into_memory_is_tried_again_and_nothing_else(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        lack_memory(patch)
        run(tunable, tuned_path, bench(dictated))
    dictated.prepared.clear()
    tuned = run(tunable, tuned_path, bench(dictated))
    assert (len(dictated.prepared), tuned.measured_now, tuned.is_complete) == (4, 1, True)
    assert set(doubts(tuned_path).values()) == {()}


def test_each_outcome_is_appended(tunable: Path, tuned_path: Path, dictated: DictatedTimer) -> None:
    seen = [b""]

    def note(done: int, _: int) -> None:
        if done:
            seen.append(state_path(tuned_path).read_bytes())

    tune([tunable], tuned_path, bench(dictated), TuningOptions(), progress=note)
    for before, after in itertools.pairwise(seen):
        assert after.startswith(before)
        assert after.count(b'"outcome"') == before.count(b'"outcome"') + 1


def killed_after(count: int, tunable: Path, tuned_path: Path, dictated: DictatedTimer) -> None:
    """A run that is killed when so many contenders were prepared: nobody looks or tidies up."""

    def kept(self: Journal, line: Line) -> AbstractContextManager[None]:
        self.append(line, sync=False)
        return contextlib.nullcontext()

    dictated.interrupt_at = count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "meanwhile", kept)
        patch.setattr(session._OtherWork, "end", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            run(tunable, tuned_path, bench(dictated))
    dictated.interrupt_at = None
    dictated.prepared.clear()


def test_what_a_killed_run_measured_is_kept_and_measured_again_at_last(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    killed_after(4, tunable, tuned_path, dictated)
    ticks = iter([0.0, 1.0, 2.0, 61.0])
    tuned = run(tunable, tuned_path, bench(dictated), budget_s=60.0, clock=lambda: next(ticks))
    assert doubts(tuned_path) == {8: (KILLED,), 16: (), 32: ()}
    assert (tuned.measured_now, tuned.is_complete, tuned.unmeasured) == (2, False, {})
    dictated.prepared.clear()
    tuned = run(tunable, tuned_path, bench(dictated))
    assert (tuned.measured_now, tuned.is_complete, len(dictated.prepared)) == (1, True, 4)
    assert set(doubts(tuned_path).values()) == {()}


def test_a_kernel_in_whose_first_run_two_runs_were_killed_is_left_out(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, caplog: pytest.LogCaptureFixture
) -> None:
    killed_after(0, tunable, tuned_path, dictated)
    name = dictated.last_run
    killed_after(0, tunable, tuned_path, dictated)
    assert dictated.last_run == name, "one kill may be anyone's"
    assert "was killed in its first run, perhaps by a time limit (time 1 of 2)" in caplog.text
    tuned = run(tunable, tuned_path, bench(dictated))
    assert name not in dictated.prepared
    ((_, reason),) = tuned.broken.items()
    assert reason.startswith(f"{PROBLEMS[0].key}: kernel")
    assert reason.endswith("first run, perhaps by a time limit (time 2 of 2)")
    assert name not in {kernel.operator for kernel in header_of(tuned_path).kernels}


def test_an_aten_in_whose_first_run_two_runs_were_killed_is_left_out_of_that_problem_alone(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    for _ in range(2):
        killed_after(3, tunable, tuned_path, dictated)
        assert dictated.last_run == "aten"
    tuned = run(tunable, tuned_path, bench(dictated))
    assert not tuned.broken
    assert [outcome.aten is None for outcome in tuned.outcomes.values()] == [True, False, False]


def test_a_kill_is_counted_though_what_reads_it_is_killed_too(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after(5, tunable, tuned_path, dictated)  # one outcome is not confirmed
    append, appended = Journal.append, []

    def once(self: Journal, line: Line, *, sync: bool = True) -> None:
        if appended:
            raise KeyboardInterrupt
        appended.append(line)
        append(self, line, sync=sync)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", once)
        with pytest.raises(KeyboardInterrupt):
            run(tunable, tuned_path, bench(dictated))
    run(tunable, tuned_path, bench(dictated))
    lines = [json.loads(line) for line in state_path(tuned_path).read_bytes().splitlines()]
    assert sum("killed" in line for line in lines) == 1


def test_an_interrupted_first_run_is_no_kill(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    for _ in range(3):
        dictated.interrupt_at = 0
        with pytest.raises(KeyboardInterrupt):
            run(tunable, tuned_path, bench(dictated))
        assert not state_path(tuned_path).exists(), "nothing is known"
    dictated.interrupt_at = None
    assert not run(tunable, tuned_path, bench(dictated)).broken


@pytest.fixture
def state(tunable: Path, tuned_path: Path, dictated: DictatedTimer) -> Path:
    """That of a run that has measured one problem."""
    dictated.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        run(tunable, tuned_path, bench(dictated))
    dictated.interrupt_at = None
    dictated.prepared.clear()
    return state_path(tuned_path)


def test_a_line_that_was_not_finished_is_left_out(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, state: Path
) -> None:
    whole = state.read_bytes()
    state.write_bytes(whole + b'{"problem": "mm/tt')
    run(tunable, tuned_path, bench(dictated))
    assert len(dictated.prepared) == 8, "two problems' contenders"
    assert state.read_bytes().startswith(whole + b'{"problem": "mm/tt/fp32xfp32/fp32/fp32/m')
    state.write_bytes(whole.splitlines()[0][:20])
    tuned_path.unlink()
    assert run(tunable, tuned_path, bench(dictated)).measured_now == 3


@pytest.mark.parametrize(
    "data", [b"\n", b"[]\n", b"{}\n", b"\xff", b"\xff\n", b"[" * 100_000, b"[" * 100_000 + b"\n"]
)
def test_what_is_no_state_is_named(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, data: bytes
) -> None:
    state_path(tuned_path).write_bytes(data)
    with pytest.raises(StorageError, match=r"tuning.jsonl: the state .* damaged.*remove it"):
        run(tunable, tuned_path, bench(dictated))
    assert state_path(tuned_path).read_bytes() == data


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("kernels", 0, 0), "ff" * 32),
        (("kernels", 0, 1), 0),
        (("kernels", 0, 1), 1.5),
        (("kernels", 0, 1), 10_000),
        (("kernels", 0), []),
        (("kernels", 1), ["cc" * 32, 1]),
        (("aten",), [2**70, 0]),
        (("aten",), [200, -1]),
        (("aten",), [200]),
        (("triton",), 0),
        (("doubts",), ["one\ntwo"]),
        (("doubts",), [""]),
        (("doubts",), "busy"),
        (("wrong",), {"ff" * 32: "off"}),
        (("wrong",), []),
        (("conditions", "driver"), 5),
        (("conditions",), {}),
        ((), {}),
    ],
)
def test_values_that_a_bundle_could_not_hold_are_damage(
    tunable: Path,
    tuned_path: Path,
    dictated: DictatedTimer,
    state: Path,
    place: tuple[str | int, ...],
    value: Any,
) -> None:
    first, line, *others = state.read_bytes().splitlines(keepends=True)
    parsed = json.loads(line)
    *way, last = ("outcome", *place)
    functools.reduce(lambda at, key: at[key], way, parsed)[last] = value
    state.write_bytes(b"".join([first, json.dumps(parsed).encode() + b"\n", *others]))
    with pytest.raises(StorageError, match="the state of a tuning is damaged"):
        run(tunable, tuned_path, bench(dictated))
    assert dictated.prepared == []


@pytest.mark.parametrize("version", [3, 5])
def test_a_state_of_another_version_is_refused(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, state: Path, version: int
) -> None:
    """Version 3 had the verdicts of a check that called right kernels of fp8 wrong."""
    state.write_bytes(state.read_bytes().replace(b'"version": 4', b'"version": %d' % version))
    with pytest.raises(TuningError, match=f"state of version {version}, this release reads 4"):
        run(tunable, tuned_path, bench(dictated))
