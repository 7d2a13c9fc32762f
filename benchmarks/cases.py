"""Cases for each benchmark's raw file.

A benchmark keeps raw measurements in a JSON file, from which its table is printed; its cases are
computed from the same file, so that both agree.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.additive import table as additive
from benchmarks.cold_start import table as cold_start
from benchmarks.hgemm import table as hgemm
from benchmarks.kernels import table as kernels
from benchmarks.record import Baseline, Case, records_of, run_of, write
from benchmarks.serving import table as serving
from benchmarks.serving.workload import Workload
from benchmarks.shared.summaries import Summary, fastest, mean, median, standard_error
from nvgemm_runtime.settings import Mode

Data = Mapping[str, Any]


def additive_cases(entries: Data) -> Iterator[Case]:
    """Yields a model's time over that without bundles, by batch and mode; then single processes."""
    rows = [
        {**row, "modes": {m: {**t} for m, t in row["modes"].items()}} for row in entries.values()
    ]
    additive.judge(rows)
    counts = Counter(row["backends"] for row in rows)
    processes: dict[str, list[float]] = {}
    for row in rows:
        for mode, timed in row["modes"].items():
            seconds = {
                side: [math.log(min(times[side])) for times in timed["times_us"]]
                for side in additive.SIDES
            }
            own, stock = (math.exp(statistics.fmean(seconds[side])) for side in additive.SIDES)
            yield Case(
                name=f"{row['backends']}/{row['model']}/batch {row['batch']}/{mode}",
                figure=own,
                unit="us",
                baseline=Baseline(name="without bundles", value=stock),
                noise=timed["noise"],
            )
            ratios = processes.setdefault(
                f"{row['backends']}/processes of {counts[row['backends']]} cases/{mode}", []
            )
            for report, one, other in zip(row["reports"], *seconds.values(), strict=True):
                if report["with"]["count"]["nvgemm"]:
                    ratios.append(math.exp(one - other))
    for name, ratios in processes.items():
        if ratios:
            yield Case(
                name=f"{name} over 2 % longer",
                figure=sum(ratio > additive.NOTABLE for ratio in ratios),
                unit="processes",
                baseline=Baseline(name="processes that call bundled kernels", value=len(ratios)),
            )


def cold_start_cases(record: Data) -> Iterator[Case]:
    """Yields each mode's first result and call time, over the run's stock modes."""
    runs = cold_start.by_label(record["runs"])
    gemms = max(sum(run["count"].values()) for run in record["runs"])
    stock = (cold_start.STOCK_MODE, cold_start.REFERENCE, cold_start.TRITON_MODE)
    yield from _on_the_stack(runs, gemms)
    for label in runs:
        inside = {
            one: statistics.median(map(cold_start.own_seconds, runs[one]))
            for one in (label, cold_start.JIT_MODE)
            if one in runs
        }
        if inside[label]:
            jit = inside.get(cold_start.JIT_MODE)
            yield Case(
                name=f"{gemms} GEMMs/{label}/inside nvgemm-aot",
                figure=inside[label],
                unit="s",
                baseline=None if jit is None else Baseline(name=cold_start.JIT_MODE, value=jit),
            )
        for reference in stock:
            if reference not in runs or (label in stock and reference != cold_start.REFERENCE):
                continue
            for key, title in (("first_result_s", "first result"), ("call_us", "call"),
                               ("graph_us", "CUDA graph")):  # fmt: skip
                own, other = (cold_start.values(runs[one], key) for one in (label, reference))
                if not own or not other:
                    continue
                figure = statistics.median(own)
                yield Case(
                    name=f"{gemms} GEMMs/{label}/{title}",
                    figure=figure,
                    unit=key.rpartition("_")[2],
                    baseline=Baseline(name=reference, value=statistics.median(other)),
                    noise=(max(own) - min(own)) / 2 / figure if len(own) > 1 else None,
                )


def _on_the_stack(runs: cold_start.Runs, gemms: int) -> Iterator[Case]:
    """Yields stock default mode's first result plus the time in nvgemm-aot's stack frames."""
    stock = cold_start.first_result_s(runs, cold_start.STOCK_MODE)
    within, stock_within = (
        [run["within_s"] for run in runs.get(mode, ()) if "within_s" in run]
        for mode in (cold_start.DEFAULT_MODE, cold_start.STOCK_MODE)
    )
    if stock is not None and within and stock_within:
        yield Case(
            name=f"{gemms} GEMMs/{cold_start.DEFAULT_MODE}/first result by stack samples",
            figure=stock + statistics.median(within) - statistics.median(stock_within),
            unit="s",
            baseline=Baseline(name=cold_start.STOCK_MODE, value=stock),
        )


def serving_cases(record: Data) -> Iterator[Case]:
    """Yields an engine's figures with bundled kernels over stock, and what they serve."""
    title = Workload.from_json(record["workload"]).title
    engine, _, _ = title.partition("/")
    stock = f"stock {engine} {record['runs'][0]['versions']['engine']}"
    for one in serving.sides(record):
        if one.own and one.stock:
            yield Case(
                name=f"{title}/{one.name}",
                figure=statistics.median(one.own),
                unit=one.unit,
                baseline=Baseline(name=stock, value=statistics.median(one.stock)),
                noise=one.noise,
            )
    for size, share in serving.served(record).items():
        yield Case(name=f"{title}/{size}/served", figure=100 * share, unit="% of GEMM time")
    for start, seconds in serving.plugin_seconds(record).items():
        yield Case(name=f"{title}/inside nvgemm-aot, {start.value}", figure=seconds, unit="s")
    if serving.of_mode(record, Mode.AUTO):
        most_ms = serving.most_while_serving_ms(record)
        yield Case(name=f"{title}/inside nvgemm-aot, while serving", figure=most_ms, unit="ms")
    for mode in (Mode.AUTO, Mode.OFF):
        for what in ("choices", "reductions", "tokens"):
            count, processes = serving.distinct(record, mode, what)
            if processes:
                yield Case(
                    name=f"{title}/{mode.value}/different digests of {what}",
                    figure=count,
                    unit="digests",
                    baseline=Baseline(name="processes", value=processes),
                )


def correctness_cases(record: Data) -> Iterator[Case]:
    """Yields the right kernels that passed and the planted faults that were caught, by type."""
    for dtype, row in record["types"].items():
        right = row["right"]
        yield _counted(f"{dtype}/right kernels", right["passed"], "tried", right["tried"])
        for fault, counts in row["faults"].items():
            if counts["planted"]:
                yield _counted(f"{dtype}/{fault}", counts["caught"], "planted", counts["planted"])


def _counted(name: str, figure: int, of: str, total: int) -> Case:
    return Case(name=name, figure=figure, unit="kernels", baseline=Baseline(name=of, value=total))


def dispatch_cases(entries: Data) -> Iterator[Case]:
    """Yields each choice's time over the best kernel's, at each size."""
    from benchmarks.dispatch.__main__ import ATEN, COMPILED, best_of

    for key, entry in entries.items():
        times = {name: Summary.from_json(row) for name, row in entry["times"].items()}
        best = times[best_of(times)]
        for choice, name in {**entry["choices"], ATEN: ATEN}.items():
            if choice in ("dispatch", COMPILED, ATEN) and name in times:
                yield _timed(f"{key}/{choice}", times[name], "best", best)


def gated_cases(entries: Data) -> Iterator[Case]:
    """Yields torch.compile with bundles, and the best kernel, over torch.compile without."""
    from benchmarks.gated.__main__ import read

    for key, entry in entries.items():
        stock, compiled, kernel, _ = read(entry)
        yield _timed(f"{key}/compiled", compiled, "without bundles", stock)
        yield _timed(f"{key}/best kernel", kernel, "without bundles", stock)


def gated_loads_cases(entries: Data) -> Iterator[Case]:
    """Yields each timing method's pick, as times over the fastest kernel."""
    from benchmarks.gated.loads import losses

    for key, entry in entries.items():
        for way, ratios in losses(entry).items():
            title = way if way == "alone" else f"after {way} ms of load"
            for name, figure in (
                ("mean", statistics.geometric_mean(ratios)),
                ("worst", max(ratios)),
            ):
                yield Case(name=f"{key}/{title}/{name}", figure=figure, unit="times the fastest")


def gated_allowed_cases(entries: Data) -> Iterator[Case]:
    """Yields a layer's kernel time, fused over not, and relative errors to fp32 on each side."""
    for key, entry in entries.items():
        for other in ("stock", "with bundles"):
            yield Case(
                name=f"{key}/fused",
                figure=entry["us"]["fused"],
                unit="us",
                baseline=Baseline(name=other, value=entry["us"][other]),
            )
        for side in ("stock", "fused"):
            for name, figure in zip(("gated values", "MLP"), entry["errors"][side]):
                yield Case(name=f"{key}/error of {name}/{side}", figure=figure, unit="of fp32")


def gated_quality_cases(entries: Data) -> Iterator[Case]:
    """Yields a small model's perplexity by rounding, over rounding twice, and its errors."""
    twice = Baseline(name="twice", value=entries["twice"]["perplexity"])
    for way, entry in entries.items():
        noise = None if entry["over_twice"] is None else entry["over_twice"][1]
        name = f"smollm2-135m/{way}"
        yield Case(
            name=f"{name}/perplexity",
            figure=entry["perplexity"],
            unit="perplexity",
            baseline=twice,
            noise=noise,
        )
        if entry["error"] is not None:
            yield Case(name=f"{name}/divergence", figure=entry["divergence"], unit="nats")
            yield Case(name=f"{name}/error of gated values", figure=entry["error"], unit="of fp32")


def hgemm_cases(entries: Data) -> Iterator[Case]:
    """Yields the best bundled kernel over the fastest of cuBLASLt, by size and mode; then means."""
    name = "cuBLASLt autotuned max"
    sizes = [hgemm.SizeTimes.from_json(key, entry) for key, entry in entries.items()]
    for mode in hgemm.MODES:
        for size in sizes:
            own = size.fastest(mode, hgemm.BUNDLED, hgemm.LAYOUTS)
            other = size.fastest(mode, hgemm.BASELINES[name].method, hgemm.LAYOUTS)
            if own is not None and other is not None:
                yield _timed(f"{size.size.key}/{mode}", own, "cuBLASLt autotuned", other)
        for title, gains in (
            ("bundled", [size.speedup(mode, name) for size in sizes]),
            ("best of both", [size.best_of(mode, name) for size in sizes]),
        ):
            yield Case(
                name=f"mean of {len(sizes)} sizes/{mode}/{title}",
                figure=100 * mean(gains),
                unit="% faster than cuBLASLt autotuned",
                noise=standard_error(gains, len(hgemm.EXTENTS) ** 3),
            )


def kernels_cases(entries: Data) -> Iterator[Case]:
    """Yields bundled kernels, and the best of all, over the best of ATen and Triton."""
    for key, entry in entries.items():
        if not entry["kernels"]:
            continue
        for launches, times in (("apart", entry), ("back to back", entry.get("back_to_back"))):
            if times is None:
                continue
            measured = kernels.ProblemTimes.from_json(key, times)
            others = "best of ATen and Triton" if measured.triton else "ATen"
            best = fastest([*measured.others, *measured.kernels.values()])
            bundled = fastest(measured.kernels.values())
            yield _timed(f"{key}/{launches}/bundled", bundled, others, measured.of_others)
            yield _timed(f"{key}/{launches}/best of all", best, others, measured.of_others)


def moe_cases(entries: Data) -> Iterator[Case]:
    """Yields each expert form's times and peak memory, over torch's."""
    from benchmarks.moe.models import MODELS
    from benchmarks.moe.turns import COMPILED, PARTS, TORCH

    for model, entry in entries.items():
        ways = entry["ways"]
        torchs = [way for way in ways if way.startswith(TORCH)]
        quickest = min(torchs, key=lambda way: sum(ways[way][part] for part in PARTS))
        for way, row in ways.items():
            if way in torchs:
                continue
            for part in PARTS:
                title, unit = part.rsplit("_", 1)
                for name, other in (("torchtitan", TORCH), ("torch's fastest", quickest)):
                    yield Case(
                        name=f"{model}/{way}/{title}",
                        figure=row[part],
                        unit=unit,
                        baseline=Baseline(name=name, value=ways[other][part]),
                    )
                flops = MODELS[model].flops * (2 if title == "backward" else 1)
                yield Case(
                    name=f"{model}/{way}/{title} rate",
                    figure=flops / row[part] / 1e9,
                    unit="TFLOP/s",
                    baseline=Baseline(name="dense product", value=entry["dense_tflops"]),
                )
            for name, other in (("torchtitan", TORCH), ("torchtitan, compiled", TORCH + COMPILED)):
                if other == TORCH or (way.endswith(COMPILED) and other in ways):
                    yield Case(
                        name=f"{model}/{way}/peak memory",
                        figure=row["peak_mb"],
                        unit="MB",
                        baseline=Baseline(name=name, value=ways[other]["peak_mb"]),
                    )


def training_cases(entries: Data) -> Iterator[Case]:
    """Yields each form's step time, peak memory and distance from losses in fp32."""
    from benchmarks.moe.training import EXACT, TORCH, distance

    if TORCH not in entries:
        return
    half = len(next(iter(entries.values()))["step_ms"]) // 2
    figures = {
        way: {
            "step": (median(row["step_ms"][half:]), "ms"),
            "peak memory": (row["peak_mb"], "MB"),
        }
        for way, row in entries.items()
    }
    if EXACT in entries:
        for way, row in entries.items():
            away = distance(row["losses"], entries[EXACT]["losses"])
            figures[way]["distance from losses in fp32"] = (away, "nats")
    for way, of_way in figures.items():
        for title, (figure, unit) in of_way.items():
            other = Baseline(name=TORCH, value=figures[TORCH][title][0])
            yield Case(name=f"{way}/{title}", figure=figure, unit=unit, baseline=other)


def calls_cases(record: Data) -> Iterator[Case]:
    """Yields each generated call's host time over the stock call's."""
    from benchmarks.runtime.chains import WITH_ONE_ROW_MORE, Row

    alone = {"function": record["functions_us"], "linear": record["linears_us"]}
    for title, times in {**alone, **record["chains_us"]}.items():
        for row in (row for row in Row if row.value in times):
            stock = Row.STOCK_BESIDE if row in WITH_ONE_ROW_MORE else Row.STOCK
            middle, other = (statistics.median(times[one.value]) for one in (row, stock))
            yield Case(name=f"{title}/{row.value}", figure=middle, unit="us",
                       baseline=Baseline(name="stock", value=other))  # fmt: skip


def loading_cases(record: Data) -> Iterator[Case]:
    """Yields load times and launches' host time."""
    loads, stock = record["loading"], statistics.median(record["host_time_us"]["torch.mm(out=)"])
    for key in ("entry_to_launchable_us", "first_launch_us"):
        yield Case(name=key[:-3].replace("_", " "), figure=median(loads[key]), unit="us")
    for name, times in record["host_time_us"].items():
        yield Case(name=f"host time/{name}", figure=median(times), unit="us",
                   baseline=Baseline(name="torch.mm(out=)", value=stock))  # fmt: skip


def lookup_cases(record: Data) -> Iterator[Case]:
    """Yields look-up times among the file's kernels."""
    for name, row in record["lookups"].items():
        yield Case(name=f"{record['kernels']} kernels/{name}", figure=row["median_us"], unit="us")


def build_cases(record: Data) -> Iterator[Case]:
    """Yields build time and bundle size."""
    small, large = record["overhead"], record["large"]
    kernels_ = large["kernels"]
    yield Case(name="compile and export/a kernel, bare", figure=small["seconds_per_kernel_bare"],
               unit="s")  # fmt: skip
    yield Case(name="build with one worker/times the bare compile", figure=small["ratio_median"],
               unit="times")  # fmt: skip
    yield Case(name=f"build/{kernels_} kernels", figure=large["build_seconds"], unit="s")
    yield Case(name=f"build again/{kernels_} kernels", figure=large["rebuild_seconds_median"],
               unit="s")  # fmt: skip
    yield Case(name=f"size/{kernels_} kernels", figure=large["bytes_per_kernel"],
               unit="bytes a kernel")  # fmt: skip


def coverage_cases(record: Data) -> Iterator[Case]:
    """Yields each manifest's kernels, bundle size and processor time."""
    for row in record["manifests"]:
        name = f"{row['name']}/{row['target']}"
        yield Case(name=f"{name}/problems", figure=row["problems"], unit="problems")
        yield Case(name=f"{name}/kernels", figure=row["kernels"], unit="kernels")
        yield Case(name=f"{name}/size", figure=row["file_bytes"], unit="bytes")
        yield Case(name=f"{name}/processor time", figure=row["cpu_seconds"], unit="s")


def choice_timing_cases(record: Data) -> Iterator[Case]:
    """Yields each timing method's choice, as times over the fastest."""
    for row in record["rows"]:
        times = row["times_us"]
        for state in ("memory", "cache"):
            best = min(one[state] for one in times.values())
            for way in ("stock", "cold", "gpu_time"):
                taken = min(times, key=lambda name: times[name][way])
                yield Case(
                    name=f"m{row['m']}n{row['n']}k{row['k']}/{state}/{way}",
                    figure=times[taken][state],
                    unit="us",
                    baseline=Baseline(name="fastest", value=best),
                )


def _timed(name: str, own: Summary, other_name: str, other: Summary) -> Case:
    return Case(
        name=name,
        figure=own.report_ns / 1e3,
        unit="us",
        baseline=Baseline(name=other_name, value=other.report_ns / 1e3),
        noise=abs(own.choice_ns / own.report_ns * other.report_ns / other.choice_ns - 1),
    )


CASES: dict[str, Callable[[Data], Iterable[Case]]] = {
    "additive": additive_cases,
    "additive.choice_timing": choice_timing_cases,
    "build": build_cases,
    "build.coverage": coverage_cases,
    "cold_start": cold_start_cases,
    "correctness": correctness_cases,
    "dispatch": dispatch_cases,
    "gated": gated_cases,
    "gated.allowed": gated_allowed_cases,
    "gated.loads": gated_loads_cases,
    "gated.quality": gated_quality_cases,
    "hgemm": hgemm_cases,
    "kernels": kernels_cases,
    "moe": moe_cases,
    "moe.tokens": moe_cases,
    "moe.training": training_cases,
    "runtime.calls": calls_cases,
    "runtime.loading": loading_cases,
    "runtime.lookup": lookup_cases,
    "serving": serving_cases,
}
"""Functions that compute a benchmark's cases: from its entries, or from its whole raw file."""


def write_cases(path: Path, benchmark: str, raw: Data, environment: Data, **run: Any) -> None:
    """Writes a raw file's cases beside it, as JSON lines.

    Args:
        path: Raw file.
        benchmark: Module under ``benchmarks``.
        raw: Argument for the function in `CASES`; benchmarks without one write nothing.
        environment: Versions and GPU product.
        **run: Other `benchmarks.record.Run` fields.
    """
    if benchmark in CASES:
        cases = CASES[benchmark](raw)
        write(path.with_suffix(".jsonl"), records_of(run_of(benchmark, environment, **run), cases))
