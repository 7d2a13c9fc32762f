"""Measures builds over Dask: two workers over one, and the time that the scheduler takes.

    python -m benchmarks.fleet.dask_build scaling [--manifest quickstart]
    python -m benchmarks.fleet.dask_build overhead [--kernels 5000] [--sleep-ms 20]

`scaling` compiles a manifest with one worker, and with two, each on a core of its own. Wall time is
that of the compile stage, followed by its rate once the compilers have started. Processor time, of
the workers and their compilers, hardly depends on other work of the machine.

`overhead` gives two workers kernels that take a fixed time to compile, by sleeping. A kernel's
overhead is the wall time beyond the ideal, divided by the kernels. Two workers compile a usual
kernel of 0.6 s each 0.3 s of wall time, so the overhead's part of a build is that divided by 0.3 s.
Kernels go through Redis. Processor time, for a kernel, hardly depends on other work of the machine.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import psutil

sys.path.append(str(Path(__file__).parents[2] / "tests/support"))

from compile_tasks import tasks
from dask_fleet import Fleet, fleet
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.manifest.shipped_manifests import find_manifest
from nvgemm_aot.pipeline.compiler import compile_all, make_tasks
from nvgemm_aot.pipeline.executor import dask_workers
from nvgemm_aot.pipeline.executor.dask_workers import DaskWorkers
from nvgemm_aot.pipeline.executor.scheduler_connection import connect
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.providers import load_provider
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.storage.remote.remote_cache import RemoteCache, open_remote
from store_servers import redis_server, redis_url

from .sleeping_workers import SLEEP_VARIABLE

USUAL_KERNEL_SECONDS = 0.6

_STARTED = 4
"""Kernels after which every worker's compiler has started."""


@contextlib.contextmanager
def workers(directory: Path, count: int, *preload: str, **environment: str) -> Iterator[Fleet]:
    """Runs a scheduler and workers of one thread, each bound to a core, with a Redis server."""
    directory.mkdir()
    with redis_server(directory) as redis:
        os.environ["NVGEMM_AOT_REMOTE_CACHE"] = redis_url(redis.port)
        with _workers(directory, count, *preload, **environment) as started:
            yield started


@contextlib.contextmanager
def _workers(directory: Path, count: int, *preload: str, **environment: str) -> Iterator[Fleet]:
    os.environ["NVGEMM_AOT_REMOTE_CACHE_TRUST"] = "1"
    cores = sorted(os.sched_getaffinity(0))
    with fleet(directory / "fleet", environment) as started:
        for number in range(count):
            process = started.worker(f"worker{number}", preload=preload)
            for thread in psutil.Process(process.pid).threads():
                os.sched_setaffinity(thread.id, {cores[number % len(cores)]})
        yield started


@contextlib.contextmanager
def dask(started: Fleet) -> Iterator[tuple[object, RemoteCache]]:
    """Connects to a fleet and to the shared cache."""
    remote = open_remote()
    assert remote is not None
    with connect(started.address) as client, remote:
        yield client, remote


def processor_seconds(*pids: int) -> float:
    """Returns the time of some processes, and of all that they started, on processors."""
    total = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
            total += times.children_user + times.children_system
    return total


@click.group()
def main() -> None:
    """Benchmarks of builds over Dask."""


@main.command()
@click.option("--manifest", default="quickstart", show_default=True)
def scaling(manifest: str) -> None:
    """Prints the compile stage's time with one worker and with two."""
    declared = load_manifest(find_manifest(Path(manifest)))
    rows = []
    contents = set()
    with tempfile.TemporaryDirectory() as name:
        for count in (1, 2):
            directory = Path(name) / str(count)
            marks: list[tuple[float, int]] = []
            with workers(directory, count) as started, dask(started) as (client, remote):
                result = build(
                    declared,
                    directory / "out",
                    Cache(directory / "cache"),
                    progress=lambda done, _, marks=marks: marks.append((time.monotonic(), done)),
                    remote=remote,
                    executor=lambda cache: DaskWorkers(client, remote, cache),
                )
                processor = processor_seconds(*(worker.pid for worker in started.workers))
                seconds = marks[-1][0] - marks[0][0]
                started_at, before = marks[_STARTED]
                rate = (marks[-1][1] - before) / (marks[-1][0] - started_at)
                rows.append((count, result.compiled, seconds, rate, processor))
            contents.add(tuple(bundle.path.read_bytes() for bundle in result.bundles))
    click.echo("| workers | kernels | stage, s | ratio | then, kernels/s | ratio | processor s |")
    click.echo(f"|{' --- |' * 7}")
    for count, kernels, seconds, rate, processor in rows:
        click.echo(
            f"| {count} | {kernels} | {seconds:.1f} | {rows[0][2] / seconds:.2f} "
            f"| {rate:.2f} | {rate / rows[0][3]:.2f} | {processor:.1f} |"
        )
    click.echo(f"bundles equal to the byte: {len(contents) == 1}")


@main.command()
@click.option("--kernels", default=5000, show_default=True)
@click.option("--sleep-ms", default=20.0, show_default=True)
@click.option("--batch", type=int, multiple=True, default=(5, 1), show_default=True)
def overhead(kernels: int, sleep_ms: float, batch: tuple[int, ...]) -> None:
    """Prints the time that is lost around each kernel, by the kernels in a batch."""
    seconds_each = sleep_ms / 1000
    environment = {SLEEP_VARIABLE: str(seconds_each)}
    candidates = [task.candidate for task in tasks(*(f"op{n}" for n in range(kernels)))]
    provider = load_provider("fake_provider:FakeProvider")
    items = make_tasks(candidates, tasks("op")[0].target, provider)
    warming = make_tasks(
        [task.candidate for task in tasks("warm0", "warm1", "warm2", "warm3")],
        items[0].target,
        provider,
    )
    click.echo(
        "| kernels in a batch | kernels | wall s | ideal s | overhead a kernel, ms "
        "| of 0.6 s kernels | processor ms a kernel: build | scheduler | workers |"
    )
    click.echo(f"|{' --- |' * 9}")
    with tempfile.TemporaryDirectory() as name:
        for most in batch:
            dask_workers._MOST_BATCH_KERNELS = most
            directory = Path(name) / str(most)
            preload = "benchmarks.fleet.sleeping_workers"
            with (
                workers(directory, 2, preload, **environment) as started,
                dask(started) as (client, remote),
            ):
                cache = Cache(directory / "cache")
                connected = DaskWorkers(client, remote, cache)
                compile_all(warming, cache, jobs=2, workers=connected)
                processes = (
                    (os.getpid(),),
                    (started.scheduler.pid,),
                    tuple(worker.pid for worker in started.workers),
                )
                before = [_own_seconds(pids) for pids in processes]
                begin = time.monotonic()
                done = compile_all(items, cache, jobs=2, workers=connected)
                wall = time.monotonic() - begin
                spent = [_own_seconds(pids) - old for pids, old in zip(processes, before)]
            if done.compiled != kernels:
                raise click.ClickException(f"{done.compiled} of {kernels} kernels were compiled")
            ideal = kernels * seconds_each / 2
            lost = (wall - ideal) / kernels
            part = lost / (USUAL_KERNEL_SECONDS / 2)
            click.echo(
                f"| {most} | {kernels} | {wall:.1f} | {ideal:.1f} | {lost * 1000:.2f} "
                f"| {part:.1%} | {' | '.join(f'{1000 * one / kernels:.2f}' for one in spent)} |"
            )


def _own_seconds(pids: Sequence[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(one.user + one.system for one in times)


if __name__ == "__main__":
    main()
