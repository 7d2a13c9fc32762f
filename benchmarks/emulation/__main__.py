"""Emulates a bounded set of kernels for every row of the support matrix; see `rows`.

    python -m benchmarks.emulation --target sm_100f --records emulation.jsonl

Kernels and PTX come from the build cache, and are compiled if it lacks them. Targets' kernels with
equal PTX, but for ``.target``, run once. A case counts a row's right kernels over all of them; the
last cases are the whole pass.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from benchmarks.emulation.rows import DESIGN_CLASS, ROW, STANDS_FOR, RowKernel, row_kernels
from benchmarks.record import Baseline, Case
from benchmarks.shared.resuming import recording, records_option
from nvgemm_aot.emulator.checking.child_processes import check_kernels, code_digest
from nvgemm_aot.emulator.checking.kernel_check import KernelReport, KernelTask, Verdict
from nvgemm_aot.emulator.checking.manifest_tasks import PlannedKernel, prepare
from nvgemm_aot.pipeline.compiler import make_tasks
from nvgemm_aot.providers import load_provider
from nvgemm_aot.storage.build_cache import Cache, default_directory
from nvgemm_aot.targets import build_target
from nvgemm_runtime import __version__

BLACKWELL = ("sm_100f", "sm_100a", "sm_103a")


@click.command()
@click.option("--target", "targets", multiple=True, default=BLACKWELL, show_default=True)
@click.option(
    "--kernels",
    type=click.Choice(STANDS_FOR),
    multiple=True,
    default=(ROW, DESIGN_CLASS),
    show_default=True,
    help="Kernels by what they stand for.",
)
@click.option("--rows", "text", default="", help="Only rows whose names have this text.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("-j", "--jobs", type=click.IntRange(1), default=2, show_default=True)
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Build cache.")
@records_option
def main(
    targets: Sequence[str],
    kernels: Sequence[str],
    text: str,
    seeds: int,
    jobs: int,
    cache_dir: Path | None,
    records_path: Path | None,
) -> None:
    """Emulate kernels of every row, and print what is not right."""
    if text and records_path is not None:
        raise click.UsageError("--rows emulates a part, which --records does not take")
    cache = Cache(cache_dir or default_directory())
    rows: dict[str, str] = {}
    planned: list[PlannedKernel] = []
    for arch in targets:
        built = build_target(arch)
        for chosen in row_kernels(built):
            if chosen.stands_for in kernels and text in chosen.row.name:
                provider = load_provider(chosen.row.provider)
                (task,) = make_tasks([chosen.candidate], built, provider)
                rows[_name(arch, chosen)] = chosen.row.name
                planned.append(PlannedKernel(task=task))
    if not planned:
        raise click.UsageError(f"no row's name has {text!r}")
    prepared = prepare(planned, cache, jobs=jobs, seeds=tuple(range(seeds)))
    for failure in prepared.failures:
        click.echo(f"not compiled: {failure.task.candidate.operator}: {failure.own_reason}")
    same: dict[str, list[KernelTask]] = {}
    for kernel in prepared.tasks:
        same.setdefault(code_digest(kernel), []).append(kernel)
    first = [group[0] for group in same.values()]
    groups = {group[0].kernel.id: group for group in same.values()}
    started = time.monotonic()
    results: list[tuple[KernelTask, KernelReport]] = []
    for done, (kernel, report) in enumerate(check_kernels(first, jobs=jobs), start=1):
        results += ((twin, report) for twin in groups[kernel.kernel.id])
        fault = report.first_fault
        if fault is not None:
            click.echo(
                f"{report.verdict.value}: {kernel.kernel.operator}: {fault.problem.key}, seed "
                f"{fault.seed}: {fault.reason}"
            )
        print(f"\r{done} of {len(first)}", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    distinct = {id(report): report for _, report in results}.values()
    executed = sum(run.warp_instructions for report in distinct for run in report.runs)
    with recording(records_path, "emulation", {"nvgemm-aot": __version__}) as cases:
        cases += _cases(results, rows)
        cases.append(Case(name="whole pass/kernels run", figure=len(first), unit="kernels"))
        cases.append(Case(name="whole pass/time", figure=seconds, unit="s"))
        cases.append(
            Case(name="whole pass/warp instructions", figure=executed, unit="warp instructions")
        )
        cases.append(Case(name="whole pass/processes", figure=jobs, unit="processes"))
    click.echo(
        f"{len(results)} kernels, {len(first)} run, {seconds:.0f} s, {executed:,} warp instructions"
    )


def _name(arch: str, chosen: RowKernel) -> str:
    candidate = chosen.candidate
    return f"{arch} {candidate.provider} {candidate.signature.key} {candidate.operator}"


def _cases(
    results: Sequence[tuple[KernelTask, KernelReport]], rows: dict[str, str]
) -> Iterator[Case]:
    """Yields each target's rows: right kernels over emulated ones."""
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for task, report in results:
        kernel = task.kernel
        name = f"{task.target.arch} {kernel.provider} {kernel.signature.key} {kernel.operator}"
        case = f"{task.target.arch}/{rows[name]}"
        total[case] += 1
        right[case] += report.verdict in (Verdict.RIGHT, Verdict.SUSPECT)
    for case, count in sorted(total.items()):
        yield Case(
            name=case,
            figure=right[case],
            unit="kernels",
            baseline=Baseline(name="emulated", value=count),
        )


if __name__ == "__main__":
    main()
