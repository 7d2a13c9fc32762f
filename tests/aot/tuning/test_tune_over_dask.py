"""Tuning over the workers of a Dask scheduler on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tuner import Tuner

import cpu_provider
from nvgemm_aot.cli.main import main
from nvgemm_aot.tuning.spread.tune_over_dask import tune_over
from nvgemm_aot.tuning.state.facts import Facts, facts_by_gpu
from nvgemm_aot.tuning.state.gathering import gather, part_path
from nvgemm_aot.tuning.state.journal import Journal, state_path
from nvgemm_aot.tuning.tune_bundles import Tuned, TuningOptions
from nvgemm_runtime.errors import ExecutorError, TuningError
from signing_keys import new_key, set_policy, sign_bundle
from tuning_bench import header_of

SIZES = [(m, n, 64) for n in (32, 64, 96, 128) for m in (8, 16)]
BENCH = "watched_benches:gpu_of_its_name"

Cluster = Any


@pytest.fixture
def several(tuner: Tuner) -> Path:
    return tuner.build([cpu_provider.problem(sizes=sizes) for sizes in SIZES])


@contextlib.contextmanager
def cluster(gpus: str, **environments: dict[str, str]) -> Iterator[Cluster]:
    """A scheduler and a worker process for each GPU, which has ``gpuN`` in its environment."""
    distributed = pytest.importorskip("distributed")
    host = {"host": "127.0.0.1", "dashboard": False}
    scheduler = {"cls": distributed.Scheduler, "options": {**host, "port": 0}}
    shared = {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = {
        number: {
            "cls": distributed.Nanny,
            "options": {
                "host": "127.0.0.1",
                "nthreads": 1,
                "dashboard": False,
                "env": {
                    **shared,
                    "CUDA_VISIBLE_DEVICES": gpu,
                    **environments.get(f"gpu{number}", {}),
                },
            },
        }
        for number, gpu in enumerate(gpus)
    }
    with distributed.SpecCluster(scheduler=scheduler, workers=workers, silence_logs=50) as made:
        yield made


def tuned_over(tuner: Tuner, path: Path, on: Cluster, confirms: int = 1, **how: Any) -> Tuned:
    options = TuningOptions(confirms=confirms, repeats=False)
    return tune_over(on.scheduler_address, [path], tuner.path, options, bench=BENCH, **how)


def measured_on(tuner: Tuner) -> Counter[str]:
    by_gpu = facts_by_gpu(Journal(state_path(tuner.path), {}).facts)
    return Counter({gpu or "": len(facts.outcomes) for gpu, facts in by_gpu.items()})


def after_an_outcome(tuner: Tuner, act: Callable[[], None]) -> threading.Thread:
    """Starts a thread that acts once both parts have saved an outcome here."""
    parts = [state_path(part_path(tuner.path, number, 2)) for number in (1, 2)]

    def wait() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if all(part.exists() and b'"outcome"' in part.read_bytes() for part in parts):
                break
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
def test_each_worker_measures_a_part_and_the_bundle_comes_back(tuner: Tuner, several: Path) -> None:
    steps: list[tuple[int, int]] = []
    with cluster("01") as on:
        tuned = tuned_over(tuner, several, on, progress=lambda *step: steps.append(step))
        assert (tuned.measured_now, tuned.is_complete) == (len(SIZES), True)
        assert (tuned.path, tuned.state) == (tuner.path, state_path(tuner.path))
        assert steps[-1] == (8, 8)
        assert sorted(measured_on(tuner).values()) == [4, 4]
        before = tuner.path.read_bytes()
        assert tuned_over(tuner, several, on).measured_now == 0
    assert tuner.path.read_bytes() == before
    assert all(ranking.measured is not None for ranking in header_of(tuner.path).rankings)
    assert not [*tuner.path.parent.glob(f".{tuner.path.name}.*jsonl")]


@pytest.mark.slow
def test_workers_that_fail_or_do_not_answer_get_no_work(
    tuner: Tuner,
    several: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("nvgemm_aot.tuning.spread.gpu_workers.IDLE_FACTOR", 0.5)
    with cluster("012") as on:
        addresses = {number: nanny.worker_address for number, nanny in on.workers.items()}
        with distributed_client(on) as client:
            broken = "from nvgemm_aot.tuning.spread import worker_tasks as w; w.identify = None"
            client.run(exec, broken, workers=[addresses[1]])
            busy = client.submit(time.sleep, 3600, workers=[addresses[2]])
            tuned = tuned_over(tuner, several, on, hang_s=60.0)
            client.cancel([busy], force=True)
    assert tuned.is_complete
    assert len(measured_on(tuner)) == 1
    told = caplog.text
    assert f"worker {addresses[1]}: TypeError: 'NoneType' object is not callable; it needs" in told
    assert f"worker {addresses[1]}: worker" not in told
    assert f"worker {addresses[2]}: it has not answered: is it busy" in told


def distributed_client(on: Cluster) -> Any:
    return pytest.importorskip("distributed").Client(on, set_as_default=False)


@pytest.mark.slow
def test_workers_with_a_policy_get_the_signatures(
    tuner: Tuner, several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key(tmp_path, "key")
    policy = set_policy(monkeypatch, tmp_path / "policy.yaml", {"ours": key}, required=True)
    with cluster("0", gpu0={"NVGEMM_AOT_POLICY": str(policy)}) as on:
        assert tuned_over(tuner, sign_bundle(several, key), on).is_complete


@pytest.mark.slow
def test_workers_confirm_each_other(tuner: Tuner, several: Path) -> None:
    with cluster("01") as on:
        tuned = tuned_over(tuner, several, on, confirms=2)
    assert (tuned.measured_now, tuned.is_complete) == (16, True)
    assert all(len(one.confirmed_by) == 2 for one in tuned.outcomes.values())


@pytest.mark.slow
def test_a_lost_workers_measurements_stay_and_the_others_do_its_rest(
    tuner: Tuner, several: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = {"WATCHED_BENCH_PAUSE_S": "1.5"}
    with cluster("01", gpu0=slow, gpu1=slow) as on:
        nanny = on.workers[1]
        thread = after_an_outcome(tuner, lambda: on.sync(nanny.close))
        tuned = tuned_over(tuner, several, on)
        thread.join()
    assert "was lost" in caplog.text
    assert (len(tuned.outcomes), tuned.is_complete) == (len(SIZES), True)
    counts = sorted(measured_on(tuner).values())
    assert counts[0] >= 1, "of the lost worker"
    assert sum(counts) >= len(SIZES)


@pytest.mark.slow
def test_too_few_workers_left_end_it_and_the_same_command_goes_on(
    tuner: Tuner, several: Path
) -> None:
    slow = {"WATCHED_BENCH_PAUSE_S": "1.5"}
    with cluster("01", gpu0=slow, gpu1=slow) as on:
        thread = after_an_outcome(tuner, lambda: on.sync(on.workers[1].close))
        with pytest.raises(ExecutorError, match=r"1 workers are left, and 2 are needed; measure"):
            tuned_over(tuner, several, on, confirms=2)
        thread.join()
    saved = sum(measured_on(tuner).values())
    assert saved >= 2
    with cluster("01") as on:
        tuned = tuned_over(tuner, several, on, confirms=2)
    assert all(len(one.confirmed_by) == 2 for one in tuned.outcomes.values())
    assert tuned.measured_now < 16


@pytest.mark.slow
def test_an_interruption_keeps_what_workers_have_measured(tuner: Tuner, several: Path) -> None:
    slow = {"WATCHED_BENCH_PAUSE_S": "1.5"}
    with cluster("01", gpu0=slow, gpu1=slow) as on:
        thread = after_an_outcome(tuner, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            tuned_over(tuner, several, on)
        thread.join()
        tuned = tuned_over(tuner, several, on)
    assert len(tuned.outcomes) == len(SIZES)
    assert tuned.measured_now < len(SIZES), "nothing is in doubt, as workers ended by themselves"


@pytest.mark.slow
def test_a_lost_scheduler_ends_it(tuner: Tuner, several: Path) -> None:
    slow = {"WATCHED_BENCH_PAUSE_S": "1.5"}
    with cluster("01", gpu0=slow, gpu1=slow) as on:
        thread = after_an_outcome(tuner, lambda: on.sync(on.scheduler.close))
        with pytest.raises(ExecutorError, match="the scheduler was lost"):
            tuned_over(tuner, several, on)
        thread.join()
    gather(tuner.path)
    saved = set(Facts(Journal(state_path(tuner.path), {}).facts).outcomes)
    assert len(saved) >= 2
    with cluster("01") as on:
        tuned = tuned_over(tuner, several, on)
    assert (len(tuned.outcomes), tuned.is_complete) == (len(SIZES), True)


@pytest.mark.slow
def test_workers_that_cannot_share_a_tuning_are_refused(
    tuner: Tuner, several: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(on: Cluster, error: type[Exception], message: str, confirms: int = 1) -> None:
        with pytest.raises(error, match=message):
            tuned_over(tuner, several, on, confirms)

    with cluster("01", gpu1={"WATCHED_BENCH_DRIVERS": "yes"}) as on:
        refused(on, TuningError, "cannot share a tuning: driver is 580")
    with cluster("00") as on:
        refused(on, TuningError, "are one GPU")
    with cluster("01", gpu1={"WATCHED_BENCH_FAILS_ON": "1"}) as on:
        refused(on, TuningError, "--confirm 2 needs 2 GPUs or more", 2)
        assert "GPU 1 is broken; it gets no work" in caplog.text
        assert tuned_over(tuner, several, on).is_complete
    with cluster("1", gpu0={"WATCHED_BENCH_PRODUCTS": "yes"}) as on:
        refused(on, TuningError, "belongs to another tuning: its GPU is")
    with cluster("0", gpu0={"WATCHED_BENCH_FAILS_ON": "0"}) as on:
        refused(on, ExecutorError, "can measure .worker tcp://.*: GPU 0 is broken")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "all"], "--executor cannot be combined with --gpus"),
        (["--shard", "1/2"], "--executor cannot be combined with --shard"),
        ([], "whoever reaches it can run code"),
    ],
)
def test_what_an_executor_excludes_is_named(arguments: list[str], message: str) -> None:
    command = ["tune", "a.nvgemm", "-o", "b.nvgemm", "--executor", "tcp://10.0.0.1:8786"]
    result = CliRunner().invoke(main, [*command, *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
