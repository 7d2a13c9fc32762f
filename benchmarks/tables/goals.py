"""Project goals and their best results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.tables.selection import TIMES, Selection, gpu, markdown, times

Figure = Callable[[Selection], float]
FORMATS: dict[str, Callable[[float], str]] = {
    TIMES: lambda value: times(value, 3 if value < 10 else 1),
    "%": lambda value: f"{value:+.1f} %",
    "µs": lambda value: f"{value:.2f} µs",
    "s": lambda value: f"{value:.1f} s",
    "ms": lambda value: f"{value:.1f} ms",
    "MB": lambda value: f"{value:.1f} MB",
    "bytes": lambda value: f"{value:,.0f} bytes",
    "": lambda value: f"{value:.0f}",
}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One row on the goals page.

    Attributes:
        title: Quantity, with its baseline.
        limit: Value to reach.
        at_least: True if larger values are better.
        unit: Key in `FORMATS`.
        select: Selects the goal's records.
        figure: Computes the quantity from one product's records.
    """

    title: str
    limit: float
    at_least: bool = False
    unit: str = TIMES
    select: Callable[[Selection], Selection]
    figure: Figure

    def row(self, records: Selection) -> tuple[str, ...]:
        """Returns the cells: goal, best result, GPU, date, met or not."""
        selected = self.select(records)
        values = {name: self.figure(selected.where(on=name)) for name in selected.products}
        best = (max if self.at_least else min)(values, key=values.__getitem__)
        sign = "≥" if self.at_least else "≤"
        formatted = FORMATS[self.unit]
        limit = f"{self.limit:,g}{self.unit if self.unit in (TIMES, '') else f' {self.unit}'}"
        verdicts = {name: self.is_met(value) for name, value in values.items()}
        verdict = "yes" if verdicts[best] else "**no**"
        if verdicts[best] and not all(verdicts.values()):
            others = ", ".join(
                f"{gpu(name)} ({formatted(values[name])})" for name in values if not verdicts[name]
            )
            verdict += f"; **no** on {others}"
        date = selected.where(on=best).date
        return f"{self.title} {sign} {limit}", formatted(values[best]), gpu(best), date, verdict

    def is_met(self, value: float) -> bool:
        """True if a value reaches the limit."""
        return value >= self.limit if self.at_least else value <= self.limit


def _slower(selection: Selection) -> float:
    """Returns how many cases are slower by over 1 % beyond their noise."""
    return sum(record.over_baseline > 1.01 + (record.case.noise or 0.0) for record in selection)


def _count(selection: Selection) -> float:
    return sum(record.case.figure for record in selection)


def _figure(selection: Selection) -> float:
    return selection.only().case.figure


def _newest_figure(selection: Selection) -> float:
    return max(selection, key=lambda record: record.run.date or "").case.figure


def _most(selection: Selection) -> float:
    return max(record.over_baseline for record in selection)


def _mean(selection: Selection) -> float:
    return selection.over_baseline()


def _speedup(selection: Selection) -> float:
    return selection.speedup()


def _least(selection: Selection) -> float:
    return selection.least_speedup()


def _where(
    benchmark: str, case: str, baseline: str | None = None, on: str | None = None
) -> Callable[[Selection], Selection]:
    return lambda records: records.where(benchmark, case, baseline=baseline, on=on)


def _cold_start() -> list[Goal]:
    rows = [
        (f"{count} GEMMs: {title}", limit, count, mode, what, reference)
        for count in (30, 10)
        for title, limit, mode, what, reference in (
            ("first result with measured rankings, over ATen alone", 1.05,
             r"aten\+measured", "first result", "aten"),
            ("first result without max-autotune, over stock", 1.02,
             r"default\+measured", "first result", "default"),
            ("call without max-autotune, over max-autotune with Triton", 1.01,
             r"default\+measured", "call", "aten+triton"),
        )
    ]  # fmt: skip
    goals = [
        Goal(title=title, limit=limit, figure=_mean,
             select=_where("cold_start", f"{count} GEMMs/{mode}/{what}", reference))
        for title, limit, count, mode, what, reference in rows
    ]  # fmt: skip
    goals += [
        Goal(title=f"{count} GEMMs: measured rankings, speed-up over max-autotune "
             "with Triton", limit=5, at_least=True, figure=_speedup,
             select=_where("cold_start", rf"{count} GEMMs/aten\+measured/first result",
                           "aten+triton"))
        for count in (30, 10)
    ]  # fmt: skip
    goals.append(
        Goal(title="10 GEMMs: first result without max-autotune by stack samples, "
             "over stock", limit=1.02, figure=_mean,
             select=_where("cold_start", "10 GEMMs/.*/first result by stack samples"))
    )  # fmt: skip
    for mode, words in (("measured", "measured"), ("bundle", "estimated")):
        goals.append(
            Goal(title=f"30 GEMMs: time inside nvgemm-aot with {words} rankings, "
                 "reduction from the JIT's", limit=100, at_least=True, figure=_speedup,
                 select=_where("cold_start", rf"30 GEMMs/aten\+{mode}/inside nvgemm-aot", "jit"))
        )  # fmt: skip
    return goals


def _kernels() -> list[Goal]:
    few = r"mm/.*/m(1|2|4|8|16|32|64)n\d+k\d+"
    rows = (
        ("156 GEMMs, launches apart: best of all", 1.03, "mm/.*/apart/best of all", _speedup),
        ("156 GEMMs, launches apart: worst case", 0.99, "mm/.*/apart/best of all", _least),
        ("156 GEMMs, launches apart: bundled alone", 1.0, "mm/.*/apart/bundled", _speedup),
        ("m up to 64, launches apart: best of all", 1.04, f"{few}/apart/best of all", _speedup),
        ("156 GEMMs back to back: best of all", 1.04, "mm/.*/back to back/best of all", _speedup),
    )
    goals = [
        Goal(title=f"{title}, speed-up over ATen and Triton", limit=limit, at_least=True,
             select=_where("kernels", case), figure=figure)
        for title, limit, case, figure in rows
    ]  # fmt: skip
    for mode, words in (("offline", "back to back"), ("server", "single requests")):
        for title, limit in (("bundled", 0.0), ("best of both", 5.0)):
            goals.append(
                Goal(title=f"HGEMM-1000, {words}: {title}, over autotuned cuBLASLt", limit=limit,
                     at_least=True, unit="%", figure=_newest_figure,
                     select=_where("hgemm", f"mean of .*/{mode}/{title}"))
            )  # fmt: skip
    return goals


def _models() -> list[Goal]:
    kinds = (
        ("ATEN", "max-autotune with ATen", ("graphs", "calls")),
        ("ATEN,TRITON", "max-autotune with ATen and Triton", ("graphs", "calls")),
        ("default", "plain torch.compile, rankings of two GPUs", ("graphs", "calls")),
        ("default, repeated rankings", "plain torch.compile, repeated rankings",
         ("kernels", "graphs", "calls")),
    )  # fmt: skip
    words = {"graphs": "CUDA graphs", "calls": "calls", "kernels": "kernel time"}
    goals = []
    for backends, title, modes in kinds:
        for mode in modes:
            goals += [
                Goal(title=f"{title}, {words[mode]}: models slower beyond noise", limit=0,
                     unit="", figure=_slower,
                     select=_where("additive", f"{backends}/.*/batch .*/{mode}")),
                Goal(title=f"{title}, {words[mode]}: single processes over 2 % slower", limit=0,
                     unit="", figure=_count,
                     select=_where("additive", f"{backends}/processes .*/{mode} over .*")),
            ]  # fmt: skip
    goals.append(
        Goal(title="Dispatch by m in a compiled graph, over the best kernel", limit=1.02,
             select=_where("dispatch", "mm/.*/compiled"), figure=_mean)
    )  # fmt: skip
    for title, figure in (("mean", _speedup), ("worst case", _least)):
        goals.append(
            Goal(title=f"Gated MLPs from m 512 on, {title}: speed-up over stock", limit=1.05,
                 at_least=True, select=_where("gated", ".*/compiled"), figure=figure)
        )  # fmt: skip
    return goals


def _experts() -> list[Goal]:
    goals = []
    for model, way, limits in (
        ("gpt-oss-20b", "experts", (1.25, 1.30)),
        ("Qwen3-30B-A3B", "experts", (1.45, 1.50)),
        ("Qwen3-30B-A3B", "experts, 2 weights", (1.45, 1.50)),
        ("Mixtral-8x7B", "experts", (1.10, 1.10)),
        ("Mixtral-8x7B", "experts, 2 weights", (1.10, 1.10)),
    ):
        for part, limit in zip(("forward", "backward"), limits):
            goals.append(
                Goal(title=f"{model} {way}, {part}: speed-up over torchtitan", limit=limit,
                     at_least=True, figure=_speedup,
                     select=_where("moe", f"{model}/{way}/{part}", "torchtitan"))
            )  # fmt: skip
    goals.append(
        Goal(title="Experts of four models, slower direction: share of a dense product's rate",
             limit=0.88, at_least=True, figure=_least,
             select=_where("moe", ".* rate", "dense product"))
    )  # fmt: skip
    for benchmark, title in (("moe", "Experts"), ("moe.tokens", "Tokens to tokens")):
        for suffix, words in (("", "as called"), (", compiled", "compiled")):
            case = f"[^/]*/experts(, 2 weights)?{suffix}/peak memory"
            goals.append(
                Goal(title=f"{title}, {words}: peak memory over torchtitan's, worst model",
                     limit=1, figure=_most,
                     select=_where(benchmark, case, f"torchtitan{suffix}", on="h200"))
            )  # fmt: skip
    return goals


def _host() -> list[Goal]:
    goals = []
    for language in ("Python", "C++"):
        title = language.replace("+", r"\+")
        goals.append(
            Goal(title=f"Host time of a compiled call in {language}, over stock", limit=0.6,
                 select=_where("runtime.calls", f"{title}/kernel"), figure=_mean)
        )  # fmt: skip
    goals += [
        Goal(title="Host time of a compiled call in C++, over Python", limit=1.0,
             select=_where("runtime.calls", r"(Python|C\+\+)/kernel"), figure=_cpp_over_python),
        Goal(title="Host time that dispatch by m adds to a call", limit=0.3, unit="µs",
             select=_where("runtime.calls", r"Python/(by m, )?kernel"), figure=_added),
        Goal(title="Host time of `mm(out=, kernel=)`, over `torch.mm(out=)`", limit=0.5,
             select=_where("runtime.loading", r"host time/mm\(out=, kernel=\)"), figure=_mean),
        Goal(title="Loading a kernel until it can be launched", limit=250, unit="µs",
             select=_where("runtime.loading", "entry to launchable"), figure=_figure),
        Goal(title="Look-up of a declared problem among 10,000 kernels", limit=50, unit="µs",
             select=_where("runtime.lookup", ".*/declared"), figure=_figure),
        Goal(title="`confirm` for a model, 324 problems", limit=30, unit="s",
             select=_where("tuning.confirm", ".*/measured with another torch"), figure=_figure),
        *(
            Goal(title=f"Llama-3.1-8B in vLLM, decode at batch {batch}, gates fused, "
                       "tokens a second", limit=limit, at_least=True, figure=_speedup,
                 select=_where("serving", rf"vllm/llama-3\.1-8b, 32 layers, gates fused/decode, "
                                          rf"batch {batch}/rate"))
            for batch, limit in ((1, 1.045), (16, 1.06), (64, 1.04))
        ),
        Goal(title="Estimates for new sizes, first choice over the best kernel", limit=1.05,
             select=_where("estimates", "all/corrected/first"), figure=_figure),
        Goal(title="Estimates for new sizes, best of four over the best kernel", limit=1.015,
             select=_where("estimates", "all/corrected/best of four"), figure=_figure),
        Goal(title="Estimates for groups, first choice over the best kernel", limit=1.05,
             select=_where("group_estimates", "held back/all/first"), figure=_figure),
        Goal(title="Bundle size a kernel, 350 kernels", limit=3000, unit="bytes",
             select=_where("build.size", "350 .*"), figure=_figure),
        Goal(title="Checkout to matched kernel on two cores, besides pip",
             limit=90, unit="s", figure=_count,
             select=_where("build.path", "quickstart.*|doctor|coverage")),
        Goal(title="Manifest of a 70B model from its config, on one core", limit=12, unit="s",
             select=_where("build.path", "from-config, qwen2.*"), figure=_figure),
        *(
            Goal(title=f"Build for {title}, processor time over x86-64 alone", limit=limit,
                 select=_where("build.platforms", f"{case}.*"), figure=_mean)
            for title, case, limit in (
                ("Arm", "Arm, cu13", 1.3),
                ("both platforms", r"both, cu13, \d+", 1.5),
                ("both platforms and both CUDA versions", "both, cu13 and cu12", 2.5),
            )
        ),
    ]  # fmt: skip
    return goals


def _cpp_over_python(selection: Selection) -> float:
    python, cpp = (selection.where(case=f"{title}/kernel").only().case.figure
                   for title in ("Python", r"C\+\+"))  # fmt: skip
    return cpp / python


def _added(selection: Selection) -> float:
    plain, dispatched = (selection.where(case=f"Python/{title}").only().case.figure
                         for title in ("kernel", "by m, kernel"))  # fmt: skip
    return dispatched - plain


def _emulation() -> list[Goal]:
    return [
        Goal(title="Mutants noticed, percent of those that are not equivalent", limit=90,
             at_least=True, unit="", select=_where("emulation.mutants", "mutants/caught"),
             figure=_figure),
        Goal(title="Emulation of one kernel a design class for every Blackwell row, on two cores",
             limit=1200, unit="s", select=_where("emulation", "whole pass/time"), figure=_figure),
        Goal(title="Warp instructions that a process emulates in a second", limit=200_000,
             at_least=True, unit="", select=_where("emulation", "whole pass/.*"), figure=_rate),
    ]  # fmt: skip


def _rate(selection: Selection) -> float:
    instructions, seconds, processes = (
        selection.where(case=f"whole pass/{name}").only().case.figure
        for name in ("warp instructions", "time", "processes")
    )
    return instructions / seconds / processes


def _overhead_percent(selection: Selection) -> float:
    """Scheduler's part of a usual kernel's 0.6 s, which two workers share."""
    return selection.only().case.figure / (600 / 2) * 100


def _fleets() -> list[Goal]:
    dask, cache, tuned = "fleet.dask_build", "fleet.remote_cache", "fleet.tuning"
    found, grown = (f"50000 kernels, .*, version 3, {what}" for what in ("found", "growth"))
    return [
        *(
            Goal(title=f"two workers on two cores, {kernels} kernels: speed-up over one", limit=1.8,
                 at_least=True, select=_where(dask, f"compile stage, {kernels} .*"),
                 figure=_speedup)
            for kernels in (58, 486)
        ),
        Goal(title="the same once compilers run", limit=1.8, at_least=True,
             select=_where(dask, "a kernel once compilers run, 486 .*"), figure=_speedup),
        Goal(title="scheduler: part of a build by two workers at 5,000 kernels", limit=2, unit="%",
             select=_where(dask, "scheduler, a kernel"), figure=_overhead_percent),
        *(
            Goal(title=f"69 kernels from a warm remote cache, {store}: over a warm local cache",
                 limit=1.3, select=_where(cache, f".* kernels, {store}"), figure=_most)
            for store in ("Redis", "S3", "directory")
        ),
        Goal(title="tuning on two GPUs: speed-up over one", limit=1.9, at_least=True,
             select=_where(tuned, "measuring, 2 GPUs"), figure=_speedup),
        Goal(title="50,000 kernels: opened and a problem found, slowest of four", limit=20,
             unit="ms", select=_where("large_bundles", found), figure=_largest),
        Goal(title="50,000 kernels: growth of the process, largest of four", limit=30, unit="MB",
             select=_where("large_bundles", grown), figure=_largest),
    ]  # fmt: skip


def _largest(selection: Selection) -> float:
    return max(record.case.figure for record in selection)


GOALS = {
    "Cold start": _cold_start(),
    "GEMMs": _kernels(),
    "Models": _models(),
    "Experts": _experts(),
    "Host time, estimates and building": _host(),
    "Emulation": _emulation(),
    "Fleets": _fleets(),
}
"""Goals by table heading."""


def goals(records: Selection) -> str:
    """Returns one table per heading."""
    head = ("goal", "best result", "GPU", "date", "met")
    return "\n\n".join(
        f"## {title}\n\n{markdown(head, [goal.row(records) for goal in group])}"
        for title, group in GOALS.items()
    )
