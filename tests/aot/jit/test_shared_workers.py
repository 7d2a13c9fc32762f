"""Compiler processes that threads share, and that are counted over all servers of a machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import two_providers
from compile_tasks import tasks
from counted_starts import bound_starts
from fake_provider import FakeProvider
from jit_programs import kill, wait_until
from nvgemm_aot.jit.shared_workers import SharedWorkers
from nvgemm_aot.pipeline.compiler import ProcessKind, TaskResult
from nvgemm_aot.pipeline.workers import WorkersCannotStart, WorkersKilled
from nvgemm_aot.storage.build_cache import Cache
from two_providers import First, Second

FAKE = ProcessKind(provider=FakeProvider.name, cuda="cu13")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def workers(cache: Cache) -> Iterator[SharedWorkers]:
    workers = SharedWorkers(cache, 2)
    yield workers
    workers.close()


def processes(workers: SharedWorkers) -> list[int]:
    return [worker.process.pid for pool in workers._held for worker in pool._idle]


def test_threads_share_them_and_each_task_is_done_once(
    workers: SharedWorkers, cache: Cache, log: Path
) -> None:
    wanted = tasks("one", "two", "three", "four", "fails")
    outcomes: list[TaskResult] = []

    def run() -> None:
        for _, outcome in workers.run(wanted):
            assert isinstance(outcome, TaskResult)
            outcomes.append(outcome)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: run(), range(4)))
    assert len(outcomes) == 4 * len(wanted)
    assert sum(outcome == TaskResult() for outcome in outcomes) == 4
    assert sum(outcome == TaskResult(was_there=True) for outcome in outcomes) == 12
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    assert [failure.reason for failure in failures] == 4 * ["fails: told to fail"]
    assert sorted(set(log.read_text().split())) == ["fails", "four", "one", "three", "two"]
    assert log.read_text().split().count("one") == 1
    assert 1 <= len(processes(workers)) <= 2


def test_servers_share_the_machine_and_none_goes_without(
    workers: SharedWorkers, cache: Cache
) -> None:
    workers.prepare(8, FAKE)
    assert len(workers._held) == 2
    other = SharedWorkers(cache, 2)
    other.prepare(8, FAKE)
    assert len(other._held) == 1
    [(_, outcome)] = other.run(tasks("one"))
    assert outcome == TaskResult()
    workers.close()
    other.prepare(2, FAKE)
    assert len(other._held) == 2
    other.close()
    assert not list((cache.directory / "locks").iterdir())


def test_a_provider_that_raises_what_interrupts_do_costs_its_kernel_alone(
    workers: SharedWorkers, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = {
        task.candidate.operator: one for task, one in workers.run(tasks("one", "interrupt"))
    }
    failed = outcomes["interrupt"]
    assert isinstance(failed, TaskResult)
    assert failed.failure is not None
    assert "raised KeyboardInterrupt" in failed.failure.reason
    assert failed.failure.is_transient
    assert outcomes["one"] == TaskResult()
    assert capfd.readouterr().err == ""


def test_those_that_are_prepared_are_used(workers: SharedWorkers) -> None:
    workers.prepare(1, FAKE)
    before = processes(workers)
    list(workers.run(tasks("one")))
    assert processes(workers) == before


def test_a_process_that_was_killed_while_idle_is_replaced(workers: SharedWorkers) -> None:
    list(workers.run(tasks("one")))
    for pid in processes(workers):
        kill(pid)
    assert [outcome for _, outcome in workers.run(tasks("two"))] == [TaskResult()]


def test_closing_stops_those_that_are_busy(workers: SharedWorkers, log: Path) -> None:
    refused: list[BaseException] = []

    def run() -> None:
        try:
            list(workers.run(tasks("slow", "one")))
        except Exception as error:
            refused.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: "slow" in log.read_text(), "nothing was compiled")
    running = [worker.process for pool in workers._held for worker in pool._all]
    workers.close()
    thread.join()
    assert all(process.poll() is not None for process in running)
    assert [type(error) for error in refused] == [WorkersKilled]


def test_none_is_started_after_one_could_not_be(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying_provider.py").write_text("import os; os._exit(127)")
    monkeypatch.syspath_prepend(tmp_path)
    name = "dying_provider:DyingProvider"
    one, two = (
        replace(task, candidate=replace(task.candidate, provider=name))
        for task in tasks("one", "two")
    )
    bound_starts(monkeypatch, 5)
    workers = SharedWorkers(cache, 2)
    with pytest.raises(WorkersCannotStart):
        list(workers.run([one]))
    workers._idle.clear()  # as where another thread has it
    held = len(workers._held)
    with pytest.raises(WorkersCannotStart):
        list(workers.run([two]))
    workers.prepare(2, ProcessKind(provider=name, cuda="cu13"))
    assert len(workers._held) == held
    # Another provider's are another matter.
    assert [outcome for _, outcome in workers.run(tasks("three"))] == [TaskResult()]
    workers.close()


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3])
def test_a_process_works_for_one_provider_alone(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv(two_providers.NOTES, str(notes))
    wanted = [
        *two_providers.tasks_of(First, "a", "bb", "ccc"),
        *two_providers.tasks_of(Second, "dddd", "eeeee", "ffffff"),
    ]
    workers = SharedWorkers(cache, most)
    workers.prepare(2, ProcessKind(provider=First.name, cuda="cu13"))
    for order in (wanted, wanted[::-1]):
        assert {outcome.failure for _, outcome in workers.run(order)} == {None}
    held = len(workers._held)
    workers.close()
    found = two_providers.processes_by_provider(notes)
    assert found.keys() == {First.name, Second.name}
    assert not found[First.name] & found[Second.name]
    assert held <= most
    assert not list((cache.directory / "locks").iterdir())
