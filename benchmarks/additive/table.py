"""Verdicts on models that are slower with bundles, and their table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

SIDES = {"with": "auto", "without": "off"}
"""Sides that are compared, with the plug-in's mode in each."""

ALLOWED = 0.01
"""Share by which a model may be slower, beyond noise."""

NOTABLE = 1.02
"""Ratio from which a single process is counted; it includes noise and chance choices."""

T_95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895}
"""One-sided Student's t at 95 %, by degrees of freedom, from any table."""


def judge(cases: list[dict[str, Any]]) -> None:
    """Adds ratio, noise and verdict to each model, batch and mode.

    A process gives one ratio, of the least times on both sides: neighbours on the machine only ever
    add to a time. A case's noise is that of its processes' ratios, at least the usual noise with
    these backends in this mode: a few processes may agree by chance.

    Args:
        cases: Entries with ``backends`` and, by mode, ``times_us``: each process' times by side.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in cases:
        for mode, timed in case["modes"].items():
            groups.setdefault((case["backends"], mode), []).append(timed)
    for group in groups.values():
        variances = [statistics.variance(_log_ratios(timed)) for timed in group]
        usual = statistics.fmean(variances)
        for timed, variance in zip(group, variances):
            ratios = _log_ratios(timed)
            ratio = math.exp(statistics.fmean(ratios))
            noise = T_95[len(ratios) - 1] * math.sqrt(max(variance, usual) / len(ratios))
            timed.update(
                least_us={
                    side: [min(times[side]) for times in timed["times_us"]] for side in SIDES
                },
                ratio=ratio,
                noise=noise,
                slower=ratio > 1 + ALLOWED + noise,
            )


def _log_ratios(timed: dict[str, Any]) -> list[float]:
    """Returns each process' log ratio: time with bundles over time without."""
    return [math.log(min(times["with"]) / min(times["without"])) for times in timed["times_us"]]


def table(cases: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each model and batch, then the slower ones; `judge` comes first."""
    modes = list(cases[0]["modes"])
    lines = []
    for backends in dict.fromkeys(case["backends"] for case in cases):
        heads = " ".join(f"{mode + ', us':>17} {'ratio':>7} {'noise':>7}" for mode in modes)
        lines += [f"{backends}", f"{'':<16} {'batch':>5} {heads}  {'with':>7} {'w/o':>7}"]
        lines += [_row(case, modes) for case in cases if case["backends"] == backends]
    lines.append(
        "us: with bundles / without; last columns: GEMMs that bundled kernels / ATen / Triton "
        "compute, in the first process"
    )
    for backends in dict.fromkeys(case["backends"] for case in cases):
        for mode in modes:
            those = [case for case in cases if case["backends"] == backends]
            lines += [f"{backends}, {mode}: {one}" for one in _summary(those, mode)]
    return lines


def _summary(cases: list[dict[str, Any]], mode: str) -> Iterator[str]:
    timed = [case["modes"][mode] for case in cases]
    slower = [f"{one['model']} {one['batch']}" for one in cases if one["modes"][mode]["slower"]]
    mean = math.exp(statistics.fmean(math.log(one["ratio"]) for one in timed))
    yield (
        f"{mean:.4f} times as long in the geometric mean, at most "
        f"{max(one['ratio'] for one in timed):.4f}; slower than {ALLOWED:.0%} beyond noise: "
        f"{', '.join(slower) or 'none'} ({len(slower)} of {len(timed)})"
    )
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for case in cases:
        found = _log_ratios(case["modes"][mode])
        for report, ratio in zip(case["reports"], found, strict=True):
            ratios[bool(report["with"]["count"]["nvgemm"])].append(math.exp(ratio))
    for is_bundled, who in ((True, "that call bundled kernels"), (False, "that call none")):
        if of_them := ratios[is_bundled]:
            yield (
                f"of {len(of_them)} processes {who}, {sum(one > NOTABLE for one in of_them)} took "
                f"over {NOTABLE - 1:.0%} longer, at most {max(of_them):.4f} times as long"
            )


def _row(case: dict[str, Any], modes: list[str]) -> str:
    columns = []
    for mode in modes:
        timed = case["modes"][mode]
        times = "/".join(f"{statistics.median(timed['least_us'][side]):.1f}" for side in SIDES)
        mark = "*" if timed["slower"] else " "
        columns.append(f"{times:>17} {timed['ratio']:7.4f}{mark}±{timed['noise']:.4f}")
    counts = [
        "/".join(
            str(case["reports"][0][side]["count"][who]) for who in ("nvgemm", "aten", "triton")
        )
        for side in SIDES
    ]
    return (
        f"{case['model']:<16} {case['batch']:>5} {' '.join(columns)}  {counts[0]:>7} {counts[1]:>7}"
    )
