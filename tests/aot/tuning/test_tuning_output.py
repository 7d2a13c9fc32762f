"""What a tuning may write, and what it leaves as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvgemm_aot.storage.locks import acquire
from nvgemm_aot.tuning.state import state_path
from nvgemm_runtime.errors import StorageError, TuningError
from tuning_bench import (
    DictatedTimer,
    bench,
    run,
)


def test_the_same_command_again_measures_nothing_and_loses_nothing(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    run(tunable, tuned_path, bench(dictated))
    whole = tuned_path.read_bytes()
    dictated.prepared.clear()
    tuned = run(tunable, tuned_path, bench(dictated), budget_s=0.0)
    assert dictated.prepared == []
    assert (tuned.measured_now, tuned.is_complete, len(tuned.outcomes)) == (0, True, 3)
    assert tuned_path.read_bytes() == whole


def test_measurements_whose_state_is_gone_are_not_overwritten(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    run(tunable, tuned_path, bench(dictated))
    whole = tuned_path.read_bytes()
    state_path(tuned_path).unlink()
    dictated.prepared.clear()
    with pytest.raises(TuningError, match=r"holds measurements.*name another output, or remove"):
        run(tunable, tuned_path, bench(dictated), budget_s=0.0)
    assert tuned_path.read_bytes() == whole
    assert dictated.prepared == []


def test_measurements_of_another_tuning_are_not_overwritten(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    run(tunable, tuned_path, bench(dictated))
    dictated.times = {"": [700.0]}
    other = tuned_path.with_name("other.nvgemm")
    run(tunable, other, bench(dictated))
    other.replace(tuned_path)
    whole = tuned_path.read_bytes()
    dictated.prepared.clear()
    with pytest.raises(TuningError, match=r"holds measurements.*name another output, or remove"):
        run(tunable, tuned_path, bench(dictated), prunes=True)
    assert tuned_path.read_bytes() == whole
    assert dictated.prepared == []


def test_a_bundle_that_was_about_to_be_written_is_known(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state names it before it is there, so that no kill in between makes it another's."""
    ticks = iter([0.0, 0.0, 99.0, 99.0])
    run(tunable, tuned_path, bench(dictated), budget_s=9.0, clock=lambda: next(ticks))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nvgemm_aot.tuning.session.write_bundle", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tunable, tuned_path, bench(dictated))
    assert run(tunable, tuned_path, bench(dictated)).is_complete


def test_an_output_without_measurements_is_written_over(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    tuned_path.write_bytes(tunable.read_bytes())
    assert run(tunable, tuned_path, bench(dictated)).is_complete
    other = tuned_path.with_name("other.nvgemm")
    other.write_bytes(b"no bundle")
    assert run(tunable, other, bench(dictated)).is_complete


def test_two_tunings_do_not_share_an_output(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    lock = acquire(tuned_path.with_name(f".{tuned_path.name}.lock"))
    assert lock is not None
    with pytest.raises(TuningError, match="another process is tuning into it"):
        run(tunable, tuned_path, bench(dictated))
    assert dictated.prepared == []
    lock.release()
    run(tunable, tuned_path, bench(dictated))
    assert sorted(tuned_path.parent.iterdir()) == [tuned_path, state_path(tuned_path)], (
        "no lock is left"
    )


def test_what_killed_writers_left_is_swept(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    partial = tuned_path.with_name(f".{tuned_path.name}.abcdef.partial")
    partial.write_bytes(b"half")
    run(tunable, tuned_path, bench(dictated))
    assert not partial.exists()


def test_an_output_that_cannot_be_written_is_said_at_once(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer
) -> None:
    directory, file = tmp_path / "dir.nvgemm", tmp_path / "file"
    directory.mkdir()
    file.write_bytes(b"")
    for tuned_path in (directory, file / "tuned.nvgemm"):
        with pytest.raises(StorageError, match="cannot write"):
            run(tunable, tuned_path, bench(dictated))
    assert dictated.prepared == []
