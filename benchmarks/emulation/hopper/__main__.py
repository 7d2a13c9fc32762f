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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.emulation.hopper import instruction_runs
from benchmarks.emulation.hopper.outcomes import DIFFERENT, EQUAL, OUTCOMES
from benchmarks.record import Baseline, Case
from benchmarks.shared.resuming import recording, records_option
from nvgemm_runtime import __version__

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
@records_option
def compare_instructions(path: Path, records_path: Path | None) -> None:
    """Emulates instruction cases and compares them with a GPU's results."""
    lines = instruction_runs.read_lines(path)
    _report("instructions", lines, instruction_runs.compare(lines), records_path)


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
@records_option
def compare_kernels(gpu: Path, emulated: Path, records_path: Path | None) -> None:
    """Compares results of kernels from a GPU and from the emulator."""
    from benchmarks.emulation.hopper import kernel_runs

    lines = instruction_runs.read_lines(gpu)
    emulated_lines = instruction_runs.read_lines(emulated)
    _report("kernels", lines, kernel_runs.compare(lines, emulated_lines), records_path)


def _report(
    what: str,
    gpu_lines: Sequence[dict[str, Any]],
    outcomes: Iterable[tuple[str, str]],
    records_path: Path | None,
) -> None:
    """Prints what is not equal, and records how many outcomes of each kind there are."""
    counts = dict.fromkeys(OUTCOMES, 0)
    for name, outcome in outcomes:
        kind = next((kind for kind in OUTCOMES if outcome.startswith(kind)), DIFFERENT)
        counts[kind] += 1
        if kind != EQUAL:
            click.echo(f"{name}: {outcome}")
    click.echo(", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
    (device,) = {line["device"] for line in gpu_lines if "device" in line}
    environment = {"nvgemm-aot": __version__, "gpu": device}
    compared = Baseline(name="compared", value=sum(counts.values()))
    with recording(records_path, "emulation.hopper", environment, is_measured=False) as cases:
        cases += (
            Case(name=f"{what}/{kind}", figure=count, unit="cases", baseline=compared)
            for kind, count in counts.items()
        )


if __name__ == "__main__":
    main()
