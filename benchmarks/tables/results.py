"""Tables for the results page and README."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from statistics import geometric_mean

from benchmarks.record import Record
from benchmarks.tables import serving
from benchmarks.tables.selection import NONE, Selection, gpu, markdown, times

RANGES = ((1, 64), (65, 512), (513, 8192))
"""m ranges, both ends included."""

COLD_STARTS = (
    ("aten+measured", "aten"),
    ("aten+measured", "aten+triton"),
    ("aten+bundle", "aten"),
    ("jit", "aten"),
    ("default+measured", "default"),
)
"""Modes in the cold-start table, and the mode that each is compared with."""

HOST_TIMES = (
    ("runtime.calls", r"(Python|C\+\+|linear)/(kernel|by m, .*)"),
    ("runtime.loading", r"entry.*|first launch|host time/(generated|mm|op).*"),
    ("runtime.lookup", ".*"),
)
"""Benchmarks and cases in the host-time table."""
SCHEMES = ("no dictionary, zstd-19", "trained, 112 KiB", "all kernels", "as bundles do it")
"""Schemes in the compression table."""


def readme(records: Selection) -> str:
    """Six rows for README: one number and one baseline each."""
    vllm = serving.decode(records, 1)
    cold = records.where(
        "cold_start", r"30 GEMMs/aten\+measured/first result", baseline="aten+triton"
    )
    experts = _step(records, "moe", "gpt-oss-20b/experts", "h200")
    call = records.where("runtime.calls", "Python/kernel")
    build = records.where("build.path", "quickstart.*").only()
    size = records.where("build.size", "350 .*").only()
    return markdown(
        ("measurement", "result", "over", "on"),
        (
            (
                "Llama-3.1-8B in vLLM 0.26, decode at batch 1, tokens a second",
                times(vllm.least_speedup()),
                "stock vLLM",
                "H100",
            ),
            (
                "First result of a decoder layer, measured rankings",
                f"{times(cold.speedup(), 1)} sooner",
                "max-autotune with Triton",
                "H200",
            ),
            (
                "gpt-oss-20b experts, forward and backward",
                times(experts),
                "torchtitan",
                "H200",
            ),
            (
                "Host time of a compiled GEMM call",
                times(call.over_baseline()),
                "stock torch.compile",
                "H100",
            ),
            (
                "Build of the quickstart on two cores: 69 kernels, Hopper and Blackwell",
                f"{build.case.figure:.0f} s",
                NONE,
                "CPU",
            ),
            ("Size of 350 kernels in a bundle", f"{size.case.figure:,.0f} bytes each", NONE, NONE),
        ),
    )


def _step(records: Selection, benchmark: str, form: str, on: str) -> float:
    """Returns the speed-up over torchtitan, forward and backward together."""
    both = records.where(benchmark, f"{form}/(forward|backward)", baseline="torchtitan", on=on)
    baselines = [record.case.baseline for record in both]
    return sum(baseline.value for baseline in baselines if baseline) / sum(
        record.case.figure for record in both
    )


def models(records: Selection) -> str:
    """Models with bundles over the same models without."""
    kinds = {
        "ATEN": "max-autotune, ATen",
        "ATEN,TRITON": "max-autotune, ATen and Triton",
        "default": "plain, rankings of two GPUs",
        "default, repeated rankings": "plain, repeated rankings",
    }
    rows = []
    for backends, title in kinds.items():
        for name in records.where("additive", f"{backends}/.*").products:
            for mode in ("graphs", "calls", "kernels"):
                cases = records.where("additive", f"{backends}/.*/batch .*/{mode}", on=name)
                if not len(cases):
                    continue
                slower = sum(
                    record.over_baseline > 1.01 + (record.case.noise or 0.0) for record in cases
                )
                processes = list(
                    records.where("additive", f"{backends}/processes .*/{mode} .*", on=name)
                )
                late = sum(record.case.figure for record in processes)
                total = sum(
                    record.case.baseline.value for record in processes if record.case.baseline
                )
                rows.append(
                    (title, gpu(name), mode, str(len(cases)), times(cases.over_baseline(), 3),
                     str(slower), f"{late:.0f} of {total:.0f}", cases.date)
                )  # fmt: skip
    head = ("torch.compile", "GPU", "measured in", "cases", "time over stock",
            "slower beyond noise", "processes over 2 % slower", "date")  # fmt: skip
    return markdown(head, rows)


def cold_start(records: Selection) -> str:
    """First results in fresh processes."""
    rows = [
        (gpu(_product(record)), gemms.split()[0], f"`{mode}`", f"{record.case.figure:.1f} s",
         f"`{baseline}`", times(record.over_baseline, 3), record.run.date or NONE)
        for mode, baseline in COLD_STARTS
        for record in records.where("cold_start", rf".*/{re.escape(mode)}/first result",
                                 baseline=baseline)
        for gemms in record.case.name.split("/")[:1]
    ]  # fmt: skip
    head = ("GPU", "GEMMs", "mode", "first result", "over", "ratio", "date")
    return markdown(head, sorted(rows, key=lambda row: (row[0], -int(row[1]))))


def kernels(records: Selection) -> str:
    """LLM GEMMs over ATen and Triton, by launches and m."""
    rows = []
    for launches in ("apart", "back to back"):
        for low, high in (*RANGES, (1, 8192)):
            best, bundled = (
                Selection(record for record in records.where("kernels", f".*/{launches}/{title}")
                          if low <= _m(record) <= high)
                for title in ("best of all", "bundled")
            )  # fmt: skip
            rows.append(
                (launches, f"{low} to {high}", str(len(best)), times(best.speedup(), 3),
                 times(best.least_speedup(), 3), times(bundled.speedup(), 3))
            )  # fmt: skip
    return markdown(("launches", "m", "GEMMs", "best of all", "worst case", "bundled alone"), rows)


def hgemm(records: Selection) -> str:
    """HGEMM-1000 over autotuned cuBLASLt."""
    rows = []
    for record in records.where("hgemm", "mean of .*/bundled"):
        sizes, mode, _ = record.case.name.split("/")
        both = records.where("hgemm", f"{sizes}/{mode}/best of both", on=_product(record)).only()
        noise = 100 * (record.case.noise or 0.0)
        rows.append(
            (gpu(_product(record)), sizes.split()[2],
             {"offline": "back to back"}.get(mode, "single"),
             f"{record.case.figure:+.1f} ± {noise:.1f} %", f"{both.case.figure:+.1f} %",
             record.run.date or NONE)
        )  # fmt: skip
    return markdown(("GPU", "sizes", "launches", "bundled", "best of both", "date"), rows)


def gated(records: Selection) -> str:
    """Four models' gated MLPs, by m."""
    rows = []
    for name in records.where("gated").products:
        for m in (512, 1024, 2048, 4096, 8192):
            compiled = records.where("gated", f".* m{m}/compiled", on=name)
            best = records.where("gated", f".* m{m}/best kernel", on=name)
            if len(compiled):
                rows.append(
                    (gpu(name), str(m), times(compiled.speedup(), 3),
                     times(compiled.least_speedup(), 3), times(best.speedup(), 3))
                )  # fmt: skip
    return markdown(("GPU", "m", "torch.compile", "worst model", "best kernel"), rows)


def fused(records: Selection) -> str:
    """Gated MLPs in plain torch.compile with NVGEMM_AOT_FUSE, by m."""
    allowed = records.where("gated.allowed")
    rows = []
    for one in allowed.where(case=".*/fused"):
        if one.case.baseline is None or one.case.baseline.name != "stock":
            continue
        size = one.case.name.removesuffix("/fused")
        over_bundles = [
            other.speedup
            for other in allowed.where(case=re.escape(one.case.name))
            if other.case.baseline is not None and other.case.baseline.name == "with bundles"
        ]
        errors = [
            allowed.where(case=re.escape(f"{size}/error of gated values/{way}")).only().case.figure
            for way in ("fused", "stock")
        ]
        is_fused = errors[0] != errors[1]  # rounding once changes every error
        rows.append(
            (size, gpu(allowed.products[0]), f"{one.case.baseline.value:,.1f}",
             f"{one.case.figure:,.1f}", times(one.speedup, 3),
             times(over_bundles[0], 3) if is_fused else "not fused",
             *(f"{error:.2e}" for error in errors))
        )  # fmt: skip
    return markdown(
        ("layer", "GPU", "stock, us", "fused", "over stock", "over unfused kernels",
         "error, fused", "stock"), rows
    )  # fmt: skip


def rounding(records: Selection) -> str:
    """A small model by the rounding of its gated products."""
    quality = records.where("gated.quality")
    rows = []
    for way in ("once", "twice", "eager"):
        error, divergence, perplexity = (
            quality.where(case=f"smollm2-135m/{way}/{name}").only()
            for name in ("error of gated values", "divergence", "perplexity")
        )
        noise = perplexity.case.noise
        rows.append(
            (way, f"{error.case.figure:.2%}", f"{divergence.case.figure:.1e}",
             f"{perplexity.case.figure:.3f}",
             NONE if noise is None else f"{perplexity.over_baseline - 1:+.2%} ± {noise:.2%}")
        )  # fmt: skip
    return markdown(
        ("rounds", "error of gated values", "divergence, nats", "perplexity", "over twice"), rows
    )


def experts(records: Selection) -> str:
    """Four models' experts from sorted rows."""
    return _experts(records, "moe")


def tokens(records: Selection) -> str:
    """Experts from tokens to tokens."""
    return _experts(records, "moe.tokens")


def _experts(records: Selection, benchmark: str) -> str:
    rows = []
    for called in records.where(
        benchmark, "[^/]*/experts(, 2 weights)?/forward", baseline="torchtitan"
    ):
        model, form, _ = called.case.name.split("/")
        name = _product(called)

        def speedups(
            suffix: str, baseline: str, on: str = name, case: str = f"{model}/{form}"
        ) -> list[str]:
            parts = (
                records.where(benchmark, f"{case}{suffix}/{part}", baseline=baseline, on=on)
                for part in ("forward", "backward")
            )
            return [times(part.speedup()) for part in parts]

        memory = records.where(
            benchmark, f"{model}/{form}/peak memory", baseline="torchtitan", on=name
        ).only()
        weights = "2" if form.endswith("2 weights") else "1"
        rows.append(
            (gpu(name), model, weights, *speedups("", "torchtitan"),
             *speedups("", "torch's fastest"), *speedups(", compiled", "torch's fastest"),
             times(memory.over_baseline))
        )  # fmt: skip
    head = ("GPU", "model", "weights", "forward", "backward", "over fastest: forward",
            "backward", "compiled: forward", "backward", "peak memory")  # fmt: skip
    return markdown(head, sorted(rows, key=lambda row: row[0]))


def training(records: Selection) -> str:
    """Training a small mixture of experts for 200 steps."""
    rows = []
    for step in records.where("moe.training", ".*/step"):
        way = step.case.name.rsplit("/", 1)[0]
        away, memory = (
            records.where("moe.training", f"{way}/{title}", on=_product(step)).only()
            for title in ("distance from losses in fp32", "peak memory")
        )
        rows.append(
            (gpu(_product(step)), way, f"{step.case.figure:.1f} ms", f"{away.case.figure:.4f}",
             f"{memory.case.figure:,.0f} MB")
        )  # fmt: skip
    return markdown(("GPU", "experts", "step", "distance from losses in fp32", "peak memory"), rows)


def gather(records: Selection) -> str:
    """Up projections that read token rows in place, over a copy."""
    rows = [
        (record.case.name.split("/")[0], record.case.name.split("/")[2], _value(record, 2, "ms"),
         _baseline(record, 2, "ms"), times(record.over_baseline))
        for record in records.where("moe.gather", r"[^/]*/experts/.*")
    ]  # fmt: skip
    head = ("model", "direction", "in place", "copied", "ratio")
    return markdown(head, rows)


def dispatch(records: Selection) -> str:
    """Dispatch by m at sizes that were not measured."""
    rows = []
    for name in records.where("dispatch").products:
        for choice, title in (
            ("compiled", "compiled graph"), ("dispatch", "dispatch table"), ("aten", "ATen alone"),
        ):  # fmt: skip
            cases = records.where("dispatch", f"mm/.*/{choice}", on=name)
            most = max(record.over_baseline for record in cases)
            rows.append(
                (gpu(name), title, str(len(cases)), times(cases.over_baseline(), 3),
                 times(most, 3))
            )  # fmt: skip
    return markdown(("GPU", "choice", "sizes", "over the best", "worst"), rows)


def gpus(records: Selection) -> str:
    """One GPU's winners on another."""
    rows = []
    for slower in records.where("ranking.gpus", ".*/slower than ATen.*"):
        rows.append((slower.case.name.split("/")[0], _of(slower), NONE))
    for every in records.where("repeated", ".*/all winners.*"):
        gain = every.case.name.split("/")[0]
        again = records.where("repeated", f"{gain}/repeated winners.*").only()
        rows.append((gain, _of(every), _of(again)))
    head = ("winners", "slower than ATen on another GPU", "of these, repeated")
    return markdown(head, rows)


def ranking(records: Selection) -> str:
    """Rankings for undeclared sizes."""
    rows = []
    for case, title in (
        ("m held back: the runtime, as shipped", "m not declared, as shipped"),
        ("m held back: the runtime, ranked measured", "m not declared, ranked kernels measured"),
        ("m held back: the runtime, all measured", "m not declared, all kernels measured"),
        ("n, k held back: the runtime, as shipped", "n and k not declared, as shipped"),
    ):
        figures = [
            records.where("ranking", f"{case}/{count}").only().case.figure
            for count in ("first", "best of 4")
        ]
        rows.append((title, *(times(record, 3) for record in figures)))
    for case, title in (("model", "estimate of the model"), ("corrected", "corrected estimate")):
        figures = [
            records.where("estimates", f"all/{case}/{count}").only().case.figure
            for count in ("first", "best of four")
        ]
        rows.append((f"held-back sizes, {title}", *(times(record, 3) for record in figures)))
    for name in records.where("group_estimates").products:
        figures = [
            records.where("group_estimates", f"held back/all/{count}", on=name).only().case.figure
            for count in ("first", "best of four")
        ]
        rows.append((f"held-back groups, {gpu(name)}", *(times(record, 3) for record in figures)))
    return markdown(("ranking", "first choice over the best", "best of four"), rows)


def timing(records: Selection) -> str:
    """Ways to time gated kernels before choosing one."""
    loads = records.where("gated.loads")
    rows = []
    for way in dict.fromkeys(record.case.name.split("/")[1] for record in loads):
        mean, worst = (
            [record.case.figure for record in loads.where(case=f".*/{way}/{title}")]
            for title in ("mean", "worst")
        )
        rows.append((f"gated MLPs: {way}", times(geometric_mean(mean), 3), times(max(worst), 3)))
    for way, title in (("stock", "Inductor's"), ("cold", "without the launch, cold"),
                       ("gpu_time", "without the launch, cold and warm")):  # fmt: skip
        cases = records.where("additive.choice_timing", f".*/memory/{way}")
        most = max(record.over_baseline for record in cases)
        rows.append((f"GEMMs: {title}", times(cases.over_baseline(), 3), times(most, 3)))
    return markdown(("way of timing", "chosen over the fastest", "worst"), rows)


def clocks(records: Selection) -> str:
    """Repeated timings while clocks fall."""
    rows = [
        (record.case.name.split("/")[0], _baseline(record, 0, "µs"), times(record.over_baseline, 3))
        for record in records.where("additive.clocks")
    ]
    return markdown(("GEMM", "first timing", "longest of 12"), rows)


def host(records: Selection) -> str:
    """Host time for calls, loading and look-ups."""
    rows = [
        (gpu(_product(record)), record.case.name.replace("/", ": "), _value(record, 2, "µs"),
         _baseline(record, 2, "µs"), _ratio(record))
        for benchmark, case in HOST_TIMES
        for record in records.where(benchmark, case)
    ]  # fmt: skip
    return markdown(("on", "operation", "time", "stock", "ratio"), rows)


def building(records: Selection) -> str:
    """Build time and size."""
    benchmarks = ("build", "build.path", "build.size")
    rows = [
        (record.case.name.replace("/", ": "), f"{record.case.figure:,.4g} {record.case.unit}"
         if record.case.figure < 1000 else f"{record.case.figure:,.0f} {record.case.unit}")
        for benchmark in benchmarks
        for record in records.where(benchmark)
    ]  # fmt: skip
    return markdown(("measurement", "result"), rows)


def coverage(records: Selection) -> str:
    """Shipped manifests' kernels, size and processor time."""
    rows = []
    for record in records.where("build.coverage", ".*/sm_100f/kernels"):
        manifest, target, _ = record.case.name.split("/")
        size, seconds = (
            records.where("build.coverage", f"{manifest}/{target}/{title}").only().case.figure
            for title in ("size", "processor time")
        )
        rows.append((manifest, f"{record.case.figure:.0f}", f"{size / 1e3:,.0f}", f"{seconds:.0f}"))
    return markdown(("manifest", "kernels", "bundle, kB", "processor time, s"), rows)


def compression(records: Selection) -> str:
    """Bytes a kernel among 400, by compression scheme."""
    rows = [
        (record.case.name.split("/")[1], _value(record, 0), times(record.over_baseline))
        for record in records.where("build.compression", "400 kernels/.*")
        if record.case.name.split("/")[1] in SCHEMES
    ]
    return markdown(("dictionary", "bytes a kernel", "over no dictionary"), rows)


def correctness(records: Selection) -> str:
    """Right kernels that passed and planted faults that tuning caught."""
    cases = records.where("correctness")
    kinds = list(dict.fromkeys(record.case.name.split("/")[1] for record in cases))
    rows = []
    for dtype in dict.fromkeys(record.case.name.split("/")[0] for record in cases):
        cells = {
            record.case.name.split("/")[1]: _of(record)
            for record in cases.where(case=f"{dtype}/.*")
        }
        rows.append((f"`{dtype}`", *(cells.get(kind, NONE) for kind in kinds)))
    return markdown(("A, B", *kinds), rows)


def tuning(records: Selection) -> str:
    """Kernels for experts and for few tiles, as `nvgemm-aot tune` timed them."""
    rows = []
    for benchmark, title in (
        ("tuning.experts", "experts of three models, over `torch._grouped_mm`"),
        ("tuning.few_tiles", "GEMMs of few tiles, over ATen"),
    ):
        cases = records.where(benchmark)
        rows.append(
            (title, gpu(cases.products[0]), str(len(cases)), times(cases.over_baseline(), 3),
             f"{times(min(_ratios(cases)), 3)} to {times(max(_ratios(cases)), 3)}")
        )  # fmt: skip
    return markdown(("kernels", "GPU", "problems", "fastest kernel's time", "range"), rows)


def tests(records: Selection) -> str:
    """GPU test runs, newest first; among a product's runs of one day, the largest."""
    every = sorted(
        records.where("tests"), key=lambda record: (record.run.date or "", record.case.figure)
    )
    newest = {(_product(record), _is_dated(record) or record.case.name): record for record in every}
    runs = sorted(newest.values(), key=lambda record: record.run.date or "", reverse=True)
    rows = [
        (record.run.date or NONE, gpu(_product(record)), record.run.commit or NONE, _title(record),
         _value(record, 0),
         _failed(record))
        for record in runs
    ]  # fmt: skip
    return markdown(("date", "on", "commit", "tests", "passed", "failed"), rows)


def _is_dated(record: Record) -> bool:
    return bool(re.match(r"\d{4}-", record.case.name))


def _failed(record: Record) -> str:
    assert record.case.baseline is not None
    return f"{record.case.baseline.value - record.case.figure:.0f}"


def _title(record: Record) -> str:
    """Returns a test run's part count, or its name."""
    if _is_dated(record):
        return f"{len(record.case.name.split('/', 2)[2].split())} parts"
    return record.case.name


def _ratios(cases: Iterable[Record]) -> Iterator[float]:
    return (record.over_baseline for record in cases)


def _product(record: Record) -> str:
    return Selection([record]).products[0]


def _m(record: Record) -> int:
    match = re.search(r"/m(\d+)n", record.case.name)
    assert match, record.case.name
    return int(match[1])


def _value(record: Record, digits: int, unit: str = "") -> str:
    return f"{record.case.figure:,.{digits}f} {unit}".rstrip()


def _baseline(record: Record, digits: int, unit: str = "") -> str:
    if record.case.baseline is None:
        return NONE
    return f"{record.case.baseline.value:,.{digits}f} {unit}".rstrip()


def _ratio(record: Record) -> str:
    return NONE if record.case.baseline is None else times(record.over_baseline)


def _of(record: Record) -> str:
    assert record.case.baseline is not None
    return f"{record.case.figure:.0f} of {record.case.baseline.value:.0f}"
