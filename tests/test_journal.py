"""Files of JSON lines that outlive their writers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from nvgemm_aot.tuning import journal
from nvgemm_aot.tuning.journal import Journal
from nvgemm_runtime.errors import StorageError

FIRST = {"version": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


class FullDisk(io.FileIO):
    """Takes half of what it is given, as a disk that runs full does."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return super().write(data[: len(data) // 2])


def test_half_a_line_is_an_error_and_no_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Journal(path, FIRST)
    begun.append({"a": 1})
    begun.close()
    whole = path.read_bytes()
    full = Journal(path, FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fdopen", lambda fd, mode, buffering: FullDisk(fd, mode))
        with pytest.raises(StorageError, match=r"cannot write .* bytes: No space left on device"):
            full.append({"b": 2})
    full.close()
    assert path.read_bytes().startswith(whole)
    assert Journal(path, FIRST).lines == [FIRST, {"a": 1}]
    after = Journal(path, FIRST)
    after.append({"c": 3})
    after.close()
    assert Journal(path, FIRST).lines == [FIRST, {"a": 1}, {"c": 3}]


def test_a_line_that_is_there_meanwhile_is_gone_afterwards(path: Path) -> None:
    lines = Journal(path, FIRST)
    with lines.meanwhile({"a": 1}):
        assert Journal(path, FIRST).lines == [FIRST, {"a": 1}]
    lines.append({"b": 2})
    with pytest.raises(KeyboardInterrupt), lines.meanwhile({"c": 3}):
        raise KeyboardInterrupt
    lines.close()
    assert Journal(path, FIRST).lines == [FIRST, {"b": 2}]


def test_a_journal_of_nothing_is_no_file(path: Path) -> None:
    lines = Journal(path, FIRST)
    with lines.meanwhile({"a": 1}):
        assert path.exists()
    lines.close()
    assert not path.exists()
