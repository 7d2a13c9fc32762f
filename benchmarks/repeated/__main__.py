"""Judges winners that one GPU measured twice on another GPU.

On each of two GPUs of a product, with the wheel of benchmarks/additive/manifest.yaml installed:

    python -m benchmarks.repeated measure DIR
    export NVGEMM_AOT_BUNDLES=DIR
    python -m benchmarks.additive measure DIR/additive.json --backends default --processes 14

``measure`` tunes the bundle as `nvgemm-aot tune` does, which measures each problem a second time
in another process, and leaves ``tuned.nvgemm`` and ``rankings.json`` in DIR. `benchmarks.additive`
finds models that are slower in default mode with repeated rankings. Anywhere, later:

    python -m benchmarks.repeated compare one/rankings.json two/rankings.json

``compare`` counts winners that are slower than ATen on the other GPU, by their gain: all, and those
that were repeated.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.ranking.gpus import measured_with
from benchmarks.repeated.gains import find_pairs, gains_cases, gains_table
from benchmarks.shared.resuming import recording, records_option
from nvgemm_aot.cli.rankings.tune import tuned_document, tuned_text
from nvgemm_aot.rankings.entries import merge
from nvgemm_aot.rankings.export import export
from nvgemm_aot.rankings.file import read_rankings, write_rankings
from nvgemm_aot.tuning import watchdog
from nvgemm_aot.tuning.tune_bundles import TuningOptions
from nvgemm_runtime.installed.registry import INSTALLATION

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group()
def main() -> None:
    """Tune twice on one GPU, and compare GPUs."""


@main.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--bundle", type=_FILE, help="The bundle to tune; the installed wheel's if not given."
)
@click.option("--budget", type=click.FloatRange(min=1), help="Seconds after which to stop.")
@click.option("--bench", default=watchdog.GPU_BENCH, hidden=True)
def measure(directory: Path, bundle: Path | None, budget: float | None, bench: str) -> None:
    """Tune a bundle into DIRECTORY, each problem twice; the same command goes on."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    output = directory / "tuned.nvgemm"
    tuned = watchdog.tune_watched(
        [bundle or _installed(output)],
        output,
        TuningOptions(budget_s=budget),
        bench=bench,
        progress=_say("measured"),
        again=_say("measured again"),
    )
    text = tuned_text(tuned_document(tuned))
    (directory / "tuned.txt").write_text(f"{text}\n")
    write_rankings(directory / "rankings.json", export([tuned.header]))
    click.echo(text)


def _installed(output: Path) -> Path:
    """Returns the one bundle of an installed wheel that this device may run."""
    found = [
        one.path
        for one in INSTALLATION.shipped_bundles()
        if one.bundle is not None and one.path.resolve() != output.resolve()
    ]
    if len(found) != 1:
        raise click.ClickException(
            f"{len(found)} bundles are installed: name the one to tune by --bundle PATH"
        )
    return found[0]


def _say(what: str) -> watchdog.Progress:
    """Prints every 25th problem, and the last."""

    def say(done: int, total: int) -> None:
        if done and (done == total or done % 25 == 0):
            click.echo(f"{what}: {done} of {total}", err=True)

    return say


@main.command()
@click.argument("files", type=_FILE, nargs=-1, required=True)
@records_option
def compare(files: tuple[Path, ...], records_path: Path | None) -> None:
    """Count, by gain, winners of one GPU that are slower than ATen on another."""
    rankings = merge(map(read_rankings, files))
    pairs = find_pairs(rankings)
    click.echo("\n".join(gains_table(pairs)))
    with recording(records_path, "repeated", measured_with(rankings), is_measured=False) as cases:
        cases += gains_cases(pairs)


if __name__ == "__main__":
    main()
