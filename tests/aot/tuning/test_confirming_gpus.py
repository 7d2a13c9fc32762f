"""Tuning that measures every problem on several GPUs, which confirm or contradict each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from tuner import Tuner

import cpu_provider
from nvgemm_aot.cli.main import main
from nvgemm_aot.rankings.assess import assess
from nvgemm_aot.rankings.entries import merge
from nvgemm_aot.rankings.export import export
from nvgemm_aot.tuning.spread import several_gpus
from nvgemm_aot.tuning.spread.several_gpus import divide, tune_on
from nvgemm_aot.tuning.state.facts import facts_by_gpu
from nvgemm_aot.tuning.state.gathering import part_path
from nvgemm_aot.tuning.state.journal import Journal, state_path
from nvgemm_aot.tuning.tune_bundles import Tuned, TuningOptions
from nvgemm_aot.tuning.watchdog import tune_watched
from nvgemm_runtime.bundle.ranking_entries import Ranking
from nvgemm_runtime.errors import StorageError, TuningError
from tuning_bench import header_of

SIZES = [(m, n, 64) for n in (32, 64, 96) for m in (8, 16)]
BENCH = "watched_benches:gpu_of_its_name"
NEAR = {"Cpu_16x16": [200.0], "Cpu_8x32": [200.5]}
"""On this GPU another kernel is fastest, by less than two GPUs' fastest may differ."""
APART = {"Cpu_16x16": [150.0], "Cpu_8x32": [200.0]}
"""On this GPU another kernel is clearly the fastest."""


@pytest.fixture
def several(tuner: Tuner) -> Path:
    return tuner.build([cpu_provider.problem(sizes=sizes) for sizes in SIZES])


def tuned_on(
    tuner: Tuner, path: Path, gpus: str = "01", confirms: int = 2, **options: object
) -> Tuned:
    how = TuningOptions(confirms=confirms, **{"repeats": False, **options})  # type: ignore[arg-type]
    return tune_on(tuple(gpus), [path], tuner.path, how, bench=BENCH)


def rankings_of(path: Path) -> dict[str, Ranking]:
    return {ranking.problem.key: ranking for ranking in header_of(path).rankings}


def measured_on(tuner: Tuner) -> Counter[str]:
    """Number of problems that the output's journal has of each GPU."""
    by_gpu = facts_by_gpu(Journal(state_path(tuner.path), {}).facts)
    return Counter({gpu or "": len(facts.outcomes) for gpu, facts in by_gpu.items()})


def journal_lines(tuner: Tuner) -> list[object]:
    lines = Journal(state_path(tuner.path), {}).lines
    return [line for line in lines if "outcome" in line]


def outcomes_in(*outputs: Path) -> tuple[set[str], set[str]]:
    """Lines of outcomes that a run confirmed, and of those that it had yet to confirm."""
    certain: set[str] = set()
    doubtful: set[str] = set()
    for output in outputs:
        pending: set[str] = set()
        for line in Journal(state_path(output), {}).lines:
            if "outcome" in line:
                pending.add(json.dumps(line))
            elif "confirmed" in line:
                certain |= pending
                pending = set()
        doubtful |= pending
    return certain, doubtful - certain


def times_on(monkeypatch: pytest.MonkeyPatch, **times: object) -> None:
    by_gpu = {gpu.removeprefix("gpu"): one for gpu, one in times.items()}
    monkeypatch.setenv("WATCHED_BENCH_TIMES", json.dumps(by_gpu))


@pytest.mark.parametrize(("count", "confirms"), [(2, 2), (3, 2), (4, 3), (5, 5)])
def test_every_problem_is_in_parts_of_as_many_gpus(count: int, confirms: int) -> None:
    parts = divide(Path("x.nvgemm"), count, confirms)
    numbers = Counter(shard.number for part in parts for shard in part.shards)
    assert numbers == dict.fromkeys(range(1, count + 1), confirms)
    assert all(len({*part.shards}) == confirms for part in parts)


@pytest.mark.slow
def test_two_gpus_confirm_what_merged_rankings_of_two_machines_do(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_on(monkeypatch, gpu1={"Cpu_8x32": [199.0]})
    tuned = tuned_on(tuner, several, repeats=True)
    assert (tuned.measured_now, tuned.unrepeated, tuned.is_complete) == (12, 0, True)
    alone = [tuner.beside(f"alone{gpu}.nvgemm") for gpu in "01"]
    for gpu, path in zip("01", alone):
        tune_watched([several], path, TuningOptions(repeats=False), bench=BENCH, gpu=gpu)
    merged = merge(export([header_of(path)]) for path in alone)
    rankings = rankings_of(tuner.path)
    assert len(rankings) == len(merged.groups) == len(SIZES)
    for (problem, _), entries in merged.groups.items():
        assessed, ranking = assess(entries), rankings[problem.key]
        assert ranking.measured is not None
        assert ranking.measured.confirmed_by == assessed.confirmed_by
        assert len(assessed.confirmed_by) == 2
        assert ranking.kernels[0].time_ns == assessed.entry.kernels[0][1].time_ns


@pytest.mark.slow
def test_three_gpus_share_the_work_evenly_and_the_same_command_measures_nothing(
    tuner: Tuner, several: Path
) -> None:
    tuned = tuned_on(tuner, several, "012")
    assert (tuned.measured_now, tuned.is_complete) == (12, True)
    assert sorted(measured_on(tuner).values()) == [4, 4, 4]
    assert all(len(one.confirmed_by) == 2 for one in tuned.outcomes.values())
    before = tuner.path.read_bytes()
    assert tuned_on(tuner, several, "210").measured_now == 0, "in another order"
    assert tuner.path.read_bytes() == before
    assert not [*tuner.path.parent.glob(f".{tuner.path.name}.*jsonl")]


@pytest.mark.slow
def test_gpus_that_contradict_each_other_are_a_doubt(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_on(monkeypatch, gpu1=APART)
    tuned = tuned_on(tuner, several, repeats=True)
    for outcome in tuned.outcomes.values():
        assert not outcome.confirmed_by
        (doubt,) = outcome.doubts
        assert "was fastest on one GPU, and took" in doubt
    assert tuned.measured_now == 12, "a second measurement on one GPU would settle nothing"


@pytest.mark.slow
def test_what_no_other_gpu_confirms_is_measured_a_second_time_where_it_counts(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_on(monkeypatch, gpu0={"aten": [201.0]}, gpu1={"aten": [199.0]})
    tuned = tuned_on(tuner, several, repeats=True)
    assert (tuned.measured_now, tuned.is_complete) == (18, True), "each once more, on one GPU"
    for outcome in tuned.outcomes.values():
        assert (outcome.confirmed_by, outcome.doubts) == ((), ())
        assert outcome.repeated is not None
    assert tuned_on(tuner, several, repeats=True).measured_now == 0


@pytest.mark.slow
def test_second_measurements_follow_parts_that_move_to_other_gpus(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_on(monkeypatch, gpu0={"aten": [201.0]}, gpu1={"aten": [199.0]})
    tuned_on(tuner, several, "01")
    absent = tuned_on(tuner, several, "23", repeats=True)
    assert (absent.measured_now, absent.unrepeated, absent.is_complete) == (0, 6, False)
    tuned = tuned_on(tuner, several, "10", repeats=True)
    assert (tuned.measured_now, tuned.unrepeated, tuned.is_complete) == (6, 0, True)
    assert all(one.repeated is not None for one in tuned.outcomes.values())


@pytest.mark.slow
def test_a_tuning_on_one_gpu_each_goes_on_as_a_confirmed_one(tuner: Tuner, several: Path) -> None:
    first = tuned_on(tuner, several, confirms=1)
    assert first.measured_now == len(SIZES)
    tuned = tuned_on(tuner, several)
    assert tuned.measured_now == len(SIZES), "each on the other GPU"
    assert all(len(one.confirmed_by) == 2 for one in tuned.outcomes.values())


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_run_without_confirmations_keeps_those_of_earlier_runs(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch, is_apart: bool
) -> None:
    times_on(monkeypatch, **({"gpu1": APART} if is_apart else {}))
    first = tuned_on(tuner, several)
    assert all(bool(one.doubts) == is_apart for one in first.outcomes.values())
    assert all(bool(one.confirmed_by) != is_apart for one in first.outcomes.values())
    before = tuner.path.read_bytes()
    for repeats in (False, True):
        tuned = tuned_on(tuner, several, "0", confirms=1, repeats=repeats)
        assert tuned.outcomes == first.outcomes
        assert tuner.path.read_bytes() == before


@pytest.mark.slow
def test_a_gpu_process_that_dies_is_replaced(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHED_BENCH_DIES_ON", "1")
    monkeypatch.setenv("WATCHED_BENCH_DEATH", str(tuner.beside("death")))
    tuned = tuned_on(tuner, several)
    assert tuner.beside("death").exists()
    assert tuned.is_complete
    assert all(len(one.confirmed_by) == 2 for one in tuned.outcomes.values())


_TUNE = """
import sys; from pathlib import Path
from nvgemm_aot.tuning.spread.several_gpus import tune_on
from nvgemm_aot.tuning.tune_bundles import TuningOptions
tune_on(("0", "1"), [Path(sys.argv[1])], Path(sys.argv[2]),
        TuningOptions(confirms=2, repeats=False), bench=sys.argv[3])
"""


def begun(tuner: Tuner, several: Path) -> subprocess.Popen[bytes]:
    """Starts a tuning, and returns its process once both GPUs have saved an outcome."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _TUNE, str(several), str(tuner.path), BENCH]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    parts = [state_path(part_path(tuner.path, number, 2)) for number in (1, 2)]
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if all(part.exists() and b'"outcome"' in part.read_bytes() for part in parts):
            break
        time.sleep(0.02)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_ended_command_loses_no_measurement(
    tuner: Tuner, several: Path, how: signal.Signals
) -> None:
    process = begun(tuner, several)
    process.send_signal(how)
    process.communicate()
    certain, doubtful = outcomes_in(tuner.path, *(part_path(tuner.path, n, 2) for n in (1, 2)))
    assert len(certain | doubtful) >= 2, "both GPUs had saved one"
    assert how == signal.SIGKILL or not doubtful
    tuned = tuned_on(tuner, several)
    assert {*measured_on(tuner).values()} == {6}
    assert tuned.measured_now == 12 - len(certain), "only what a kill left in doubt is lost"
    assert len(journal_lines(tuner)) == 12 + len(doubtful)


@pytest.mark.slow
def test_a_full_disk_ends_it_and_the_same_command_goes_on(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise StorageError(f"{path}: cannot write {len(data)} bytes: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nvgemm_aot.tuning.state.gathering.write_atomic", full)
        with pytest.raises(StorageError, match="No space left on device"):
            tuned_on(tuner, several)
    assert not state_path(tuner.path).exists()
    tuned = tuned_on(tuner, several)
    assert (tuned.measured_now, tuned.is_complete) == (0, True)
    assert {*measured_on(tuner).values()} == {6}


@pytest.mark.slow
def test_a_part_is_taken_once_where_its_removal_was_cut_off(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nvgemm_aot.tuning.state.gathering.remove_file", killed)
        with pytest.raises(KeyboardInterrupt):
            tuned_on(tuner, several)
    assert tuned_on(tuner, several).measured_now == 0
    assert len(journal_lines(tuner)) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DRIVERS", "yes", r"GPU 0 and GPU 1 cannot share a tuning: driver is 580\.0 on the first"),
        ("PRODUCTS", "yes", r"GPU is NVIDIA H000 on the first and NVIDIA H100 on the second"),
        ("UUID", "GPU-5", r"GPU 0 and GPU 1 are one GPU \(UUID digest [0-9a-f]{12}\)"),
        ("UUID", "", r"GPU 0: its UUID is unknown, so it cannot confirm another GPU"),
        ("FAILS_ON", "1", "GPU 1 is broken"),
    ],
)
def test_gpus_that_cannot_confirm_each_other_are_refused_before_anything_is_measured(
    tuner: Tuner,
    several: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(f"WATCHED_BENCH_{variable}", value)
    with pytest.raises(TuningError, match=message):
        tuned_on(tuner, several)
    assert not [*tuner.path.parent.glob("*.jsonl"), *tuner.path.parent.glob(".*.jsonl")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--confirm", "2"], "--confirm 2 needs --gpus"),
        (["--confirm", "2", "--shard", "1/2"], "--confirm 2 needs --gpus"),
        (["--confirm", "1", "--gpus", "0,1"], "1 is not in the range x>=2"),
        (["--confirm", "3", "--gpus", "0,1"], "--confirm 3 needs 3 GPUs or more; --gpus 0,1 names"),
    ],
)
def test_too_few_gpus_cannot_confirm(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["tune", "a.nvgemm", "-o", "b.nvgemm", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_all_gpus_are_too_few_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_gpus, "_COUNT_GPUS", "print(1)")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    arguments = ["tune", "a.nvgemm", "-o", "b.nvgemm", "--gpus", "all", "--confirm", "2"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "--gpus all names 1 GPU: 0" in result.output
