"""``nvgemm-aot build``: compiles a manifest's kernels, or prints the plan."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvgemm_runtime import __version__
from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.gemm.problem import Problem

from ...pipeline.executor.scheduler_connection import LOCAL
from ..terminal.executors import (
    checked_executor,
    executor_option,
    insecure_option,
    open_executor,
)
from ..terminal.printing import (
    keep_stdout,
    print_result,
    report_progress,
)
from ..terminal.remote_texts import open_remote_cache, remote_document
from ..terminal.shared_options import (
    ANY_PATH,
    ShardParam,
    cache_option,
    json_option,
    out_directory_option,
)
from .documents import (
    build_document,
    build_text,
    plan_document,
    plan_text,
    shard_document,
    shard_text,
)
from .packing import prepare_wheels, write_wheels

if TYPE_CHECKING:
    from ...manifest.parse import Manifest
    from ...pipeline.pipeline import BuildResult
    from ...pipeline.shard import Shard
    from ...pipeline.target_plan import RejectionSink
    from ...providers import Rejection
    from ...rankings.entries import Rankings
    from ...targets import BuildTarget


@click.command()
@click.argument("manifest", type=ANY_PATH)
@out_directory_option("Directory for the bundles (and the wheel).")
@click.option("-j", "--jobs", type=click.IntRange(1), help="Compiler processes.")
@executor_option(
    "Compile on the workers of this Dask scheduler, such as tls://scheduler:8786; tcp:// on this "
    "machine alone. Needs $NVGEMM_AOT_REMOTE_CACHE here and on the workers."
)
@insecure_option
@click.option("--strict", is_flag=True, help="Fail if a target lacks any kernel.")
@click.option(
    "--shard",
    type=ShardParam(),
    help="Compile only this part, such as 2/8, into the cache, and write no bundle. A build with "
    "the cache of all parts then writes the bundles.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and compile nothing.")
@click.option(
    "--rejections",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="With --dry-run: write every operator not chosen, and why, as JSON lines.",
)
@click.option(
    "--rankings",
    type=ANY_PATH,
    multiple=True,
    help="Also rank by this file's measurements, where they fit; may be repeated. Measurements "
    "that come with nvgemm-aot need not be named.",
)
@click.option(
    "--estimates-only",
    is_flag=True,
    help="Use no measurements, not even those that come with nvgemm-aot.",
)
@click.option(
    "--prune", is_flag=True, help="Keep only kernels that win a problem or are in a dispatch table."
)
@click.option(
    "--wheel",
    is_flag=True,
    help="Also pack the bundles into a wheel, or one for each platform, and nvgemm-aot itself.",
)
@click.option("--wheel-version", help="Version of the wheels; default is nvgemm-aot's own.")
@cache_option("Build cache")
@json_option
def build(
    manifest: Path,
    out: Path,
    jobs: int | None,
    executor: str,
    insecure_executor: bool,
    strict: bool,
    shard: Shard | None,
    dry_run: bool,
    rejections: Path | None,
    rankings: tuple[Path, ...],
    estimates_only: bool,
    prune: bool,
    wheel: bool,
    wheel_version: str | None,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Compile the kernels that MANIFEST declares, into one bundle per target.

    MANIFEST is a file, or the name of a manifest that comes with nvgemm-aot, such as llama-3.1-8b.
    Problems are ranked by measurements that come with nvgemm-aot if some fit, and by estimates
    otherwise; the output counts both.

    A kernel whose compiler takes longer than $NVGEMM_AOT_COMPILE_TIMEOUT seconds, by default 300,
    counts as one that does not compile. If $NVGEMM_AOT_SIGNING_KEY is set, the bundles are signed.
    """
    from ...manifest.parse import load_manifest
    from ...manifest.shipped_manifests import find_manifest
    from ...pipeline import pipeline
    from ...pipeline.compile_shard import compile_shard
    from ...pipeline.unserved import require_served
    from ...storage.build_cache import Cache, default_directory
    from ..signing.written import output_key, sign_written

    if rejections and not dry_run:
        raise click.UsageError("--rejections needs --dry-run")
    if wheel_version and not wheel:
        raise click.UsageError("--wheel-version needs --wheel")
    if shard and (wheel or dry_run or prune):
        raise click.UsageError("--shard cannot be combined with --wheel, --dry-run or --prune")
    executor = checked_executor(executor, allow_insecure=insecure_executor)
    if executor != LOCAL and (jobs or shard or dry_run):
        raise click.UsageError(
            "--executor cannot be combined with --jobs (a worker's threads are its compiler "
            "processes), --shard or --dry-run"
        )
    if estimates_only and rankings:
        raise click.UsageError("--estimates-only cannot be combined with --rankings")
    declared = load_manifest(find_manifest(manifest))
    files = _user_files(rankings)
    measured = None if estimates_only else _measurements(declared, files)
    cache = Cache(cache_dir or default_directory())
    key = output_key()
    if shard:
        with open_remote_cache() as remote:
            with report_progress("Compiling") as report, keep_stdout():
                compiled = compile_shard(
                    declared,
                    cache,
                    shard,
                    jobs=jobs,
                    strict=strict,
                    progress=report,
                    rankings=measured,
                    remote=remote,
                )
            document = shard_document(compiled) | {"remote_cache": remote_document(remote)}
        print_result(document, shard_text, as_json=as_json)
        return
    if dry_run:
        with open_rejection_log(rejections) as on_rejection, keep_stdout():
            planned = pipeline.plan_build(
                declared, cache, on_rejection=on_rejection, rankings=measured, prunes=prune
            )
        plan = plan_document(planned, jobs, files, prunes=prune)
        print_result(plan, plan_text, as_json=as_json)
        if strict:
            pipeline.require_rankings_used(pipeline.ranking_sources(planned), measured)
        require_served(pipeline.without_operator(planned), len(planned), strict=strict)
        return
    if wheel:
        runtime = prepare_wheels(out, name=declared.name, version=wheel_version or __version__)
    with (
        open_remote_cache() as remote,
        open_executor(executor, remote, allow_insecure=insecure_executor) as workers,
    ):
        with report_progress("Compiling") as report, keep_stdout():
            result = pipeline.build(
                declared,
                out,
                cache,
                jobs=jobs,
                strict=strict,
                progress=report,
                rankings=measured,
                prunes=prune,
                remote=remote,
                executor=workers,
                key=key,
            )
        sign_written((bundle.path for bundle in result.bundles), key)
        document = build_document(result, files) | {"remote_cache": remote_document(remote)}
    if wheel:
        document |= write_wheels(
            _bundles_by_platform(result),
            runtime,
            name=declared.name,
            version=wheel_version or __version__,
            summary=declared.description or None,
            out=out,
            key=key,
        )
        document["platforms_without_wheel"] = _platforms_without_bundle(result, declared)
    print_result(document, build_text, as_json=as_json)
    require_served(result.unserved, len(declared.bundle_targets))


def _bundles_by_platform(result: BuildResult) -> dict[str, list[Path]]:
    bundles: dict[str, list[Path]] = {}
    for bundle in result.bundles:
        bundles.setdefault(bundle.header.target.platform, []).append(bundle.path)
    return bundles


def _platforms_without_bundle(result: BuildResult, manifest: Manifest) -> list[str]:
    """Returns the declared platforms, sorted, for which no target has a kernel."""
    declared = {target.target.platform for target in manifest.targets}
    return sorted(declared - {bundle.header.target.platform for bundle in result.bundles})


def _user_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files among the `--rankings` arguments, and reports that names change nothing."""
    from ...rankings.shipped_rankings import is_shipped_name

    names = [path for path in paths if is_shipped_name(path)]
    for name in names:
        click.echo(
            f"nvgemm-aot: --rankings {name} has no effect: every build uses the measurements that "
            "come with nvgemm-aot",
            err=True,
        )
    return [path for path in paths if path not in names]


def _measurements(manifest: Manifest, files: Sequence[Path]) -> Rankings:
    """Returns the shipped measurements that a manifest may use, and all of the user's files."""
    from ...rankings.entries import merge
    from ...rankings.file import read_rankings
    from ...rankings.shipped_rankings import shipped_rankings

    shipped = shipped_rankings(entry.problem for entry in manifest.declared)
    return merge([shipped, *map(read_rankings, files)])


@contextlib.contextmanager
def open_rejection_log(path: Path | None) -> Iterator[RejectionSink | None]:
    """Opens a sink that writes rejections as JSON lines; yields None if ``path`` is None.

    Raises:
        StorageError: If the file cannot be written.
    """
    if path is None:
        yield None
        return
    with _name_unwritable(path):
        file = path.open("w", encoding="utf-8")

    def write(target: BuildTarget, problem: Problem, rejection: Rejection) -> None:
        line = {
            "target": target.target.key,
            "device": target.device.name,
            "problem": problem.key,
            "operator": rejection.operator,
            "reason": rejection.reason,
        }
        with _name_unwritable(path):
            file.write(json.dumps(line) + "\n")

    try:
        yield write
        with _name_unwritable(path):
            file.flush()
    finally:
        with contextlib.suppress(OSError):
            file.close()


@contextlib.contextmanager
def _name_unwritable(path: Path) -> Iterator[None]:
    """Names the file if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from error
