"""Builds over Dask with a scheduler and workers in processes of their own, and faults in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from dask_fleet import SUPPORT, Fleet, fleet, name_certificates
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.pipeline.executor import dask_workers, scheduler_connection
from nvgemm_aot.pipeline.executor import fleet as executor_fleet
from nvgemm_aot.pipeline.executor.dask_workers import DaskWorkers
from nvgemm_aot.pipeline.pipeline import BuildResult, build
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.storage.private_key import make_key
from nvgemm_aot.storage.remote.remote_cache import open_remote
from nvgemm_runtime.errors import ExecutorError
from nvgemm_runtime.installed.signatures import public_text

pytestmark = pytest.mark.slow

TEXT = """
version: 1
name: some
targets: [{targets}]
candidates: 24
providers: ["fake_provider:FakeProvider"]
gemms: [{{dtype: bf16, mnk: [[16, 512, 256]]}}]
"""


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path) -> Path:
    """A directory that this process and all workers share and trust."""
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE", f"file://{tmp_path}/shared")
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_TRUST", "1")
    monkeypatch.setenv("FAKE_VERSION", "1")
    return tmp_path / "shared"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path / "fleet") as started:
        yield started


def manifest(directory: Path, targets: str = "sm_100f") -> Manifest:
    path = directory / "some.yaml"
    path.write_text(TEXT.format(targets=targets))
    return load_manifest(path)


def run(
    declared: Manifest, directory: Path, address: str, *, patience_seconds: float = 60.0
) -> BuildResult:
    """A build over an executor, with a cache of its own."""
    with scheduler_connection.connect(address) as client, open_remote() as remote:  # type: ignore[union-attr]
        return build(
            declared,
            directory / "out",
            Cache(directory / "cache"),
            remote=remote,
            executor=lambda cache: DaskWorkers(
                client, remote, cache, patience_seconds=patience_seconds
            ),
        )


def bundles_of(result: BuildResult) -> list[bytes]:
    return [bundle.path.read_bytes() for bundle in result.bundles]


REAL = """
version: 1
name: real
targets: [sm_100f, {arch: sm_90a, device: H200}]
candidates: 2
gemms: [{dtype: bf16, mnk: [[8, 4096, 4096]]}]
"""


def test_real_kernels_come_signed_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_TRUST", "0")
    name_certificates(monkeypatch, tmp_path / "tls")
    keys = {name: tmp_path / f"{name}.pem" for name in ("known", "unknown")}
    public = {name: make_key(path).public for name, path in keys.items()}
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"keys: [{{name: fleet, ed25519: {public_text(public['known'])}}}]\n")
    (tmp_path / "real.yaml").write_text(REAL)

    def command(out: str, *options: str) -> subprocess.CompletedProcess[str]:
        places = ("-o", str(tmp_path / out), "--cache-dir", str(tmp_path / f"{out}.cache"))
        return subprocess.run(
            [sys.executable, "-m", "nvgemm_aot", "build", *places, "real.yaml", *options],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "NVGEMM_AOT_POLICY": str(policy)},
        )

    with fleet(tmp_path / "fleet") as machines:
        machines.worker("unknown", NVGEMM_AOT_SIGNING_KEY=str(keys["unknown"]))
        refused = command("refused", "--executor", machines.address)
        assert refused.returncode == ExecutorError.exit_code
        assert "is not in the policy" in refused.stderr
        machines.worker("known", threads=2, NVGEMM_AOT_SIGNING_KEY=str(keys["known"]))
        done = command("dask", "--executor", machines.address, "--strict")
        assert done.returncode == 0, done.stderr
        assert machines.address.startswith("tls://")
    monkeypatch.delenv("NVGEMM_AOT_REMOTE_CACHE")
    assert command("alone").returncode == 0
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        for out in ("dask", "alone")
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) == 2


def name_operators(monkeypatch: pytest.MonkeyPatch, *operators: str) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", " ".join(operators))


def compiled(log: Path) -> Counter[str]:
    return Counter(log.read_text().split())


def when(condition: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """Acts, in another thread, once a condition holds."""

    def wait() -> None:
        while not condition():
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_two_workers_compile_each_kernel_once(
    tmp_path: Path, machines: Fleet, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    name_operators(monkeypatch, *(f"op{n}" for n in range(20)), "fail", "crash")
    declared = manifest(tmp_path, "sm_100f, {arch: sm_90a, device: H200}")
    machines.worker("first")
    machines.worker("second", threads=2)
    result = run(declared, tmp_path / "fleet_build", machines.address)
    assert result.compiled == 40
    assert {f.task.candidate.operator for b in result.bundles for f in b.failures} == {
        "fail",
        "crash",
    }
    counts = compiled(log)
    assert {counts[f"op{n}"] for n in range(20)} == {2}  # one for each target
    assert counts["crash"] == 4  # the worker's own compiler processes die, twice for each target
    for name in ("first", "second"):
        assert any((machines.directory / name / "entries").iterdir())
    again = run(declared, tmp_path / "again", machines.address)
    assert again.compiled == 0
    monkeypatch.delenv("NVGEMM_AOT_REMOTE_CACHE")
    alone = build(declared, tmp_path / "alone", Cache(tmp_path / "alone.cache"))
    assert bundles_of(result) == bundles_of(again) == bundles_of(alone)


def test_workers_that_differ_or_cannot_write_get_no_kernels(
    tmp_path: Path,
    machines: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    log: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name_operators(monkeypatch, *(f"op{n}" for n in range(6)))
    declared = manifest(tmp_path)
    (tmp_path / "other_store").mkdir()
    machines.worker("other_toolchain", FAKE_VERSION="2")
    machines.worker("read_only", NVGEMM_AOT_REMOTE_CACHE_MODE="read")
    machines.worker("elsewhere", NVGEMM_AOT_REMOTE_CACHE=f"file://{tmp_path}/other_store")
    machines.worker("no_cache", NVGEMM_AOT_CACHE=f"{tmp_path}/some.yaml/cache")
    machines.worker("no_compiler", PYTHONPATH=f"{SUPPORT}", CC="/nowhere/cc")
    expected = {
        "fake 2, this build has 1",
        "its remote cache is read-only by NVGEMM_AOT_REMOTE_CACHE_MODE",
        "its entries do not reach file://",
        "some.yaml/cache",
        "/nowhere/cc",
    }
    with pytest.raises(ExecutorError, match="none of 5 workers can compile") as caught:
        run(declared, tmp_path / "none", machines.address)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 5
    assert all(sum(text in line for line in lines) == 1 for text in expected), lines
    assert not compiled(log)
    caplog.clear()
    machines.worker("good")
    assert run(declared, tmp_path / "one", machines.address).compiled == 6
    assert set(compiled(log).values()) == {1}
    assert sum("gets no kernels" in record.message for record in caplog.records) == 5


def test_a_worker_that_dies_loses_no_kernel(
    tmp_path: Path, machines: Fleet, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    name_operators(monkeypatch, *(f"op{n}" for n in range(20)), "hangs")
    dying = machines.worker("dying")
    killing = when(lambda: "hangs" in compiled(log), dying.kill)
    joining = when(lambda: dying.poll() is not None, lambda: machines.worker("joining"))
    result = run(manifest(tmp_path), tmp_path / "build", machines.address)
    killing.join()
    joining.join()
    assert not result.bundles[0].failures
    counts = compiled(log)
    assert counts.pop("hangs") == 2
    assert set(counts.values()) <= {1, 2}
    assert result.compiled == 21


def test_a_kernel_that_ends_workers_is_given_up(
    tmp_path: Path, machines: Fleet, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    name_operators(monkeypatch, "slow", "one", "two")
    logs = [tmp_path / f"{n}.log" for n in range(dask_workers.MAX_WORKER_DEATHS + 1)]
    workers = []
    for path in logs:
        path.touch()
        workers.append(machines.worker(path.stem, FAKE_LOG=str(path)))
        when(partial(lambda path: "slow" in compiled(path), path), workers[-1].kill)
    result = run(manifest(tmp_path), tmp_path / "build", machines.address)
    [failure] = result.bundles[0].failures
    assert (failure.task.candidate.operator, failure.is_transient) == ("slow", True)
    assert f"with {dask_workers.MAX_WORKER_DEATHS} workers of the executor" in failure.reason
    assert sum("slow" in compiled(path) for path in logs) == dask_workers.MAX_WORKER_DEATHS
    assert sum(worker.poll() is None for worker in workers) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_scheduler_ends_the_build(
    tmp_path: Path,
    machines: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    log: Path,
    shared: Path,
    how: signal.Signals,
) -> None:
    monkeypatch.setattr(executor_fleet, "ANSWER_SECONDS", 2.0)
    name_operators(monkeypatch, *(f"op{n}" for n in range(8)), "hangs")
    machines.worker("only", threads=2)
    declared = manifest(tmp_path)

    def has_begun() -> bool:  # besides kernels, the store has a plan and a worker's trial
        return "hangs" in compiled(log) and len(list(shared.iterdir())) >= 4

    when(has_begun, lambda: machines.scheduler.send_signal(how))
    wanted = {
        signal.SIGKILL: "the connection to the scheduler was lost",
        signal.SIGSTOP: "the scheduler does not answer, for 2 s",
    }
    with pytest.raises(ExecutorError, match=f"{wanted[how]}; run the same command again"):
        run(declared, tmp_path / "build", machines.address)
    monkeypatch.setenv("FAKE_LOG", "")
    with fleet(tmp_path / "others") as others:
        others.worker("other", FAKE_LOG=str(log))
        result = run(declared, tmp_path / "build", others.address)
    assert 0 < result.compiled < 9
    assert not result.bundles[0].failures


def test_ctrl_c_keeps_what_is_finished(
    tmp_path: Path, machines: Fleet, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    name_operators(monkeypatch, *(f"op{n}" for n in range(12)), "hangs")
    manifest(tmp_path)
    machines.worker("only")
    command = subprocess.Popen(
        [
            *(sys.executable, "-m", "nvgemm_aot", "build", str(tmp_path / "some.yaml")),
            *("--executor", machines.address, "--cache-dir", str(tmp_path / "cache")),
            *("-o", str(tmp_path / "out")),
        ],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    when(lambda: "hangs" in compiled(log), lambda: command.send_signal(signal.SIGINT))
    _, errors = command.communicate(timeout=100)
    assert command.returncode == 130, errors
    assert errors.rstrip().endswith("interrupted; compiled kernels are in the cache")
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
