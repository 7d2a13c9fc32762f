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

from ..terminal.printing import (
    count_text,
    keep_stdout,
    print_result,
    report_progress,
    size_text,
    table,
    us_text,
)
from ..terminal.shared_options import ANY_PATH, cache_option, json_option, out_directory_option
from .packing import prepare_wheels, wheel_lines, write_wheels

if TYPE_CHECKING:
    from ...manifest.parse import Manifest
    from ...pipeline.assemble import PlannedDevice, PlannedTarget
    from ...pipeline.pipeline import BuildResult, MeasuredTarget
    from ...pipeline.target_plan import RejectionSink, Unserved
    from ...providers import Rejection
    from ...rankings.entries import Rankings
    from ...targets import BuildTarget

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
    """Compile the kernels that MANIFEST declares, into one bundle per target.

    MANIFEST is a file, or the name of a manifest that comes with nvgemm-aot, such as llama-3.1-8b.
    Problems are ranked by measurements that come with nvgemm-aot if some fit, and by estimates
    otherwise; the output counts both.

    A kernel whose compiler takes longer than $NVGEMM_AOT_COMPILE_TIMEOUT seconds, by default 300,
    counts as one that does not compile.
    """
    from ...manifest.parse import load_manifest
    from ...manifest.shipped_manifests import find_manifest
    from ...pipeline import pipeline
    from ...pipeline.target_plan import require_served
    from ...storage.build_cache import Cache, default_directory

    if rejections and not dry_run:
        raise click.UsageError("--rejections needs --dry-run")
    if wheel_version and not wheel:
        raise click.UsageError("--wheel-version needs --wheel")
    if estimates_only and rankings:
        raise click.UsageError("--estimates-only cannot be combined with --rankings")
    declared = load_manifest(find_manifest(manifest))
    files = _user_files(rankings)
    measured = None if estimates_only else _measurements(declared, files)
    cache = Cache(cache_dir or default_directory())
    if dry_run:
        with open_rejection_log(rejections) as on_rejection, keep_stdout():
            planned = pipeline.plan_build(
                declared, cache, on_rejection=on_rejection, rankings=measured, prunes=prune
            )
        plan = plan_document(planned, jobs, files, prunes=prune)
        print_result(plan, plan_text, as_json=as_json)
        if strict:
            pipeline.require_used(pipeline.measured_of(planned), measured)
        require_served(pipeline.without_operator(planned), len(planned), strict=strict)
        return
    if wheel:
        runtime = prepare_wheels(out, name=declared.name, version=wheel_version or __version__)
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
            _bundles_by_platform(result),
            runtime,
            name=declared.name,
            version=wheel_version or __version__,
            summary=declared.description or None,
            out=out,
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


_SECONDS_PER_KERNEL = 0.6
"""Compile time per kernel on one core: benchmarks.build printed 0.56 s for sm_100f, and 11 % more
with everything around the compiler."""

_SECONDS_PER_START = 4.0
"""Start-up time for one provider's compiler processes on one core: ``build -j1`` took 3.3 to 4.5 s
of processor time in addition to its kernels."""

_PLANNED_PROBLEMS = 50
"""Most problems per target that a plan prints."""

_MAX_BYTES_PER_KERNEL = 4_700
"""Kernel size in a small bundle: quickstart's for sm_100f took 4,674 bytes each. Larger bundles
take less: the 854 kernels in benchmarks.build took 2,219 bytes each."""


def plan_document(
    planned: Sequence[PlannedTarget],
    jobs: int | None,
    rankings: Sequence[Path],
    *,
    prunes: bool = False,
) -> Document:
    """Describes a plan with its ranking sources, and estimates its cost.

    ``rankings`` are the user's rankings files.
    """
    from ...pipeline.compiler_limits import default_jobs
    from ...pipeline.pipeline import measured_of, without_operator

    measured = measured_of(planned)
    standings = {(target.target, target.device): target.standings for target in measured}

    missing = sum(item.missing for item in planned)
    processes = max(1, min(jobs or default_jobs(), missing))
    starts = len({task.process_kind for item in planned if item.missing for task in item.tasks})
    seconds = starts * _SECONDS_PER_START + missing * _SECONDS_PER_KERNEL / processes
    targets = [_planned_target(item, standings) for item in planned]
    return {
        "targets": targets,
        "unserved": _unserved_document(without_operator(planned)),
        "jobs": processes,
        "estimated_seconds": round(seconds, 1),
        "measured": _measured_document(measured),
        "rankings": [str(file) for file in rankings],
        "prunes": prunes,
    }


def _planned_target(
    item: PlannedTarget, standings: Mapping[tuple[Target, str], Mapping[Problem, str]]
) -> Document:
    products = [
        {
            "device": device.target.device.name,
            "gpu": device.target.device.driver_name,
            "problems": _planned_problems(device, standings),
        }
        for device in item.devices
    ]
    kernels = len(item.all_tasks)
    return {
        "target": item.target.target.key,
        "device": item.target.device.name,
        "problems": products[0]["problems"],
        "products": products,
        "kernels": kernels,
        "to_compile": item.missing,
        "estimated_most_bytes": kernels * _MAX_BYTES_PER_KERNEL,
    }


def _planned_problems(
    item: PlannedDevice, standings: Mapping[tuple[Target, str], Mapping[Problem, str]]
) -> list[Document]:
    measured = standings.get((item.target.target, item.target.device.name), {})
    return [
        {
            "problem": p.problem.key,
            "declared": p.is_declared,
            "times": _times_source(measured, p.problem),
            "kernels": [
                {"operator": item.plan.candidates[i].operator, "time_ns": time_ns}
                for i, time_ns in p.choices
            ],
        }
        for p in item.plan.problems
    ]


def _times_source(standings: Mapping[Problem, str], problem: Problem) -> str:
    return "measured" if problem in standings else "estimated"


def _measured_document(measured: Sequence[MeasuredTarget]) -> list[Document]:
    return [
        {
            "arch": target.target.arch,
            "target": target.target.key,
            "device": target.device,
            "problems": dict(sorted(Counter(target.standings.values()).items())),
            "shipped": len(target.standings) - len(target.user_problems),
            "own": len(target.user_problems),
            "estimated": target.estimated,
            "notes": list(target.notes),
        }
        for target in measured
    ]


def _ranking_source_lines(document: Document) -> list[str]:
    """Describes the ranking sources, one line per target, followed by unused measurements."""
    lines = []
    counts = Counter(target["target"] for target in document["measured"])
    for target in document["measured"]:
        name = _short_name(target) + (
            f" on {target['device']}" if counts[target["target"]] > 1 else ""
        )
        lines.append(f"{name}: problems ranked by {_ranked_by_text(target)}")
        lines += (f"  {note}" for note in target["notes"])
    if any("doubtful" in target["problems"] for target in document["measured"]):
        lines.append(f"to see the doubts: {_show_command(document['rankings'])}")
    return lines


def _ranked_by_text(target: Document) -> str:
    """Counts a target's problems by their ranking source."""
    count = target["shipped"] + target["own"]
    sources = (("shipped", target["shipped"]), ("from your files", target["own"]))
    counted = ", ".join(f"{number} {source}" for source, number in sources if number)
    standings = ", ".join(f"{number} {standing}" for standing, number in target["problems"].items())
    detail = f" ({counted}: {standings})" if count else ""
    return f"measurements: {count}{detail}; by estimates: {target['estimated']}"


def _show_command(files: Sequence[str]) -> str:
    """Returns the command that shows the doubts about the measurements that a build used."""
    from ...rankings.shipped_rankings import SHIPPED

    return f"nvgemm-aot rankings show {shlex.join([SHIPPED, *files])} --standing doubtful"


def plan_text(document: Document) -> str:
    """Renders a plan: one line per problem and one per target."""
    parts = []
    built = [target for target in document["targets"] if target["kernels"]]
    for target in built:
        for product in target["products"]:
            rows = [
                [p["problem"], len(p["kernels"]), us_text(p["kernels"][0]["time_ns"]), p["times"]]
                for p in product["problems"][:_PLANNED_PROBLEMS]
            ]
            lines = [
                f"{target['target']} (device {product['device']})",
                table(rows, ["problem", "candidates", "best time, us", "basis"]),
            ]
            if (hidden := len(product["problems"]) - len(rows)) > 0:
                lines.append(f"and {count_text(hidden, 'more problem')}, which --json lists")
            parts.append("\n".join(lines))
    for target in built:
        problems = {p["problem"] for product in target["products"] for p in product["problems"]}
        parts.append(
            f"{target['target']}: {count_text(len(problems), 'problem')}, "
            f"{count_text(target['kernels'], 'unique kernel')} ({target['to_compile']} to compile)"
            f", at most about {size_text(target['estimated_most_bytes'])}"
        )
    if document["prunes"]:
        parts.append("--prune keeps fewer kernels: those that win, which is known after compiling")
    parts.append(
        f"about {document['estimated_seconds']:.0f} s of compiling in "
        f"{count_text(document['jobs'], 'process')}, more if other programs run"
    )
    parts += (
        "\n".join(lines) for lines in (_unserved_lines(document), _ranking_source_lines(document))
    )
    return "\n\n".join(filter(None, parts))


def _short_name(document: Document) -> str:
    """Returns a target's architecture, or its whole key if platform or CUDA are not the default."""
    arch, key = document["arch"], document["target"]
    return str(arch if key == Target(arch=arch).key else key)


_LISTED_PROBLEMS = 8
"""Most problems that are printed for one reason."""


def _unserved_document(unserved: Sequence[Unserved]) -> list[Document]:
    return [
        {
            "arch": entry.target.arch,
            "target": entry.target.key,
            "device": entry.device,
            "problem": entry.problem.key,
            "reason": entry.reason,
        }
        for entry in unserved
    ]


def _unserved_lines(document: Document) -> list[str]:
    """Returns the problems without a kernel, grouped by target and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in document["unserved"]:
        name = (
            _short_name(entry)
            if entry["device"] is None
            else f"{_short_name(entry)} on {entry['device']}"
        )
        groups.setdefault((name, entry["reason"]), []).append(entry["problem"])
    lines = []
    for (name, reason), problems in groups.items():
        lines.append(f"{name}: no kernel for {count_text(len(problems), 'problem')}: {reason}")
        lines += (f"  {problem}" for problem in problems[:_LISTED_PROBLEMS])
        if len(problems) > _LISTED_PROBLEMS:
            lines.append(f"  and {len(problems) - _LISTED_PROBLEMS} more, which --json lists")
    return lines


def build_document(result: BuildResult, rankings: Sequence[Path] = ()) -> Document:
    """Describes a finished build; ``rankings`` are the user's rankings files."""
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
                "not_declared": bundle.header.not_declared_count,
                "products": list(bundle.header.products),
                "incomplete": len(
                    {
                        ranking.problem
                        for ranking in bundle.header.rankings
                        if not bundle.header.is_complete(ranking)
                    }
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
    """Renders a finished build: one line per file, and every kernel left out or file removed."""
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
    lines += [*_unserved_lines(document), *_ranking_source_lines(document)]
    lines += wheel_lines(document)
    lines += (
        f"{platform}: no wheel: no target of this platform has a kernel; the reasons are above"
        for platform in document.get("platforms_without_wheel", ())
    )
    lines.append(f"{count_text(document['compiled'], 'kernel')} compiled now")
    return "\n".join(lines)
