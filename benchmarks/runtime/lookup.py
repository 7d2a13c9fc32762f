"""Measures look-ups among 10,000 kernels, and opening such a bundle. Needs no GPU.

    python -m benchmarks.runtime.lookup [--kernels 10000] [--lookups 5000] [--json results.json]

The bundle is made up: 16 signatures (two operations, four layouts, two types), kernels spread over
them evenly, as many declared problems as kernels, each with 8 kernels of its signature. Sizes are
random multiples of 8 up to 32,768, so hardly two problems share n or k; manifests of real models,
with many m for few n and k, are quicker. Payloads are 256 random bytes, since no look-up reads
them.

Each look-up is timed alone, with another problem each time and the garbage collector on, as in a
user's process.
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.cases import write_cases
from benchmarks.large_bundles.contents import made_content, made_kernel, made_ranking
from benchmarks.shared.h200 import H200
from benchmarks.shared.resuming import this_run
from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Problem, Signature
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import Basis, BundleView, Match, Miss

GOAL_US = 50
SIZES = range(8, 32_769, 8)
BATCHES = (1, 8, 32, 128)

SIGNATURES = [
    Signature(op=op, layout=layout, a=dtype, b=dtype, accumulator=DType.FP32, out=dtype)
    for op in (Op.MM, Op.BMM)
    for layout in Layout
    for dtype in (DType.BF16, DType.FP16)
]

OPEN = """
import sys, time
from nvgemm_runtime.bundle.reader import Bundle
begin = time.perf_counter()
bundle = Bundle(sys.argv[1])
print((time.perf_counter() - begin) * 1e3)
"""


def some_problem(source: random.Random, signature: Signature) -> Problem:
    m, n, k = (source.choice(SIZES) for _ in range(3))
    batch = source.choice(BATCHES) if signature.op is Op.BMM else 1
    return Problem(signature=signature, m=m, n=n, k=k, batch=batch)


def made_up_content(kernels: int, source: random.Random) -> BundleContent:
    built: dict[Signature, list[BuiltKernel]] = {signature: [] for signature in SIGNATURES}
    for number in range(kernels):
        signature = SIGNATURES[number % len(SIGNATURES)]
        built[signature].append(made_kernel(signature, str(number), source))
    ids = {s: [sha256_hex(kernel.payload) for kernel in built[s]] for s in SIGNATURES}
    declared: dict[Problem, ProblemRanking] = {}
    while len(declared) < kernels:
        signature = SIGNATURES[len(declared) % len(SIGNATURES)]
        problem = some_problem(source, signature)
        declared[problem] = made_ranking(problem, ids[signature], source)
    return made_content(
        "benchmarks.runtime.lookup",
        [kernel for of_signature in built.values() for kernel in of_signature],
        [*declared.values()],
    )


def times_us(
    index: Index, asked: list[Problem], alignment: int, right: Callable[[Any], bool]
) -> list[float]:
    """Returns each look-up's microseconds."""
    times = []
    for problem in asked:
        begin = time.perf_counter_ns()
        outcome = index.match(problem, alignment)
        times.append((time.perf_counter_ns() - begin) / 1e3)
        if not right(outcome):
            raise SystemExit(f"{problem.key}: unexpected {outcome}")
    return times


def opening_ms(path: Path, rounds: int) -> list[float]:
    """Returns milliseconds to open and validate the bundle, each in a fresh process."""
    command = [sys.executable, "-c", OPEN, str(path)]
    return [
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    ]


@click.command()
@click.option("--kernels", default=10_000, show_default=True)
@click.option("--lookups", default=5_000, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Times that the bundle is opened.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(kernels: int, lookups: int, rounds: int, json_path: Path | None) -> None:
    """Time look-ups and print a table."""
    source = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "lookup.nvgemm"
        write_bundle(path, made_up_content(kernels, source))
        opened_ms = opening_ms(path, rounds)
        with Bundle(path) as bundle:
            header, header_bytes = bundle.header, bundle.header.kernels[0].span.offset
    begin = time.perf_counter()
    index = Index([BundleView(name="made up", header=header)], H200)
    index_ms = (time.perf_counter() - begin) * 1e3

    declared = [source.choice(header.rankings).problem for _ in range(lookups)]
    others = [some_problem(source, source.choice(SIGNATURES)) for _ in range(lookups)]
    unknown = Signature.parse("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16")
    strangers = [some_problem(source, unknown) for _ in range(lookups)]

    def is_match(basis: Basis) -> Callable[[Any], bool]:
        return lambda outcome: isinstance(outcome, Match) and outcome.basis is basis

    def is_miss(outcome: Any) -> bool:
        return isinstance(outcome, Miss)

    known = set(declared) | {ranking.problem for ranking in header.rankings}
    others = [problem for problem in others if problem not in known]
    measured = {
        "declared": times_us(index, declared, 16, is_match(Basis.DECLARED)),
        "by signature, nearest sizes": times_us(index, others, 16, is_match(Basis.SIGNATURE)),
        "miss: no such signature": times_us(index, strangers, 16, is_miss),
        "miss: alignment": times_us(index, others, 8, is_miss),
    }
    rows = {
        name: {
            "median_us": statistics.median(times),
            "p99_us": sorted(times)[len(times) * 99 // 100],
            "max_us": max(times),
        }
        for name, times in measured.items()
    }
    print(
        f"{len(header.kernels)} kernels, {len(header.rankings)} declared problems, "
        f"{len(SIGNATURES)} signatures; Python {platform.python_version()}, "
        f"{os.cpu_count()} cores; {lookups} look-ups each\n"
    )
    print(f"{'look-up, us':30}{'median':>9}{'p99':>9}{'max':>9}   goal: median <= {GOAL_US}")
    for name, row in rows.items():
        values = "".join(f"{row[key]:9.1f}" for key in ("median_us", "p99_us", "max_us"))
        verdict = "met" if row["median_us"] <= GOAL_US else "MISSED"
        print(f"{name:30}{values}   {verdict}")
    print(f"\nopen and validate the bundle ({header_bytes / 1e6:.1f} MB header), ms: ", end="")
    print(f"median {statistics.median(opened_ms):.0f} of {rounds}, max {max(opened_ms):.0f}")
    print(f"index it for a device, ms: {index_ms:.0f}")
    if json_path:
        document = {
            "kernels": len(header.kernels),
            "problems": len(header.rankings),
            "header_bytes": header_bytes,
            "python": platform.python_version(),
            "lookups": rows,
            "open_ms": opened_ms,
            "index_ms": index_ms,
        }
        json_path.write_text(json.dumps(document, indent=2) + "\n")
        write_cases(json_path, "runtime.lookup", document, {}, **this_run())


if __name__ == "__main__":
    main()
