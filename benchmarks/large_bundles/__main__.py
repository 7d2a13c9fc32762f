"""Measures opening a large bundle and looking a problem up. Needs no GPU.

    python -m benchmarks.large_bundles [--kernels 10000 --kernels 50000] [--json results.json]

The bundles are made up: as many declared problems as kernels, each with 8 kernels.

- "500 signatures": each row of problems, which differ in m alone, has 8 values of m and ranks a
  dozen kernels, as manifests of real models do.
- "16 signatures": no two problems share n and k, and each ranks 8 kernels at random out of
  thousands. This is the hard case, since every look-up reads other pages.

Each figure is from a fresh process that has imported the runtime: milliseconds from opening the
file until a match is returned, CPU time for the same, and the growth of the process. Python's own
allocations are traced in a process of their own. Version 2 is measured up to its longest header.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click

from benchmarks.large_bundles.contents import content, pack
from nvgemm_aot.bundle import writer
from nvgemm_runtime.bundle.format import MAX_HEADER_BYTES
from nvgemm_runtime.bundle.reader import Bundle

GOAL_MS, GOAL_MB = 20, 30

VERSION_2_KERNELS = 15_000
"""Most kernels here: more would need a header of more than 16 MiB."""

KINDS = {"500 signatures": (500, False), "16 signatures": (16, True)}

LOOK_UP = """
import gc, json, sys, time, tracemalloc
from benchmarks.shared.h200 import H200
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.matching.combined.paged_index import PagedIndex
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView, Match

path, traced, *keys = sys.argv[1:]
problems = [Problem.parse(key) for key in keys]

def memory():
    with open("/proc/self/status") as status:
        fields = dict(line.split(":") for line in status)
    return [int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")]

gc.collect()
before = memory()
if traced == "traced":
    tracemalloc.start()
cpu = time.process_time()
times = [time.perf_counter()]
bundle = Bundle(path)
pages = bundle.pages()
view = BundleView(name="made up", header=bundle.facts, opened=bundle, pages=pages)
index = (Index if pages is None else PagedIndex)([view], H200)
times.append(time.perf_counter())
for problem in problems:
    match = index.match(problem, 16)
    times.append(time.perf_counter())
    assert isinstance(match, Match), match
cpu = time.process_time() - cpu
rss, peak = (now - then for now, then in zip(memory(), before))
traced_peak = tracemalloc.get_traced_memory()[1] / 2**20 if traced == "traced" else None
print(json.dumps({
    "ms": [(time - times[0]) * 1e3 for time in times[1:]],
    "cpu_ms": cpu * 1e3, "rss_mb": rss, "peak_mb": peak, "traced_mb": traced_peak,
}))
"""


def look_up(path: Path, problem: str, *, traced: bool = False) -> Any:
    """Opens a bundle and looks a problem up, in a fresh process."""
    command = [sys.executable, "-c", LOOK_UP, str(path), "traced" if traced else "plain", problem]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def written(directory: Path, kernels: int, kind: str) -> Iterator[tuple[int, Path]]:
    """Writes a bundle in version 2, if it may be so large, and in version 3."""
    signatures, one_m = KINDS[kind]
    made = content(kernels, signatures, one_m=one_m)
    versions = ((2, MAX_HEADER_BYTES), (3, 0)) if kernels <= VERSION_2_KERNELS else ((3, 0),)
    for version, above in versions:
        path = directory / f"{kernels}-{signatures}-{version}.nvgemm"
        with mock.patch.object(writer, "PAGED_ABOVE_BYTES", above):
            header = writer.write_bundle(path, made, pack)
        assert header.format_version == version
        yield version, path


def problems_of(path: Path, count: int) -> dict[str, list[str]]:
    """Returns declared and undeclared problems."""
    source = random.Random(1)
    with Bundle(path) as bundle:
        declared = [ranking.problem for ranking in bundle.header.rankings]
    known = set(declared)
    chosen = source.sample(declared, count)
    changed = (
        replace(problem, m=problem.m + 3, n=problem.n + 64 * source.randint(1, 50))
        for problem in source.sample(declared, count)
    )
    return {
        "declared": [problem.key for problem in chosen],
        "undeclared": [problem.key for problem in changed if problem not in known],
    }


def measure(path: Path, rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields figures by kind of problem."""
    for kind, problems in problems_of(path, rounds).items():
        results = [look_up(path, problem) for problem in problems]
        traced = look_up(path, problems[0], traced=True)
        yield (
            kind,
            {
                "open_ms": [result["ms"][0] for result in results],
                "found_ms": [result["ms"][-1] for result in results],
                "cpu_ms": [result["cpu_ms"] for result in results],
                "rss_mb": [result["rss_mb"] for result in results],
                "peak_mb": [result["peak_mb"] for result in results],
                "traced_mb": traced["traced_mb"],
            },
        )


@click.command()
@click.option("--kernels", "sizes", multiple=True, default=(10_000, 50_000), show_default=True)
@click.option("--rounds", default=7, show_default=True, help="Fresh processes for each figure.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(sizes: tuple[int, ...], rounds: int, json_path: Path | None) -> None:
    """Time opening and looking up, and print a table."""
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {rounds} processes each")
    print(f"goal: found <= {GOAL_MS} ms, growth <= {GOAL_MB} MB; medians, and the largest growth\n")
    columns = ("open ms", "found ms", "least ms", "CPU ms", "RSS MB", "peak MB", "traced MB")
    print(f"{'kernels':>8} {'content':16}{'version':>8}  {'problem':12}", end="")
    print("".join(f"{column:>11}" for column in columns))
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for kernels in sizes:
            for kind in KINDS:
                for version, path in written(Path(directory), kernels, kind):
                    for problem, result in measure(path, rounds):
                        figures = (
                            statistics.median(result["open_ms"]),
                            statistics.median(result["found_ms"]),
                            min(result["found_ms"]),
                            statistics.median(result["cpu_ms"]),
                            max(result["rss_mb"]),
                            max(result["peak_mb"]),
                            result["traced_mb"],
                        )
                        met = figures[1] <= GOAL_MS and max(figures[4:6]) <= GOAL_MB
                        print(f"{kernels:8} {kind:16}{version:8}  {problem:12}", end="")
                        print("".join(f"{figure:11.1f}" for figure in figures), end="")
                        print("  met" if met else "  MISSED", flush=True)
                        row = {"kernels": kernels, "content": kind, "version": version}
                        rows.append({**row, "problem": problem, **result})
                    path.unlink()
    if json_path:
        json_path.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
