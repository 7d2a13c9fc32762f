"""Tuning on several GPUs at once: parts in processes of their own, joined into one bundle."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tuner import Tuner

import cpu_provider
from nvgemm_aot.cli.main import main
from nvgemm_aot.tuning.spread import several_gpus
from nvgemm_aot.tuning.spread.several_gpus import tune_on
from nvgemm_aot.tuning.state.facts import Facts
from nvgemm_aot.tuning.state.journal import Journal, state_path
from nvgemm_aot.tuning.tune_bundles import Tuned, TuningOptions
from nvgemm_runtime.errors import TuningError
from tuning_bench import header_of

SIZES = [(m, n, 64) for n in (32, 64, 96) for m in (8, 16)]

pytestmark = pytest.mark.slow


@pytest.fixture
def several(tuner: Tuner) -> Path:
    return tuner.build([cpu_provider.problem(sizes=sizes) for sizes in SIZES])


def tuned_on(tuner: Tuner, path: Path, bench: str = "gpu_of_its_name", **how: object) -> Tuned:
    options = how.pop("options", TuningOptions(repeats=False))
    return tune_on(
        ("0", "1"),
        [path],
        tuner.path,
        options,  # type: ignore[arg-type]
        bench=f"watched_benches:{bench}",
        **how,  # type: ignore[arg-type]
    )


def leftovers(tuner: Tuner) -> set[str]:
    return {path.name for path in tuner.path.parent.glob(f".{tuner.path.name}.*of*")}


def test_each_gpu_measures_a_part_and_one_bundle_has_all(tuner: Tuner, several: Path) -> None:
    steps: list[tuple[int, int]] = []
    tuned = tuned_on(tuner, several, progress=lambda *step: steps.append(step))
    assert len(tuned.outcomes) == tuned.measured_now == len(SIZES)
    assert tuned.is_complete
    assert steps[-1] == (6, 6)
    gpus = {outcome.conditions.gpu_sha256 for outcome in tuned.outcomes.values()}
    assert len(gpus) == 2
    assert all(ranking.measured is not None for ranking in header_of(tuner.path).rankings)
    assert leftovers(tuner) == set()


def test_the_same_command_again_measures_nothing(tuner: Tuner, several: Path) -> None:
    tuned_on(tuner, several)
    before = tuner.path.read_bytes()
    assert tuned_on(tuner, several).measured_now == 0
    assert tuner.path.read_bytes() == before


def test_what_a_stopped_gpu_left_is_measured_by_the_next_run(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU 1's process fails, as where its driver is another; GPU 0's part goes on later."""
    monkeypatch.setenv("WATCHED_BENCH_FAILS_ON", "1")
    with pytest.raises(TuningError, match="GPU 1 is broken"):
        tuned_on(tuner, several)
    assert not tuner.path.exists()
    monkeypatch.delenv("WATCHED_BENCH_FAILS_ON")
    tuned = tuned_on(tuner, several)
    assert len(tuned.outcomes) == len(SIZES)
    assert leftovers(tuner) == set()


def test_gpus_that_differ_are_refused_and_their_parts_stay(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHED_BENCH_DRIVERS", "yes")
    with pytest.raises(TuningError, match=r"its driver is 580\.1, here it is 580\.0"):
        tuned_on(tuner, several)
    assert leftovers(tuner)
    saved = Facts(Journal(state_path(tuner.path), {}).facts).outcomes
    assert 0 < len(saved) < len(SIZES), "one GPU's part is saved"


def test_an_interruption_saves_what_every_gpu_has_measured(
    tuner: Tuner, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(running: object, **_: object) -> None:
        deadline = time.monotonic() + 60
        parts = [state_path(tuner.path.with_name(f".{tuner.path.name}.{i}of2")) for i in (1, 2)]
        while time.monotonic() < deadline and not all(part.exists() for part in parts):
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(several_gpus, "wait", interrupted)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        tuned_on(tuner, several)
    assert threading.active_count() == threads
    monkeypatch.undo()
    assert len(tuned_on(tuner, several).outcomes) == len(SIZES)


def test_all_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_gpus, "_COUNT_GPUS", "print(2)")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert several_gpus.visible_gpus() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-ab,7")
    assert several_gpus.visible_gpus() == ("3", "GPU-ab")


def test_without_a_gpu_there_is_nothing_to_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_gpus, "_COUNT_GPUS", "print(0)")
    with pytest.raises(TuningError, match="torch sees no GPU, which tuning needs"):
        several_gpus.visible_gpus()


@pytest.mark.parametrize("named", ["0,", ",", "0,1,0"])
def test_each_gpu_is_named_once(named: str) -> None:
    result = CliRunner().invoke(main, ["tune", "a.nvgemm", "-o", "b.nvgemm", "--gpus", named])
    assert result.exit_code == 2
    assert f"--gpus {named}: name each GPU once" in result.output


def test_shards_and_gpus_divide_alike_so_one_of_them_is_named(tmp_path: Path) -> None:
    arguments = ["tune", "a.nvgemm", "-o", "b.nvgemm", "--gpus", "0,1", "--shard", "1/2"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "--shard cannot be combined with --gpus" in result.output
