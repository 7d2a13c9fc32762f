from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nvgemm_aot.storage.locks import acquire, locked, remove_unused
from nvgemm_runtime.errors import StorageError

HOLDER = """
import sys, time
from pathlib import Path
from nvgemm_aot.storage.locks import acquire
acquire(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(3600)
"""


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with locked(tmp_path / "locks" / "a"):
        assert (tmp_path / "locks" / "a").exists()
    assert not list((tmp_path / "locks").iterdir())


def test_a_lock_that_is_held_need_not_be_waited_for(tmp_path: Path) -> None:
    with locked(tmp_path / "a"):
        assert acquire(tmp_path / "a", wait=False) is None
    lock = acquire(tmp_path / "a", wait=False)
    assert lock is not None
    lock.release()


def test_a_killed_holder_frees_its_lock_and_its_file_is_removed_but_no_other(
    tmp_path: Path,
) -> None:
    remove_unused(tmp_path / "none")
    left, held = tmp_path / "left", tmp_path / "held"
    left.touch()
    command = [sys.executable, "-c", HOLDER, str(held)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        remove_unused(tmp_path)
        assert list(tmp_path.iterdir()) == [held]
        assert acquire(held, wait=False) is None
        holder.kill()
        holder.wait()
    remove_unused(tmp_path)
    assert not list(tmp_path.iterdir())


def test_who_waits_for_a_lock_file_that_is_removed_gets_the_lock(tmp_path: Path) -> None:
    """One at a time, while another thread removes files all along."""
    inside = most = 0
    done = threading.Event()

    def sweep() -> None:
        while not done.is_set():
            remove_unused(tmp_path)

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with locked(tmp_path / "a"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    sweeper = threading.Thread(target=sweep)
    for thread in (*threads, sweeper):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    sweeper.join()
    assert most == 1
    assert not list(tmp_path.iterdir())


def test_an_error_inside_frees_the_lock(tmp_path: Path) -> None:
    with pytest.raises(LookupError), locked(tmp_path / "a"):
        raise LookupError
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot lock: File exists"):
        acquire(tmp_path / "file" / "a")


def test_a_file_system_without_locks_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "a"):
        pass


def test_other_failures_leave_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StorageError, match="Input/output error"):
        acquire(tmp_path / "a")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
