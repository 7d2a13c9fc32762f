"""``nvgemm-aot build``: compiles a manifest's kernels, or prints the plan."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime import __version__
from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target

from .options import ANY_PATH, cache_option, json_option, out_directory_option
from .packing import pack_runtime, wheel_lines, write_wheels
from .printing import (
    count_text,
    keep_stdout,
    print_result,
    report_progress,
    size_text,
    table,
    us_text,
)

if TYPE_CHECKING:
    from ..build.assemble import PlannedTarget
    from ..build.pipeline import BuildResult, MeasuredTarget
    from ..build.plan import RejectionSink, Unserved
    from ..manifest.parse import Manifest
    from ..providers import Rejection

Document = dict[str, Any]


@click.command()
@click.argument("manifest", type=ANY_PATH)
@out_directory_option("Directory for the bundles (and the wheel).")
@click.option("-j", "--jobs", type=click.IntRange(1), help="Compiler processes.")
@click.option("--strict", is_flag=True, help="Fail if a target lacks any kernel.")
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
    help="Rank by the measurements of this file, or of a shipped manifest, where they fit; may be "
    "repeated.",
)
@click.option(
    "--estimates-only",
    is_flag=True,
    help="Use no measurements, nor those that come with nvgemm-aot for MANIFEST.",
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
    strict: bool,
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
    """Compile the kernels that MANIFEST declares, into one bundle a target.

    MANIFEST is a file, or the name of a manifest that comes with nvgemm-aot, such as llama-3.1-8b.
    If measured rankings come with that manifest, they are used as if given by --rankings.

    A kernel whose compiler takes longer than $NVGEMM_AOT_COMPILE_TIMEOUT seconds, by default 300,
    counts as one that does not compile.
    """
    from ..build import pipeline
    from ..build.plan import require_served
    from ..manifest.parse import load_manifest
    from ..manifest.shipped import find_manifest
    from ..rankings.entries import merge
    from ..rankings.file import read_rankings
    from ..storage.cache import Cache, default_directory

    if rejections and not dry_run:
        raise click.UsageError("--rejections goes with --dry-run")
    if wheel_version and not wheel:
        raise click.UsageError("--wheel-version goes with --wheel")
    if estimates_only and rankings:
        raise click.UsageError("--estimates-only goes without --rankings")
    path = find_manifest(manifest)
    declared = load_manifest(path)
    is_shipped = path != manifest
    files = [] if estimates_only else _rankings_files(rankings, declared.name, is_shipped)
    measured = merge([read_rankings(file) for file in files]) if files else None
    cache = Cache(cache_dir or default_directory())
    if dry_run:
        with open_rejection_log(rejections) as on_rejection, keep_stdout():
            planned = pipeline.plan_build(
                declared, cache, on_rejection=on_rejection, rankings=measured, prunes=prune
            )
        plan = plan_document(planned, jobs, files, prunes=prune)
        print_result(plan, plan_text, as_json=as_json)
        if strict:
            pipeline.require_used(pipeline.measured_of(planned))
        require_served(pipeline.without_operator(planned), 1 if strict else len(planned))
        return
    if wheel:
        from ..bundle.wheel import identify

        identify(declared.name, wheel_version or __version__)  # refused before time is spent
        runtime = pack_runtime(out)
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
        )
    document = build_document(result, files)
    if wheel:
        document |= write_wheels(
            _by_platform(result),
            runtime,
            name=declared.name,
            version=wheel_version or __version__,
            summary=declared.description or None,
            out=out,
        )
        document["platforms_without_wheel"] = _platforms_without_bundle(result, declared)
    print_result(document, build_text, as_json=as_json)
    require_served(result.unserved, len(declared.targets))


def _by_platform(result: BuildResult) -> dict[str, list[Path]]:
    bundles: dict[str, list[Path]] = {}
    for bundle in result.bundles:
        bundles.setdefault(bundle.header.target.platform, []).append(bundle.path)
    return bundles


def _platforms_without_bundle(result: BuildResult, manifest: Manifest) -> list[str]:
    """Declared platforms, sorted, that get no wheel because no target of theirs has a kernel."""
    declared = {target.target.platform for target in manifest.targets}
    return sorted(declared - {bundle.header.target.platform for bundle in result.bundles})


def _rankings_files(given: Sequence[Path], name: str, is_shipped: bool) -> list[Path]:
    """The files that were named, or the one that comes with a shipped manifest."""
    from ..rankings.shipped import find_rankings, named_rankings

    shipped = find_rankings(name) if is_shipped and not given else None
    return [*map(named_rankings, given), *([] if shipped is None else [shipped])]


@contextlib.contextmanager
def open_rejection_log(path: Path | None) -> Iterator[RejectionSink | None]:
    """Open a sink that writes rejections as JSON lines; None where ``path`` is None.

    Raises:
        StorageError: If the file cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from error

    def write(problem: Problem, rejection: Rejection) -> None:
        line = {"problem": problem.key, "operator": rejection.operator, "reason": rejection.reason}
        try:
            file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise StorageError(f"{path}: cannot write: {error.strerror}") from error

    with file:
        yield write


_SECONDS_PER_KERNEL = 0.6
"""Seconds of one core for one kernel: benchmarks.build printed 0.56 s for sm_100f, and 11 % more
with everything around the compiler."""

_MAX_BYTES_PER_KERNEL = 4_700
"""Size of a kernel in a small bundle: quickstart's for sm_100f took 4,674 bytes each. Larger
bundles take less: the 854 kernels of benchmarks.build took 2,219 bytes each."""


def plan_document(
    planned: Sequence[PlannedTarget],
    jobs: int | None,
    rankings: Sequence[Path],
    *,
    prunes: bool = False,
) -> Document:
    """Describe a plan, what it uses of rankings files, and estimate its cost."""
    from ..build.compiler_limits import default_jobs
    from ..build.pipeline import measured_of, without_operator

    measured = measured_of(planned)
    standings = {one.target: one.standings for one in measured}

    missing = sum(item.missing for item in planned)
    processes = max(1, min(jobs or default_jobs(), missing))
    targets = [
        {
            "target": item.target.target.key,
            "device": item.target.device.name,
            "problems": [
                {
                    "problem": p.problem.key,
                    "declared": p.is_declared,
                    "times": _times_are(standings.get(item.target.target, {}), p.problem),
                    "kernels": [
                        {"operator": item.plan.candidates[i].operator, "time_ns": time_ns}
                        for i, time_ns in p.choices
                    ],
                }
                for p in item.plan.problems
            ],
            "kernels": len(item.tasks),
            "to_compile": item.missing,
            "estimated_most_bytes": len(item.tasks) * _MAX_BYTES_PER_KERNEL,
        }
        for item in planned
    ]
    return {
        "targets": targets,
        "unserved": _unserved_document(without_operator(planned)),
        "jobs": processes,
        "estimated_seconds": round(missing * _SECONDS_PER_KERNEL / processes, 1),
        "measured": _measured_document(measured),
        "rankings": [str(file) for file in rankings],
        "prunes": prunes,
    }


def _times_are(standings: Mapping[Problem, str], problem: Problem) -> str:
    return "measured" if problem in standings else "estimated"


def _measured_document(measured: Sequence[MeasuredTarget]) -> list[Document]:
    return [
        {
            "arch": one.target.arch,
            "target": one.target.key,
            "problems": dict(sorted(Counter(one.standings.values()).items())),
            "notes": list(one.notes),
        }
        for one in measured
    ]


def _measured_lines(document: Document) -> list[str]:
    """What is used of rankings: a line a target, and what is not used."""
    lines = []
    for one in document["measured"]:
        ranked = ", ".join(f"{count} {standing}" for standing, count in one["problems"].items())
        lines.append(f"{_short_name(one)}: problems ranked by measurements: {ranked or 'none'}")
        if "doubtful" in one["problems"]:
            lines.append(f"  why doubtful: {_show_command(document['rankings'])}")
        lines += (f"  {note}" for note in one["notes"])
    return lines


def _show_command(files: Sequence[str]) -> str:
    """What shows the doubts of rankings that were read from files."""
    merged = "" if len(files) == 1 else f"nvgemm-aot rankings merge {shlex.join(files)} -o FILE; "
    shown = shlex.quote(files[0]) if len(files) == 1 else "FILE"
    return f"{merged}nvgemm-aot rankings show {shown} --standing doubtful"


def plan_text(document: Document) -> str:
    """Print a plan: a line a problem, a line a target."""
    parts = []
    built = [target for target in document["targets"] if target["problems"]]
    for target in built:
        rows = [
            [p["problem"], len(p["kernels"]), us_text(p["kernels"][0]["time_ns"]), p["times"]]
            for p in target["problems"]
        ]
        parts.append(
            f"{target['target']} (device {target['device']})\n"
            + table(rows, ["problem", "candidates", "best time, us", "which is"])
        )
    for target in built:
        parts.append(
            f"{target['target']}: {count_text(len(target['problems']), 'problem')}, "
            f"{count_text(target['kernels'], 'unique kernel')} ({target['to_compile']} to compile)"
            f", at most about {size_text(target['estimated_most_bytes'])}"
        )
    if document["prunes"]:
        parts.append("--prune keeps fewer of these: those that win, known once all are compiled")
    parts.append(
        f"about {document['estimated_seconds']} s of compiling in {document['jobs']} processes"
    )
    parts += ("\n".join(lines) for lines in (_unserved_lines(document), _measured_lines(document)))
    return "\n\n".join(filter(None, parts))


def _short_name(document: Document) -> str:
    """A target by its architecture, and by all of its key where that is not the usual one."""
    arch, key = document["arch"], document["target"]
    return str(arch if key == Target(arch=arch).key else key)


_LISTED_PROBLEMS = 8
"""Most problems that are printed for one reason."""


def _unserved_document(unserved: Sequence[Unserved]) -> list[Document]:
    return [
        {
            "arch": one.target.arch,
            "target": one.target.key,
            "problem": one.problem.key,
            "reason": one.reason,
        }
        for one in unserved
    ]


def _unserved_lines(document: Document) -> list[str]:
    """Problems without a kernel, grouped by target and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in document["unserved"]:
        groups.setdefault((_short_name(one), one["reason"]), []).append(one["problem"])
    lines = []
    for (name, reason), problems in groups.items():
        lines.append(f"{name}: no kernel for {count_text(len(problems), 'problem')}: {reason}")
        lines += (f"  {problem}" for problem in problems[:_LISTED_PROBLEMS])
        if len(problems) > _LISTED_PROBLEMS:
            lines.append(f"  and {len(problems) - _LISTED_PROBLEMS} more, which --json lists")
    return lines


def build_document(result: BuildResult, rankings: Sequence[Path] = ()) -> Document:
    """Describe a finished build, and which rankings files it used."""
    return {
        "bundles": [
            {
                "path": str(bundle.path),
                "bytes": bundle.file_bytes,
                "target": bundle.header.target.key,
                "kernels": len(bundle.header.kernels),
                "providers": dict(
                    sorted(Counter(kernel.provider for kernel in bundle.header.kernels).items())
                ),
                "problems": bundle.header.declared_count,
                "not_declared": len(bundle.header.rankings) - bundle.header.declared_count,
                "incomplete": sum(
                    not bundle.header.is_complete(ranking) for ranking in bundle.header.rankings
                ),
                "up_to_date": bundle.up_to_date,
                "failures": [
                    {
                        "operator": f.task.candidate.operator,
                        "provider": f.task.candidate.provider,
                        "reason": f.own_reason,
                        "is_transient": f.is_transient,
                    }
                    for f in bundle.failures
                ],
            }
            for bundle in result.bundles
        ],
        "compiled": result.compiled,
        "removed": [str(path) for path in result.removed],
        "unserved": _unserved_document(result.unserved),
        "measured": _measured_document(result.measured),
        "rankings": [str(file) for file in rankings],
    }


def _not_declared_text(count: int) -> str:
    return f" and {count} measured and not declared" if count else ""


def build_text(document: Document) -> str:
    """Print a finished build: a line a file, and every kernel left out or file removed."""
    lines = []
    for bundle in document["bundles"]:
        state = "up to date" if bundle["up_to_date"] else "written"
        lines.append(
            f"{bundle['path']}: {state}, {count_text(bundle['kernels'], 'kernel')} for "
            f"{count_text(bundle['problems'], 'problem')}"
            f"{_not_declared_text(bundle['not_declared'])}, {size_text(bundle['bytes'])} "
            f"({size_text(bundle['bytes'] // bundle['kernels'])} a kernel)"
        )
        if len(bundle["providers"]) > 1:
            counts = (f"{count} of {name}" for name, count in bundle["providers"].items())
            lines.append(f"  kernels: {', '.join(counts)}")
        lines += [
            f"  left out {f['operator']} of provider {f['provider']!r}: {f['reason']}"
            + "; the next build tries it again" * f["is_transient"]
            for f in bundle["failures"]
        ]
        if bundle["incomplete"]:
            count = count_text(bundle["incomplete"], "problem")
            lines.append(f"  {count} may get more kernels: compilers were killed; build again")
    lines += (
        f"{path}: removed; an earlier build made it, and its target has no kernel now"
        for path in document["removed"]
    )
    lines += [*_unserved_lines(document), *_measured_lines(document)]
    lines += wheel_lines(document)
    lines += (
        f"{platform}: no wheel, as no target of this platform has a kernel; the reasons are above"
        for platform in document.get("platforms_without_wheel", ())
    )
    lines.append(f"{count_text(document['compiled'], 'kernel')} compiled now")
    return "\n".join(lines)
