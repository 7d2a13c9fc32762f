"""A Dask worker's side of a build, called as the scheduler would: what it checks and answers."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpu_provider import _InThisProcess
from fake_provider import FakeProvider, candidate
from nvgemm_aot.pipeline.compiler import Task, make_tasks
from nvgemm_aot.pipeline.executor import fleet_worker, worker_facts
from nvgemm_aot.pipeline.executor.fleet_worker import Request, check_worker, compile_batch
from nvgemm_aot.pipeline.executor.worker_facts import differences, facts_for, kinds_of
from nvgemm_aot.providers import load_provider
from nvgemm_aot.storage.build_cache import Cache, cache_key
from nvgemm_aot.storage.private_key import make_key
from nvgemm_aot.storage.remote.remote_cache import open_remote
from nvgemm_aot.storage.remote.signed_entries import decode_entry
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.installed.policy import key_id

TRIAL_KEY = cache_key("trial", 1)
BF16 = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path) -> Iterator[Path]:
    """This process as a fresh worker, with a cache of its own; yields the shared directory."""
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE", f"file://{tmp_path}/shared")
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_TRUST", "1")
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fleet_worker, "_remote", None)
    monkeypatch.setattr(fleet_worker, "_compilers", fleet_worker._Compilers())
    monkeypatch.setattr(fleet_worker, "ProviderWorkers", _InThisProcess)
    return tmp_path / "shared"


def tasks(*operators: str) -> tuple[Task, ...]:
    return make_tasks(
        [candidate(name, BF16) for name in operators],
        build_target("sm_100f", "B200", platform="linux_x86_64"),
        load_provider(FakeProvider.name),
    )


def ask(**changes: Any) -> dict[str, Any]:
    """A worker's answer to a build whose facts differ from its own by ``changes``."""
    kinds = kinds_of(tasks("one"))
    facts = facts_for(kinds)
    for name, value in changes.items():
        if name in facts:
            facts[name] = value
        else:
            [provider] = [value for value in facts.values() if isinstance(value, dict)]
            provider[name] = value
    document = {
        "facts": facts,
        "kinds": [(name, t.arch, t.platform, t.cuda) for name, t in kinds],
        "trial_key": TRIAL_KEY,
    }
    answer: dict[str, Any] = json.loads(check_worker(json.dumps(document)))
    return answer


def compile_here(*items: Task) -> dict[str, Any]:
    request = Request(groups=tuple((task,) for task in items), facts=facts_for(kinds_of(items)))
    answer: dict[str, Any] = json.loads(compile_batch(pickle.dumps(request)))
    return answer


def test_an_equal_worker_shows_that_it_can_write(tmp_path: Path) -> None:
    assert ask() == {"reason": None}
    with open_remote() as remote:  # type: ignore[union-attr]
        other = Cache(tmp_path / "other")
        assert remote.fetch([TRIAL_KEY], other, lambda *_: None) == {TRIAL_KEY}
    assert other.get(TRIAL_KEY) == fleet_worker.TRIAL_PAYLOAD


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"Python": "3.9"}, "Python {python}, this build has 3.9"),
        ({"nvgemm-aot": "9.9"}, "this build has 9.9"),
        ({"processor": "riscv64"}, "this build has riscv64"),
        ({"fake": "2"}, "fake 1, this build has 2"),
        ({"recipe": "7"}, "this build has 7"),
        ({"linker": "GNU ld 1.0"}, "this build has GNU ld 1.0"),
        ({"nvidia-cutlass-dsl": "4.8.1"}, "nvidia-cutlass-dsl missing, this build has 4.8.1"),
    ],
)
def test_a_worker_that_differs_says_in_what(changes: Mapping[str, str], text: str) -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    reason = ask(**changes)["reason"]
    assert reason.startswith("it differs from this build: ")
    assert text.format(python=python) in reason


def test_differences_name_each_fact_once() -> None:
    here = {"Python": "3.11", "a": {"linker": "2", "x": "1"}, "b": {"linker": "2"}}
    there = {"Python": "3.11", "a": {"linker": "3", "y": "1"}, "b": {"linker": "3"}}
    assert differences(here, there) == [
        "linker 3, this build has 2",
        "x missing, this build has 1",
        "y 1, this build has missing",
    ]
    assert worker_facts.differences(here, here) == []


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NVGEMM_AOT_REMOTE_CACHE": ""}, "NVGEMM_AOT_REMOTE_CACHE is not set there"),
        ({"NVGEMM_AOT_REMOTE_CACHE_MODE": "read"}, "is read-only by NVGEMM_AOT_REMOTE_CACHE_MODE"),
        ({"NVGEMM_AOT_REMOTE_CACHE_TRUST": "0"}, "NVGEMM_AOT_SIGNING_KEY is not set there"),
        ({"NVGEMM_AOT_REMOTE_CACHE": "file:///nowhere"}, "takes nothing: no such directory"),
        ({"NVGEMM_AOT_REMOTE_CACHE": "ftp://a"}, "has the scheme ftp"),
        ({"NVGEMM_AOT_CACHE": __file__ + "/cache"}, "test_fleet_worker.py"),
    ],
)
def test_a_worker_that_cannot_store_says_why(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], text: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert text in ask()["reason"]
    assert text in compile_here(*tasks("one"))["reason"]


def test_a_store_that_is_there_again_is_used_again(worker: Path) -> None:
    worker.rmdir()
    assert "no such directory" in ask()["reason"]
    worker.mkdir()
    assert ask() == {"reason": None}


def test_signs_with_its_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: Path
) -> None:
    public = make_key(tmp_path / "key.pem").public
    monkeypatch.setattr(fleet_worker, "_remote", None)
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_TRUST", "0")
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", str(tmp_path / "key.pem"))
    assert ask() == {"reason": None}
    [stored] = worker.iterdir()
    signatures = decode_entry(stored.read_bytes()).signatures
    assert [signature.key_id for signature in signatures] == [key_id(public)]
    answer = compile_here(*tasks("one"))
    assert (answer["reason"], answer["results"][0]["failure"]) == (None, None)


def test_answers_with_a_result_for_each_task(worker: Path, log: Path) -> None:
    items = tasks("one", "fail", "two")
    answer = compile_here(*items)
    assert answer["reason"] is None
    assert answer["seconds"] > 0
    assert [result["failure"] for result in answer["results"]] == [
        None,
        "fail: told to fail",
        None,
    ]
    stored = {path.name for path in worker.iterdir()}
    assert stored == {f"nvgemm-aot-1-{items[0].key}", f"nvgemm-aot-1-{items[2].key}"}
    again = compile_here(items[0])
    assert again["results"][0]["was_there"]
    assert log.read_text().split() == ["one", "fail", "two"]


def test_refuses_a_key_that_it_would_not_give(log: Path) -> None:
    [task] = tasks("one")
    answer = compile_here(replace(task, key="0" * 64))
    assert answer["results"] == []
    assert "operator one has another key there" in answer["reason"]
    assert not log.read_text()


def test_a_failure_of_the_machine_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = compile_here(*tasks("nospace"))
    assert answer["results"] == []
    assert "No space left on device" in answer["reason"]


def test_one_timer_stops_idle_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Timer] = []
    now = [100.0]

    class Timer:
        def __init__(self, seconds: float, act: Callable[[], None]) -> None:
            self.seconds, self.act = seconds, act
            timers.append(self)

        def start(self) -> None:
            pass

    [task] = tasks("one")
    stopped: list[object] = []
    monkeypatch.setattr(_InThisProcess, "__exit__", lambda self, *_: stopped.append(self))
    monkeypatch.setattr(fleet_worker.threading, "Timer", Timer)
    monkeypatch.setattr(fleet_worker.time, "monotonic", lambda: now[0])
    compilers = fleet_worker._Compilers()
    first, second = (compilers.take(Cache(tmp_path), task) for _ in range(2))
    compilers.give_back(first)
    now[0] += 100
    for _ in range(1000):
        compilers.give_back(second)
        assert compilers.take(Cache(tmp_path), task) is second
    compilers.give_back(second)
    assert [timer.seconds for timer in timers] == [300]
    now[0] += 200
    timers[0].act()
    assert (stopped, [timer.seconds for timer in timers]) == ([first], [300, 100])
    now[0] += 100
    timers[1].act()
    assert (stopped, len(timers)) == ([first, second], 2)
    compilers.give_back(first)
    assert len(timers) == 3
