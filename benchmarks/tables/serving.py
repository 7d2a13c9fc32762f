"""Table of whole models in serving engines."""

from __future__ import annotations

import re
from statistics import geometric_mean

from benchmarks.record import Record
from benchmarks.tables.selection import NONE, Selection, gpu, markdown, times

BENCHMARK = "serving"

HEAD = ("engine", "model", "", "GPU", "with a wheel, tokens/s", "stock", "speed-up",
        "kernels' speed-up", "GEMM time served")  # fmt: skip


def serving(records: Selection) -> str:
    """Rates, kernels' time and served GEMM time, by engine, model and size."""
    rows = []
    for rate in records.where(BENCHMARK, ".*/rate"):
        engine, model, size, _ = rate.case.name.split("/")
        beside = records.where(BENCHMARK, re.escape(f"{engine}/{model}/{size}/") + ".*")
        beside = Selection(one for one in beside if one.run.gpu == rate.run.gpu)
        kernels = [one.speedup for one in beside.where(case=".*/kernels")]
        shares = [one.case.figure for one in beside.where(case=".*/served")]
        rows.append(
            (
                engine,
                model,
                size,
                _gpu(rate),
                f"{rate.case.figure:,.0f}",
                NONE if rate.case.baseline is None else f"{rate.case.baseline.value:,.0f}",
                times(rate.speedup, 3),
                times(geometric_mean(kernels), 3) if kernels else NONE,
                f"{max(shares):.0f} %" if shares else NONE,
            )
        )
    return markdown(HEAD, rows)


def decode(records: Selection, batch: int) -> Selection:
    """Selects Llama-3.1-8B's decode rate in vLLM on an H100."""
    case = rf"vllm/llama-3\.1-8b, 32 layers/decode, batch {batch}/rate"
    return records.where(BENCHMARK, case, on="h100")


def _gpu(record: Record) -> str:
    return gpu(Selection([record]).products[0])
