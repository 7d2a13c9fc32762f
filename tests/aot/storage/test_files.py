from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvgemm_aot.storage.build_cache import Cache, cache_key, default_directory
from nvgemm_aot.storage.files import (
    make_directories,
    remove_file,
    require_writable,
    space_hint,
    write_atomic,
)
from nvgemm_runtime.errors import StorageError


def test_removes_a_file_that_is_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert remove_file(path)
    assert not remove_file(path)
    with pytest.raises(StorageError, match=r"cannot remove .*; remove it by hand"):
        remove_file(tmp_path)


def test_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match=r"file: cannot write 3 bytes: No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_parent_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot write"):
        write_atomic(tmp_path / "file" / "inner", b"")


def test_cache_gives_back_what_was_put(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    key = cache_key("kind", {"a": 1})
    assert cache.get(key) is None
    assert not cache.has(key)
    cache.put(key, b"payload")
    assert cache.get(key) == b"payload"
    assert cache.has(key)


@pytest.mark.parametrize("damage", [b"", b"short", bytes(40)])
def test_damaged_cache_entry_counts_as_absent(tmp_path: Path, damage: bytes) -> None:
    cache = Cache(tmp_path)
    key = cache_key("kind", 1)
    cache.put(key, b"payload")
    cache.path(key).write_bytes(damage)
    assert cache.get(key) is None


def test_cache_keys_depend_on_content_not_on_order() -> None:
    assert cache_key("k", {"a": 1, "b": 2}) == cache_key("k", {"b": 2, "a": 1})
    assert cache_key("k", {"a": 1}) != cache_key("k", {"a": 2})
    assert cache_key("k", {"a": 1}) != cache_key("l", {"a": 1})


def test_unwritable_cache_says_how_to_name_another(tmp_path: Path) -> None:
    (tmp_path / "entries").write_bytes(b"in the way")
    with pytest.raises(StorageError, match=r"NVGEMM_AOT_CACHE or --cache-dir"):
        Cache(tmp_path).require_writable()


def test_sweeps_what_killed_builds_left_but_not_what_others_write(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    key = cache_key("kind", 1)
    cache.put(key, b"x")
    folder = cache.path(key).parent
    old, young = folder / f".{key}.1.partial", folder / f".{key}.2.partial"
    old.write_bytes(b"")
    young.write_bytes(b"")
    os.utime(old, (0, 0))
    cache.require_writable()
    assert not old.exists()
    assert young.exists()
    assert cache.get(key) == b"x"


@pytest.mark.parametrize("key", ["", "../../../victim", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_name_that_is_no_key_reaches_no_file(tmp_path: Path, key: str) -> None:
    cache = Cache(tmp_path / "a" / "b")
    for use in (cache.get, cache.has, lambda key: cache.put(key, b"x")):
        with pytest.raises(ValueError, match="is no key of the build cache"):
            use(key)
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_finishes_what_another_of_its_threads_writes(tmp_path: Path) -> None:
    script = """
import os, sys, threading, time
from pathlib import Path
from nvgemm_aot.storage.files import finish_writing, write_atomic
fsync, begun = os.fsync, threading.Event()

def slow(descriptor):
    begun.set()
    time.sleep(0.2)
    fsync(descriptor)

def write_on():
    for count in range(100):
        write_atomic(Path(sys.argv[1]) / f"{count}", b"content")

os.fsync = slow
threading.Thread(target=write_on).start()
begun.wait()
finish_writing()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "0" in written
    assert len(written) < 100, "the process ended before the thread did"
    assert all(name.isdecimal() and content == b"content" for name, content in written.items())


def test_default_directory_follows_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT_CACHE", "/somewhere")
    assert default_directory() == Path("/somewhere")
    monkeypatch.delenv("NVGEMM_AOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_directory() == Path("/xdg/nvgemm-aot")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == Path.home() / ".cache" / "nvgemm-aot"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StorageError, match="set NVGEMM_AOT_CACHE"):
        default_directory()


@pytest.mark.parametrize("path", ["/proc/made", "/proc/made/below"])
def test_a_file_system_that_takes_no_directories_is_an_error(path: str) -> None:
    with pytest.raises(FileNotFoundError):
        make_directories(Path(path))
    with pytest.raises(StorageError, match=f"^{path}: cannot be written: No such file"):
        require_writable(Path(path))


def test_a_deleted_directory_takes_no_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    with pytest.raises(FileNotFoundError):
        make_directories(Path("dist/below"))


def test_an_umask_for_nobody_leaves_no_directory_behind(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        with pytest.raises(PermissionError, match="the umask denies this user"):
            make_directories(tmp_path / "a/b")
    finally:
        os.umask(before)
    assert not list(tmp_path.iterdir())


def test_only_a_full_disk_is_to_be_freed(tmp_path: Path) -> None:
    assert space_hint(OSError(errno.ENOSPC, "")) == "free space there"
    with pytest.raises(StorageError, match="File name too long; choose another directory"):
        write_atomic(tmp_path / ("a" * 300), b"")
