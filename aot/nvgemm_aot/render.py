"""What the command prints: documents (for ``--json``) and the tables made of them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.errors import NvgemmError, StorageError
from nvgemm_runtime.format import Kernel
from nvgemm_runtime.problem import Problem

if TYPE_CHECKING:
    from nvgemm_runtime.discover import InstalledBundle

    from .compiler import Progress
    from .pipeline import BuildResult, PlannedTarget
    from .plan import RejectionSink
    from .providers import Rejection
    from .verify import Report

Document = dict[str, Any]

_SECONDS_PER_KERNEL = 0.9
"""Time of one core for one kernel: the median that benchmarks/build.py printed for sm_100f."""

_BYTES_PER_KERNEL = 5_000
"""Size of a kernel in a bundle: what benchmarks/build.py printed, rounded up."""

_PLAIN_SECONDS = 5.0
"""Where there is no terminal, progress is one line at most this often."""


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Lay out rows in columns; columns whose cells are all numbers are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def size_text(size_bytes: int) -> str:
    """A size as people read it."""
    if size_bytes < 10_000:
        return f"{size_bytes} B"
    if size_bytes < 10_000_000:
        return f"{size_bytes / 1e3:.1f} kB"
    return f"{size_bytes / 1e6:.1f} MB"


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Report compiled kernels on stderr: a bar with the time left, or plain lines."""
    if sys.stderr.isatty():
        with contextlib.ExitStack() as stack:
            bar: Any = None

            def advance(done: int, total: int, name: str) -> None:
                nonlocal bar
                if bar is None:
                    bar = stack.enter_context(
                        click.progressbar(
                            length=total, label="Compiling", show_pos=True, file=sys.stderr
                        )
                    )
                bar.update(1)

            yield advance
        return
    started = last = time.monotonic()

    def report(done: int, total: int, name: str) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= _PLAIN_SECONDS:
            last = now
            left = (now - started) / done * (total - done)
            click.echo(f"compiled {done} of {total} kernels, about {left:.0f} s left", err=True)

    yield report


@contextlib.contextmanager
def rejection_log(path: Path | None) -> Iterator[RejectionSink | None]:
    """Write rejections as JSON lines to ``path``; None where there is none.

    Raises:
        StorageError: If the file cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        with path.open("w", encoding="utf-8") as file:

            def write(problem: Problem, rejection: Rejection) -> None:
                line = {
                    "problem": problem.key,
                    "operator": rejection.operator,
                    "reason": rejection.reason,
                }
                file.write(json.dumps(line) + "\n")

            yield write
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from error


def plan_document(planned: Sequence[PlannedTarget], jobs: int | None) -> Document:
    """Describe a plan and estimate its cost."""
    from .compiler import default_jobs

    processes = jobs or default_jobs()
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
            "estimated_bytes": len(item.tasks) * _BYTES_PER_KERNEL,
        }
        for item in planned
    ]
    missing = sum(item.missing for item in planned)
    return {
        "targets": targets,
        "jobs": processes,
        "estimated_seconds": round(missing * _SECONDS_PER_KERNEL / processes, 1),
    }


def plan_text(document: Document) -> str:
    """Print a plan: a line a problem, a line a target."""
    parts = []
    for target in document["targets"]:
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
    for target in document["targets"]:
        parts.append(
            f"{target['target']}: {len(target['problems'])} problems, {target['kernels']} unique "
            f"kernels ({target['to_compile']} to compile), "
            f"about {size_text(target['estimated_bytes'])}"
        )
    parts.append(
        f"about {document['estimated_seconds']} s of compiling in {document['jobs']} processes"
    )
    return "\n\n".join(parts)


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
                "up_to_date": bundle.up_to_date,
                "failures": [
                    {"operator": f.candidate.operator, "reason": f.reason}
                    for f in bundle.failures
                ],
            }
            for bundle in result.bundles
        ],
        "compiled": result.compiled,
    }


def build_text(document: Document) -> str:
    """Print a finished build: a line a file, and every kernel left out."""
    lines = []
    for bundle in document["bundles"]:
        state = "up to date" if bundle["up_to_date"] else "written"
        lines.append(
            f"{bundle['path']}: {state}, {bundle['kernels']} kernels for {bundle['problems']} "
            f"problems, {size_text(bundle['bytes'])} "
            f"({size_text(bundle['bytes'] // bundle['kernels'])} a kernel)"
        )
        lines += [f"  left out {f['operator']}: {f['reason']}" for f in bundle["failures"]]
    if "wheel" in document:
        lines.append(file_text(document["wheel"]))
    lines.append(f"{document['compiled']} kernels compiled, the others were in the cache")
    return "\n".join(lines)


def file_document(path: Path) -> Document:
    """Describe a written file."""
    return {"path": str(path), "bytes": path.stat().st_size}


def file_text(document: Document) -> str:
    """Print a written file."""
    return f"{document['path']}: written, {size_text(document['bytes'])}"


def bundle_document(bundle: Bundle) -> Document:
    """Describe a bundle's header and sizes."""
    header = bundle.header
    return {
        "path": str(bundle.path),
        "bytes": bundle.file_bytes,
        "target": header.target.key,
        "device": header.device,
        "generator": header.generator,
        "build_key": header.build_key,
        "toolchain": header.toolchain,
        "dictionary_bytes": header.dictionary.span.stored_bytes if header.dictionary else 0,
        "kernels": [_kernel_document(kernel) for kernel in header.kernels],
        "problems": [
            {
                "problem": ranking.problem.key,
                "source": _source_text(header.sources[ranking.source]),
                "kernels": [
                    {"id": header.kernels[place.kernel].id, "time_ns": place.time_ns}
                    for place in ranking.kernels
                ],
            }
            for ranking in header.rankings
        ],
    }


def _source_text(source: Any) -> str:
    return f"{source.kind} by {source.by} for {source.gpu}"


def _kernel_document(kernel: Kernel) -> Document:
    design = kernel.design
    return {
        "id": kernel.id,
        "signature": kernel.signature.key,
        "provider": kernel.provider,
        "operator": kernel.operator,
        "tile": list(design.tile),
        "ctas_per_tile": design.ctas_per_tile,
        "cluster": list(design.cluster),
        "fallback_cluster": design.fallback_cluster and list(design.fallback_cluster),
        "scheduler": design.scheduler,
        "cluster_limits": [
            {"cluster_size": c.cluster_size, "max_active": c.max_active, "basis": c.basis}
            for c in design.cluster_limits
        ],
        "alignment_bytes": kernel.alignment_bytes,
        "workspace_bytes": kernel.workspace_bytes,
        "calling_convention": kernel.calling_convention,
        "stored_bytes": kernel.span.stored_bytes,
        "payload_bytes": kernel.span.content_bytes,
    }


def _by_extents(extents: Sequence[int]) -> str:
    return "x".join(map(str, extents))


def bundle_text(document: Document) -> str:
    """Print a bundle: facts, kernels, problems with their ranking."""
    kernels = document["kernels"]
    counts = Counter(kernel["signature"] for kernel in kernels)
    facts = [
        ["target", document["target"]],
        ["device profile", document["device"]],
        ["generator", document["generator"]],
        *[[f"toolchain {name}", text] for name, text in sorted(document["toolchain"].items())],
        ["file", size_text(document["bytes"])],
        ["dictionary", size_text(document["dictionary_bytes"])],
        ["kernels", f"{len(kernels)} ({size_text(document['bytes'] // len(kernels))} each)"],
        *[[f"signature {key}", f"{count} kernels"] for key, count in sorted(counts.items())],
    ]
    kernel_rows = [
        [
            kernel["id"][:12],
            kernel["signature"],
            _by_extents(kernel["tile"]),
            kernel["ctas_per_tile"],
            _by_extents(kernel["cluster"])
            + (f"|{_by_extents(kernel['fallback_cluster'])}" if kernel["fallback_cluster"] else ""),
            kernel["scheduler"],
            kernel["stored_bytes"],
            kernel["payload_bytes"],
        ]
        for kernel in kernels
    ]
    problem_rows = [
        [
            problem["problem"],
            place,
            ranked["id"][:12],
            "-" if ranked["time_ns"] is None else ranked["time_ns"] / 1e3,
            problem["source"],
        ]
        for problem in document["problems"]
        for place, ranked in enumerate(problem["kernels"], start=1)
    ]
    kernel_header = ["id", "signature", "tile", "ctas", "cluster", "scheduler", "stored", "payload"]
    return "\n\n".join(
        [
            document["path"],
            table(facts, ["fact", "value"]),
            table(kernel_rows, kernel_header),
            table(problem_rows, ["problem", "place", "kernel", "time, us", "source"]),
        ]
    )


def verification_text(report: Report) -> str:
    """Print a verification: the evidence a kernel, then every finding."""
    rows = [
        [
            evidence.id[:12],
            evidence.signature,
            evidence.compiled_for or "?",
            "?" if evidence.registers is None else evidence.registers,
            "?" if evidence.static_shared_bytes is None else evidence.static_shared_bytes,
            "?" if evidence.dynamic_shared_bytes is None else evidence.dynamic_shared_bytes,
            "?" if evidence.local_bytes is None else evidence.local_bytes,
            " ".join(f"{name} {count}" for name, count in sorted(evidence.instructions.items()))
            or evidence.disassembled_by,
        ]
        for evidence in report.kernels
    ]
    header = ["kernel", "signature", "arch", "regs", "static smem", "dyn smem", "local", "code"]
    verdict = "OK" if report.ok else f"FAILED, {len(report.findings)} findings"
    lines = [
        f"{report.path}: {report.target}, device profile {report.device}, "
        f"disassembled by {report.disassembler or 'nothing'}",
        table(rows, header),
        *(f"note: {note}" for note in report.notes),
        *(
            f"{finding.check.value}: {finding.kernel[:12] if finding.kernel else 'bundle'}: "
            f"{finding.message}"
            for finding in report.findings
        ),
        f"{report.path}: {verdict}, {len(report.kernels)} kernels",
    ]
    return "\n".join(lines)


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
        except NvgemmError as error:
            document["error"] = str(error)
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
