"""JSON document and text of ``nvgemm-aot emulate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.errors import count_text

from ..terminal.printing import percent_text, table

if TYPE_CHECKING:
    from ...emulator.checking.kernel_check import KernelReport, KernelTask
    from ...pipeline.compiler import Failure

MEANING = "PTX executed functionally on a CPU; not run on a GPU"
"""Meaning of a right kernel."""

RIGHT = ("right", "suspect")
"""Verdicts with which every result was right."""


def emulation_document(
    reports: Sequence[tuple[KernelTask, KernelReport]], failures: Sequence[Failure]
) -> dict[str, Any]:
    """Returns outcomes as JSON, kernels sorted by target, signature and name."""
    kernels = [kernel_document(task, report) for task, report in reports]
    return {
        "meaning": MEANING,
        "kernels": sorted(
            kernels, key=lambda row: (row["target"], row["signature"], row["operator"])
        ),
        "not_compiled": [
            {
                "target": failure.task.target.target.key,
                "signature": failure.task.candidate.signature.key,
                "operator": failure.task.candidate.operator,
                "reason": failure.own_reason,
            }
            for failure in failures
        ],
    }


def join(documents: Sequence[dict[str, Any]], planned: int) -> dict[str, Any]:
    """Returns the command's result as JSON: outcomes of all parts, and the number of kernels."""
    return {
        "meaning": MEANING,
        "planned": planned,
        "kernels": [row for document in documents for row in document["kernels"]],
        "not_compiled": [row for document in documents for row in document["not_compiled"]],
    }


def kernel_document(task: KernelTask, report: KernelReport) -> dict[str, Any]:
    """Returns one kernel's outcome as JSON."""
    kernel = task.kernel
    return {
        "target": task.target.key,
        "device": task.device,
        "signature": kernel.signature.key,
        "provider": kernel.provider,
        "operator": kernel.operator,
        "id": kernel.id,
        "verdict": report.verdict.value,
        "instructions": report.instructions,
        "idle_lines": list(report.idle),
        "warp_instructions": sum(run.warp_instructions for run in report.runs),
        "seconds": round(sum(run.seconds for run in report.runs), 3),
        "runs": [
            {
                "problem": run.problem.key,
                "seed": run.seed,
                "operands": run.operands,
                "verdict": run.verdict.value,
                "reason": run.reason,
                "launches": run.launches,
                "warp_instructions": run.warp_instructions,
                "seconds": round(run.seconds, 3),
            }
            for run in report.runs
        ],
    }


def rows_text(document: dict[str, Any]) -> str:
    """Renders a row for each kernel, then each fault and each kernel that does not compile."""
    kernels = document["kernels"]
    rows = [
        (
            kernel["target"],
            kernel["signature"],
            kernel["operator"],
            _sizes(kernel),
            kernel["verdict"],
            kernel["warp_instructions"],
            percent_text(100 * _share_run(kernel)),
            kernel["seconds"],
        )
        for kernel in kernels
    ]
    header = (
        *("target", "signature", "operator", "problems"),
        *("result", "warp instructions", "instructions run", "seconds"),
    )
    lines = [table(rows, header)] if rows else []
    for kernel in kernels:
        faults = (run for run in kernel["runs"] if run["verdict"] == kernel["verdict"])
        fault = None if kernel["verdict"] == "right" else next(faults)
        if fault is not None:
            lines.append(
                f"{kernel['verdict']}: {kernel['operator']}: {fault['problem']}, seed "
                f"{fault['seed']}: {fault['reason']}"
            )
    lines += (
        f"not compiled: {failure['operator']}: {failure['signature']} for {failure['target']}: "
        f"{failure['reason']}"
        for failure in document["not_compiled"]
    )
    return "\n".join(lines)


def summary_text(document: dict[str, Any]) -> str:
    """Renders the counts of right and other kernels."""
    kernels, failures = document["kernels"], document["not_compiled"]
    right = sum(kernel["verdict"] in RIGHT for kernel in kernels)
    text = f"{right} of {count_text(len(kernels), 'kernel')} right"
    if suspect := sum(kernel["verdict"] == "suspect" for kernel in kernels):
        text += f", {suspect} of them suspect"
    if failures:
        text += f", {len(failures)} not compiled"
    if left := document["planned"] - len(kernels) - len(failures):
        text += f", {left} not emulated"
    return f"{text}: {document['meaning']}"


def _sizes(kernel: dict[str, Any]) -> str:
    problems = dict.fromkeys(run["problem"].rpartition("/")[2] for run in kernel["runs"])
    shown = list(problems)
    return shown[0] if len(shown) == 1 else f"{len(shown)}, up to {shown[-1]}"


def _share_run(kernel: dict[str, Any]) -> float:
    if not kernel["instructions"]:
        return 0.0
    return 1.0 - float(len(kernel["idle_lines"]) / kernel["instructions"])
