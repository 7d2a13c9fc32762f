"""Who can hold a lock file, and what ends a wait for it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvgemm_runtime.recording import file_locks
from nvgemm_runtime.recording.file_locks import acquire

FORKING_HOLDER = """
import os, sys, time
from pathlib import Path
from nvgemm_runtime.recording.file_locks import acquire
lock = acquire(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(3600)
"""


@contextlib.contextmanager
def held_by_a_reader(path: Path) -> Iterator[None]:
    """Lock a file or directory as another user can who may only read it."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(descriptor)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("wait", [True, False])
def test_a_file_that_others_can_read_is_replaced_though_one_holds_it(
    tmp_path: Path, wait: bool
) -> None:
    path = tmp_path / "a"
    path.touch(0o644)
    with held_by_a_reader(path):
        lock = acquire(path, wait=wait)
        assert lock is not None
        assert mode_of(path) == 0o600
        assert acquire(path, wait=False) is None
        lock.release()
    assert not path.exists()


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
@pytest.mark.parametrize(
    ("directory_mode", "file_mode"),
    [(0o755, 0o600), (0o2775, 0o660), (0o775, 0o660), (0o777, 0o666), (0o1777, 0o600)],
)
def test_only_who_can_write_the_directory_can_open_the_file(
    tmp_path: Path, umask: int, directory_mode: int, file_mode: int
) -> None:
    tmp_path.chmod(directory_mode)
    before = os.umask(umask)
    try:
        lock = acquire(tmp_path / "a")
    finally:
        os.umask(before)
    assert lock is not None
    assert mode_of(tmp_path / "a") == file_mode
    lock.release()
    tmp_path.chmod(0o755)


def test_a_lock_that_no_live_holder_has_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that the holder forked keeps the lock after the holder was killed."""
    monkeypatch.setattr(file_locks, "PATIENCE_SECONDS", 0.05)
    path = tmp_path / "a"
    command = [sys.executable, "-c", FORKING_HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            assert acquire(path, wait=False) is None
            lock = acquire(path)
            assert lock is not None
            lock.release()
        finally:
            os.kill(child, signal.SIGKILL)
    assert f"{path}: held for 0.05 s without a live nvgemm-aot process; replacing it" in caplog.text


def test_a_live_holder_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_locks, "PATIENCE_SECONDS", 0.05)
    path = tmp_path / "a"
    lock = acquire(path)
    assert lock is not None
    named = threading.Event()

    class Named(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            named.set()

    handler = Named()
    logging.getLogger(file_locks.__name__).addHandler(handler)
    try:
        waiting = threading.Thread(target=lambda: acquire(path).release())  # type: ignore[union-attr]
        waiting.start()
        assert named.wait(60)
        assert waiting.is_alive()
        lock.release()
        waiting.join()
    finally:
        logging.getLogger(file_locks.__name__).removeHandler(handler)
    assert f"waiting for {path}, which process {os.getpid()} (" in caplog.text


def test_a_number_that_another_process_has_now_is_no_live_holder() -> None:
    place = file_locks._host_namespace()
    started = file_locks._start_time(os.getpid())
    holder = file_locks._Holder
    assert holder(os.getpid(), started, place).is_live()
    assert not holder(os.getpid(), "1", place).is_live()
    assert holder(os.getpid(), "1", "another host").is_live(), "nobody can tell"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert not holder(ended.pid, file_locks._UNKNOWN, place).is_live()


def test_releasing_leaves_the_file_of_who_replaced_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    lock = acquire(path)
    assert lock is not None
    path.unlink()
    other = acquire(path, wait=False)
    assert other is not None
    lock.release()
    assert path.exists()
    other.release()
    assert not path.exists()


def test_a_directory_that_cannot_be_written_has_no_locks(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can write everywhere")
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(PermissionError):
            acquire(tmp_path / "a")
    finally:
        tmp_path.chmod(0o755)
