"""``nvgemm-aot emulate``: executes kernels' PTX on this CPU and compares their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime.errors import CompileError, EmulatedKernelError, NoCandidateError, count_text
from nvgemm_runtime.gemm.target import TargetName

from ..terminal.interrupts import INTERRUPTED
from ..terminal.printing import keep_stdout, print_result, report_progress
from ..terminal.shared_options import ANY_PATH, TargetNameParam, cache_option, json_option
from .emulation_rows import RIGHT, emulation_document, join, rows_text, summary_text

if TYPE_CHECKING:
    from ...emulator.checking.kernel_check import KernelReport, KernelTask
    from ...emulator.checking.manifest_tasks import PlannedKernel
    from ...pipeline.compiler import Failure

_DEFAULT_TARGET = "sm_100f"

_PART, _PART_OF_A_PROCESS = 32, 8
"""Least kernels, at all and for each process, that are compiled and emulated before their rows are
printed. Processes take about 10 s to start, a kernel about 2 s."""


@click.command()
@click.argument("manifest", type=ANY_PATH, required=False)
@click.option(
    "--provider",
    "provider_name",
    help="Check this provider's kernels: a name, or module:class. Without a manifest, for every "
    "signature that it serves.",
)
@click.option(
    "--target",
    type=TargetNameParam(),
    help=f"Without a manifest: target to compile for; default {_DEFAULT_TARGET}.",
)
@click.option(
    "--candidates",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Without a manifest: most kernels for a signature.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Operands and schedules for each problem.",
)
@click.option(
    "--declared-sizes",
    is_flag=True,
    help="Use the manifest's problems instead of small ones with sizes from each kernel's tile. "
    "A problem with m, n, k of 4096 takes hours.",
)
@click.option("-j", "--jobs", type=click.IntRange(1), help="Processes.")
@click.option(
    "--limit",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for a kernel with all its problems and seeds; longer counts as an error.",
)
@cache_option("Build cache, which also keeps the PTX")
@json_option
@click.pass_context
def emulate(
    ctx: click.Context,
    manifest: Path | None,
    provider_name: str | None,
    target: TargetName | None,
    candidates: int,
    seeds: int,
    declared_sizes: bool,
    jobs: int | None,
    limit: float,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Check the kernels of MANIFEST, or of a provider, on a machine without their GPU.

    Compiles the kernels that a build of MANIFEST holds. Then executes their PTX functionally on the
    CPU, called by their own launchers through nvgemm_runtime's functions, and compares each result
    with a reference. Problems are small: three with tails along m, n and k, one with several tiles,
    and one with a long k. Rows are printed for each part of many kernels; Ctrl-C ends with the rows
    so far.

    Emulation does not show what ptxas makes of the PTX, times, or how tensor cores round.
    """
    from ...emulator.checking import manifest_tasks
    from ...emulator.checking.child_processes import check_kernels
    from ...pipeline.compiler_limits import default_jobs
    from ...storage.build_cache import Cache, default_directory

    if manifest is None and provider_name is None:
        raise click.UsageError("name a MANIFEST, a --provider, or both")
    if manifest is not None and target is not None:
        raise click.UsageError("--target cannot be combined with MANIFEST, which has its targets")
    if manifest is None and declared_sizes:
        raise click.UsageError("--declared-sizes needs MANIFEST")
    cache = Cache(cache_dir or default_directory())
    with report_progress("Listing", "signature") as report, keep_stdout():
        if manifest is None:
            assert provider_name is not None
            planned = manifest_tasks.provider_kernels(
                provider_name,
                target or TargetName.parse(_DEFAULT_TARGET),
                most=candidates,
                progress=report,
            )
        else:
            planned = manifest_tasks.manifest_kernels(manifest, cache, provider_name)
    if not planned:
        raise NoCandidateError("no provider has a kernel to emulate on this machine")
    count = jobs or default_jobs()
    parts = _split(planned, max(_PART, _PART_OF_A_PROCESS * count))
    if len(parts) > 1:
        signatures = {one.task.candidate.signature for one in planned}
        click.echo(
            f"{len(planned)} kernels for {count_text(len(signatures), 'signature')}, in "
            f"{len(parts)} parts; Ctrl-C ends with the results so far",
            err=True,
        )
    documents: list[dict[str, Any]] = []
    is_interrupted = False
    for number, part in enumerate(parts, start=1):
        place = f" (part {number} of {len(parts)})" if len(parts) > 1 else ""
        failures: Sequence[Failure] = ()
        reports: list[tuple[KernelTask, KernelReport]] = []
        try:
            with report_progress(f"Compiling{place}") as report, keep_stdout():
                prepared = manifest_tasks.prepare(
                    part,
                    cache,
                    jobs=count,
                    seeds=tuple(range(seeds)),
                    declared_sizes=declared_sizes,
                    progress=report,
                )
            failures = prepared.failures
            with report_progress(f"Emulating{place}") as report, keep_stdout():
                checks = check_kernels(
                    prepared.tasks, jobs=count, limit_seconds=limit, progress=report
                )
                for outcome in checks:
                    reports.append(outcome)
        except KeyboardInterrupt:
            is_interrupted = True
        if reports or failures:
            documents.append(emulation_document(reports, failures))
            if not as_json:
                click.echo(rows_text(documents[-1]))
        if is_interrupted:
            break
    result = join(documents, len(planned))
    print_result(result, summary_text, as_json=as_json)
    if is_interrupted:
        click.echo("nvgemm-aot: interrupted; compiled kernels are in the cache", err=True)
        ctx.exit(INTERRUPTED)
    _require_right(result)


def _split(planned: Sequence[PlannedKernel], size: int) -> list[Sequence[PlannedKernel]]:
    return [planned[begin : begin + size] for begin in range(0, len(planned), size)]


def _require_right(result: dict[str, Any]) -> None:
    kernels, failures = result["kernels"], result["not_compiled"]
    if not kernels:
        raise CompileError(f"none of {count_text(len(failures), 'kernel')} compiles")
    bad = sum(kernel["verdict"] not in RIGHT for kernel in kernels)
    if bad:
        raise EmulatedKernelError(
            f"{bad} of {count_text(len(kernels), 'emulated kernel')} failed; see their rows"
        )
