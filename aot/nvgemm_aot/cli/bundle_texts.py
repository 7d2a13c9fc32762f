"""Bundles and reports on them, as JSON documents and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.bundle.encode import measured_json, unserved_json
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.ranking_entries import RankingSource
from nvgemm_runtime.bundle.reader import Bundle

from .signing.signed_by import signatures_text
from .terminal.printing import count_text, size_text, table, us_text

if TYPE_CHECKING:
    from nvgemm_runtime.installed.discover import InstalledBundle

    from ..verify.bundle import Report
    from ..verify.kernel_inspection import KernelEvidence

Document = dict[str, Any]


def bundle_document(bundle: Bundle) -> Document:
    """Describes a bundle's header and sizes."""
    header = bundle.header
    return {
        "path": str(bundle.path),
        "bytes": bundle.file_bytes,
        "target": header.target.key,
        "device": header.device,
        "devices": list(header.devices),
        "products": list(header.products),
        "format_version": header.format_version,
        "generator": header.generator,
        "build_key": header.build_key,
        "part_of": [asdict(whole) for whole in header.part_of],
        "toolchain": header.toolchain,
        "imports": header.imports,
        "dictionary_bytes": header.dictionary.span.stored_bytes if header.dictionary else 0,
        "kernels": [_kernel_document(kernel) for kernel in header.kernels],
        "problems": [
            {
                "problem": ranking.problem.key,
                "gpu": header.gpu_of(ranking),
                "further": ranking.is_further,
                "source": _source_text(header.sources[ranking.source]),
                "kernels": [
                    {"id": header.kernels[ranked.kernel].id, "time_ns": ranked.time_ns}
                    for ranked in ranking.kernels
                ],
                "measured": ranking.measured
                and {**measured_json(ranking.measured), "standing": ranking.measured.standing},
                "declared": ranking.is_declared,
                "complete": header.is_complete(ranking),
                "missing": [asdict(header.failures[position]) for position in ranking.missing],
            }
            for ranking in header.rankings
        ],
        "unserved": unserved_json(header.unserved),
        "unknown_kernels": [
            {name: value for name, value in vars(kernel).items() if name != "span"}
            for kernel in header.unknown_kernels
        ],
        "unknown_problems": [asdict(ranking) for ranking in header.unknown_rankings],
        "unknown_sources": list(header.unknown_sources),
        "unknown_unserved": [asdict(entry) for entry in header.unknown_unserved],
    }


def _source_text(source: RankingSource) -> str:
    text = f"{source.kind} by {source.by} for {source.gpu}"
    if source.conditions is None:
        return text
    conditions = source.conditions
    return (
        f"{text}, driver {conditions.driver}, torch {conditions.torch}, CUDA {conditions.cuda}, "
        f"{conditions.date}, launches {conditions.launches}"
    )


def _kernel_document(kernel: Kernel) -> Document:
    return {
        "id": kernel.id,
        "signature": kernel.signature.key,
        "provider": kernel.provider,
        "operator": kernel.operator,
        **asdict(kernel.design),
        "alignment_bytes": kernel.alignment_bytes,
        "workspace_bytes": kernel.workspace_bytes,
        "workspace": None if kernel.workspace is None else asdict(kernel.workspace),
        "is_deterministic": kernel.is_deterministic,
        "calling_convention": kernel.calling_convention,
        "imports": kernel.imports,
        "stored_bytes": kernel.span.stored_bytes,
        "payload_bytes": kernel.span.content_bytes,
    }


def _imports_text(document: Document) -> str:
    common = document["imports"]
    if common is None:
        return "not stated"
    others = sum(kernel["imports"] is not None for kernel in document["kernels"])
    return (
        f"{len(common)}, of {count_text(others, 'kernel')} others" if others else str(len(common))
    )


def _scheduler_text(kernel: Document) -> str:
    if kernel["splits"] == 1:
        return str(kernel["scheduler"])
    order = "" if kernel["is_deterministic"] else ", any order"
    return f"{kernel['scheduler']}, k split in {kernel['splits']}{order}"


def _by_extents(extents: Sequence[int]) -> str:
    return "x".join(map(str, extents))


def bundle_text(document: Document) -> str:
    """Renders a bundle: facts, who signed it if that is known, kernels, and ranked problems."""
    kernels, unknown = document["kernels"], document["unknown_kernels"]
    count = len(kernels) + len(unknown)
    counts = Counter(kernel["signature"] for kernel in kernels)
    providers = Counter(kernel["provider"] for kernel in kernels)
    facts = [
        ["target", document["target"]],
        ["device profile", ", ".join(document["devices"])],
        ["ranked for", ", ".join(document["products"]) or "no GPU"],
        ["format version", document["format_version"]],
        ["generator", document["generator"]],
        *([["signatures", signatures_text(document)]] if "signatures" in document else []),
        *[[f"toolchain {name}", text] for name, text in sorted(document["toolchain"].items())],
        ["file", size_text(document["bytes"])],
        ["dictionary", size_text(document["dictionary_bytes"])],
        ["imported symbols", _imports_text(document)],
        ["kernels", f"{count} ({size_text(document['bytes'] // count)} each)"],
        *[
            [f"provider {name}", count_text(number, "kernel")]
            for name, number in sorted(providers.items())
        ],
        *[
            [f"signature {key}", count_text(number, "kernel")]
            for key, number in sorted(counts.items())
        ],
    ]
    kernel_rows = [
        [
            kernel["id"][:12],
            kernel["signature"],
            _by_extents(kernel["tile"]),
            kernel["ctas_per_tile"],
            _by_extents(kernel["cluster"])
            + (f"|{_by_extents(kernel['fallback_cluster'])}" if kernel["fallback_cluster"] else ""),
            _scheduler_text(kernel),
            kernel["stored_bytes"],
            kernel["payload_bytes"],
        ]
        for kernel in kernels
    ]
    many_products = len(document["products"]) > 1
    problem_rows = [
        [*row[:1], problem["gpu"], *row[1:]] if many_products else row
        for problem in document["problems"]
        for row in _problem_rows(problem)
    ]
    problem_header = ["problem", *(["GPU"] if many_products else []), "place", "kernel", "time, us"]
    unserved = [
        [entry["problem"], entry.get("scope", "-"), entry["reason"]]
        for entry in document["unserved"]
    ]
    yes_or_no = {True: "yes", False: "no"}
    missing = [
        [
            problem["problem"],
            failure["operator"],
            yes_or_no[failure["is_transient"]],
            failure["reason"],
        ]
        for problem in document["problems"]
        for failure in problem["missing"]
    ]
    unknown_rows = [
        *([kernel["id"][:12], kernel["signature"], kernel["why"]] for kernel in unknown),
        *(["ranking", entry["problem"], entry["why"]] for entry in document["unknown_problems"]),
        *(["source", "-", reason] for reason in document["unknown_sources"]),
        *(["unserved", entry["problem"], entry["why"]] for entry in document["unknown_unserved"]),
    ]
    kernel_header = ["id", "signature", "tile", "ctas", "cluster", "scheduler", "stored", "payload"]
    return "\n\n".join(
        [
            document["path"],
            table(facts, ["fact", "value"]),
            table(kernel_rows, kernel_header),
            table(problem_rows, [*problem_header, "source"]),
            *(
                table(rows, header)
                for rows, header in (
                    (unserved, ["problem without a kernel", "scope", "why"]),
                    (missing, ["problem", "kernel not compiled", "try again", "why"]),
                    (unknown_rows, ["not understood", "computes", "why"]),
                )
                if rows
            ),
        ]
    )


def _problem_rows(problem: Document) -> list[list[object]]:
    """Returns a row per kernel; for measured rankings also rows for ATen, Triton and doubts."""
    source, measured = problem["source"], problem["measured"]
    rows: list[list[object]] = [
        [problem["problem"], rank, ranked["id"][:12], us_text(ranked["time_ns"]), source]
        for rank, ranked in enumerate(problem["kernels"], start=1)
    ]
    if measured is None:
        return rows
    others = [("ATen", measured["aten"]), ("Triton", measured["triton"])]
    rows += [[problem["problem"], "-", name, t[0] / 1e3, source] for name, t in others if t]
    rows += [[problem["problem"], "-", "uncertain", "-", doubt] for doubt in measured["doubts"]]
    if not measured["doubts"]:
        rows.append([problem["problem"], "-", measured["standing"], "-", source])
    if not problem["declared"]:
        rows.append([problem["problem"], "-", "measured and not declared", "-", source])
    return rows


def _no_instructions_text(evidence: KernelEvidence) -> str:
    """Returns why no instruction is shown for a kernel's code."""
    from ..verify.kernel_inspection import NO_DEVICE_CODE, NOT_DISASSEMBLED

    if evidence.disassembled_by in (NOT_DISASSEMBLED, NO_DEVICE_CODE):
        return evidence.disassembled_by
    return "no tensor-core instruction"


def verification_text(report: Report) -> str:
    """Renders a verification: each kernel's evidence, then every finding."""
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
            or _no_instructions_text(evidence),
        ]
        for evidence in report.kernels
    ]
    header = ["kernel", "signature", "arch", "regs", "static smem", "dyn smem", "local", "code"]
    verdict = "OK" if report.ok else f"FAILED, {count_text(len(report.findings), 'finding')}"
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
        f"{report.path}: {verdict}, {count_text(len(report.kernels), 'kernel')}",
    ]
    return "\n".join(lines)


def installed_document(installed: Sequence[InstalledBundle]) -> list[Document]:
    """Describes installed bundles, including the reason if one cannot be read."""
    documents = []
    for item in installed:
        document: Document = {
            "path": str(item.path),
            "distribution": item.distribution,
            "version": item.version,
            "confirmed": [path.name for path in item.confirmed_files],
        }
        if item.problem is not None:
            documents.append(document | {"error": item.problem})
            continue
        try:
            with Bundle(item.path) as bundle:
                document |= {
                    "target": bundle.header.target.key,
                    "kernels": len(bundle.header.kernels),
                    "problems": bundle.header.declared_count,
                    "not_declared": bundle.header.undeclared_count,
                    "products": list(bundle.header.products),
                    "bytes": bundle.file_bytes,
                    "error": None,
                }
        except Exception as error:  # One broken bundle must not hide the others.
            document["error"] = str(error) or type(error).__name__
        documents.append(document)
    return documents


def installed_text(documents: Sequence[Document]) -> str:
    """Renders installed bundles."""
    if not documents:
        return "no bundle is installed: no distribution has an entry point in nvgemm_aot.bundles"
    rows = [
        [
            d["distribution"] or "-",
            d["version"] or "-",
            d.get("target", "-"),
            d.get("kernels", "-"),
            d.get("problems", "-"),
            size_text(d["bytes"]) if "bytes" in d else "-",
            d["path"],
        ]
        for d in documents
    ]
    broken = [
        d["error"] if d["error"].startswith(d["path"]) else f"{d['path']}: {d['error']}"
        for d in documents
        if d["error"]
    ]
    header = ["distribution", "version", "target", "kernels", "problems", "size", "path"]
    return "\n".join([table(rows, header), *broken])
