"""What the command prints of builds, files and installed bundles.

Each has a document, for ``--json``, and the text made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.bundle.reader import Bundle

from .tables import count_text, size_text, table

if TYPE_CHECKING:
    from nvgemm_runtime.installed.discover import InstalledBundle

    from ..build.assemble import PlannedTarget
    from ..build.pipeline import BuildResult
    from ..build.plan import Unserved

Document = dict[str, Any]

_SECONDS_PER_KERNEL = 0.6
"""Time of one core for one kernel: benchmarks/build.py printed 0.56 s for sm_100f, and 11 % more
with everything around the compiler."""

_MAX_BYTES_PER_KERNEL = 4_700
"""Size of a kernel in a small bundle: quickstart's for sm_100f took 4,674 bytes each. Larger
bundles take less: the 854 kernels of benchmarks/build.py took 2,219 bytes each."""


def plan_document(planned: Sequence[PlannedTarget], jobs: int | None) -> Document:
    """Describe a plan and estimate its cost."""
    from ..build.compiler import default_jobs
    from ..build.pipeline import without_operator

    missing = sum(item.missing for item in planned)
    processes = max(1, min(jobs or default_jobs(), missing))
    targets = [
        {
            "target": item.target.target.key,
            "device": item.target.device.name,
            "problems": [
                {
                    "problem": p.problem.key,
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
    }


def plan_text(document: Document) -> str:
    """Print a plan: a line a problem, a line a target."""
    parts = []
    built = [target for target in document["targets"] if target["problems"]]
    for target in built:
        rows = [
            [
                p["problem"],
                len(p["kernels"]),
                "-" if p["kernels"][0]["time_ns"] is None else p["kernels"][0]["time_ns"] / 1e3,
            ]
            for p in target["problems"]
        ]
        parts.append(
            f"{target['target']} (device {target['device']})\n"
            + table(rows, ["problem", "candidates", "best estimate, us"])
        )
    for target in built:
        parts.append(
            f"{target['target']}: {len(target['problems'])} problems, {target['kernels']} unique "
            f"kernels ({target['to_compile']} to compile), "
            f"at most about {size_text(target['estimated_most_bytes'])}"
        )
    parts.append(
        f"about {document['estimated_seconds']} s of compiling in {document['jobs']} processes"
    )
    parts += ["\n".join(lines) for lines in [_unserved_lines(document)] if lines]
    return "\n\n".join(parts)


_LISTED_PROBLEMS = 8
"""Most problems to print that share a reason."""


def _unserved_document(unserved: Sequence[Unserved]) -> list[Document]:
    return [
        {"arch": one.arch, "problem": one.problem.key, "reason": one.reason} for one in unserved
    ]


def _unserved_lines(document: Document) -> list[str]:
    """What has no kernel, by target and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in document["unserved"]:
        groups.setdefault((one["arch"], one["reason"]), []).append(one["problem"])
    lines = []
    for (arch, reason), problems in groups.items():
        lines.append(f"{arch}: no kernel for {count_text(len(problems), 'problem')}: {reason}")
        lines += (f"  {problem}" for problem in problems[:_LISTED_PROBLEMS])
        if len(problems) > _LISTED_PROBLEMS:
            lines.append(f"  and {len(problems) - _LISTED_PROBLEMS} more, which --json lists")
    return lines


def build_document(result: BuildResult) -> Document:
    """Describe a finished build."""
    return {
        "bundles": [
            {
                "path": str(bundle.path),
                "bytes": bundle.file_bytes,
                "target": bundle.header.target.key,
                "kernels": len(bundle.header.kernels),
                "problems": len(bundle.header.rankings),
                "incomplete": sum(
                    not bundle.header.is_complete(ranking) for ranking in bundle.header.rankings
                ),
                "up_to_date": bundle.up_to_date,
                "failures": [
                    {
                        "operator": f.task.candidate.operator,
                        "reason": f.reason,
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
    }


def build_text(document: Document) -> str:
    """Print a finished build: a line a file, and every kernel left out or file removed."""
    lines = []
    for bundle in document["bundles"]:
        state = "up to date" if bundle["up_to_date"] else "written"
        lines.append(
            f"{bundle['path']}: {state}, {bundle['kernels']} kernels for {bundle['problems']} "
            f"problems, {size_text(bundle['bytes'])} "
            f"({size_text(bundle['bytes'] // bundle['kernels'])} a kernel)"
        )
        lines += [
            f"  left out {f['operator']}: {f['reason']}"
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
    lines += _unserved_lines(document)
    if "wheel" in document:
        lines.append(file_text(document["wheel"]))
    lines.append(f"{document['compiled']} kernels compiled now")
    return "\n".join(lines)


def file_document(path: Path) -> Document:
    """Describe a written file."""
    return {"path": str(path), "bytes": path.stat().st_size}


def file_text(document: Document) -> str:
    """Print a written file."""
    return f"{document['path']}: written, {size_text(document['bytes'])}"


def installed_document(installed: Sequence[InstalledBundle]) -> list[Document]:
    """Describe installed bundles; one that cannot be read says why."""
    documents = []
    for item in installed:
        document: Document = {
            "path": str(item.path),
            "distribution": item.distribution,
            "version": item.version,
        }
        try:
            with Bundle(item.path) as bundle:
                document |= {
                    "target": bundle.header.target.key,
                    "kernels": len(bundle.header.kernels),
                    "problems": len(bundle.header.rankings),
                    "bytes": bundle.file_bytes,
                    "error": None,
                }
        except Exception as error:  # Whatever is wrong with one bundle, the others are listed.
            document["error"] = str(error) or type(error).__name__
        documents.append(document)
    return documents


def installed_text(documents: Sequence[Document]) -> str:
    """Print installed bundles."""
    if not documents:
        return "no bundle is installed: no distribution has an entry point in nvgemm_aot.bundles"
    rows = [
        [
            d["distribution"],
            d["version"],
            d.get("target", "-"),
            d.get("kernels", "-"),
            d.get("problems", "-"),
            size_text(d["bytes"]) if "bytes" in d else "-",
            d["path"],
        ]
        for d in documents
    ]
    broken = [f"{d['path']}: {d['error']}" for d in documents if d["error"]]
    header = ["distribution", "version", "target", "kernels", "problems", "size", "path"]
    return "\n".join([table(rows, header), *broken])
