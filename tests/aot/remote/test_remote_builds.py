"""Builds, shards and run-time compiling behind a remote cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cpu_provider
from fake_provider import FakeProvider
from jit_programs import JitMachine, problem
from nvgemm_aot.cli.main import main
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.pipeline.compile_shard import compile_shard
from nvgemm_aot.pipeline.compiler import compile_all, make_tasks
from nvgemm_aot.pipeline.pipeline import BuildResult, build
from nvgemm_aot.pipeline.shard import Shard
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.storage.remote.remote_cache import RemoteCache, open_remote
from nvgemm_aot.storage.remote.signed_entries import decode_entry, encode_entry
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.gemm.problem import Signature
from store_servers import QUOTED, Relay, Server, free_port, name_s3, redis_url

TEXT = """
version: 1
name: some
targets: [sm_100f, {arch: sm_90a, device: H200}]
providers: ["fake_provider:FakeProvider"]
gemms: [{dtype: bf16, mnk: [[16, 512, 256]]}]
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "some.yaml").write_text(TEXT)
    return load_manifest(tmp_path / "some.yaml")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is trusted and that all machines share."""
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE", f"file://{tmp_path}/shared")
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_TRUST", "1")
    return tmp_path / "shared"


def opened() -> RemoteCache:
    remote = open_remote()
    assert remote is not None
    return remote


def run(manifest: Manifest, directory: Path, remote: RemoteCache | None) -> BuildResult:
    """A build on a machine of its own."""
    return build(
        manifest,
        directory / "out",
        Cache(directory / "cache"),
        jobs=1,
        provider=FakeProvider(),
        remote=remote,
    )


def bundles_of(result: BuildResult) -> list[bytes]:
    return [bundle.path.read_bytes() for bundle in result.bundles]


@pytest.mark.usefixtures("shared", "compiled_here")
def test_a_second_machine_plans_and_compiles_nothing(
    manifest: Manifest, tmp_path: Path, log: Path
) -> None:
    with opened() as remote:
        first = run(manifest, tmp_path / "first", remote)
    assert (first.compiled, remote.statistics.pushed) == (6, 8)  # kernels and a plan a target
    log.write_text("")
    with opened() as remote:
        second = run(manifest, tmp_path / "second", remote)
    assert (second.compiled, remote.statistics.hits, remote.statistics.pushed) == (0, 8, 0)
    assert log.read_text() == ""
    alone = run(manifest, tmp_path / "alone", None)
    assert bundles_of(second) == bundles_of(first) == bundles_of(alone)


@pytest.mark.usefixtures("compiled_here")
def test_what_one_machine_lacks_is_compiled_and_sent(
    manifest: Manifest, tmp_path: Path, shared: Path, log: Path
) -> None:
    with opened() as remote:
        first = run(manifest, tmp_path / "first", remote)
    kernels = sorted(p for p in shared.iterdir() if b"ELF" in _payload(p))
    kernels[0].unlink()
    kernels[1].write_bytes(b"what somebody else wrote")
    with opened() as remote:
        second = run(manifest, tmp_path / "second", remote)
    assert (second.compiled, sum(remote.statistics.refused.values())) == (2, 1)
    assert bundles_of(second) == bundles_of(first)
    with opened() as remote:
        assert run(manifest, tmp_path / "third", remote).compiled == 0


def _payload(path: Path) -> bytes:
    return decode_entry(path.read_bytes()).open()[:8]


@pytest.mark.usefixtures("shared", "compiled_here")
def test_shards_meet_in_the_remote_cache(manifest: Manifest, tmp_path: Path) -> None:
    for number in (1, 2):
        with opened() as remote:
            shard = Shard(number=number, count=2)
            cache = Cache(tmp_path / f"shard {number}")
            done = compile_shard(
                manifest, cache, shard, jobs=1, provider=FakeProvider(), remote=remote
            )
        assert done.compiled == 3
    with opened() as remote:
        assert run(manifest, tmp_path / "last", remote).compiled == 0


@pytest.mark.usefixtures("compiled_here")
def test_a_server_that_is_gone_costs_a_warning(
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE", redis_url(free_port()))
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_TRUST", "1")
    with opened() as remote:
        result = run(manifest, tmp_path / "first", remote)
    assert result.compiled == 6
    (message,) = [text for text in caplog.messages if "remote cache" in text]
    assert "Connection refused" in message
    assert QUOTED not in message


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(
    ("field", "change", "reason"),
    [
        ("candidates", lambda _: 3, "ValidationError"),
        ("problems", lambda old: [[old[0][0], [[99, None]], True]], "names no candidate"),
        pytest.param(
            "problems",
            lambda old: [[old[0][0], [[-1, None]], True]],
            "names no candidate",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "problems",
            lambda old: [[old[0][0], [[0.0, None]], True]],
            "names no candidate",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "problems", lambda old: [[old[0][0], [[0]], True]], "ValueError", marks=pytest.mark.slow
        ),
        (
            "problems",
            lambda old: [[old[0][0].replace("512", "1024"), *old[0][1:]]],
            "another build's problem",
        ),
    ],
)
def test_a_plan_that_is_none_is_refused(
    manifest: Manifest,
    tmp_path: Path,
    shared: Path,
    field: str,
    change: Callable[[Any], object],
    reason: str,
) -> None:
    with opened() as remote:
        run(manifest, tmp_path / "first", remote)
    path = next(p for p in shared.iterdir() if b"ELF" not in _payload(p))
    plan = json.loads(decode_entry(path.read_bytes()).open())
    payload = json.dumps({**plan, field: change(plan[field])}).encode()
    path.write_bytes(encode_entry(payload, sha256_hex(payload), ()))
    with opened() as remote:
        result = run(manifest, tmp_path / "second", remote)
    assert result.compiled == 0
    (refused,) = remote.statistics.refused
    assert refused.startswith("it is no plan: ")
    assert reason in refused


@pytest.mark.usefixtures("compiled_here", "shared")
def test_a_kernel_for_another_target_is_refused_though_signed(tmp_path: Path) -> None:
    """The store holds, under the key of a GPU's kernel, one that only a CPU's could be."""
    provider = cpu_provider.CpuProvider()
    served = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    candidates = provider.enumerate(served, cpu_provider.TARGET).candidates[:1]
    (task,) = make_tasks(candidates, cpu_provider.TARGET, provider)
    cache, other = Cache(tmp_path / "cache"), Cache(tmp_path / "other")
    with opened() as remote:
        compile_all([task], cache, jobs=1, remote=remote)
        payload = cache.get(task.key)
        assert payload is not None
        other.put(task.key, payload.replace(b"__tvm_ffi_", b"__tvm_other"[:10]))
        remote.push([task.key], other)
    with opened() as remote:
        result = compile_all([task], Cache(tmp_path / "third"), jobs=1, remote=remote)
    assert result.compiled == 1
    assert "must export exactly" in next(iter(remote.statistics.refused))


def command(directory: Path, *arguments: str, **environment: str) -> tuple[str, str]:
    """Runs the command on a machine of its own; returns its output and its error output."""
    done = subprocess.run(
        [sys.executable, "-m", "nvgemm_aot", *arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2] / "support"),
            "NVGEMM_AOT_CACHE": str(directory / "cache"),
            **environment,
        },
    )
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["password", "", "silent"])
def test_the_commands_show_the_store_and_no_password(
    manifest: Manifest, tmp_path: Path, redis: Server, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with Relay(redis.port, fault) as relay:
        url = redis_url(relay.port)
        if fault == "password":
            url = url.replace(QUOTED, "canary-which-is-wrong")
        variables = {
            "NVGEMM_AOT_REMOTE_CACHE": url,
            "NVGEMM_AOT_REMOTE_CACHE_TRUST": "1",
            "NVGEMM_AOT_REMOTE_CACHE_TIMEOUT": "1",
        }
        path = str(tmp_path / "some.yaml")
        state, state_errors = command(tmp_path, "cache", "remote", "--json", **variables)
        built, errors = command(
            tmp_path, "build", path, "-o", str(tmp_path / "out"), "-j1", "--json", **variables
        )
    assert "canary" not in (state + state_errors + built + errors).lower()
    address = f"redis://127.0.0.1:{relay.port}/0"
    assert json.loads(state)["address"] == address
    assert json.loads(state)["reachable"] is (fault == "")
    document = json.loads(built)
    assert document["compiled"] == 6
    assert document["remote_cache"]["address"] == address
    assert (document["remote_cache"]["off"] is None) == (fault == "")
    assert errors.count("is not used any more by this process") == (fault != "")


@pytest.mark.slow
def test_the_output_counts_what_s3_did_and_shows_no_secret(
    manifest: Manifest, tmp_path: Path, s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {
        "NVGEMM_AOT_REMOTE_CACHE": name_s3(monkeypatch, s3.port),
        "NVGEMM_AOT_REMOTE_CACHE_TRUST": "1",
    }
    path = str(tmp_path / "some.yaml")
    texts = [
        command(
            tmp_path / machine, "build", path, "-o", str(tmp_path / machine), "-j1", **variables
        )
        for machine in ("one", "two")
    ]
    assert ", 8 not there, 8 sent (" in texts[0][0]
    assert ": 8 fetched (" in texts[1][0]
    assert "0 kernels compiled now" in texts[1][0]
    assert "canary" not in str(texts).lower()


@pytest.mark.parametrize("mode", ["read", "read-write"])
def test_asking_a_store_writes_only_if_builds_would(
    shared: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_MODE", mode)
    result = CliRunner().invoke(main, ["cache", "remote"])
    assert result.exit_code == 0
    names = [path.name for path in shared.iterdir()]
    assert [name.startswith("nvgemm-aot-1-probe-") for name in names] == [True] * (mode != "read")
    assert ("written: yes, unsigned" if mode != "read" else "written: no\n") in result.output


def test_asking_a_store_that_takes_nothing_is_an_error(shared: Path) -> None:
    CliRunner().invoke(main, ["cache", "remote"])
    [written] = shared.iterdir()
    written.unlink()
    written.mkdir()
    result = CliRunner().invoke(main, ["cache", "remote"])
    assert "written: no: Is a directory" in result.output
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == StorageError.exit_code
    assert "takes no entries: Is a directory; free space" in result.output


@pytest.mark.slow
@pytest.mark.usefixtures("shared")
def test_run_time_compiling_fetches_what_another_machine_compiled(
    machine: JitMachine, tmp_path: Path
) -> None:
    first = machine.run(problem())
    assert first["compiled"] == [3]
    machine.set(NVGEMM_AOT_CACHE=str(tmp_path / "other machine"))
    second = machine.run(problem())
    assert second["compiled"] == [0]
    assert machine.compiled() == ["one", "three", "two"]
    (one,), (two,) = first["bundles"], second["bundles"]
    assert one != two
    assert Path(one).read_bytes() == Path(two).read_bytes()


@pytest.mark.slow
def test_run_time_compiling_goes_on_where_settings_are_wrong(machine: JitMachine) -> None:
    machine.set(NVGEMM_AOT_REMOTE_CACHE="redis://:canary1234@host:port")
    answer = machine.run(problem())
    assert answer["compiled"] == [3]
    assert "goes on without the remote cache: the remote cache's URL is wrong" in answer["said"]
    assert "canary1234" not in answer["said"]
