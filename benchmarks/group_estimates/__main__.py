"""Measures, fits and judges estimated times of grouped products.

    python -m benchmarks.group_estimates build kernels.nvgemm               # where the builder is
    python -m benchmarks.group_estimates measure kernels.nvgemm times.json  # on a GPU
    python -m benchmarks.group_estimates fit times.json                     # anywhere: the table
    python -m benchmarks.group_estimates fit times.json --write

``build`` compiles every grouped kernel that providers list. ``fit`` fits each kernel's tile cost on
the experts of four models and judges it on those of three others: by how much a build's first
choice, and the best of its first four, are slower than the fastest kernel. ``--write`` stores the
costs for builds.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.group_estimates import measuring
from benchmarks.shared.records import read_json
from benchmarks.shared.resuming import recording, records_option

MANIFEST = Path(__file__).parent / "manifest.yaml"


@click.group()
def main() -> None:
    """Measure kernels for groups, and fit estimates of their times."""


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-j", "--jobs", type=click.IntRange(1), help="Compiler processes.")
def build(path: Path, jobs: int | None) -> None:
    """Compile every kernel for groups."""
    from benchmarks.estimates.every_kernel import build_every_kernel
    from nvgemm_aot.cli.terminal.printing import report_progress
    from nvgemm_aot.manifest.parse import load_manifest
    from nvgemm_aot.storage.build_cache import Cache, default_directory

    with report_progress("Compiling") as report:
        header, lost = build_every_kernel(
            load_manifest(MANIFEST), path, Cache(default_directory()), jobs=jobs, progress=report
        )
    click.echo("\n".join(f"left out {line}" for line in lost), nl=bool(lost))
    click.echo(f"{path}: {len(header.kernels)} kernels")


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.argument("times", type=click.Path(path_type=Path))
@click.option("--budget", type=click.FloatRange(min=1), help="Seconds after which to stop.")
def measure(bundle: Path, times: Path, budget: float | None) -> None:
    """Time every kernel of a bundle, on a GPU."""
    measuring.measure(bundle, times, budget)


@main.command()
@click.argument("times", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@click.option("--write", is_flag=True, help="Keep the costs for builds.")
@records_option
def fit(times: tuple[Path, ...], write: bool, records_path: Path | None) -> None:
    """Fit costs to measured times, and print how good estimates are on experts held back."""
    from benchmarks.group_estimates import fitting

    gpu = {"gpu": read_json(times[-1]).get("gpu")}
    with recording(records_path, "group_estimates", gpu, is_measured=False) as cases:
        fitting.fit_and_judge(times, cases, write=write)


if __name__ == "__main__":
    main()
