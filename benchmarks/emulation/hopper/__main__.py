"""Compares the emulator with a Hopper GPU: single instructions, and kernels of every design.

python -m benchmarks.emulation.hopper instructions OUT.jsonl           # on the GPU
python -m benchmarks.emulation.hopper kernels BUNDLE OUT.jsonl         # on the GPU
python -m benchmarks.emulation.hopper compare-instructions OUT.jsonl   # anywhere
python -m benchmarks.emulation.hopper emulate BUNDLE PTX EMULATED.jsonl
python -m benchmarks.emulation.hopper compare-kernels OUT.jsonl EMULATED.jsonl
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import click

from benchmarks.emulation.hopper import instruction_runs

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(help=__doc__)
def main() -> None:
    """Compares the emulator with a GPU."""


@main.command("instructions")
@click.argument("path", type=_FILE)
def run_instructions(path: Path) -> None:
    """Runs every instruction case on this machine's GPU."""
    instruction_runs.run_on_gpu(path)
    lines = instruction_runs.read_lines(path)
    failed = [f"{line['case']}: {line['error']}" for line in lines if "error" in line]
    click.echo("\n".join([*failed, f"{len(lines)} cases, {len(failed)} failed"]))


@main.command("instruction-worker", hidden=True)
@click.argument("path", type=_FILE)
def run_worker(path: Path) -> None:
    """Runs cases until one fails."""
    instruction_runs.work(path)


@main.command("kernels")
@click.argument("bundle", type=_FILE)
@click.argument("path", type=_FILE)
def run_kernels(bundle: Path, path: Path) -> None:
    """Runs a bundle's kernels on this machine's GPU."""
    os.environ["NVGEMM_AOT_BUNDLES"] = str(bundle.resolve())
    from benchmarks.emulation.hopper import kernel_runs

    kernel_runs.run_all(bundle, path, "cuda")
    lines = instruction_runs.read_lines(path)
    failed = [f"{line['case']}: {line['error']}" for line in lines if "error" in line]
    click.echo("\n".join([*failed, f"{len(lines)} cases, {len(failed)} failed"]))


@main.command("compare-instructions")
@click.argument("path", type=_FILE)
def compare_instructions(path: Path) -> None:
    """Emulates instruction cases and compares them with a GPU's results."""
    _print_outcomes(instruction_runs.compare(instruction_runs.read_lines(path)))


@main.command("condense")
@click.argument("path", type=_FILE)
@click.argument("kept", type=_FILE)
def condense(path: Path, kept: Path) -> None:
    """Keeps what `compare-instructions` needs of a GPU's results."""
    lines = instruction_runs.condensed(instruction_runs.read_lines(path))
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))


@main.command("emulate")
@click.argument("bundle", type=_FILE)
@click.argument("ptx", type=click.Path(path_type=Path, file_okay=False))
@click.argument("path", type=_FILE)
@click.option("--only", default="", help="Text that a case's name or operator must have.")
def emulate(bundle: Path, ptx: Path, path: Path, only: str) -> None:
    """Runs a bundle's kernels on an emulated H100; PTX lies beside objects in folders."""
    os.environ["NVGEMM_AOT_BUNDLES"] = str(bundle.resolve())
    from benchmarks.emulation.hopper import kernel_runs
    from benchmarks.emulation.hopper.emulated_hopper import start_hopper

    start_hopper(ptx)
    kernel_runs.run_all(bundle, path, "cpu", only)


@main.command("compare-kernels")
@click.argument("gpu", type=_FILE)
@click.argument("emulated", type=_FILE)
def compare_kernels(gpu: Path, emulated: Path) -> None:
    """Compares results of kernels from a GPU and from the emulator."""
    from benchmarks.emulation.hopper import kernel_runs

    _print_outcomes(kernel_runs.compare(gpu, emulated))


def _print_outcomes(outcomes: Iterable[tuple[str, str]]) -> None:
    counts: dict[str, int] = {}
    for name, outcome in outcomes:
        kind = outcome.split(":")[0] if outcome.startswith(("equal", "close")) else "different"
        counts[kind] = counts.get(kind, 0) + 1
        if kind != "equal":
            click.echo(f"{name}: {outcome}")
    click.echo(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
