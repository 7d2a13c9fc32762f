"""What a tuning may write, and what it leaves as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import cpu_provider
from nvgemm_aot.cache import Cache
from nvgemm_aot.locks import acquire
from nvgemm_aot.tuning.state import state_path
from nvgemm_runtime.errors import StorageError, TuningError
from tuning_bench import (
    SLOW_FIRST,
    DictatedTimer,
    bench,
    build,
    run,
)

PROBLEMS = tuple(cpu_provider.problem(sizes=(m, 32, 64)) for m in (8, 16, 32))


@pytest.fixture(scope="module")
def path(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(PROBLEMS, tmp_path_factory.mktemp("tune"), kernel_cache)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "tuned.nvgemm"


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> DictatedTimer:
    timer = DictatedTimer(SLOW_FIRST)
    timer.watch_runs(monkeypatch)
    return timer


def test_the_same_command_again_measures_nothing_and_loses_nothing(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    run(path, output, bench(timer))
    whole = output.read_bytes()
    timer.prepared.clear()
    tuned = run(path, output, bench(timer), budget_s=0.0)
    assert timer.prepared == []
    assert (tuned.measured_now, tuned.is_complete, len(tuned.outcomes)) == (0, True, 3)
    assert output.read_bytes() == whole


def test_measurements_whose_state_is_gone_are_not_overwritten(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    run(path, output, bench(timer))
    whole = output.read_bytes()
    state_path(output).unlink()
    timer.prepared.clear()
    with pytest.raises(TuningError, match=r"holds measurements.*name another output, or remove"):
        run(path, output, bench(timer), budget_s=0.0)
    assert output.read_bytes() == whole
    assert timer.prepared == []


def test_an_output_without_measurements_is_written_over(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    output.write_bytes(path.read_bytes())
    assert run(path, output, bench(timer)).is_complete
    other = output.with_name("other.nvgemm")
    other.write_bytes(b"no bundle")
    assert run(path, other, bench(timer)).is_complete


def test_two_tunings_do_not_share_an_output(path: Path, output: Path, timer: DictatedTimer) -> None:
    lock = acquire(output.with_name(f".{output.name}.lock"))
    assert lock is not None
    with pytest.raises(TuningError, match="another process is tuning into it"):
        run(path, output, bench(timer))
    assert timer.prepared == []
    lock.release()
    run(path, output, bench(timer))
    assert sorted(output.parent.iterdir()) == [output, state_path(output)], "no lock is left"


def test_what_killed_writers_left_is_swept(path: Path, output: Path, timer: DictatedTimer) -> None:
    partial = output.with_name(f".{output.name}.abcdef.partial")
    partial.write_bytes(b"half")
    run(path, output, bench(timer))
    assert not partial.exists()


def test_an_output_that_cannot_be_written_is_said_at_once(
    path: Path, tmp_path: Path, timer: DictatedTimer
) -> None:
    directory, file = tmp_path / "dir.nvgemm", tmp_path / "file"
    directory.mkdir()
    file.write_bytes(b"")
    for output in (directory, file / "tuned.nvgemm"):
        with pytest.raises(StorageError, match="cannot write"):
            run(path, output, bench(timer))
    assert timer.prepared == []
