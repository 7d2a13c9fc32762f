"""Files of JSON lines that outlive their writers."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from nvgemm_aot.tuning.state import journal as state
from nvgemm_aot.tuning.state.journal import Journal
from nvgemm_runtime.errors import StorageError

FIRST = {"version": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def append(path: Path, line: dict[str, int]) -> None:
    lines = Journal(path, FIRST)
    lines.append(line)
    lines.close()


class FullDisk(io.FileIO):
    """Takes half of what it is given, as a disk that runs full does."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return super().write(data[: len(data) // 2])


def test_half_a_line_is_an_error_and_no_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, {"a": 1})
    whole = path.read_bytes()
    full = Journal(path, FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(state.os, "fdopen", lambda fd, mode, buffering: FullDisk(fd, mode))
        with pytest.raises(StorageError, match=r"cannot write .* bytes: No space left on device"):
            full.append({"b": 2})
    full.close()
    assert path.read_bytes().startswith(whole)
    assert Journal(path, FIRST).lines == [FIRST, {"a": 1}]
    append(path, {"c": 3})
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


def test_two_writers_do_not_cut_off_each_others_lines(path: Path) -> None:
    """As they could where a file system has no locks."""
    one, other = Journal(path, FIRST), Journal(path, FIRST)
    one.append({"a": 1})
    with pytest.raises(StorageError, match=r"has 24 bytes, but 0 when .*another process tunes"):
        other.append({"b": 2})
    other.close()
    other = Journal(path, FIRST)
    with pytest.raises(StorageError, match="another process tunes"), one.meanwhile({"running": 1}):
        path.write_bytes(path.read_bytes() + b'{"c": 3}\n')
    with pytest.raises(StorageError, match="another process tunes"):
        other.append({"d": 4})
    one.close()
    other.close()
    assert Journal(path, FIRST).lines == [FIRST, {"a": 1}, {"running": 1}, {"c": 3}]


def test_a_line_that_cannot_be_taken_away_is_an_error_of_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnceTruncated(io.FileIO):
        def truncate(self, size: int | None = None) -> int:
            if self.tell():
                raise OSError(errno.EIO, "Input/output error")
            return super().truncate(size)

    monkeypatch.setattr(state.os, "fdopen", lambda fd, mode, buffering: OnceTruncated(fd, mode))
    lines = Journal(path, FIRST)
    with (
        pytest.raises(StorageError, match=r"cannot write .*: Input/output error") as caught,
        lines.meanwhile({"b": 2}),
    ):
        raise RuntimeError("of the contender")
    lines.close()
    error = caught.value.__cause__
    assert isinstance(error, OSError)
    assert str(error.__context__) == "of the contender"


def test_a_first_line_that_was_not_finished_is_known_by_its_beginning(path: Path) -> None:
    for ours in (b"", b"{", b'{"version": ', b'{"version": 99, "identi'):
        path.write_bytes(ours)
        assert Journal(path, FIRST).lines == []
    for data in (b'{"vision": 2, "identi', b'{"my": "notes"}'):
        path.write_bytes(data)
        with pytest.raises(StorageError, match="its first line does not end"):
            Journal(path, FIRST)
