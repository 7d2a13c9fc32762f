"""Figures of committed results; needs matplotlib and no GPU.

    python -m benchmarks.figures benchmarks/results/kernels-*.json   # into docs/figures

Draws ``kernels.svg``, ``hgemm.svg``, ``cold_start.svg`` or, where it was compiled for several
batches, ``cold_start_batches.svg``, by what a file says it holds. The same file and the same
matplotlib give the same bytes.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.cold_start import table as cold_start_table
from benchmarks.hgemm import table as hgemm_table
from benchmarks.kernels import table as kernels_table
from benchmarks.shared.records import as_written, read_json, write
from benchmarks.shared.summaries import geomean, grouped, mean

TOKEN_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677")
"""Of the ranges of m: Paul Tol's bright scheme, which colour-blind readers can tell apart."""
BUNDLED_COLOUR, OTHER_COLOUR = "#4477aa", "#bbbbbb"


def draw_kernels(record: Mapping[str, Any]) -> Figure:
    """Speed-up of the best bundled kernel over the best of the others, by size."""
    entries = [
        kernels_table.ProblemTimes.from_json(key, one)
        for key, one in record["entries"].items()
        if one["kernels"] and one["triton"] is not None
    ]
    if not entries:
        raise click.ClickException("no problem of the file was measured with Triton")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    groups = grouped(entries, kernels_table.TOKENS, lambda one: one.problem.m)
    colours = dict(zip(kernels_table.TOKENS, TOKEN_COLOURS))
    for label, group in groups:
        axes.scatter(
            [one.problem.flops for one in group],
            [one.bundle for one in group],
            s=18,
            color=colours[int(label.split("-")[0])],
            label=f"m {label}: {geomean([one.bundle for one in group]):.2f}",
        )
    best = geomean([one.best_of_all for one in entries])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhline(best, color="black", linewidth=0.8, linestyle="--")
    axes.text(
        0.01, best, f"best of all: {best:.3f}", transform=axes.get_yaxis_transform(), va="bottom"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4]
    values = [one.bundle for one in entries]
    shown = [tick for tick in ticks if min(values) * 0.9 <= tick <= max(values) * 1.1]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set_xlabel("floating-point operations of the product")
    axes.set_ylabel("bundled kernel over\nthe best of ATen and Triton")
    axes.set_title(f"{record['environment']['gpu']}: {len(entries)} declared GEMMs")
    figure.legend(loc="outside right upper", title="geometric mean", fontsize="small")
    return figure


def draw_hgemm(record: Mapping[str, Any]) -> Figure:
    """Mean speed-up over each strong baseline, by size, in both modes."""
    entries = [hgemm_table.SizeTimes.from_json(key, one) for key, one in record["entries"].items()]
    if not entries:
        raise click.ClickException("no size of the file was measured")
    groups = grouped(entries, hgemm_table.LOG2_BOUNDS, lambda one: one.size.log2)
    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, mode in zip(figure.subplots(1, 2, sharey=True), hgemm_table.MODES):
        for name, colour in zip(hgemm_table.STRONGEST, TOKEN_COLOURS):
            heights = [
                100 * mean([one.speedup(mode, name) for one in group]) for _, group in groups
            ]
            overall = mean([one.speedup(mode, name) for one in entries])
            axes.plot(
                [label for label, _ in groups],
                heights,
                marker="o",
                color=colour,
                label=f"{name}: {overall:+.1%}",
            )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xlabel("log2(m n k)")
        axes.set_title(mode)
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.18),
            title="mean speed-up over",
            fontsize="small",
        )
    figure.axes[0].set_ylabel("t_ref / t - 1, %")
    figure.suptitle(f"{record['environment']['gpu']}: HGEMM-1000, {len(entries)} sizes")
    return figure


def draw_cold_start(record: Mapping[str, Any]) -> Figure:
    """Seconds to the first result, by mode."""
    runs = cold_start_table.by_label(record["runs"])
    labels = list(runs)
    seconds = [cold_start_table.values(runs[label], "first_result_s") for label in labels]
    medians = [statistics.median(found) for found in seconds]
    figure = Figure(figsize=(8, 0.5 * len(labels) + 1.2), layout="constrained")
    axes = figure.subplots()
    bundled = (
        cold_start_table.BUNDLE_MODE,
        cold_start_table.MEASURED_MODE,
        cold_start_table.JIT_MODE,
        cold_start_table.KEPT_MODE,
    )
    bars = axes.barh(
        labels,
        medians,
        xerr=[
            [middle - min(found) for middle, found in zip(medians, seconds)],
            [max(found) - middle for middle, found in zip(medians, seconds)],
        ],
        color=[BUNDLED_COLOUR if label.startswith(bundled) else OTHER_COLOUR for label in labels],
    )
    axes.bar_label(bars, [f"{middle:.1f} s" for middle in medians], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("seconds to the first result, in a fresh process with empty caches")
    gemms = max(sum(run["count"].values()) for run in record["runs"])
    axes.set_title(f"{record['runs'][0]['versions']['device']}: {gemms} GEMMs")
    return figure


DRAWN: dict[str, Callable[[Mapping[str, Any]], Figure]] = {
    "kernels": draw_kernels,
    "hgemm": draw_hgemm,
    "cold_start": draw_cold_start,
}
"""By what a file holds."""


def figure_name(record: Mapping[str, Any]) -> str:
    """Name of the figure of a file, without its suffix."""
    several = len(record.get("batches", ())) > 1
    return f"{record['what']}{'_batches' if several else ''}"


def svg(figure: Figure) -> str:
    """A figure as SVG, with nothing in it that changes from call to call."""
    settings = {"svg.hashsalt": "nvgemm-aot", "svg.fonttype": "none"}
    with mpl.rc_context(settings):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(__file__).parents[1] / "docs/figures",
    help="Directory for the figures.  [default: docs/figures]",
)
def main(paths: tuple[Path, ...], output: Path) -> None:
    """Draw the figures of result files."""
    for path in paths:
        record = read_json(path)
        draw = DRAWN.get(record.get("what"))
        if draw is None:
            raise click.ClickException(
                f"{path} says it holds {record.get('what')!r}; drawn are {', '.join(DRAWN)}"
            )
        figure = output / f"{figure_name(record)}.svg"
        with as_written(path):
            drawn = svg(draw(record))
        write(figure, drawn)
        click.echo(f"{figure}: drawn from {path}")


if __name__ == "__main__":
    main()
