"""Locks between processes: an exclusive flock, released when its holder dies.

Only users who can write the directory can open a lock file, so nobody else can hold the lock. The
file names its holder, and is removed when it is unlocked. Killed processes leave harmless files
behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""Seconds until a wait is logged, or a lock without a live nvgemm-aot holder is replaced."""

_LONGEST_PAUSE_SECONDS = 0.05

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors from file systems without locks. There, work is at worst done twice: files are replaced
whole."""

_MAX_HOLDER_BYTES = 400

_UNKNOWN = "?"


class FileLock:
    """Held lock."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Removes the file and unlocks it."""
        # Removed while held: a process that waits for the removed file notices and retries.
        with contextlib.suppress(OSError):
            _remove(self._path, os.fstat(self._descriptor))
        os.close(self._descriptor)


def acquire(path: Path, *, wait: bool = True) -> FileLock | None:
    """Locks a dedicated file in a directory that this user can write.

    Returns:
        Lock, or None if another process holds it and ``wait`` is false.

    Raises:
        OSError: If the file cannot be created, opened, locked or replaced.
    """
    waiting = _Waiting(path)
    while True:
        attempt = _try_lock(path)
        if isinstance(attempt, FileLock):
            return attempt
        if attempt is _RETRY:
            continue
        if not wait:
            return None
        if waiting.pause(attempt.holder):
            _log.warning(
                "%s: held for %g s without a live nvgemm-aot process; replacing it",
                *(path, PATIENCE_SECONDS),
            )
            _remove(path, attempt.file)


@dataclass(frozen=True)
class _Held:
    """Lock held elsewhere: the holder, if known, and the lock file."""

    holder: _Holder | None = None
    file: os.stat_result | None = None


_RETRY = _Held()
"""Result if the file was removed during the attempt."""


def _try_lock(path: Path) -> FileLock | _Held:
    descriptor = _open(path)
    if descriptor is None:
        with contextlib.suppress(FileNotFoundError):
            return _Held(file=path.lstat())
        return _RETRY
    lock = None
    try:
        file = os.fstat(descriptor)
        is_free = _flock(descriptor)
        holder = None if is_free else _read_holder(descriptor)
        if not _is_same_file(file, path):
            return _RETRY
        if _is_open_to_others(file, path.parent) and not (holder and holder.is_live()):
            _remove(path, file)  # others may have it open, and lock it at any time
            return _RETRY
        if not is_free:
            return _Held(holder, file)
        _write_holder(descriptor)
        lock = FileLock(path, descriptor)
        return lock
    finally:
        if lock is None:
            os.close(descriptor)


def _remove(path: Path, file: os.stat_result | None) -> None:
    """Removes a lock file unless another took its place."""
    if file is not None and _is_same_file(file, path):
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Holder:
    """Process named in a lock file.

    Attributes:
        pid: Process id.
        started: Start time in clock ticks since boot, because process ids are reused.
        namespace: Host and PID namespace, in which the process id is valid.
    """

    pid: int
    started: str
    namespace: str

    def is_live(self) -> bool:
        """Returns False only if the process is known to have ended."""
        if self.namespace != _host_namespace():
            return True
        started = _start_time(self.pid)
        if _UNKNOWN not in (started, self.started):
            return started == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # another user's, whose /proc entry may be hidden
            return True
        return True


class _Waiting:
    """Pauses, and reports a wait without a live holder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pause_s = 0.001
        self._began = time.monotonic()
        self._vain_since: float | None = None
        self._is_logged = False

    def pause(self, holder: _Holder | None) -> bool:
        """Sleeps a moment; logs once what a long wait is for.

        Returns:
            True if the wait is in vain: for long enough, at each look, no live nvgemm-aot process
            held the lock.
        """
        now = time.monotonic()
        if holder is not None and holder.is_live():
            self._vain_since = None
            if not self._is_logged and now - self._began > PATIENCE_SECONDS:
                self._is_logged = True
                _log.warning(
                    "waiting for %s, which process %d (%s) holds",
                    *(self._path, holder.pid, holder.namespace),
                )
        elif self._vain_since is None:
            self._vain_since = now
        elif now - self._vain_since > PATIENCE_SECONDS:
            return True
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_SECONDS)
        return False


def _open(path: Path) -> int | None:
    """Opens or creates a lock file; returns None for another user's file that cannot be opened."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        with contextlib.suppress(FileNotFoundError):
            try:
                return os.open(path, flags)
            except PermissionError:
                if os.access(path.parent, os.W_OK | os.X_OK):
                    return None
                raise
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            _open_to_writers(descriptor, path.parent)
            return descriptor


def _open_to_writers(descriptor: int, directory: Path) -> None:
    """Lets those who can write its directory, and nobody else, open a new lock file."""
    with contextlib.suppress(OSError):
        group = directory.stat().st_gid
        if _allowed_mode(directory, group) & stat.S_IRGRP and os.fstat(descriptor).st_gid != group:
            os.fchown(descriptor, -1, group)
    # Whatever the umask.
    os.fchmod(descriptor, _allowed_mode(directory, os.fstat(descriptor).st_gid))


def _allowed_mode(directory: Path, group: int) -> int:
    """Returns the most permissive mode for a group's lock file."""
    status = directory.stat()
    mode = 0o600
    if not status.st_mode & stat.S_ISVTX:  # in a sticky directory, nobody replaces others' files
        if status.st_mode & stat.S_IWGRP and status.st_gid == group:
            mode |= 0o060
        if status.st_mode & stat.S_IWOTH:
            mode |= 0o066
    return mode


def _is_open_to_others(file: os.stat_result, directory: Path) -> bool:
    return bool(stat.S_IMODE(file.st_mode) & ~_allowed_mode(directory, file.st_gid))


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_same_file(file: os.stat_result, path: Path) -> bool:
    """Returns True if a path still leads to a file."""
    try:
        return os.path.samestat(file, path.lstat())
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor, f"{os.getpid()} {_start_time(os.getpid())} {_host_namespace()}".encode(), 0
        )


def _read_holder(descriptor: int) -> _Holder | None:
    """Returns the holder named in a lock file, or None."""
    try:
        text = os.pread(descriptor, _MAX_HOLDER_BYTES, 0).decode()
        pid, started, namespace = text.split(" ", 2)
        return _Holder(int(pid), started, namespace)
    except (OSError, ValueError):
        return None


def _start_time(pid: int) -> str:
    """Returns a process's start time in clock ticks since boot; see proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return _UNKNOWN


def _host_namespace() -> str:
    """Returns this host and PID namespace."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = _UNKNOWN
    return f"{os.uname().nodename} {namespace}"
