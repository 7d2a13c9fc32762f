"""`cold_start`'s table, with its goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

REFERENCE = "aten"
STOCK_MODE = "default"
DEFAULT_MODE = "default+measured"
"""Mode without max-autotune, with confirmed rankings."""
TRITON_MODE = "aten+triton"
BUNDLE_MODE = "aten+bundle"
MEASURED_MODE = "aten+measured"
JIT_MODE = "jit"
KEPT_MODE = "kept"
"""Mode of a second process with the kernels that `JIT_MODE` compiled."""

MOST_OVER_ATEN = 1.05
MOST_OVER_STOCK = 1.02
MOST_OVER_AUTOTUNED = 1.01
LEAST_UNDER_TRITON = 5.0
LEAST_UNDER_JIT = 100.0

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Measurements by label, one per repetition."""


def by_label(runs: Sequence[Mapping[str, Any]]) -> Runs:
    """Groups measurements by variant, in first-measured order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["label"], []).append(run)
    return found


def values(of_label: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Returns one number per repetition; a list of windows gives its median."""
    medians = [
        statistics.median(run[key]) if isinstance(run[key], list) and run[key] else run[key]
        for run in of_label
    ]
    return [float(one) for one in medians if not isinstance(one, list)]


def spread(numbers: Sequence[float], digits: int) -> str:
    """Formats the median, least and most."""
    if not numbers:
        return "-"
    middle, least, most = statistics.median(numbers), min(numbers), max(numbers)
    return f"{middle:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def own_seconds(run: Mapping[str, Any]) -> float:
    """Returns seconds by the plug-in's own clock."""
    stats = run.get("stats")  # older files have none
    return sum(stats["milliseconds"].values()) / 1e3 if stats else 0.0


def first_result_s(runs: Runs, label: str) -> float | None:
    """Returns the median seconds to the first result; None if not measured."""
    found = values(runs.get(label, ()), "first_result_s")
    return statistics.median(found) if found else None


def table(record: Mapping[str, Any]) -> list[str]:
    """Returns a file's table, with conditions and goals, as lines."""
    runs = by_label(record["runs"])
    every = record["runs"]
    found = every[0]["versions"]
    lines = [f"$ {one['command']}    # {one['date']}" for one in record["commands"]]
    named = [found["device"]]
    if found.get("driver"):  # not on a CPU, nor in older files
        named.append(f"driver {found['driver']}")
    named += [f"torch {found['torch']}", f"nvgemm-aot {found['nvgemm-aot']}"]
    lines.append(", ".join(named))
    for mode in (BUNDLE_MODE, MEASURED_MODE, DEFAULT_MODE):
        first = next((run for run in every if run["mode"] == mode), None)
        if first is not None:
            lines += [f"  {mode}: {bundle}" for bundle in first["versions"]["bundles"]]
    gemms = max(sum(run["count"].values()) for run in every)
    calls = ", ".join(map(str, record["batches"]))
    lines.append(f"{gemms} distinct GEMMs; sequences that decode: {calls}")
    columns = (
        ("first_result_s", "first result, s", 2),
        ("call_us", "call, us", 1),
        ("graph_us", "graph, us", 1),
    )
    head = "".join(f" {title:>26} {'ratio':>6}" for _, title, _ in columns)
    title = (
        f"{'':<24} {'runs':>4} {'import, s':>9}{head} {'plug-in, s':>10}  bundled / ATen / Triton"
    )
    lines.append(title)
    lines += [row(runs, label, columns) for label in runs]
    lines.append(f"medians over repetitions (least-most); ratios to {REFERENCE}")
    return lines + goals(runs)


def row(runs: Runs, label: str, columns: Sequence[tuple[str, str, int]]) -> str:
    """Returns one table row."""
    of_label = runs[label]
    imports = statistics.median(values(of_label, "import_s"))
    text = f"{label:<24} {len(of_label):4d} {imports:9.2f}"
    for key, _, digits in columns:
        own, reference = values(of_label, key), values(runs.get(REFERENCE, ()), key)
        ratio = "-"
        if own and reference:
            ratio = f"{statistics.median(own) / statistics.median(reference):.3f}"
        text += f" {spread(own, digits):>26} {ratio:>6}"
    counts = [
        " / ".join(str(run["count"][who]) for who in ("nvgemm", "aten", "triton"))
        for run in of_label
    ]
    own_s = statistics.median(own_seconds(run) for run in of_label)
    return f"{text} {own_s:10.2f}  {', '.join(dict.fromkeys(counts))}"


def goals(runs: Runs) -> list[str]:
    """Returns a line for each goal that was measured, with its verdict."""
    aten, triton = first_result_s(runs, REFERENCE), first_result_s(runs, TRITON_MODE)
    measured, jit = first_result_s(runs, MEASURED_MODE), first_result_s(runs, JIT_MODE)
    lines = default_goals(runs)
    if aten is not None and measured is not None:
        ratio = measured / aten
        lines.append(
            f"goal: {MEASURED_MODE} at most {MOST_OVER_ATEN} x {REFERENCE}: {ratio:.3f} x, "
            f"{verdict(MOST_OVER_ATEN, ratio)}"
        )
    if triton is not None and measured is not None:
        ratio = triton / measured
        lines.append(
            f"goal: {MEASURED_MODE} at least {LEAST_UNDER_TRITON:.0f} x as fast as {TRITON_MODE}: "
            f"{ratio:.2f} x, {verdict(ratio, LEAST_UNDER_TRITON)}"
        )
    if aten is None or jit is None:
        return lines
    noise = noise_s(runs)
    apart = "was run once" if math.isnan(noise) else f"has runs {noise:.2f} s apart"
    lines += [
        f"seconds that kernels add to {REFERENCE}, which {apart}, and by the plug-in's clock,",
        "which has matching, loading and timing of kernels and waiting for compilers:",
    ]
    for mode in (JIT_MODE, KEPT_MODE, BUNDLE_MODE, MEASURED_MODE):
        found = first_result_s(runs, mode)
        if found is None:
            continue
        own_s = statistics.median(own_seconds(run) for run in runs[mode])
        line = f"  {mode:<14} {found - aten:+8.2f} {own_s:8.3f}"
        if mode != JIT_MODE:
            added = math.nan if math.isnan(noise) else max(found - aten, noise)
            about = "at least " if found - aten < noise else ""
            ratio = (jit - aten) / added if added > 0 else math.nan
            by_wall = "not known"
            if not math.isnan(ratio):
                by_wall = f"{about}{ratio:.0f} x, {verdict(ratio, LEAST_UNDER_JIT)}"
            own_jit = statistics.median(own_seconds(run) for run in runs[JIT_MODE])
            by_clock = own_jit / own_s if own_s else math.nan
            line += (
                f"   goal: {LEAST_UNDER_JIT:.0f} x less than {JIT_MODE}: {by_wall}; "
                f"by the clock {by_clock:.0f} x, {verdict(by_clock, LEAST_UNDER_JIT)}"
            )
        lines.append(line)
    return lines


def default_goals(runs: Runs) -> list[str]:
    """Returns the goals without max-autotune."""
    own, stock = first_result_s(runs, DEFAULT_MODE), first_result_s(runs, STOCK_MODE)
    if own is None or stock is None:
        return []
    lines = [
        f"goal: {DEFAULT_MODE} at most {MOST_OVER_STOCK} x {STOCK_MODE}: {own / stock:.3f} x, "
        f"{verdict(MOST_OVER_STOCK, own / stock)}"
    ]
    within, stock_within = (
        [run["within_s"] for run in runs[mode] if "within_s" in run]  # older files have none
        for mode in (DEFAULT_MODE, STOCK_MODE)
    )
    if within and stock_within:
        added_s = statistics.median(within) - statistics.median(stock_within)
        lines.append(
            f"  seen on the stack, nvgemm-aot takes {spread(within, 3)} s of it, "
            f"and without kernels {spread(stock_within, 3)} s: "
            f"by that {1 + added_s / stock:.4f} x"
        )
    for key in ("call_us", "graph_us"):
        mine, best = (values(runs.get(mode, ()), key) for mode in (DEFAULT_MODE, TRITON_MODE))
        if mine and best:
            ratio = statistics.median(mine) / statistics.median(best)
            lines.append(
                f"goal: {DEFAULT_MODE}, {key}, at most {MOST_OVER_AUTOTUNED} x {TRITON_MODE}: "
                f"{ratio:.3f} x, {verdict(MOST_OVER_AUTOTUNED, ratio)}"
            )
    return lines


def noise_s(runs: Runs) -> float:
    """Returns the seconds between the least and the most first result in mode `REFERENCE`.

    Not a number where there is one alone.
    """
    found = values(runs.get(REFERENCE, ()), "first_result_s")
    return max(found) - min(found) if len(found) > 1 else math.nan


def verdict(more: float, less: float) -> str:
    """Returns the table's word for a goal that requires one number to be at least another."""
    if math.isnan(more) or math.isnan(less):
        return "not known"
    return "met" if more >= less else "MISSED"
