from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvgemm_aot.storage import temporary_directory
from nvgemm_aot.storage.temporary_directory import make, remove
from nvgemm_runtime.errors import StorageError

HOLDER = """
import sys, time
from pathlib import Path
from nvgemm_aot.storage import temporary_directory
temporary_directory._SHARED_MEMORY = Path(sys.argv[1])
print(temporary_directory.make(), flush=True)
time.sleep(3600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(temporary_directory, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def age(directory: Path) -> None:
    os.utime(directory, (0, 0))


def test_it_is_this_users_alone_and_goes_with_all_that_is_in_it(place: Path) -> None:
    made = make()
    assert made.parent == place
    assert made.stat().st_mode & 0o777 == 0o700
    (made / "a").mkdir()
    (made / "a" / "b").touch()
    remove(made)
    assert not made.exists()


def test_those_of_killed_processes_are_removed_and_no_others(place: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        (held / "content").touch()
        age(held)
        young = place / "nvgemm-aot-jit-young"
        young.mkdir()
        remove(make())
        assert (held / "content").exists()
        age(held)
        holder.kill()
        holder.wait()
    remove(make())
    assert not held.exists()
    assert young.exists()


def test_without_shared_memory_it_lies_where_temporary_files_do(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporary_directory, "_SHARED_MEMORY", place / "none")
    monkeypatch.setattr("tempfile.tempdir", str(place))
    made = make()
    assert made.parent == place
    remove(made)


def test_no_place_is_a_storage_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_directory, "_SHARED_MEMORY", place / "none")
    monkeypatch.setattr("tempfile.tempdir", str(place / "none"))
    with pytest.raises(StorageError, match="no temporary directory: No such file"):
        make()
