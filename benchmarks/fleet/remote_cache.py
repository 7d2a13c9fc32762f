"""Measures a second machine's build from a warm remote cache, over one from a warm local cache.

    python -m benchmarks.fleet.remote_cache [--manifest quickstart] [--rounds 3]

A first build compiles everything. Its entries go to three stores on this machine: Redis, S3
(rclone's server) and a directory. Every other build is a process of its own, from its start to the
finished bundles. A second machine has an empty local cache and takes only signed entries. The
builds take turns, and the table has each kind's median. Processor time hardly depends on other work
of the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

sys.path.append(str(Path(__file__).parents[2] / "tests/support"))

import pytest

from nvgemm_aot.storage.build_cache import Cache, entry_files
from nvgemm_aot.storage.private_key import make_key
from nvgemm_aot.storage.remote.remote_cache import RemoteCache
from nvgemm_aot.storage.remote.store_trust import StoreTrust
from nvgemm_aot.storage.remote.store_urls import open_store
from nvgemm_runtime.installed.policy import read_policy
from nvgemm_runtime.installed.signatures import public_text
from store_servers import name_s3, redis_server, redis_url, s3_server

LOCAL = "warm local cache"


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build.

    Attributes:
        seconds: Wall time of its process.
        processor_seconds: Processor time of it and its children.
        document: What it printed.
    """

    seconds: float
    processor_seconds: float
    document: dict[str, object]


def build(directory: Path, manifest: str, cache: Path, **environment: str) -> Build:
    """Builds into an empty directory."""
    out = directory / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "nvgemm_aot", "build", manifest, "-o", str(out), "--json"]
    variables = {**os.environ, "NVGEMM_AOT_CACHE": str(cache), **environment}
    before, begin = _children_seconds(), time.perf_counter()
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise click.ClickException(f"the build failed: {done.stderr.strip()}")
    return Build(
        seconds=seconds,
        processor_seconds=_children_seconds() - before,
        document=json.loads(done.stdout),
    )


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def bundle_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "out").glob("*.nvgemm")}


@contextlib.contextmanager
def stores(directory: Path) -> Iterator[dict[str, str]]:
    """Runs the servers; yields the URL of each store."""
    for name in ("redis", "s3", "file"):
        (directory / name).mkdir()
    with (
        pytest.MonkeyPatch.context() as patch,
        redis_server(directory / "redis") as redis,
        s3_server(directory / "s3") as s3,
    ):
        yield {
            "Redis": redis_url(redis.port),
            "S3": name_s3(patch, s3.port),
            "directory": f"file://{directory / 'file'}",
        }


@click.command()
@click.option("--manifest", default="quickstart", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
def main(manifest: str, rounds: int) -> None:
    """Prints seconds, and ratios to the warm local cache."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        key = make_key(directory / "key.pem")
        policy = directory / "policy.yaml"
        policy.write_text(f"keys: [{{name: benchmark, ed25519: {public_text(key.public)}}}]\n")
        trust = {"NVGEMM_AOT_POLICY": str(policy)}
        with stores(directory) as urls:
            runs: dict[str, list[Build]] = {}
            local = directory / "local"
            runs["empty local cache"] = [build(directory, manifest, local)]
            trusted = StoreTrust(
                policy=read_policy(policy), key=key, trusts_store=False, is_read_only=False
            )
            for url in urls.values():
                with RemoteCache(open_store(url, 60.0), trusted, 60.0) as remote:
                    remote.push((path.name for path in entry_files(local)), Cache(local))
            expected = bundle_bytes(directory)
            for _ in range(rounds):
                runs.setdefault(LOCAL, []).append(build(directory, manifest, local))
                for store, url in urls.items():
                    shutil.rmtree(directory / "second", ignore_errors=True)
                    environment = {"NVGEMM_AOT_REMOTE_CACHE": url, **trust}
                    done = build(directory, manifest, directory / "second", **environment)
                    if done.document["compiled"] or bundle_bytes(directory) != expected:
                        raise click.ClickException(f"{store}: compiled, or other bytes")
                    runs.setdefault(f"warm remote cache, {store}", []).append(done)
    click.echo(table(runs))


def table(runs: dict[str, list[Build]]) -> str:
    """Renders each kind's medians in Markdown."""
    lines = [
        "| build | kernels compiled | s | ratio | processor s | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    base = runs[LOCAL]
    for kind, builds in runs.items():
        columns = [kind, str(builds[0].document["compiled"])]
        for figure in ("seconds", "processor_seconds"):
            value, reference = (
                statistics.median(getattr(one, figure) for one in some) for some in (builds, base)
            )
            columns += [f"{value:.2f}", f"{value / reference:.2f}"]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
