"""Checks that `nvgemm-aot tune` tells right kernels from wrong ones, over random sizes, on a GPU.

    nvgemm-aot build benchmarks/correctness/manifest.yaml -o dist --wheel  # then install it
    python -m benchmarks.correctness --json correctness.json --budget 150

Every installed kernel for plain matrix products takes its turn at random sizes: m and n up to
16384, k up to 65536, the largest included. `tune`'s checks
(`nvgemm_aot.tuning.correctness.exact_operands`) judge its own results, then results with a planted
fault (`faults`). The table counts right results that passed and planted faults that were noticed,
by type of A and B.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.cases import write_cases
from benchmarks.correctness.faults import FAULTS
from benchmarks.shared.compiling import versions
from benchmarks.shared.records import check_output, write
from benchmarks.shared.resuming import this_run
from nvgemm_aot.tuning.contenders import kernel_run
from nvgemm_aot.tuning.correctness.exact_operands import make_checks
from nvgemm_aot.tuning.correctness.judgement import find_fault
from nvgemm_runtime import bundles
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import extra_roles
from nvgemm_runtime.matching.device import device_facts

WHAT = "correctness"

MOST_ROWS = 16384
"""Most rows in A and columns in B."""
MOST_K = 65536
LARGEST = (
    (MOST_ROWS, MOST_ROWS, MOST_K),
    (MOST_ROWS, MOST_ROWS, 4096),
    (1, MOST_ROWS, MOST_K),
    (MOST_ROWS, 64, MOST_K),
    (1536, 13824, 2560),
    (96, 5120, 2560),
)
"""Largest sizes for each type; the last two once failed with right kernels."""
MOST_PRODUCTS = 2**37
"""Most products at random sizes; larger sizes take the time of many."""

Installed = tuple[Bundle, Kernel]


@dataclass(kw_only=True)
class Tally:
    """Counts for one operand type.

    Attributes:
        sizes: Sizes tried.
        passed: Right results that passed.
        tried: Right results.
        caught: Noticed faults, by kind.
        planted: Planted faults, by kind.
        left_out: Sizes that did not fit into memory.
        failures: Results against expectation, each in words.
    """

    sizes: int = 0
    passed: int = 0
    tried: int = 0
    caught: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    planted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    left_out: int = 0
    failures: list[str] = field(default_factory=list)


def plain_kernels(device: str) -> dict[DType, list[Installed]]:
    """Returns this device's kernels whose only operands are A and B, by type of A and B."""
    facts = device_facts(device, 0)
    found: dict[str, Installed] = {}
    for one in bundles():
        if one.bundle is not None and one.refusal(facts) is None:
            found.update({kernel.id: (one.bundle, kernel) for kernel in one.bundle.header.kernels})
    by_type: dict[DType, list[Installed]] = defaultdict(list)
    for _, (bundle, kernel) in sorted(found.items()):
        signature = kernel.signature
        if signature.op in (Op.MM, Op.BMM) and not extra_roles(signature):
            by_type[signature.a].append((bundle, kernel))
    return dict(sorted(by_type.items()))


def steps(signature: Signature, alignment_bytes: int) -> tuple[int, int, int]:
    """Returns divisors of m, n and k that keep rows aligned."""

    def values(dtype: DType) -> int:
        return max(1, alignment_bytes * 8 // dtype.bits)

    of_operand, layout = values(signature.a), signature.layout
    m = 1 if layout.a_row_major else of_operand
    n = math.lcm(values(signature.out), of_operand if layout.b_row_major else 1)
    return m, n, of_operand if layout.a_row_major or not layout.b_row_major else 1


def sizes(source: random.Random, most: int | None) -> Iterator[tuple[int, int, int]]:
    """Yields the largest sizes, then random ones without end, at all scales."""
    if most is None:
        yield from LARGEST
    while True:
        m, n, k = (
            round(math.exp(source.uniform(0.0, math.log(min(limit, most or limit)))))
            for limit in (MOST_ROWS, MOST_ROWS, MOST_K)
        )
        if m * n * k <= MOST_PRODUCTS:
            yield m, n, k


def problem_of(kernel: Kernel, size: tuple[int, int, int]) -> Problem:
    """Returns a problem of at least this size that suits a kernel; bmm has a batch of two."""
    signature = kernel.signature
    m, n, k = (
        -(-extent // step) * step
        for extent, step in zip(size, steps(signature, kernel.alignment_bytes))
    )
    batch = 2 if signature.op is Op.BMM else 1
    return Problem(signature=signature, m=m, n=n, k=k, batch=batch)


def try_one(installed: Installed, problem: Problem, device: str, seed: int, tally: Tally) -> None:
    """Checks one kernel at one size, right and with each fault."""
    bundle, kernel = installed
    run = kernel_run(bundle, kernel)
    checks = make_checks(problem, device, seed=seed)
    where = f"{problem.key}, kernel {kernel.id[:12]} ({kernel.operator})"
    rights, faults = [], []
    for check in checks:
        check.prepare()
        rights.append(run(*check.operands))
        fault = check.fault(rights[-1])
        if fault is not None:
            faults.append(f"{check.name}: {fault}")
    tally.tried += 1
    tally.passed += not faults
    if faults:
        tally.failures.append(f"right, but called wrong: {where}: {'; '.join(faults)}")
    for name, plant in FAULTS.items():
        results = [plant(run, problem, checks, i, right) for i, right in enumerate(rights)]
        noticed = [
            find_fault(result, check.expected) is not None
            for result, check in zip(results, checks)
            if result is not None
        ]
        if noticed:
            tally.planted[name] += 1
            tally.caught[name] += any(noticed)
            if not any(noticed):
                tally.failures.append(f"{name} was not noticed: {where}")


def go_through(
    kernels: dict[DType, list[Installed]],
    device: str,
    *,
    seed: int,
    budget_s: float,
    count: int,
    most: int | None,
) -> dict[DType, Tally]:
    """Tries types in turn until each has enough sizes or time is up."""
    import torch

    source, begin = random.Random(seed), time.monotonic()
    tallies = {dtype: Tally() for dtype in kernels}
    drawn = {dtype: sizes(source, most) for dtype in kernels}
    turns = {dtype: itertools.cycle(source.sample(ks, len(ks))) for dtype, ks in kernels.items()}
    for _ in range(count):
        for dtype, tally in tallies.items():
            if time.monotonic() - begin >= budget_s:
                return tallies
            installed = next(turns[dtype])
            problem = problem_of(installed[1], next(drawn[dtype]))
            try:
                try_one(installed, problem, device, source.randrange(2**32), tally)
            except torch.OutOfMemoryError:
                tally.left_out += 1
            else:
                tally.sizes += 1
            if device == "cuda" and problem.flops > 2**36:
                torch.cuda.empty_cache()
    return tallies


def table(tallies: dict[DType, Tally]) -> str:
    """Yields a row for each type."""
    header = ["A, B", "sizes", "right: passed", *FAULTS]
    rows = [
        [
            dtype.value,
            str(one.sizes),
            f"{one.passed}/{one.tried}",
            *(f"{one.caught[name]}/{one.planted[name]}" for name in FAULTS),
        ]
        for dtype, one in tallies.items()
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip()
        for row in [header, *rows]
    )


def notes(tallies: dict[DType, Tally]) -> Sequence[str]:
    """Yields facts that the table does not show."""
    left_out = [
        f"{dtype.value}: {one.left_out} sizes did not fit into memory"
        for dtype, one in tallies.items()
        if one.left_out
    ]
    return [*left_out, *(text for one in tallies.values() for text in one.failures)]


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
@click.option("--seed", default=0, show_default=True, help="Of sizes and operands.")
@click.option("--sizes", "count", default=120, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--budget", default=150.0, show_default=True, help="Seconds after which no size is begun."
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
@click.option("--largest", type=click.IntRange(min=1), help="No extent is larger.", hidden=True)
def main(
    json_path: Path | None, seed: int, count: int, budget: float, device: str, largest: int | None
) -> None:
    """Try and print a table; fails if a right result did not pass or a fault was not noticed."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("no GPU: kernels are checked on the GPU they were built for")
    if json_path is not None:
        check_output(json_path)
    kernels = plain_kernels(device)
    if not kernels:
        raise click.ClickException(
            "no installed bundle has kernels of plain products for this device; build "
            "benchmarks/correctness/manifest.yaml with --wheel and install it, or name bundles in "
            "NVGEMM_AOT_BUNDLES"
        )
    tallies = go_through(kernels, device, seed=seed, budget_s=budget, count=count, most=largest)
    found: dict[str, Any] = versions()
    lines = [
        f"{found['device']}, torch {found['torch']}, nvgemm-aot {found['nvgemm-aot']}, seed {seed}",
        *(f"  {bundle}" for bundle in found["bundles"]),
        table(tallies),
        *notes(tallies),
    ]
    click.echo("\n".join(lines))
    if json_path is not None:
        types = {
            dtype.value: {
                "kernels": len(kernels[dtype]),
                "sizes": one.sizes,
                "right": {"passed": one.passed, "tried": one.tried},
                "faults": {
                    name: {"caught": one.caught[name], "planted": one.planted[name]}
                    for name in FAULTS
                },
                "left_out": one.left_out,
                "failures": one.failures,
            }
            for dtype, one in tallies.items()
        }
        record = {"what": WHAT, "seed": seed, "versions": found, "types": types}
        write(json_path, json.dumps(record, indent=1) + "\n")
        write_cases(json_path, WHAT, record, found, **this_run())
    sys.exit(any(one.failures for one in tallies.values()))


if __name__ == "__main__":
    main()
