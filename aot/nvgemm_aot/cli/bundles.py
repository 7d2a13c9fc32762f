"""``nvgemm-aot inspect``, ``verify``, ``list`` and ``wheel``: commands for finished bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.encode import measured_json, unserved_json
from nvgemm_runtime.bundle.format import Kernel, RankingSource
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, NvgemmError, StorageError, VerificationError

from .build.packing import prepare_wheels, wheel_lines, write_wheels
from .terminal.printing import (
    count_text,
    print_result,
    report_progress,
    size_text,
    table,
    us_text,
)
from .terminal.shared_options import ANY_PATH, json_option, out_directory_option

if TYPE_CHECKING:
    from nvgemm_runtime.installed.discover import InstalledBundle

    from ..verify.bundle import Report
    from ..verify.kernel_inspection import KernelEvidence
    from ..workload.find_bundles import NamedBundle

Document = dict[str, Any]


@click.command()
@click.argument("bundles", type=ANY_PATH, nargs=-1, required=True)
@out_directory_option("Directory for the wheel.")
@click.option("--name", required=True, help="The wheel is called nvgemm-kernels-NAME.")
@click.option("--version", "wheel_version", default=__version__, show_default=True)
@click.option("--summary", help="One line about the purpose of the kernels.")
def wheel(
    bundles: tuple[Path, ...], out: Path, name: str, wheel_version: str, summary: str | None
) -> None:
    """Pack BUNDLES, one per target, into a wheel, and nvgemm-aot itself into another."""
    runtime = prepare_wheels(out, name=name, version=wheel_version)
    with Bundle(bundles[0]) as first:
        platform = first.header.target.platform
    document = write_wheels(
        {platform: bundles}, runtime, name=name, version=wheel_version, summary=summary, out=out
    )
    click.echo("\n".join(wheel_lines(document)))


@click.command()
@click.argument("bundle", type=ANY_PATH)
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds: target, kernels, rankings, sizes, toolchain.

    BUNDLE may also be a wheel, or a directory of either: each is shown; --json prints a list.
    """
    from ..workload.find_bundles import find_bundles

    documents = []
    for entry in find_bundles(bundle):
        with entry.named_in_errors(), Bundle(entry.file) as opened:
            documents.append({**bundle_document(opened), "path": entry.name})
    if bundle.is_dir() or bundle.suffix == ".whl":
        print_result(
            documents, lambda listed: "\n\n".join(map(bundle_text, listed)), as_json=as_json
        )
    else:
        print_result(documents[0], bundle_text, as_json=as_json)


@click.command()
@click.argument("bundles", type=ANY_PATH, nargs=-1, required=True)
@click.option(
    "--disassemble/--no-disassemble",
    default=None,
    help="Require or skip proofs from disassembled code. Default: if tools are installed.",
)
@click.option("-j", "--jobs", type=click.IntRange(1), help="Disassembler processes.")
@json_option
def verify(
    bundles: tuple[Path, ...],
    disassemble: bool | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Check every rule, hash and kernel of BUNDLES, and print the evidence.

    BUNDLES are bundles, wheels, and directories of either. The wheel of nvgemm-aot itself, which
    dist/*.whl includes, is skipped.

    The exit status is 0 if all bundles are good. If one is bad, the status tells its fault: 16 if
    it cannot be read, 20 if it breaks its format, 21 for a finding. If several are bad, it is 21.
    """
    from ..pipeline.compiler_limits import default_jobs
    from ..workload.find_bundles import find_bundles, without_runtime

    documents: list[Document] = []
    texts: list[str] = []
    failed: list[NvgemmError] = []

    def add_failure(name: str, error: NvgemmError) -> None:
        documents.append({"path": name, "ok": False, "error": str(error)})
        texts.append(f"{name}: FAILED")
        failed.append(error)

    for path in without_runtime(bundles):
        try:
            for bundle in find_bundles(path, headers_only=False):
                try:
                    report = _verify(bundle, disassemble, jobs or default_jobs())
                except (BundleFormatError, StorageError) as error:
                    add_failure(bundle.name, error)
                    continue
                documents.append(report.to_json())
                texts.append(verification_text(report))
                if not report.ok:
                    count = count_text(len(report.findings), "finding")
                    failed.append(VerificationError(f"{bundle.name}: {count}"))
        except StorageError as error:
            add_failure(str(path), error)
    print_result(documents, lambda _: "\n\n".join(texts), as_json=as_json)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise VerificationError(
            f"{len(failed)} of {count_text(len(documents), 'bundle')} failed:\n"
            + "\n".join(map(str, failed))
        )


def _verify(bundle: NamedBundle, disassemble: bool | None, jobs: int) -> Report:
    from ..verify.bundle import verify_bundle

    with bundle.named_in_errors(), report_progress("Verifying") as progress:
        report = verify_bundle(bundle.file, disassemble=disassemble, jobs=jobs, progress=progress)
    return replace(report, path=Path(bundle.name))


@click.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """Show the bundles of installed wheels."""
    from nvgemm_runtime.installed.discover import find_wheel_bundles

    print_result(installed_document(find_wheel_bundles()), installed_text, as_json=as_json)


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
    """Renders a bundle: facts, kernels, and problems with their ranking."""
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
                    "not_declared": bundle.header.not_declared_count,
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
