"""``nvgemm-aot emulate``: executes kernels' PTX on this CPU and compares their results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvgemm_runtime.errors import CompileError, EmulatedKernelError, NoCandidateError, count_text
from nvgemm_runtime.gemm.target import TargetName

from ..terminal.printing import keep_stdout, print_result, report_progress
from ..terminal.shared_options import ANY_PATH, TargetNameParam, cache_option, json_option
from .emulation_rows import emulation_document, emulation_text

if TYPE_CHECKING:
    from ...emulator.checking.kernel_check import KernelReport, KernelTask

_DEFAULT_TARGET = "sm_100f"


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
def emulate(
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
    and one with a long k.

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
    count = jobs or default_jobs()
    with report_progress("Compiling") as report, keep_stdout():
        if manifest is None:
            assert provider_name is not None
            planned = manifest_tasks.provider_kernels(
                provider_name, target or TargetName.parse(_DEFAULT_TARGET), most=candidates
            )
        else:
            planned = manifest_tasks.manifest_kernels(manifest, cache, provider_name)
        if not planned:
            raise NoCandidateError("no provider has a kernel to emulate on this machine")
        prepared = manifest_tasks.prepare(
            planned,
            cache,
            jobs=count,
            seeds=tuple(range(seeds)),
            declared_sizes=declared_sizes,
            progress=report,
        )
    with report_progress("Emulating") as report, keep_stdout():
        reports = list(
            check_kernels(prepared.tasks, jobs=count, limit_seconds=limit, progress=report)
        )
    print_result(emulation_document(reports, prepared.failures), emulation_text, as_json=as_json)
    _require_right(reports)
    if not reports:
        raise CompileError(f"none of {count_text(len(prepared.failures), 'kernel')} compiles")


def _require_right(reports: list[tuple[KernelTask, KernelReport]]) -> None:
    from ...emulator.checking.kernel_check import Verdict

    bad = [report for _, report in reports if report.verdict in (Verdict.WRONG, Verdict.ERROR)]
    if bad:
        raise EmulatedKernelError(
            f"{len(bad)} of {count_text(len(reports), 'emulated kernel')} failed; see their rows"
        )
