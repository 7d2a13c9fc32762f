from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from nvgemm_aot import workers
from nvgemm_aot.workers import WorkerDied, Workers, WorkersKilled


def nothing() -> None:
    pass


def double(number: int) -> int:
    return 2 * number


def process_id(_: int) -> int:
    return os.getpid()


def die_on_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    return number


def die_once(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def refuse(number: int) -> int:
    raise ValueError(f"not {number}")


def sleep(seconds: int) -> None:
    time.sleep(seconds)


def fail_to_start() -> None:
    raise RuntimeError("no compiler")


def test_yields_every_result_once() -> None:
    with Workers(2, double, nothing) as pool:
        assert sorted(pool.run(range(10))) == [(n, 2 * n) for n in range(10)]
        assert list(pool.run([21])) == [(21, 42)], "a pool can be used again"


def test_uses_as_many_processes_as_asked() -> None:
    with Workers(2, process_id, nothing) as pool:
        pids = {result for _, result in pool.run(range(40))}
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids


def test_a_death_names_its_item_and_the_others_go_on() -> None:
    with Workers(2, die_on_three, nothing) as pool:
        results = dict(pool.run(range(6)))
    assert isinstance(results.pop(3), WorkerDied)
    assert results == {n: n for n in (0, 1, 2, 4, 5)}


def test_an_item_gets_a_second_chance(tmp_path: Path) -> None:
    path = str(tmp_path / "was here")
    with Workers(1, die_once, nothing) as pool:
        assert list(pool.run([path])) == [(path, "alive")]


def test_raises_what_the_work_raised() -> None:
    with Workers(1, refuse, nothing) as pool, pytest.raises(ValueError, match="not 7"):
        list(pool.run([7]))


def test_raises_what_the_start_raised() -> None:
    with Workers(1, double, fail_to_start) as pool, pytest.raises(RuntimeError, match="no comp"):
        list(pool.run([7]))


def test_starts_anew_after_so_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "TASKS_PER_WORKER", 3)
    with Workers(1, process_id, nothing) as pool:
        pids = [result for _, result in pool.run(range(7))]
    assert len(set(pids)) == 3


def test_leaving_stops_processes_that_are_busy() -> None:
    with Workers(2, sleep, nothing) as pool:
        running = pool.run([600, 600])
        alarm = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            next(running)
        signal.signal(signal.SIGALRM, alarm)
        processes = [worker.process for worker in pool._busy.values()]
        assert len(processes) == 2
    assert not any(process.is_alive() for process in processes)


def test_killing_from_another_thread_stops_those_that_are_busy() -> None:
    pool = Workers(2, sleep, nothing)
    running = [worker.process for worker in pool._all]
    threading.Timer(0.5, pool.kill).start()
    with pytest.raises(WorkersKilled):
        list(pool.run([600, 600, 600]))
    pool.kill()
    # Not is_alive(), which may miss the end of a process that another thread is waiting for.
    assert all(wait([process.sentinel], 20) for process in running)
    assert len(pool._all) == 2, "none was started in their place"


def test_a_worker_that_is_busy_does_not_outlive_its_parent(tmp_path: Path) -> None:
    script = (
        "import os, sys, threading\n"
        "from test_workers import nothing, sleep\n"
        "from nvgemm_aot.workers import Workers\n"
        "pool = Workers(1, sleep, nothing)\n"
        "print([worker.process.pid for worker in pool._all][0], flush=True)\n"
        "list(pool.run([600]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = Path("/proc") / parent.stdout.readline().strip()
        time.sleep(0.5)
        assert worker.exists()
        parent.kill()
    deadline = time.monotonic() + 20
    while worker.exists() and "State:\tZ" not in (worker / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
