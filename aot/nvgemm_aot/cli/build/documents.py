"""Build plans and results, as JSON documents and as text."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target

from ..terminal.printing import (
    count_text,
    size_text,
    table,
    us_text,
)
from ..terminal.remote_texts import remote_line
from .packing import wheel_lines

if TYPE_CHECKING:
    from ...pipeline.assemble import PlannedDevice, PlannedTarget
    from ...pipeline.compile_shard import CompiledShard
    from ...pipeline.compiler import Failure
    from ...pipeline.pipeline import BuildResult, RankingSources
    from ...pipeline.unserved import Unserved

Document = dict[str, Any]


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
    from ...pipeline.pipeline import ranking_sources, without_operator

    measured = ranking_sources(planned)
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


def _measured_document(measured: Sequence[RankingSources]) -> list[Document]:
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


def _failure_documents(failures: Sequence[Failure]) -> list[Document]:
    return [
        {
            "operator": failure.task.candidate.operator,
            "provider": failure.task.candidate.provider,
            "reason": failure.own_reason,
            "is_transient": failure.is_transient,
        }
        for failure in failures
    ]


def _failure_line(failure: Document) -> str:
    again = "; the next build tries it again" if failure["is_transient"] else ""
    provider, reason = failure["provider"], failure["reason"]
    return f"{failure['operator']} of provider {provider!r}: {reason}{again}"


def shard_document(compiled: CompiledShard) -> Document:
    """Describes a compiled shard."""
    return {
        "shard": str(compiled.shard),
        "kernels": compiled.kernels,
        "all_kernels": compiled.all_kernels,
        "compiled": compiled.compiled,
        "failures": _failure_documents(compiled.failures),
        "unserved": _unserved_document(compiled.unserved),
    }


def shard_text(document: Document) -> str:
    """Renders a compiled shard: its counts, and every kernel that failed."""
    lines = [
        f"shard {document['shard']}: {document['kernels']} of "
        f"{count_text(document['all_kernels'], 'kernel')}, {document['compiled']} compiled now, "
        f"{len(document['failures'])} failed"
    ]
    lines += [f"  failed: {_failure_line(failure)}" for failure in document["failures"]]
    lines += remote_line(document.get("remote_cache"))
    return "\n".join([*lines, *_unserved_lines(document)])


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
                "not_declared": bundle.header.undeclared_count,
                "products": list(bundle.header.products),
                "incomplete": len(
                    {
                        ranking.problem
                        for ranking in bundle.header.rankings
                        if not bundle.header.is_complete(ranking)
                    }
                ),
                "up_to_date": bundle.up_to_date,
                "failures": _failure_documents(bundle.failures),
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
        lines += [f"  left out {_failure_line(failure)}" for failure in bundle["failures"]]
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
    lines += remote_line(document.get("remote_cache"))
    lines.append(f"{count_text(document['compiled'], 'kernel')} compiled now")
    return "\n".join(lines)
