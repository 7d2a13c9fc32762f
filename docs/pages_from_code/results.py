"""Benchmark results, from the committed JSON where this knows its form, else as printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from .tables import table

Data = dict[str, Any]


def section(folder: Path) -> str:
    """Each result under its name: what it was made with, a table or the printed text, its files."""
    names = sorted({path.stem for path in folder.iterdir()}, key=_order)
    return "\n\n".join(_result(folder, name) for name in names)


def _order(name: str) -> tuple[str, str]:
    """By name, and of one benchmark the newest first."""
    title, date = title_and_date(name)
    return title, "".join(chr(255 - ord(one)) for one in date)


def title_and_date(name: str) -> tuple[str, str]:
    """A result's name without its date, and its date."""
    found = re.fullmatch(r"(.*)-(\d{4}-\d{2}-\d{2})", name)
    return (found[1], found[2]) if found else (name, "")


def _result(folder: Path, name: str) -> str:
    title, date = title_and_date(name)
    files = sorted(folder.glob(f"{name}.*"))
    parts = [f"## {title}, {date}"]
    data: Data | None = None
    for path in files:
        if path.suffix == ".json":
            data = json.loads(path.read_text("utf-8"))
    if data is not None and (made_with := _made_with(data)):
        parts.append(made_with)
    kind = re.sub(r"-(cpu|h200|\d+-gemms)", "", title)
    if data is not None and kind in TABLES:
        parts.append(TABLES[kind](data))
    links = ", ".join(f"[{path.name}](../../benchmarks/results/{path.name})" for path in files)
    printed = [path for path in files if path.suffix in (".txt", ".md")]
    if printed and not (data is not None and kind in TABLES):
        text = printed[0].read_text("utf-8").rstrip()
        parts.append(f'??? note "As printed"\n\n    ```text\n{_indented(text)}\n    ```')
    parts.append(f"Files: {links}")
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _made_with(data: Data) -> str:
    """Versions and machine, as far as a result has them."""
    versions = data.get("versions") or data.get("environment") or {}
    if "runs" in data and data["runs"] and "versions" in data["runs"][0]:
        versions = data["runs"][0]["versions"]
    versions = versions or {key: data[key] for key in ("gpu", "torch", "nvgemm-aot") if key in data}
    return ", ".join(
        f"{key} {value}".removeprefix("device ").removeprefix("gpu ")
        for key, value in versions.items()
        if not isinstance(value, (list, dict))
    )


def _build(data: Data) -> str:
    overhead, large = data["overhead"], data["large"]
    return table(
        ("", ""),
        [
            (
                f"bare compile and export of {overhead['kernels']} kernels, one core",
                f"{overhead['seconds_per_kernel_bare']:.2f} s a kernel",
            ),
            (
                "the same kernels by `nvgemm-aot build` with one worker",
                f"{overhead['ratio_median']:.2f} times that",
            ),
            (f"a build of {large['kernels']} kernels", f"{large['build_seconds']:.0f} s"),
            ("the same build again", f"{large['rebuild_seconds_median']:.2f} s"),
            ("size of that bundle", f"{large['bytes_per_kernel']:.0f} bytes a kernel"),
        ],
    )


def _cold_start(data: Data) -> str:
    by_mode: dict[str, list[Data]] = {}
    for run in data["runs"]:
        by_mode.setdefault(run["mode"], []).append(run)
    seconds = {
        mode: median(run["first_result_s"] for run in runs) for mode, runs in by_mode.items()
    }
    calls = {mode: median(median(run["call_us"]) for run in runs) for mode, runs in by_mode.items()}
    rows = [
        (
            f"`{mode}`",
            str(len(runs)),
            f"{seconds[mode]:.2f}",
            f"{seconds[mode] / seconds['aten']:.2f}",
            f"{sum(median(_milliseconds(run, key) for run in runs) for key in CLOCK) / 1e3:.2f}",
            f"{calls[mode]:.0f}",
        )
        for mode, runs in by_mode.items()
    ]
    head = ("mode", "processes", "first result, s", "times ATEN", "plug-in's clock, s", "call, µs")
    return table(head, rows)


CLOCK = ("matching", "loading", "timing", "jit")


def _milliseconds(run: Data, key: str) -> float:
    return float(run["stats"]["milliseconds"].get(key, 0))


def _correctness(data: Data) -> str:
    faults = list(next(iter(data["types"].values()))["faults"])
    rows = [
        (
            f"`{name}`",
            str(one["sizes"]),
            f"{one['right']['passed']} of {one['right']['tried']}",
            *(f"{one['faults'][key]['caught']} of {one['faults'][key]['planted']}"
              for key in faults),
        )
        for name, one in data["types"].items()
    ]  # fmt: skip
    return table(("A, B", "sizes", "right kernels passed", *faults), rows)


def _coverage(data: Data) -> str:
    keys = ("problems", "choices", "kernels")
    rows = [
        (one["name"], one["target"], *(f"{one[key]:,}" for key in keys),
         f"{one['file_bytes'] / 1e3:,.1f} kB", f"{one['cpu_seconds'] / 60:.1f}",
         str(len(one["failed"])))
        for one in data["manifests"]
    ]  # fmt: skip
    total = [sum(one[key] for one in data["manifests"]) for key in ("problems", "choices")]
    rows.append(
        ("all, each kernel once", "", *(f"{one:,}" for one in total),
         f"{data['unique_kernels']:,}", "", "", "")
    )  # fmt: skip
    head = ("manifest", "target", "problems", "kernels ranked", "compiled", "bundle")
    return table((*head, "minutes of a core", "failed"), rows)


def _lookup(data: Data) -> str:
    rows = [
        (name, *(f"{one[key]:.1f}" for key in ("median_us", "p99_us", "max_us")))
        for name, one in data["lookups"].items()
    ]
    return (
        f"{data['kernels']:,} kernels, {data['problems']:,} declared problems.\n\n"
        + table(("look-up, µs", "median", "99 %", "longest"), rows)
    )  # fmt: skip


def _runtime(data: Data) -> str:
    loading = data["loading"]
    times: dict[str, Iterable[float]] = {
        "from a bundle's entry to a kernel that can be launched": loading["entry_to_launchable_us"],
        "first launch, with the upload of its device code": loading["first_launch_us"],
        **{f"host time of `{name}`": one for name, one in data["host_time_us"].items()},
    }
    rows = [
        (name, *(f"{kind(one):.2f}" for kind in (median, min, max))) for name, one in times.items()
    ]
    memory = (
        f"A loaded kernel takes {loading['host_bytes_per_kernel'] / 1e3:.0f} kB on the host and "
        f"{loading['device_bytes_per_kernel'] / 1e3:.0f} kB on the GPU."
    )
    return table(("µs", "median", "least", "most"), rows) + f"\n\n{memory}"


TABLES: dict[str, Callable[[Data], str]] = {
    "build": _build,
    "cold-start": _cold_start,
    "correctness": _correctness,
    "coverage": _coverage,
    "lookup": _lookup,
    "runtime": _runtime,
}
"""By benchmark: its table, made from its JSON."""
