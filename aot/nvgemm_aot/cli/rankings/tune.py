"""``nvgemm-aot tune``: measures bundles on this machine's GPU."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX

from ...pipeline.executor.scheduler_connection import LOCAL
from ..terminal.executors import checked_executor, executor_option, insecure_option
from ..terminal.interrupts import INTERRUPTED
from ..terminal.printing import count_text, print_result, report_progress, size_text, table
from ..terminal.shared_options import ANY_PATH, Duration, ShardParam, json_option

if TYPE_CHECKING:
    from nvgemm_runtime.bundle.ranking_entries import Ranking

    from ...pipeline.shard import Shard
    from ...tuning.outcome import TuningOutcome
    from ...tuning.tune_bundles import Tuned

Document = dict[str, Any]

_DURATION = Duration(
    r"[0-9]+(?:\.[0-9]+)?",
    {"s": 1, "m": 60, "h": 3600},
    "is not a duration such as 90s, 10m or 1.5h",
)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Makes SIGTERM, which ends jobs at their time limit, raise KeyboardInterrupt like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command()
@click.argument("bundles", type=ANY_PATH, nargs=-1, required=True)
@click.option("-o", "--out", type=ANY_PATH, required=True, help="The bundle to write.")
@click.option("--budget", type=_DURATION, help="Start no problem after this time, e.g. 90s, 10m.")
@click.option(
    "--all-kernels",
    is_flag=True,
    help="Measure each problem with all kernels of its signature, not only those ranked for it.",
)
@click.option(
    "--neighbours",
    is_flag=True,
    help="Also measure each problem with the kernels that won at the next smaller and larger m.",
)
@click.option(
    "--grid",
    is_flag=True,
    help="Also measure m between the declared ones, more of them where the fastest kernel changes; "
    "includes --neighbours.",
)
@click.option(
    "--serving",
    is_flag=True,
    help="Also measure the m between the declared ones that serving engines use, each with the "
    "kernels that won at the nearest declared m.",
)
@click.option(
    "--skip-confirmed",
    is_flag=True,
    help="Keep rankings that two GPUs of this product confirm with this torch.",
)
@click.option(
    "--shard",
    type=ShardParam(),
    help="Measure only this part of the problems, such as 1/4, as other GPUs measure the rest. "
    "Join the parts by `rankings export` and `build --rankings`.",
)
@click.option(
    "--gpus",
    metavar="all|0,1",
    help="Measure a part of the problems on each of these GPUs at once, named as by "
    "CUDA_VISIBLE_DEVICES. They must be of one product.",
)
@click.option(
    "--confirm",
    type=click.IntRange(min=2),
    metavar="K",
    help="Measure each problem on K of the GPUs of --gpus or --executor: where they agree, it is "
    "confirmed.",
)
@executor_option(
    "Measure a part of the problems on each worker of this Dask scheduler, such as "
    "tls://scheduler:8786; tcp:// on this machine alone. Each worker process measures on the first "
    "GPU that it sees."
)
@insecure_option
@click.option("--triton", is_flag=True, help="Also ask Inductor for its best Triton kernel.")
@click.option(
    "--prune",
    is_flag=True,
    help="Drop kernels that are never among the first two and in no dispatch table.",
)
@click.option(
    "--accept-suspect",
    is_flag=True,
    help="Write the bundle even if all kernels of a signature, or most kernels, are wrong.",
)
@click.option(
    "--no-repeat",
    is_flag=True,
    help="Do not measure problems a second time; default mode then uses none of them until "
    "another GPU confirms them.",
)
@click.option(
    "--hang-after",
    type=_DURATION,
    default="60s",
    show_default=True,
    help="Drop a kernel that has not returned after this time; Triton gets 30 times as long.",
)
@json_option
@click.pass_context
def tune(
    ctx: click.Context,
    bundles: tuple[Path, ...],
    out: Path,
    budget: float | None,
    all_kernels: bool,
    neighbours: bool,
    grid: bool,
    serving: bool,
    skip_confirmed: bool,
    shard: Shard | None,
    gpus: str | None,
    confirm: int | None,
    executor: str,
    insecure_executor: bool,
    triton: bool,
    prune: bool,
    accept_suspect: bool,
    no_repeat: bool,
    hang_after: float,
    as_json: bool,
) -> None:
    """Measure the kernels of BUNDLES on this GPU, and write a bundle with the measurements.

    Every declared problem is timed with its kernels and with ATen. Two minutes later or more,
    another process times the fastest a second time: if both agree, one GPU is enough for plain
    torch.compile to use kernels that gain 8 %. The results rank kernels for this GPU's product;
    rankings for other products stay. Measurements are stored next to the output, in
    OUT.tuning.jsonl: the same command continues from there. A kernel that never returns is dropped:
    the measuring process is killed, and another continues. If $NVGEMM_AOT_SIGNING_KEY is set, OUT
    is signed.
    """
    from ...tuning import watchdog
    from ...tuning.measuring.grid import Grid
    from ...tuning.spread.several_gpus import tune_on, visible_gpus
    from ...tuning.spread.tune_over_dask import tune_over
    from ...tuning.state.journal import state_path
    from ...tuning.tune_bundles import TuningOptions
    from ..signing.written import output_key, sign_written

    if out.suffix != BUNDLE_SUFFIX:
        raise click.UsageError(f"{out}: a bundle is named NAME{BUNDLE_SUFFIX}")
    if out.resolve() in [path.resolve() for path in bundles]:
        raise click.UsageError(f"{out} is among the bundles to tune; name another output")
    if grid and serving:
        raise click.UsageError("--grid and --serving name two grids; name one of them")
    names = [name.strip() for name in (gpus or "all").split(",")]
    if not all(names) or len({*names}) < len(names):
        raise click.UsageError(f"--gpus {gpus}: name each GPU once, as in 0,1, or all")
    if shard and gpus:
        raise click.UsageError("--shard cannot be combined with --gpus, which divides problems too")
    if confirm and not gpus and executor == LOCAL:
        raise click.UsageError(
            f"--confirm {confirm} needs --gpus or --executor: one GPU cannot confirm itself; "
            "--gpus all takes all of this machine"
        )
    if executor != LOCAL and (gpus or shard):
        raise click.UsageError(
            f"--executor cannot be combined with {'--gpus' if gpus else '--shard'}, which "
            "divides problems too"
        )
    executor = checked_executor(executor, allow_insecure=insecure_executor)
    if shard and prune:
        raise click.UsageError(
            "--shard cannot be combined with --prune, which needs all problems' winners; "
            "`build --rankings --prune` prunes by all parts"
        )
    options = TuningOptions(
        budget_s=budget,
        all_kernels=all_kernels,
        neighbours=neighbours,
        grid=Grid.STEPS if grid else Grid.SERVING if serving else None,
        skips_confirmed=skip_confirmed,
        triton=triton,
        prunes=prune,
        accepts_suspect=accept_suspect,
        repeats=not no_repeat,
        shard=shard,
        confirms=confirm or 1,
    )
    key = output_key()
    try:
        with (
            _sigterm_interrupts(),
            report_progress("Measuring", "problem") as progress,
            report_progress("Measuring again", "problem") as again,
        ):
            tune_bundles = watchdog.tune_watched
            if gpus:
                chosen = visible_gpus() if gpus == "all" else names
                if len(chosen) < options.confirms:
                    raise click.UsageError(
                        f"--confirm {confirm} needs {confirm} GPUs or more; --gpus {gpus} names "
                        f"{count_text(len(chosen), 'GPU')}: {', '.join(chosen)}"
                    )
                tune_bundles = functools.partial(tune_on, chosen)
            elif executor != LOCAL:
                tune_bundles = functools.partial(
                    tune_over, executor, allow_insecure=insecure_executor
                )
            tuned = tune_bundles(
                bundles, out, options, hang_s=hang_after, progress=progress, again=again
            )
    except KeyboardInterrupt:
        state_text = "nothing was measured yet"
        if state_path(out).exists():
            state_text = f"measurements are in {state_path(out)}"
        click.echo(
            f"nvgemm-aot: interrupted; {state_text}; to continue, run the same command", err=True
        )
        ctx.exit(INTERRUPTED)
    sign_written([tuned.path], key)
    print_result(tuned_document(tuned), tuned_text, as_json=as_json)


def tuned_document(tuned: Tuned) -> Document:
    """Describes the measurements and the written bundle."""
    from ...rankings.counting import count_by_product

    return {
        "suspicion": tuned.suspicion,
        "path": str(tuned.path),
        "gpu": tuned.gpu,
        "products": list(tuned.header.products),
        "bytes": tuned.file_bytes,
        "kernels": len(tuned.header.kernels),
        "problems": {key: _outcome_document(item) for key, item in tuned.outcomes.items()},
        "not_declared": [
            ranking.problem.key for ranking in _product_rankings(tuned) if not ranking.is_declared
        ],
        "standings": _standings(tuned),
        "counted": [asdict(counts) for counts in count_by_product(tuned.header)],
        "unmeasured": dict(tuned.unmeasured),
        "broken": dict(tuned.broken),
        "hanging": [list(kernel) for kernel in tuned.hanging],
        "pruned": tuned.pruned and {**asdict(tuned.pruned), "bytes": tuned.pruned_bytes},
        "state": None if tuned.state is None else str(tuned.state),
        "measured_now": tuned.measured_now,
        "unrepeated": tuned.unrepeated,
        "is_complete": tuned.is_complete,
    }


def _product_rankings(tuned: Tuned) -> list[Ranking]:
    """Returns the new bundle's rankings for the measured product."""
    header = tuned.header
    return [ranking for ranking in header.rankings if header.gpu_of(ranking) == tuned.gpu]


def _standings(tuned: Tuned) -> dict[str, int]:
    """Counts the product's rankings by standing."""
    standings = [
        ranking.measured.standing
        for ranking in _product_rankings(tuned)
        if ranking.measured is not None
    ]
    return dict(sorted(Counter(standings).items()))


def _outcome_document(outcome: TuningOutcome) -> Document:
    from ...tuning.outcome import outcome_json

    document = outcome_json(outcome)
    conditions = document.pop("conditions")  # only the date differs between problems
    return {**document, "date": conditions["date"]}


def tuned_text(document: Document) -> str:
    """Renders a table of the problems, then wrong kernels, doubts, and the new bundle.

    *Back to back* is the kernel's time over ATen's, too, for launches back to back.
    """
    header = (
        "problem",
        "first",
        "bundled, us",
        "ATen, us",
        "Triton, us",
        "over ATen",
        "back to back",
        "kernel",
    )
    rows = [_problem_row(key, item) for key, item in document["problems"].items()]
    parts = [] if document["suspicion"] is None else [f"SUSPECT: {document['suspicion']}"]
    parts += [table(rows, header)] if rows else []
    return "\n".join(
        [*parts, *_wrong_lines(document), *_doubt_lines(document), *_summary_lines(document)]
    )


def _problem_row(key: str, item: Document) -> list[object]:
    from ...rankings.agreement import ATEN

    times = {"ATen": item["aten"], "Triton": item["triton"]}
    bundled = item["kernels"][0][1:] if item["kernels"] else None
    known = {name: timing for name, timing in {"bundled": bundled, **times}.items() if timing}
    first = min(known, key=lambda name: known[name][0]) if known else "-"
    ratio = f"{bundled[0] / item['aten'][0]:.3f}" if bundled and item["aten"] else "-"
    back_to_back = item["back_to_back"]
    first_kernel, aten = (
        back_to_back.get(name) for name in (bundled and item["kernels"][0][0], ATEN)
    )
    return [
        key,
        first + (" ?" if item["doubts"] else ""),
        *(_timing_text(timing) for timing in (bundled, *times.values())),
        ratio,
        f"{first_kernel[0] / aten[0]:.3f}" if first_kernel and aten else "-",
        item["kernels"][0][0][:12] if bundled else "-",
    ]


def _timing_text(timing: list[int] | None) -> str:
    return "-" if timing is None else f"{timing[0] / 1e3:.2f} ± {timing[1] / 1e3:.2f}"


def _wrong_lines(document: Document) -> Iterator[str]:
    from ...rankings.agreement import contender_name

    faults: dict[str, list[str]] = {}
    for key, item in document["problems"].items():
        for id_, fault in item["wrong"].items():
            faults.setdefault(id_, []).append(f"{key}: {fault}")
    hanging = {(contender, fault) for contender, fault in document["hanging"]}
    for contender, fault in document["hanging"]:
        left_out = "dropped" if contender in document["broken"] else "left out there"
        yield f"HANGS: {contender_name(contender)} is {left_out}: {fault}"
    for id_, fault in document["broken"].items():
        if (id_, fault) not in hanging:
            faults.setdefault(id_, []).append(fault)
    for id_, texts in faults.items():
        yield f"WRONG: {contender_name(id_)} is dropped:"
        yield from (f"  {text}" for text in texts)


def _doubt_lines(document: Document) -> Iterator[str]:
    """Yields problems grouped by doubts, because a disturbance mostly affects many."""
    doubted: dict[tuple[str, ...], list[str]] = {}
    for key, item in document["problems"].items():
        if item["doubts"]:
            doubted.setdefault(tuple(item["doubts"]), []).append(key)
    for doubts, keys in doubted.items():
        yield f"uncertain ({len(keys)}), and timed again wherever it is used: {'; '.join(doubts)}"
        yield from (f"  {key}" for key in keys)
    for key, reason in document["unmeasured"].items():
        yield f"not measured: {key}: {reason}"


def _summary_lines(document: Document) -> Iterator[str]:
    measured, unmeasured = len(document["problems"]), len(document["unmeasured"])
    pruned = document["pruned"]
    if pruned is not None:
        unknown = pruned["unknown_losses"]
        unknown_note = f" (unknown for {unknown}, which were measured with their own kernels only)"
        yield (
            f"pruned: kernels dropped: {len(pruned['dropped'])}; bytes saved: "
            f"{size_text(pruned['bytes'])}; speed lost: {_loss_text(pruned['declared_loss'])} on "
            f"measured problems, {_loss_text(pruned['undeclared_loss'])} on others like them"
            f"{unknown_note if unknown else ''}"
        )
    if document["standings"]:
        counts = ", ".join(f"{n} {standing}" for standing, n in document["standings"].items())
        yield f"rankings: {counts}"
    for counted in document["counted"]:
        yield from _counted_lines(counted)
    if document["not_declared"]:
        yield f"measured and not declared: {count_text(len(document['not_declared']), 'problem')}"
    yield (
        f"{document['path']}: written, {measured} of "
        f"{count_text(measured + unmeasured, 'problem')} measured, "
        f"{count_text(document['kernels'], 'kernel')}, {size_text(document['bytes'])}"
    )
    others = [product for product in document["products"] if product != document["gpu"]]
    if others:
        yield f"ranked for {document['gpu']}, with unchanged rankings for {', '.join(others)}"
    state = document["state"]
    if document["unrepeated"]:
        yield (
            f"still to be measured a second time: {count_text(document['unrepeated'], 'problem')}"
        )
    if state is not None and not document["is_complete"]:
        yield f"measurements are in {state}; to continue, run the same command"
    elif state is not None and document["measured_now"] == 0:
        yield (
            f"nothing new was measured: all measurements are in {state}; to repeat them, name "
            "another output"
        )


def _counted_lines(counted: Document) -> Iterator[str]:
    """Yields the number of problems for which torch.compile uses kernels on a product's GPUs."""
    from nvgemm_runtime.matching.evidence import REPEATED_GAIN
    from nvgemm_runtime.matching.thresholds import MIN_GAIN
    from nvgemm_runtime.settings import FUSE_VARIABLE, REPEATED_VARIABLE

    used = counted["confirmed"] + counted["repeated"]
    yield (
        f"on every {counted['gpu']} with torch {counted['torch']}, CUDA {counted['cuda']}, of "
        f"{count_text(counted['measured'], 'measured problem')}:"
    )
    yield (
        f"  plain torch.compile uses kernels for {used}: {counted['confirmed']} confirmed, "
        f"{counted['repeated']} repeated with a gain of {REPEATED_GAIN:.0%} or more; with "
        f"{REPEATED_VARIABLE}=1 for {counted['with_setting']}"
    )
    if counted["if_fused"]:
        products = count_text(counted["if_fused"], "gated product")
        yield f"  with {FUSE_VARIABLE}=1, it also uses kernels for {products}"
    yield f"  ATen computes {counted['aten']}, where no kernel gains {MIN_GAIN:.0%}"
    if counted["beyond_default"]:
        yield f"  only max-autotune uses {counted['beyond_default']}: fused or gathered ones"
    yield f"  under max-autotune, kernels compete for {counted['competing']}"


def _loss_text(ratio: float | None) -> str:
    return "an unknown part" if ratio is None else f"{(ratio - 1) * 100:.1f} %"
