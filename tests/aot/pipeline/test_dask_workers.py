"""Dealing kernels to a scheduler's workers, all in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpu_provider import _InThisProcess
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.pipeline.compiler import Task
from nvgemm_aot.pipeline.executor import dask_workers, fleet, fleet_worker
from nvgemm_aot.pipeline.executor.batches import Answer, Batch, read_answer
from nvgemm_aot.pipeline.executor.dask_workers import DaskWorkers
from nvgemm_aot.pipeline.executor.fleet import Member
from nvgemm_aot.pipeline.executor.scheduler_connection import connect, workers_of
from nvgemm_aot.pipeline.pipeline import BuildResult, build
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.storage.remote.remote_cache import open_remote
from nvgemm_runtime.errors import ExecutorError

distributed = pytest.importorskip("distributed", reason="needs distributed, of the extra fleet")

TEXT = """
version: 1
name: some
targets: [sm_100f, {arch: sm_90a, device: H200}]
candidates: 24
providers: ["fake_provider:FakeProvider"]
gemms: [{dtype: bf16, mnk: [[16, 512, 256]]}]
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "some.yaml").write_text(TEXT)
    return load_manifest(tmp_path / "some.yaml")


def cluster_of(workers: int) -> Any:
    """A scheduler on loopback, and workers of two threads in this process."""
    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=2,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A scheduler whose workers are threads of this process."""
    with cluster_of(1) as started:
        yield started


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE", f"file://{tmp_path}/shared")
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_TRUST", "1")
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "worker.cache"))
    monkeypatch.setenv("FAKE_OPERATORS", "one two three fail")
    monkeypatch.setattr(fleet_worker, "_remote", None)
    monkeypatch.setattr(fleet_worker, "_compilers", fleet_worker._Compilers())
    monkeypatch.setattr(fleet_worker, "ProviderWorkers", _InThisProcess)
    monkeypatch.setattr(dask_workers, "_TICK_SECONDS", 0.02)


def run(
    declared: Manifest, directory: Path, address: str, progress: list[tuple[int, int]] | None = None
) -> BuildResult:
    with connect(address) as client, open_remote() as remote:  # type: ignore[union-attr]
        return build(
            declared,
            directory / "out",
            Cache(directory / "cache"),
            progress=None if progress is None else lambda *counts: progress.append(counts),
            remote=remote,
            executor=lambda cache: DaskWorkers(client, remote, cache, patience_seconds=0.5),
        )


@pytest.mark.usefixtures("compiled_here")
def test_bundles_equal_a_local_builds(
    manifest: Manifest, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    progress: list[tuple[int, int]] = []
    result = run(manifest, tmp_path / "dask", cluster.scheduler_address, progress)
    assert result.compiled == 6
    assert sorted(log.read_text().split()) == ["fail"] * 2 + sorted(["one", "two", "three"] * 2)
    assert progress == [(done, 8) for done in range(9)]
    [failure] = result.bundles[0].failures
    assert (failure.reason, failure.is_transient) == ("fail: told to fail", False)
    log.write_text("")
    again = run(manifest, tmp_path / "again", cluster.scheduler_address)
    assert (again.compiled, log.read_text().split()) == (0, ["fail", "fail"])
    monkeypatch.delenv("NVGEMM_AOT_REMOTE_CACHE")
    alone = build(manifest, tmp_path / "alone", Cache(tmp_path / "alone.cache"))
    contents = [
        [bundle.path.read_bytes() for bundle in one.bundles] for one in (result, again, alone)
    ]
    assert contents[0] == contents[1] == contents[2]


def test_a_worker_whose_kernels_do_not_arrive_gets_no_more(
    manifest: Manifest, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    monkeypatch.setattr(fleet_worker, "push_kernel", lambda *_, **__: None)
    with pytest.raises(ExecutorError, match="none of 1 worker can compile") as caught:
        run(manifest, tmp_path / "dask", cluster.scheduler_address)
    assert f"{cluster.workers[0].address}: kernels that it compiled do not arrive" in str(
        caught.value
    )
    compiled = log.read_text().split()
    assert all(compiled.count(name) <= 2 for name in {*compiled} - {"fail"})  # once for a target


def test_a_provider_that_a_worker_lacks_is_a_reason(
    manifest: Manifest, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_missing(_: str) -> str:
        raise ModuleNotFoundError("No module named 'nvgemm_aot'")

    monkeypatch.setattr(fleet_worker, "check_worker", raise_missing)
    raise_missing.__module__, raise_missing.__name__ = fleet_worker.__name__, "check_worker"
    with pytest.raises(ExecutorError, match="of this release is not installed there"):
        run(manifest, tmp_path / "dask", cluster.scheduler_address)


def test_a_worker_does_not_name_the_entry_of_its_trial(
    manifest: Manifest, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = fleet_worker.check_worker

    def name_another(request: str) -> str:
        document = json.loads(request)
        document["trial_key"] = "../../../victim"
        return checked(json.dumps(document))

    def name_in_answer(request: str) -> str:
        checked(request)
        return json.dumps({"reason": None, "trial_key": "../../../victim"})

    for number, lie in enumerate([name_another, name_in_answer]):
        lie.__module__, lie.__name__ = fleet_worker.__name__, "check_worker"
        monkeypatch.setattr(fleet_worker, "check_worker", lie)
        with contextlib.suppress(ExecutorError):
            run(manifest, tmp_path / f"dask{number}", cluster.scheduler_address)
    assert not list(tmp_path.rglob("victim"))


GOOD = {"failure": None, "is_transient": False, "was_there": False}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "[1]", "null", '"text"', "NaN", "1" * 5000, "[" * 5000),
        *('{"reason": 1}', '{"results": [1]}', '{"results": 1, "reason": "a"}', '{"other": 1}'),
        json.dumps({"results": [{}], "reason": None}),
        json.dumps({"results": [GOOD | {"failure": 1}]}),
        json.dumps({"results": [GOOD | {"other": 1}]}),
        json.dumps({"results": [GOOD] * 1000}),
        json.dumps({"results": [GOOD] * 1000, "reason": "some"}),
        json.dumps({"results": [], "reason": None, "seconds": 1.0}),
    ],
)
def test_a_malformed_answer_is_a_reason(text: str) -> None:
    answer = read_answer(Finished(text), 2)
    assert answer == Answer(reason="its answer is malformed")


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "1e999", '"1"', "true"])
def test_a_time_that_is_no_number_is_a_reason(seconds: str) -> None:
    text = f'{{"results": [{json.dumps(GOOD)}], "reason": null, "seconds": {seconds}}}'
    assert read_answer(Finished(text), 1) == Answer(reason="its answer is malformed")
    good = read_answer(Finished(text.replace(seconds, "1.5")), 1)
    assert good is not None
    assert (len(good.results), good.reason, good.seconds) == (1, None, 1.5)


class Finished:
    """A future that is done."""

    status = "finished"

    def __init__(self, text: object) -> None:
        self._text = text

    def result(self, timeout: float) -> object:
        return self._text


@pytest.mark.parametrize("text", ["{}", "[1]", 7])
@pytest.mark.parametrize("name", ["check_worker", "compile_batch"])
def test_a_worker_with_a_malformed_answer_gets_no_kernels(
    manifest: Manifest,
    tmp_path: Path,
    cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: object,
) -> None:
    def lie(_: object) -> object:
        return text

    lie.__module__, lie.__name__ = fleet_worker.__name__, name
    monkeypatch.setattr(fleet_worker, name, lie)
    if name == "check_worker" and text == "{}":  # nothing against it, and no entry of its own
        expected = "its entries do not reach"
    else:
        expected = "its answer is malformed"
    with pytest.raises(ExecutorError, match=expected):
        run(manifest, tmp_path / "dask", cluster.scheduler_address)


@pytest.mark.parametrize("is_paused", [False, True])
def test_another_worker_compiles_what_a_silent_one_has(
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_paused: bool,
) -> None:
    begun, end = threading.Event(), threading.Event()
    compile_here = fleet_worker._compile

    def hang(tasks: Sequence[Task], cache: Cache) -> list[dict[str, Any]]:
        if distributed.get_worker().name == "silent":
            begun.set()
            end.wait()
        else:
            begun.wait()
        return compile_here(tasks, cache)

    monkeypatch.setattr(fleet_worker, "_compile", hang)
    monkeypatch.setattr(dask_workers, "compile_limit_seconds", lambda: 3600 if is_paused else 0.1)
    monkeypatch.setattr(fleet, "_REFRESH_SECONDS", 0.05)
    with cluster_of(0) as pair:
        for name in ("silent", "other"):
            # Without a limit of memory, for which Dask would end the pause.
            options = {"nthreads": 1, "memory_limit": 0}
            pair.worker_spec[name] = {"cls": distributed.Worker, "options": options}
        pair.sync(pair._correct_state)
        silent = pair.workers["silent"]

        def pause() -> None:
            begun.wait()
            silent.loop.add_callback(setattr, silent, "status", distributed.Status.paused)

        if is_paused:
            threading.Thread(target=pause, daemon=True).start()
        try:
            result = run(manifest, tmp_path / "dask", pair.scheduler_address)
        finally:
            begun.set()
            end.set()
    assert result.compiled == 6
    assert ("it has answered nothing for" in caplog.text) is not is_paused


def test_a_build_ends_if_its_only_worker_is_silent(
    manifest: Manifest, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    monkeypatch.setattr(fleet_worker, "_compile", lambda *_: end.wait() and [])
    monkeypatch.setattr(dask_workers, "compile_limit_seconds", lambda: 0.1)
    try:
        with pytest.raises(ExecutorError, match="it has answered nothing for"):
            run(manifest, tmp_path / "dask", cluster.scheduler_address)
    finally:
        end.set()


def test_a_scheduler_without_workers_is_an_error(manifest: Manifest, tmp_path: Path) -> None:
    with (
        distributed.LocalCluster(
            n_workers=0,
            processes=False,
            protocol="tcp",
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
        ) as empty,
        pytest.raises(ExecutorError, match=r"has no workers, for .* s; start some"),
    ):
        run(manifest, tmp_path / "dask", empty.scheduler_address)


def test_a_lost_worker_ends_the_build_if_its_kernels_cannot_be_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the build would wait for kernels that no thread collects."""

    def fail(*_: object) -> frozenset[str]:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(dask_workers, "fetch_kernels", fail)
    client = SimpleNamespace(scheduler=SimpleNamespace(address="tcp://127.0.0.1:1"))
    with open_remote() as remote:  # type: ignore[union-attr]
        run = dask_workers._Run(client, remote, Cache(tmp_path / "cache"), [], 0.5)
        batch = Batch(groups=())
        run._lose(Member(address="tcp://127.0.0.1:2", threads=1, is_running=True, batches={batch}))
        event = run._events.get(timeout=60)
    with pytest.raises(RuntimeError, match="told to fail"):
        list(event())


def test_all_workers_are_seen_whatever_the_client_keeps(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(cluster.scheduler_address) as client:
        # A client's own record has five workers in some releases of Dask, and none in others.
        monkeypatch.setattr(client, "_scheduler_identity", {"workers": {}})
        monkeypatch.setattr(client, "scheduler_info", lambda *_, **__: {"workers": {}})
        assert list(workers_of(client)) == [cluster.workers[0].address]
        monkeypatch.setattr(client.scheduler, "identity", _never)
        with pytest.raises(TimeoutError, match=r"does not answer, for 0\.01 s"):
            workers_of(client, 0.01)


def test_a_build_asks_the_scheduler_for_its_workers(
    manifest: Manifest, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed.Client, "scheduler_info", lambda *_, **__: {"workers": {}})
    assert run(manifest, tmp_path / "dask", cluster.scheduler_address).compiled == 6


async def _never(**_: Any) -> None:
    await asyncio.Event().wait()
