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

import cpu_provider
from nvgemm_aot.cache import Cache
from nvgemm_aot.tuning import measuring, session
from nvgemm_aot.tuning.journal import Journal, Line
from nvgemm_aot.tuning.session import OUT_OF_BUDGET
from nvgemm_aot.tuning.state import KILLED, state_path
from nvgemm_aot.tuning.tune import Options, tune
from nvgemm_runtime.errors import StorageError, TuningError
from nvgemm_runtime.problem import Problem
from tuning_bench import (
    SLOW_FIRST,
    DictatedTimer,
    DictatedWatch,
    bench,
    build,
    doubts,
    header_of,
    run,
)

PROBLEMS = tuple(cpu_provider.problem(sizes=(m, 32, 64)) for m in (8, 16, 32))


@pytest.fixture(scope="module")
def path(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(PROBLEMS, tmp_path_factory.mktemp("tune"), kernel_cache)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "tuned.nvgemm"


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> DictatedTimer:
    timer = DictatedTimer(SLOW_FIRST)
    timer.watch_runs(monkeypatch)
    return timer


def test_a_budget_ends_between_problems_and_the_same_call_goes_on(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    ticks = iter([0.0, 1.0, 2.0, 61.0])
    tuned = run(path, output, bench(timer), budget_s=60.0, clock=lambda: next(ticks))
    assert len(tuned.outcomes) == 2
    assert list(tuned.unmeasured.values()) == [OUT_OF_BUDGET]
    assert tuned.state == state_path(output)
    assert not tuned.is_complete
    header = header_of(output)
    kinds = [header.sources[ranking.source].kind for ranking in header.rankings]
    assert kinds == ["measurement", "measurement", "estimate"]
    timer.prepared.clear()
    tuned = run(path, output, bench(timer))
    assert len(timer.prepared) == 4, "one problem's contenders"
    assert len(tuned.outcomes) == 3
    assert (tuned.measured_now, tuned.is_complete) == (1, True)
    assert all(ranking.measured is not None for ranking in header_of(output).rankings)


def test_an_interruption_keeps_what_was_measured(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    timer.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        run(path, output, bench(timer))
    assert not output.exists()
    timer.interrupt_at = None
    timer.prepared.clear()
    tuned = run(path, output, bench(timer))
    assert len(tuned.outcomes) == 3
    assert len(timer.prepared) == 8, "two problems' contenders"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"facts": replace(bench().facts, name="another CPU")}, "GPU"),
        ({"watch": DictatedWatch(driver="1.0")}, "driver"),
    ],
)
def test_a_state_of_another_tuning_is_refused(
    path: Path, output: Path, timer: DictatedTimer, change: dict[str, Any], named: str
) -> None:
    timer.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        run(path, output, bench(timer))
    with pytest.raises(TuningError, match=f"another tuning: its {named} is"):
        run(path, output, bench(timer, **change))
    with pytest.raises(TuningError, match="its choice of kernels is ranked, here it is all"):
        run(path, output, bench(timer), all_kernels=True)


def test_problems_that_do_not_fit_into_memory_keep_their_ranking(
    path: Path, output: Path, timer: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    make_sets = measuring.make_sets

    def lacking(problem: Problem, *arguments: Any, **options: Any) -> Any:
        if problem.m == 16:
            raise torch.OutOfMemoryError("tried to allocate 99 GiB")
        return make_sets(problem, *arguments, **options)

    monkeypatch.setattr(measuring, "make_sets", lacking)
    tuned = run(path, output, bench(timer))
    ((key, reason),) = tuned.unmeasured.items()
    assert key == PROBLEMS[1].key
    assert "99 GiB" in reason
    assert not tuned.is_complete
    assert [ranking.measured is None for ranking in header_of(output).rankings] == [
        False, True, False
    ]  # fmt: skip


def test_what_did_not_fit_into_memory_is_tried_again_and_nothing_else(
    path: Path, output: Path, timer: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sets = measuring.make_sets

    def lacking(problem: Problem, *arguments: Any, **options: Any) -> Any:
        if problem.m == 16:
            raise torch.OutOfMemoryError("tried to allocate 99 GiB")
        return make_sets(problem, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "make_sets", lacking)
        run(path, output, bench(timer))
    timer.prepared.clear()
    tuned = run(path, output, bench(timer))
    assert (len(timer.prepared), tuned.measured_now, tuned.is_complete) == (4, 1, True)
    assert set(doubts(output).values()) == {()}


def test_each_outcome_is_appended(path: Path, output: Path, timer: DictatedTimer) -> None:
    seen = [b""]

    def note(done: int, _: int) -> None:
        if done:
            seen.append(state_path(output).read_bytes())

    tune([path], output, bench(timer), Options(), progress=note)
    for before, after in itertools.pairwise(seen):
        assert after.startswith(before)
        assert after.count(b'"outcome"') == before.count(b'"outcome"') + 1


def killed_after(count: int, path: Path, output: Path, timer: DictatedTimer) -> None:
    """A run that is killed when so many contenders were prepared: nobody looks or tidies up."""

    def kept(self: Journal, line: Line) -> AbstractContextManager[None]:
        self.append(line, sync=False)
        return contextlib.nullcontext()

    timer.interrupt_at = count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "meanwhile", kept)
        patch.setattr(session._Looks, "end", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            run(path, output, bench(timer))
    timer.interrupt_at = None
    timer.prepared.clear()


def test_what_a_killed_run_measured_is_kept_and_measured_again_at_last(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    killed_after(4, path, output, timer)
    ticks = iter([0.0, 1.0, 2.0, 61.0])
    tuned = run(path, output, bench(timer), budget_s=60.0, clock=lambda: next(ticks))
    assert doubts(output) == {8: (KILLED,), 16: (), 32: ()}
    assert (tuned.measured_now, tuned.is_complete, tuned.unmeasured) == (2, False, {})
    timer.prepared.clear()
    tuned = run(path, output, bench(timer))
    assert (tuned.measured_now, tuned.is_complete, len(timer.prepared)) == (1, True, 4)
    assert set(doubts(output).values()) == {()}


def test_a_kernel_in_whose_first_run_two_runs_were_killed_is_left_out(
    path: Path, output: Path, timer: DictatedTimer, caplog: pytest.LogCaptureFixture
) -> None:
    killed_after(0, path, output, timer)
    name = timer.last_run
    killed_after(0, path, output, timer)
    assert timer.last_run == name, "one kill may be anyone's"
    assert "was killed in its first run (time 1 of 2)" in caplog.text
    tuned = run(path, output, bench(timer))
    assert name not in timer.prepared
    ((_, reason),) = tuned.broken.items()
    assert reason.startswith(f"{PROBLEMS[0].key}: kernel")
    assert reason.endswith("was killed in its first run (time 2 of 2)")
    assert name not in {kernel.operator for kernel in header_of(output).kernels}


def test_an_interrupted_first_run_is_no_kill(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    for _ in range(3):
        timer.interrupt_at = 0
        with pytest.raises(KeyboardInterrupt):
            run(path, output, bench(timer))
        assert not state_path(output).exists(), "nothing is known"
    timer.interrupt_at = None
    assert not run(path, output, bench(timer)).broken


@pytest.fixture
def state(path: Path, output: Path, timer: DictatedTimer) -> Path:
    """That of a run that has measured one problem."""
    timer.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        run(path, output, bench(timer))
    timer.interrupt_at = None
    timer.prepared.clear()
    return state_path(output)


def test_a_line_that_was_not_finished_is_left_out(
    path: Path, output: Path, timer: DictatedTimer, state: Path
) -> None:
    whole = state.read_bytes()
    state.write_bytes(whole + b'{"problem": "mm/tt')
    run(path, output, bench(timer))
    assert len(timer.prepared) == 8, "two problems' contenders"
    assert state.read_bytes().startswith(whole + b'{"problem": "mm/tt/fp32xfp32/fp32/fp32/m')
    state.write_bytes(whole.splitlines()[0][:20])
    output.unlink()
    assert run(path, output, bench(timer)).measured_now == 3


@pytest.mark.parametrize(
    "data", [b"\n", b"[]\n", b"{}\n", b"\xff", b"\xff\n", b"[" * 100_000, b"[" * 100_000 + b"\n"]
)
def test_what_is_no_state_is_named(
    path: Path, output: Path, timer: DictatedTimer, data: bytes
) -> None:
    state_path(output).write_bytes(data)
    with pytest.raises(StorageError, match=r"tuning.jsonl: the state .* damaged.*remove it"):
        run(path, output, bench(timer))
    assert state_path(output).read_bytes() == data


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
    path: Path,
    output: Path,
    timer: DictatedTimer,
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
        run(path, output, bench(timer))
    assert timer.prepared == []


def test_a_state_of_another_version_is_refused(
    path: Path, output: Path, timer: DictatedTimer, state: Path
) -> None:
    state.write_bytes(state.read_bytes().replace(b'"version": 2', b'"version": 3'))
    with pytest.raises(TuningError, match="state of version 3, this release reads 2"):
        run(path, output, bench(timer))
