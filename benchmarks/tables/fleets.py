"""Tables about fleets: figures of the parts, and what 50,000 kernels cost by them."""

from __future__ import annotations

from benchmarks.tables.selection import NONE, Selection, gpu, markdown, times

KERNELS = 50_000
WORKERS = (1, 10, 100)
"""Workers of one core each, and GPUs."""

CONFIRMING = 2
"""GPUs that measure each problem."""


def parts(records: Selection) -> str:
    """Figures of the parts, each beside what it is compared with."""
    rows = [
        (
            record.run.benchmark,
            record.case.name,
            NONE if record.run.gpu is None else gpu(_product(record.run.gpu)),
            f"{_number(record.case.figure)} {record.case.unit}",
            NONE
            if record.case.baseline is None
            else f"{times(record.over_baseline)} {record.case.baseline.name}",
            record.run.date or NONE,
        )
        for benchmark, cases in _PARTS
        for record in records.where(benchmark, cases)
    ]
    head = ("benchmark", "case", "GPU", "figure", "over", "date")
    return markdown(head, [(f"`{name}`", *cells) for name, *cells in rows])


_PARTS = (
    ("fleet.dask_build", ""),
    ("fleet.remote_cache", ""),
    ("fleet.tuning", ""),
    ("large_bundles", "10000 .*, declared, version 2, .*|50000 .*"),
)
"""Benchmarks, and the cases that the table has."""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _product(name: str) -> str:
    return name.removeprefix("NVIDIA ").partition(" ")[0].lower()


def arithmetic(records: Selection) -> str:
    """Time and bytes of 50,000 kernels, by the number of workers or GPUs."""
    covered = records.where("build.coverage")
    kernels, problems, seconds = (
        sum(record.case.figure for record in covered.where(case=f".*/{what}"))
        for what in ("kernels", "problems", "processor time")
    )
    second_worker = records.where("fleet.dask_build", "compile stage, 486 .*").only()
    scheduler_ms = records.where("fleet.dask_build", "scheduler, a kernel").only().case.figure
    client_ms = records.where("fleet.remote_cache", "fetch and check, a kernel").only().case.figure
    entry_bytes = records.where("fleet.remote_cache", "an entry").only().case.figure
    bundle_bytes = records.where("build", "size/854 kernels").only().case.figure
    problem_s = records.where("fleet.tuning", "a problem, 1 GPU").only().case.figure
    second_gpu = records.where("fleet.tuning", "measuring, 2 GPUs").only()
    compile_s = KERNELS * seconds / kernels
    serial_s = KERNELS * (client_ms + scheduler_ms) / 1e3
    tuned = round(KERNELS * problems / kernels)
    tuning_s = tuned * problem_s * CONFIRMING

    def divided(total: float, count: int, speedup: float) -> float:
        """Total over the count, with the loss that the second worker has."""
        return total / count * (1 if count == 1 else 2 / speedup)

    rows = [
        (
            "compile and plan",
            _duration(compile_s) + " of a core",
            *(_duration(divided(compile_s, count, second_worker.speedup)) for count in WORKERS),
        ),
        (
            "deal, fetch and check, where the build runs",
            _duration(serial_s) + " of a core",
            *([_duration(serial_s)] * len(WORKERS)),
        ),
        (
            f"measure {tuned:,} problems, each on {CONFIRMING} GPUs",
            _duration(tuning_s) + " of a GPU",
            *(_duration(divided(tuning_s, count, second_gpu.speedup)) for count in WORKERS),
        ),
        ("shared cache", f"{KERNELS * entry_bytes / 1e6:,.0f} MB", *([NONE] * len(WORKERS))),
        ("bundles", f"{KERNELS * bundle_bytes / 1e6:,.0f} MB", *([NONE] * len(WORKERS))),
    ]
    return markdown(
        ("", "in all", *(f"{count:,} worker{'s' * (count > 1)}" for count in WORKERS)), rows
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
