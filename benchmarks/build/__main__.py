"""Measures build cost: overhead over the bare compiler, a repeated build, bytes a kernel.

    python -m benchmarks.build [--kernels 500] [--rounds 3] [--json results.json]

Overhead compares the same kernels in the same order: once by the bare compiler
(``operator.compile`` and ``export_to_c``), once by `nvgemm-aot build` with one worker and an empty
cache, from process start to the finished bundle. The two take turns, each in its own process; both
import the compiler.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import click

from benchmarks.cases import write_cases
from benchmarks.shared.resuming import this_run

MANIFEST = """version: 1
name: benchmark
targets: [sm_100f]
candidates: {candidates}
gemms:
  - dtype: {dtypes}
    layout: {layouts}
    m: {ms}
    nk: [[4096, 4096], [28672, 4096], [4096, 14336], [6144, 4096], [1024, 8192]]
"""

BARE = """
import json, sys
from pathlib import Path
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import plan_build
from nvgemm_aot.providers import cutlass_operators as provider
import time

directory = Path(sys.argv[1])
manifest = load_manifest(directory / "benchmark.yaml")
planned = plan_build(manifest, Cache(directory / "plan-cache"))[0]
begin = time.perf_counter()
provider.toolchain.import_operators()
with provider.toolchain.hardware_facts(planned.target.device):
    for task in planned.tasks:
        signature = task.candidate.signature
        operator = provider._operators(signature, "sm_100f")[task.candidate.operator]
        arguments = provider._sample_arguments(signature)
        artifact = operator.compile(arguments, target_sm="100f")
        artifact.compiled_obj.export_to_c(
            object_file_path=str(directory / "bare.o"), function_name="gemm"
        )
print(time.perf_counter() - begin)
"""


def run_build(directory: Path, cache: str, *options: str) -> float:
    """Runs `nvgemm-aot build` and returns its seconds, process start included."""
    command = [
        sys.executable, "-c", "from nvgemm_aot.cli.main import main; main()", "build",
        str(directory / "benchmark.yaml"), "-o", str(directory / f"out-{cache}"),
        "--cache-dir", str(directory / cache), *options,
    ]  # fmt: skip
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def plan_size(directory: Path) -> int:
    """Returns the plan's kernel count."""
    command = [
        sys.executable, "-c", "from nvgemm_aot.cli.main import main; main()", "build",
        str(directory / "benchmark.yaml"), "--dry-run", "--json",
        "--cache-dir", str(directory / "plan-cache"),
    ]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(json.loads(output)["targets"][0]["kernels"])


def overhead(directory: Path, rounds: int) -> dict[str, object]:
    """Times the bare compiler and the build in turns."""
    (directory / "benchmark.yaml").write_text(
        MANIFEST.format(candidates=8, dtypes="[bf16, fp16]", layouts="tn", ms="[64, 1024]")
    )
    kernels = plan_size(directory)
    bare, built = [], []
    for number in range(rounds):
        output = subprocess.run(
            [sys.executable, "-c", BARE, str(directory)], check=True, capture_output=True, text=True
        ).stdout
        bare.append(float(output.splitlines()[-1]))
        built.append(run_build(directory, f"cache-{number}", "-j", "1"))
    ratios = [b / a for a, b in zip(bare, built)]
    return {
        "kernels": kernels,
        "bare_seconds": bare,
        "build_seconds": built,
        "ratio_median": statistics.median(ratios),
        "seconds_per_kernel_bare": statistics.median(bare) / kernels,
    }


def large(directory: Path, kernels: int, jobs: int) -> dict[str, object]:
    """Builds at least ``kernels`` kernels, then builds them again."""
    dtypes, layouts = "[bf16, fp16]", "[tn, nn, nt, tt]"
    for candidates in (8, 16, 24, 32, 48, 64):
        (directory / "benchmark.yaml").write_text(
            MANIFEST.format(
                candidates=candidates, dtypes=dtypes, layouts=layouts, ms="[8, 64, 256, 4096]"
            )
        )
        if plan_size(directory) >= kernels:
            break
    first = run_build(directory, "large", "-j", str(jobs))
    again = [run_build(directory, "large") for _ in range(5)]
    bundle = next((directory / "out-large").glob("*.nvgemm"))
    count = plan_size(directory)
    return {
        "kernels": count,
        "jobs": jobs,
        "build_seconds": first,
        "rebuild_seconds": again,
        "rebuild_seconds_median": statistics.median(again),
        "bundle_bytes": bundle.stat().st_size,
        "bytes_per_kernel": bundle.stat().st_size / count,
    }


@click.command()
@click.option("--kernels", default=500, show_default=True, help="Kernels of the large build.")
@click.option("--rounds", default=2, show_default=True, help="Rounds of the overhead comparison.")
@click.option("--jobs", default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
@click.option("--keep", type=click.Path(path_type=Path), help="Copy the large bundle here.")
def main(kernels: int, rounds: int, jobs: int, json_path: Path | None, keep: Path | None) -> None:
    """Measure the build and print a table."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        result = {
            "versions": {
                package: version(package)
                for package in (
                    "nvgemm-aot",
                    "nvidia-cutlass-dsl",
                    "nvidia-cutlass-operators",
                    "torch",
                )
            },
            "cores": len(os.sched_getaffinity(0)),
            "overhead": (small := overhead(directory, rounds)),
            "large": (big := large(directory, kernels, jobs)),
        }
        if keep is not None:
            shutil.copy(next((directory / "out-large").glob("*.nvgemm")), keep)
    rows = [
        ("kernels of the overhead comparison", f"{small['kernels']}"),
        ("bare compile + export, a kernel", f"{small['seconds_per_kernel_bare']:.2f} s"),
        ("build with one worker / bare, median", f"{small['ratio_median']:.2f} x"),
        ("kernels of the large build", f"{big['kernels']}"),
        (f"large build, {jobs} workers", f"{big['build_seconds']:.0f} s"),
        ("the same again, median of 5", f"{big['rebuild_seconds_median']:.2f} s"),
        ("bytes a kernel, file / kernels", f"{big['bytes_per_kernel']:.0f}"),
    ]
    for label, value in rows:
        click.echo(f"{label:<40} {value:>10}")
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
        write_cases(json_path, "build", result, result["versions"], **this_run())


if __name__ == "__main__":
    main()
