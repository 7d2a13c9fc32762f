"""Benchmark figures; needs matplotlib and no GPU.

    python -m benchmarks.figures   # draws benchmarks/results into docs/figures

The same results and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import click
import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.hgemm.table import LOG2_BOUNDS, Size
from benchmarks.record import RESULTS, Record, read_all
from benchmarks.shared.records import write
from benchmarks.shared.summaries import grouped, mean
from benchmarks.tables.selection import Selection

BUNDLED_COLOUR, OTHER_COLOUR, BELOW_COLOUR = "#4477aa", "#bbbbbb", "#ee6677"
"""Paul Tol's bright scheme, which colour-blind readers can tell apart."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Ticks for m."""


def draw_kernels(records: Selection) -> Figure:
    """Draws the speed-up that bundled kernels add to ATen and Triton, by m."""
    best = records.where("kernels", ".*/apart/best of all")
    speedups = [record.speedup for record in best]
    if not speedups:
        raise click.ClickException("no record of benchmark kernels; measure it first")
    faster = sum(value > 1.01 for value in speedups)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.scatter([_m(record) for record in best], speedups, s=18, color=BUNDLED_COLOUR)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TOKENS, [str(m) for m in TOKENS])
    axes.set_xlabel("m (tokens)")
    axes.set_ylabel("speed-up over the best\nof ATen and Triton")
    axes.set_title(
        f"GEMMs of LLMs on an {_gpu(best)}, with bundled kernels among the choices:\n"
        f"{faster} of {len(speedups)} are over 1 % faster, none is over "
        f"{_percent_below(min(speedups))} slower"
    )
    return figure


def draw_hgemm(records: Selection) -> Figure:
    """Draws mean speed-ups over cuBLASLt's fastest algorithm, by size."""
    newest = max(
        records.where("hgemm", "mean of .*/bundled"),
        key=lambda record: record.run.date or "",
        default=None,
    )
    if newest is None:
        raise click.ClickException("no record of benchmark hgemm; measure it first")
    on = Selection([newest]).products[0]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    overall = {}
    for mode, title, colour in (
        ("offline", "back to back", BUNDLED_COLOUR),
        ("server", "single requests", BELOW_COLOUR),
    ):
        sizes = records.where("hgemm", rf"\d+_\d+_\d+/{mode}", on=on)
        groups = grouped(list(sizes), LOG2_BOUNDS, _log2)
        heights = [100 * mean([record.speedup - 1 for record in group]) for _, group in groups]
        axes.plot([label for label, _ in groups], heights, marker="o", color=colour, label=title)
        gains = records.where("hgemm", f"mean of .*/{mode}/bundled", on=on)
        overall[title] = max(gains, key=lambda record: record.run.date or "").case.figure
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("log2(m n k)")
    axes.set_ylabel("faster than autotuned\ncuBLASLt, %")
    axes.legend()
    words = ", ".join(f"{value:+.1f} % {title}" for title, value in overall.items())
    axes.set_title(f"HGEMM-1000 on an {_gpu([newest])}, {len(sizes)} sizes: {words}")
    return figure


COLD_STARTS = {
    "aten+triton": "max-autotune, ATen and Triton",
    "jit": "max-autotune, ATen and kernels compiled at run time",
    "aten+bundle": "max-autotune, ATen and bundle, estimated rankings",
    "aten+measured": "max-autotune, ATen and bundle, measured rankings",
    "aten": "max-autotune, ATen alone",
}
"""Bars in the cold-start figure, by mode."""


def draw_cold_start(records: Selection) -> Figure:
    """Draws seconds to the first result, by mode, from the newest run with Triton and bundles."""
    first = records.where("cold_start", r"30 GEMMs/aten\+measured/first result")
    measured = first.where(baseline="aten+triton").only()
    date = measured.run.date
    seconds = {}
    for record in records.where("cold_start", "30 GEMMs/.*/first result"):
        if record.run.date == date and record.case.baseline is not None:
            seconds[record.case.name.split("/")[1]] = record.case.figure
            seconds[record.case.baseline.name] = record.case.baseline.value
    shown = [mode for mode in COLD_STARTS if mode in seconds]
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        [COLD_STARTS[mode] for mode in shown],
        [seconds[mode] for mode in shown],
        color=[
            BUNDLED_COLOUR if mode in ("aten+bundle", "aten+measured") else OTHER_COLOUR
            for mode in shown
        ],
    )
    axes.bar_label(bars, [f"{seconds[mode]:.1f} s" for mode in shown], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("seconds to the first result, fresh process, empty caches")
    figure.suptitle(
        f"With measured rankings, a decoder layer of 30 GEMMs starts {measured.speedup:.1f} times "
        f"as fast as with Triton ({_gpu([measured])})"
    )
    return figure


SERVED = r"vllm/llama-3\.1-8b, 32 layers"
"""Engine and model in the serving figure, as a pattern."""


def draw_serving(records: Selection) -> Figure:
    """Draws the speed-up of a decode step in vLLM, by sequences that decode."""
    rates = records.where("serving", rf"{SERVED}/decode, batch \d+/rate")
    if not len(rates):
        raise click.ClickException("no record of benchmark serving; measure it first")
    kernels = records.where("serving", rf"{SERVED}/decode, batch \d+/kernels")
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    for measured, title, colour in (
        (kernels, "time in which kernels ran", BUNDLED_COLOUR),
        (rates, "tokens a second", OTHER_COLOUR),
    ):
        by_batch = {_batch(record): record for record in measured}
        batches = sorted(by_batch)
        axes.errorbar(
            [str(batch) for batch in batches],
            [by_batch[batch].speedup for batch in batches],
            yerr=[by_batch[batch].case.noise or 0.0 for batch in batches],
            marker="o", capsize=3, color=colour, label=title,
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("sequences that decode")
    axes.set_ylabel("speed-up over stock vLLM")
    axes.legend()
    least, most = min(one.speedup for one in kernels), max(one.speedup for one in kernels)
    model = next(iter(rates)).case.name.split("/")[1].partition(",")[0]
    axes.set_title(
        f"{model} in vLLM on an {_gpu(rates)}: with a kernel wheel, kernels of a decode step are\n"
        f"{least:.3f} to {most:.3f} times as fast as stock"
    )
    return figure


DRAWN: dict[str, Callable[[Selection], Figure]] = {
    "cold_start": draw_cold_start,
    "hgemm": draw_hgemm,
    "kernels": draw_kernels,
    "serving": draw_serving,
}
"""Functions that draw each figure, by its file name."""


def svg(figure: Figure) -> str:
    """Returns a figure as SVG that is equal in every call."""
    settings = {"svg.hashsalt": "nvgemm-aot", "svg.fonttype": "none"}
    with mpl.rc_context(settings):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _m(record: Record) -> int:
    match = re.search(r"/m(\d+)n", record.case.name)
    assert match, record.case.name
    return int(match[1])


def _batch(record: Record) -> int:
    match = re.search(r"batch (\d+)", record.case.name)
    assert match, record.case.name
    return int(match[1])


def _log2(record: Record) -> int:
    return Size.parse(record.case.name.split("/")[0]).log2


def _gpu(records: Selection | list[Record]) -> str:
    gpu = next(iter(records)).run.gpu or "CPU"
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def _percent_below(least: float) -> str:
    """Formats the least speed-up's distance below 1, rounded up to 0.1 %."""
    return f"{max(0.0, -((least - 1) * 1000 // 1) / 10):.1f} %"


@click.command()
@click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=RESULTS,
    help="Directory of result files.  [default: benchmarks/results]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(__file__).parents[1] / "docs/figures",
    help="Directory for the figures.  [default: docs/figures]",
)
def main(results: Path, output: Path) -> None:
    """Draw the figures."""
    records = Selection(read_all(results))
    for name, draw in DRAWN.items():
        path = output / f"{name}.svg"
        write(path, svg(draw(records)))
        click.echo(f"{path}: drawn")


if __name__ == "__main__":
    main()
