from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from counted_starts import bound_starts
from nvgemm_aot.pipeline import workers
from nvgemm_aot.pipeline.workers import (
    TimeLimitExceeded,
    WorkerDied,
    Workers,
    WorkersCannotStart,
    WorkersKilled,
    clock_stopped,
)
from repository import TESTS

HERE = Path(__file__).parent


def nothing() -> None:
    pass


def double(number: int) -> int:
    return 2 * number


def environment_of_a_worker(name: str) -> str | None:
    return os.environ.get(name)


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


def die_at_start() -> None:
    with Path(os.environ["STARTS"]).open("a") as file:
        file.write("start\n")
    os.write(2, b"a library is missing\n")
    os._exit(3)


def die_at_first_start() -> None:
    if not Path(os.environ["STARTS"]).exists():
        die_at_start()


def speak(text: str) -> None:
    os.write(2, text.encode())


def speak_early() -> None:
    os.write(2, b"early")


def lose_descriptors() -> None:
    """As a library that makes a daemon does, and then opens pipes of its own."""
    os.closerange(3, 1000)
    for _ in range(30):
        os.pipe()


def lose_descriptors_at_work(_: int) -> None:
    lose_descriptors()


def print_a_line(_: int) -> None:
    os.write(1, b"a compiler's own words\n")


def hang_on_three(number: int) -> int:
    if number == 3:
        let_time_pass()
        time.sleep(600)
    return number


def let_time_pass() -> None:
    with Path(os.environ["LEAP"]).open("ab") as file:
        file.write(b".")


def wait_for_another(number: int) -> int:
    with clock_stopped():
        let_time_pass()
        time.sleep(0.5)
    return number


def wait_and_hang(_: int) -> None:
    with clock_stopped():
        pass
    while True:  # whenever the pool learns that the wait is over, more time passes behind it
        let_time_pass()
        time.sleep(0.05)


def hang() -> None:
    time.sleep(600)


def kill_itself(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("chosen", "seen"), [(None, "1"), ("3", "3")])
def test_libraries_start_no_threads_unless_told_to(
    chosen: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    with Workers(1, environment_of_a_worker, nothing) as workers:
        assert [*workers.run(["OMP_NUM_THREADS"])] == [("OMP_NUM_THREADS", seen)]


def test_yields_every_result_once() -> None:
    with Workers(2, double, nothing) as pool:
        assert sorted(pool.run(range(10))) == [(n, 2 * n) for n in range(10)]
        assert list(pool.run([21])) == [(21, 42)], "a pool can be used again"


def test_a_death_names_its_item_and_the_others_go_on() -> None:
    with Workers(2, die_on_three, nothing) as pool:
        results = dict(pool.run(range(6)))
    assert isinstance(results.pop(3), WorkerDied)
    assert results == {n: n for n in (0, 1, 2, 4, 5)}


def test_an_item_gets_a_second_chance(tmp_path: Path) -> None:
    path = str(tmp_path / "was here")
    with Workers(1, die_once, nothing) as pool:
        assert list(pool.run([path])) == [(path, "alive")]


@pytest.mark.parametrize(
    ("work", "prepare", "error"),
    [(refuse, nothing, ValueError("not 7")), (double, fail_to_start, RuntimeError("no compiler"))],
)
def test_raises_what_the_work_or_the_start_raised(
    work: Callable[[int], int], prepare: Callable[[], None], error: Exception
) -> None:
    with Workers(1, work, prepare) as pool, pytest.raises(type(error), match=str(error)):
        list(pool.run([7]))


@pytest.mark.parametrize("count", [1, 2])
def test_processes_that_cannot_start_are_given_up_with_their_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    bound_starts(monkeypatch, 2 * (count + 2) + count)
    said = rf"{count + 2} in a row .* the last with exit status 3: a library is missing$"
    with Workers(count, double, die_at_start) as pool:
        for _ in range(2):
            with pytest.raises(WorkersCannotStart, match=said):
                list(pool.run(range(100)))
    starts = (tmp_path / "starts").read_text().split()
    # Those that are still starting at the end may be stopped before they get there.
    assert 2 * (count + 2) <= len(starts) <= 2 * (count + 2) + count


def test_a_process_that_was_killed_before_it_was_ready_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    with Workers(1, double, die_at_first_start) as pool:
        assert list(pool.run([1, 2])) == [(1, 2), (2, 4)]


def test_work_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = type(sys)("lost_module")
    exec("def lost(item): return item", lost.__dict__)
    monkeypatch.setitem(sys.modules, "lost_module", lost)
    bound_starts(monkeypatch, 3)
    with (
        Workers(1, lost.lost, nothing) as pool,
        pytest.raises(WorkersCannotStart, match="No module named 'lost_module'"),
    ):
        list(pool.run([1]))


def test_what_processes_say_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    with Workers(1, speak, speak_early) as pool:
        list(pool.run([" and late"]))
    assert capfd.readouterr().err == "early and late"


def test_a_death_says_how() -> None:
    with Workers(1, die_on_three, nothing) as pool:
        [(_, died)] = pool.run([3])
    assert str(died) == "by SIGSEGV"
    with Workers(1, kill_itself, nothing) as pool:
        [(_, died)] = pool.run([3])
    assert str(died) == "by SIGKILL, as when memory is short"


@pytest.fixture
def leap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; for each byte in it, it is 1000 seconds later for pools of this process."""
    file = tmp_path / "leap"
    clock = time.monotonic
    monkeypatch.setenv("LEAP", str(file))
    monkeypatch.setattr(workers, "_LONGEST_WAIT_SECONDS", 0.05)

    def leaping() -> float:
        return clock() + 1000 * (file.stat().st_size if file.exists() else 0)

    monkeypatch.setattr(workers.time, "monotonic", leaping)
    return file


def test_an_item_that_takes_too_long_is_given_up_and_the_others_go_on(leap: Path) -> None:
    with Workers(1, hang_on_three, nothing, limit_seconds=900) as pool:
        assert list(pool.run([1])) == [(1, 1)]
        results = dict(pool.run([3, 4]))
    assert leap.exists()
    late = results.pop(3)
    assert isinstance(late, TimeLimitExceeded)
    assert str(late) == "not done within 900 s"
    assert results == {4: 4}


def test_getting_ready_does_not_count_as_work(leap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_SECONDS", 2000)
    with Workers(1, double, let_time_pass, limit_seconds=900) as pool:
        assert list(pool.run([7])) == [(7, 14)]
    assert leap.exists()


def test_waiting_for_another_process_does_not_count_as_work(leap: Path) -> None:
    with Workers(1, wait_for_another, nothing, limit_seconds=900) as pool:
        assert list(pool.run([7])) == [(7, 7)]
    assert leap.exists()


def test_what_comes_after_waiting_counts_as_work(leap: Path) -> None:
    with Workers(1, wait_and_hang, nothing, limit_seconds=900) as pool:
        [(_, late)] = pool.run([7])
    assert isinstance(late, TimeLimitExceeded)


def test_processes_have_the_flags_of_the_interpreter() -> None:
    asked = "(lambda sys: (sys.flags.isolated, sys.warnoptions))(__import__('sys'))"
    program = (
        "from nvgemm_aot.pipeline.workers import Workers\n"
        "with Workers(1, eval, list) as pool:\n"
        f"    print([result for _, result in pool.run([{asked!r}])])\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error::UserWarning", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[(1, ['error::UserWarning'])]"


def test_a_process_that_is_never_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_SECONDS", 0.5)
    bound_starts(monkeypatch, 3)
    with (
        Workers(1, double, hang) as pool,
        pytest.raises(WorkersCannotStart, match=r"the last not ready within 0\.5 s"),
    ):
        list(pool.run([1]))


def test_starts_anew_after_so_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "TASKS_PER_WORKER", 3)
    with Workers(1, process_id, nothing) as pool:
        pids = [result for _, result in pool.run(range(7))]
    assert len(set(pids)) == 3


def test_leaving_stops_processes_that_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(connections: object, timeout: float) -> None:
        raise KeyboardInterrupt

    with Workers(2, sleep, nothing) as pool:
        running = pool.run([600, 600])
        monkeypatch.setattr(workers, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(running)
        processes = [worker.process for worker in pool._busy.values()]
        assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)


def test_killing_from_another_thread_stops_those_that_are_busy() -> None:
    pool = Workers(2, sleep, nothing)
    running = [worker.process for worker in pool._all]
    threading.Timer(0.5, pool.kill).start()
    with pytest.raises(WorkersKilled):
        list(pool.run([600, 600, 600]))
    pool.kill()
    assert all(process.poll() == -signal.SIGKILL for process in running)
    assert len(pool._all) == 2, "none was started in their place"


def test_a_worker_that_is_busy_does_not_outlive_its_parent(tmp_path: Path) -> None:
    script = (
        "import os, sys, threading\n"
        "from test_workers import nothing, sleep\n"
        "from nvgemm_aot.pipeline.workers import Workers\n"
        "pool = Workers(1, sleep, nothing)\n"
        "print([worker.process.pid for worker in pool._all][0], flush=True)\n"
        "list(pool.run([600]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE, TESTS / "support")))}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = Path("/proc") / parent.stdout.readline().strip()
        time.sleep(0.5)
        assert worker.exists()
        parent.kill()
    deadline = time.monotonic() + 300
    while worker.exists() and "State:\tZ" not in (worker / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_closes_all_descriptors_ends_at_once_and_says_so() -> None:
    with Workers(1, lose_descriptors_at_work, nothing) as pool:
        [(_, died)] = pool.run([1])
        assert isinstance(died, WorkerDied)
        assert "without its pipe to the build, as after a provider" in str(died)
    with (
        Workers(1, double, lose_descriptors) as pool,
        pytest.raises(WorkersCannotStart, match="the last without its pipe to the build"),
    ):
        list(pool.run([1]))


def test_a_parent_that_closes_all_descriptors_does_not_wait_for_lost_pipes() -> None:
    lost = os.open(os.devnull, os.O_RDWR)
    with Workers(1, double, nothing) as pool:
        [worker] = pool._all
        os.dup2(lost, worker.connection.fileno())
        with pytest.raises(WorkersCannotStart, match=r"lost their pipes.*os\.closerange"):
            list(pool.run([1]))
    os.close(lost)


def test_what_a_worker_prints_is_no_part_of_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    with Workers(1, print_a_line, nothing) as pool:
        list(pool.run([1]))
    assert capfd.readouterr() == ("", "a compiler's own words\n")
