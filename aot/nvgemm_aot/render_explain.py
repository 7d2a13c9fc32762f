"""What the command prints of the GEMMs that a run met."""

from __future__ import annotations

import math
from typing import Any

from .tables import table

Document = dict[str, Any]

_MOST_REASONS = 3


def explain_text(document: Document) -> str:
    """A table of the GEMMs, and below it why some have no bundled kernel."""
    gemms = document["gemms"]
    if not gemms:
        return (
            "no GEMM came up for autotuning: nothing was compiled under max-autotune "
            '(torch.compile(model, mode="max-autotune")), or NVGEMM_AOT=off'
        )
    rows = [
        (
            gemm["gemm"],
            gemm["graphs"],
            gemm["basis"],
            len(gemm["offered"]),
            _time(gemm, bundled=True),
            _time(gemm, bundled=False),
            _in_code(gemm),
        )
        for gemm in gemms
    ]
    header = (
        "problem", "met", "found as", "offered", "best of ours, us", "best other, us", "in the code"
    )  # fmt: skip
    return "\n".join([table(rows, header), *_misses(gemms)])


def _time(gemm: Document, *, bundled: bool) -> str:
    times = {
        name: time
        for name, time in gemm["times_ms"].items()
        if time is not None and math.isfinite(time) and (name in gemm["offered"]) == bundled
    }
    if not times:
        return "-"
    best = min(times, key=times.__getitem__)
    return f"{times[best] * 1e3:.1f} {best}"


def _in_code(gemm: Document) -> str:
    if gemm["used"]:
        return ", ".join(f"{name} {gemm['offered'].get(name, '')}".strip() for name in gemm["used"])
    return gemm["fastest"] or "-"


def _misses(gemms: list[Document]) -> list[str]:
    lines = []
    for gemm in gemms:
        if gemm["basis"] == "miss":
            lines += ["", f"{gemm['gemm']}: no bundled kernel"]
            lines += [f"  {reason}" for reason in gemm["reasons"][:_MOST_REASONS]]
            if len(gemm["reasons"]) > _MOST_REASONS:
                lines.append(f"  … and {len(gemm['reasons']) - _MOST_REASONS} more reasons")
    return lines
