"""Measures, fits and judges corrections of a model's runtime estimates.

    python -m benchmarks.estimates build kernels.nvgemm                 # anywhere the builder is
    python -m benchmarks.estimates measure kernels.nvgemm times.json    # on a GPU
    python -m benchmarks.estimates fit kernels.nvgemm times.json        # anywhere; prints the table
    python -m benchmarks.estimates fit kernels.nvgemm times.json more.json --write
    python -m benchmarks.estimates schedules kernels.nvgemm times.json  # of schedules.yaml
    python -m benchmarks.estimates winners times.json                   # of between.yaml

``build`` compiles every kernel that the manifest's providers list. ``fit`` also reads files of
``nvgemm-aot tune --json``, ``benchmarks.kernels`` and ``benchmarks.ranking``. It fits on two thirds
of the sizes and judges on the rest: by how much a build's first choice, and the best of its first
few, are slower than the bundle's best kernel, with corrections and without. ``--write`` stores the
corrections, fitted on all sizes, if they are better on the sizes held back. ``winners`` compares
the fastest kernel with ATen, and counts each design's problems among the fastest.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.estimates import fitting, measuring, records, schedules, winners
from benchmarks.shared.records import read_json, read_record
from benchmarks.shared.resuming import recording, records_option

MANIFEST = Path(__file__).parent / "manifest.yaml"


@click.group()
def main() -> None:
    """Measure kernels, and fit corrections of their estimated runtimes."""


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--manifest", type=click.Path(path_type=Path, exists=True), default=MANIFEST)
@click.option("-j", "--jobs", type=click.IntRange(1), help="Compiler processes.")
def build(path: Path, manifest: Path, jobs: int | None) -> None:
    """Compile every kernel that a manifest's providers list, for its problems' signatures."""
    # The machine that measures has no builder.
    from benchmarks.estimates import every_kernel
    from nvgemm_aot.cli.terminal.printing import report_progress
    from nvgemm_aot.manifest.parse import load_manifest
    from nvgemm_aot.storage.build_cache import Cache, default_directory

    with report_progress("Compiling") as report:
        header, lost = every_kernel.build_every_kernel(
            load_manifest(manifest), path, Cache(default_directory()), jobs=jobs, progress=report
        )
    click.echo("\n".join(f"left out {line}" for line in lost), nl=bool(lost))
    click.echo(f"{path}: {len(header.kernels)} kernels, {len(header.rankings)} problems")


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.argument("times", type=click.Path(path_type=Path))
@click.option("--budget", type=click.FloatRange(min=1), help="Seconds after which to stop.")
def measure(bundle: Path, times: Path, budget: float | None) -> None:
    """Time every kernel of a bundle at the problems that it declares, on a GPU."""
    measuring.measure(bundle, times, budget)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.argument("times", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@click.option("--write", is_flag=True, help="Keep the corrections for builds.")
@records_option
def fit(bundle: Path, times: tuple[Path, ...], write: bool, records_path: Path | None) -> None:
    """Fit corrections to measured times, and print what they gain on sizes held back."""
    gpu = {"gpu": read_json(times[-1]).get("gpu")}
    with recording(records_path, "estimates", gpu, is_measured=False) as cases:
        fitting.fit_and_judge(records.read_times(bundle, times), cases, write=write)


@main.command(name="schedules")
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.argument("times", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
def compare_schedules(bundle: Path, times: tuple[Path, ...]) -> None:
    """Compare dynamic schedules with the static ones of the same kernels, as measured."""
    click.echo(schedules.compare(records.read_times(bundle, times)))


@main.command(name="winners")
@click.argument("times", type=click.Path(path_type=Path, exists=True))
def print_winners(times: Path) -> None:
    """Compare the fastest kernels with ATen, and count what is among the fastest."""
    keys = {"kernels": list, "times_ns": dict, "aten_ns": dict}
    click.echo(winners.winners(read_record(times, measuring.WHAT, keys)))


if __name__ == "__main__":
    main()
