"""Measures the rankings that ship with nvgemm-aot, run by run, from a committed queue.

    python -m benchmarks.rankings_queue build bundles            # where the builder is; no GPU
    python -m benchmarks.rankings_queue measure bundles results --budget 420   # on the GPU; again
    python -m benchmarks.rankings_queue status results           # anywhere
    python -m benchmarks.rankings_queue export results -o aot/nvgemm_aot/rankings/data

``queue.yaml`` lists each problem's best candidates by estimate, and the kernels that won at
neighbouring m. ``measure`` continues row by row until its budget is used up. Results are bundles
and the states of their tunings (`nvgemm-aot tune`), which belong together. A second GPU measures
into another directory, and ``export`` of both confirms rankings. ``export`` adds to the files
that are there, so results of former sessions need not be kept.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import click

from benchmarks.rankings_queue.rows import (
    ROWS,
    Row,
    done_mark,
    is_done_with,
    progress_of,
    read_rows,
    table,
    write_rows,
)
from nvgemm_aot.rankings.assess import assess
from nvgemm_aot.rankings.entries import Rankings, merge
from nvgemm_aot.rankings.export import export as export_headers
from nvgemm_aot.rankings.file import read_rankings, write_rankings
from nvgemm_aot.tuning import watchdog
from nvgemm_aot.tuning.measuring.grid import Grid
from nvgemm_aot.tuning.tune_bundles import Tuned, TuningOptions
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import NvgemmError

MOST_SHOWN = 3
"""Most unmeasured problems that the table names per row."""

_DIRECTORY = click.Path(path_type=Path, file_okay=False)


@click.group()
def main() -> None:
    """Measure what the queue holds, run by run."""


def _named(rows: list[Row], names: tuple[str, ...]) -> list[Row]:
    unknown = sorted(set(names) - {row.name for row in rows})
    if unknown:
        known = ", ".join(row.name for row in rows)
        raise click.UsageError(f"no row is called {', '.join(unknown)} (known: {known})")
    return [row for row in rows if not names or row.name in names]


_rows_option = click.option("--row", "names", multiple=True, help="Only this row; may be repeated.")


@main.command()
@click.argument("bundles", type=_DIRECTORY)
@click.option("-j", "--jobs", type=click.IntRange(1), help="Compiler processes.")
@_rows_option
def build(bundles: Path, jobs: int | None, names: tuple[str, ...]) -> None:
    """Build the bundles to measure into BUNDLES, on a machine without a GPU."""
    from benchmarks.rankings_queue.planning import read_queue
    from nvgemm_aot.pipeline.pipeline import build as build_bundles
    from nvgemm_aot.rankings.shipped_rankings import shipped_rankings
    from nvgemm_aot.storage.build_cache import Cache, default_directory

    bundles.mkdir(mode=0o755, parents=True, exist_ok=True)
    planned = {one.row.name: one for one in read_queue()}
    write_rows(bundles, [one.row for one in planned.values()])
    for row in _named(read_rows(bundles), names):
        work = planned[row.name].work
        rankings = None
        if row.serving:
            rankings = shipped_rankings(entry.problem for entry in work.declared)
        result = build_bundles(
            work,
            bundles,
            Cache(default_directory()),
            jobs=jobs,
            rankings=rankings,
            prunes=row.serving,
        )
        for bundle in result.bundles:
            click.echo(
                f"{bundle.path}: {len(bundle.header.kernels)} kernels for "
                f"{len(bundle.header.rankings)} problems, {bundle.file_bytes} bytes"
            )
        for one in result.unserved:
            click.echo(f"{row.name}: no kernel for {one.problem.key}: {one.reason}")


@main.command()
@click.argument("bundles", type=_DIRECTORY)
@click.argument("results", type=_DIRECTORY)
@click.option("--budget", type=click.FloatRange(min=1), help="Seconds after which to stop.")
@_rows_option
def measure(bundles: Path, results: Path, budget: float | None, names: tuple[str, ...]) -> None:
    """Measure what is left of BUNDLES on this GPU, into RESULTS.

    A row that fails does not end the others; the status is 1 then.
    """
    results.mkdir(mode=0o755, parents=True, exist_ok=True)
    begin = time.monotonic()
    rows = _named(read_rows(bundles), names)
    if not rows:
        raise click.ClickException(f"{bundles / ROWS} is not there: build the bundles first")
    failed: list[str] = []
    try:
        missing = [row for row in rows if not row.bundle(bundles).exists()]
        for row in missing:
            click.echo(f"{row.name}: left out: {row.bundle(bundles)} is not there; build it")
        # Measures a row a second time after all others, so that nothing waits.
        for repeats, row in itertools.product((False, True), rows):
            left = None if budget is None else budget - (time.monotonic() - begin)
            if left is not None and left <= 0:
                break
            if row in missing or row.name in failed:
                continue
            try:
                _measure_row(row, bundles, results, left, repeats=repeats)
            except NvgemmError as error:
                click.echo(f"{row.name}: FAILED: {error}")
                failed.append(row.name)
    finally:
        _print_table(rows, results, MOST_SHOWN)
    if failed:
        raise click.ClickException(f"rows that failed, see above: {', '.join(failed)}")


def _measure_row(
    row: Row, bundles: Path, results: Path, budget_s: float | None, *, repeats: bool
) -> None:
    """Measures a row's rest; does nothing if this very bundle is done."""
    key = _header(row.bundle(bundles)).build_key
    if is_done_with(row, results, key):
        return
    done_mark(row, results).unlink(missing_ok=True)  # left by another bundle
    tuned = _tune(row, bundles, results, budget_s, repeats=repeats)
    for contender, reason in tuned.hanging:
        click.echo(f"HANGS: {contender[:12]}: {reason}")
    click.echo(
        f"{row.name}: {tuned.measured_now} measured now, {len(tuned.outcomes)} in all, "
        f"{len(tuned.unmeasured)} left"
    )
    if tuned.is_complete and repeats:
        done_mark(row, results).write_text(f"{key}\n")


def _tune(
    row: Row, bundles: Path, results: Path, budget_s: float | None, *, repeats: bool
) -> Tuned:
    options = TuningOptions(
        budget_s=budget_s,
        neighbours=row.neighbours,
        grid=Grid.SERVING if row.serving else None,
        skips_confirmed=row.serving,
        repeats=repeats,
    )
    return watchdog.tune_watched([row.bundle(bundles)], row.bundle(results), options)


@main.command()
@click.argument("results", type=_DIRECTORY)
@click.option("--all", "shows_all", is_flag=True, help="Name all unmeasured problems.")
def status(results: Path, shows_all: bool) -> None:
    """Print how far measuring has come, and what is unmeasured."""
    from benchmarks.rankings_queue.planning import read_queue

    _print_table([one.row for one in read_queue()], results, None if shows_all else MOST_SHOWN)


def _print_table(rows: list[Row], results: Path, most: int | None) -> None:
    click.echo("\n".join(table([progress_of(row, results) for row in rows], most=most)))


@main.command()
@click.argument("results", type=_DIRECTORY, nargs=-1, required=True)
@click.option("-o", "--out", type=_DIRECTORY, required=True, help="Directory for NAME.json.")
def export(results: tuple[Path, ...], out: Path) -> None:
    """Add what all RESULTS measured to the rankings files of shipped manifests."""
    from benchmarks.rankings_queue.planning import problems_of, read_queue

    rows = [one.row for one in read_queue()]
    everything = merge(
        [
            _measured_in(row, directory)
            for directory in results
            for row in rows
            if row.bundle(directory).exists()
        ]
    )
    for manifest in dict.fromkeys(row.manifest for row in rows):
        wanted = problems_of(manifest)  # also those in another manifest's row
        found = Rankings(
            entries=tuple(entry for entry in everything.entries if entry.problem in wanted)
        )
        if not found.entries:
            click.echo(f"{manifest}: nothing is measured")
            continue
        path = out / f"{manifest}.json"
        if path.exists():
            found = merge([read_rankings(path), found])
        write_rankings(path, found)
        standings = [assess(entries).standing for entries in found.groups.values()]
        counts = ", ".join(f"{standings.count(one)} {one}" for one in sorted(set(standings)))
        click.echo(f"{path}: {path.stat().st_size} bytes; problems: {counts}")


def _measured_in(row: Row, results: Path) -> Rankings:
    """Returns the rankings that a directory's runs measured, without those built in."""
    measured = progress_of(row, results).outcomes
    exported = export_headers([_header(row.bundle(results))])
    return Rankings(
        entries=tuple(entry for entry in exported.entries if entry.problem.key in measured)
    )


def _header(path: Path) -> Header:
    with Bundle(path) as bundle:
        return bundle.header


if __name__ == "__main__":
    main()
