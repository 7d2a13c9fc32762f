"""What the command prints of coverage: the document, for ``--json``, and the text made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .tables import percent_text, table

if TYPE_CHECKING:
    from ..manifest.parse import Manifest
    from ..workload.coverage import GemmCoverage, TargetCoverage, Weight

Document = dict[str, Any]

WEIGHT_NAMES = {"problems": "problems", "count": "count", "flops": "FLOPs"}
"""What people read, by the value of a `nvgemm_aot.workload.coverage.Weight`."""

_MOST_REFUSALS = 3


def coverage_document(
    manifest: Manifest, targets: Sequence[TargetCoverage], by: Weight
) -> Document:
    """Describe coverage; GEMMs are sorted by the weight ``by``, most first."""
    return {
        "manifest": manifest.name,
        "by": by.value,
        "targets": [_target_document(target, by) for target in targets],
    }


def _target_document(target: TargetCoverage, by: Weight) -> Document:
    from ..workload.coverage import SERVED, Status, Weight

    groups = {"covered": SERVED, **{status.value: frozenset({status}) for status in Status}}
    return {
        "target": target.target.target.key,
        "device": target.target.device.name,
        "runtime_library": target.runtime_library,
        "bundles": list(target.bundles),
        "refusals": list(target.refusals),
        "totals": {weight.value: target.weight(weight) for weight in Weight},
        "percent": {
            weight.value: {
                name: float(target.percent(weight, statuses)) for name, statuses in groups.items()
            }
            for weight in Weight
        },
        "gemms": [_gemm_document(gemm) for gemm in target.heaviest(by, frozenset(Status))],
    }


def _gemm_document(gemm: GemmCoverage) -> Document:
    from ..workload.coverage import Weight

    return {
        "gemm": gemm.gemm,
        "status": gemm.status.value,
        "count": gemm.count,
        "flops": gemm.weight(Weight.FLOPS),
        "ranked_as": gemm.ranked_as and gemm.ranked_as.key,
        "split": gemm.is_split,
        "kernels": gemm.kernels,
        "bundle": gemm.bundle,
        "reasons": list(gemm.reasons),
    }


def coverage_text(document: Document) -> str:
    """Print coverage: for each target its GEMMs, why some are missed, and the percentages."""
    return "\n\n".join("\n".join(_target_text(target)) for target in document["targets"])


def _target_text(target: Document) -> Iterator[str]:
    reasons = _number_reasons(target["gemms"])
    header = ("GEMM", "found as", "count", "% of count", "% of FLOPs", "ranked as")
    shares = [
        [
            _share(gemm[weight], target["totals"][weight]).rjust(len(title))
            for gemm in target["gemms"]
        ]
        for weight, title in (("count", header[3]), ("flops", header[4]))
    ]
    rows = [
        (gemm["gemm"], gemm["status"], gemm["count"], count, flops, _ranked_as(gemm, reasons))
        for gemm, count, flops in zip(target["gemms"], *shares)
    ]
    yield f"{target['target']} on {target['device']}"
    yield table(rows, header)
    yield from _misses(target, reasons)
    yield ""
    yield _percentages(target)


def _percentages(target: Document) -> str:
    header = ("", "covered", "declared", "by signature")
    rows = [
        (
            f"by {title}",
            *(
                percent_text(target["percent"][weight][name]).rjust(len(column))
                for name, column in zip(("covered", "declared", "signature"), header[1:])
            ),
        )
        for weight, title in WEIGHT_NAMES.items()
    ]
    return table(rows, header)


def _share(part: int, total: int) -> str:
    return percent_text(100 * part / total)


def _number_reasons(gemms: Sequence[Document]) -> dict[str, int]:
    """The first reason of each miss, numbered: those of a model's layers are mostly the same."""
    different = dict.fromkeys(gemm["reasons"][0] for gemm in gemms if gemm["reasons"])
    return {reason: number for number, reason in enumerate(different, start=1)}


def _ranked_as(gemm: Document, reasons: dict[str, int]) -> str:
    if gemm["ranked_as"] is None:
        return f"see [{reasons[gemm['reasons'][0]]}]"
    if gemm["ranked_as"] == gemm["gemm"]:
        return ""
    ranked_as: str = gemm["ranked_as"]
    if gemm["split"]:
        return f"{ranked_as}, and torch adds"
    signature, _, sizes = ranked_as.rpartition("/")
    return sizes if gemm["gemm"].startswith(f"{signature}/") else ranked_as


def _misses(target: Document, reasons: dict[str, int]) -> Iterator[str]:
    if not reasons:
        return
    yield ""
    for reason, number in reasons.items():
        yield f"[{number}] {reason}"
    refusals = target["refusals"]
    if refusals:
        yield "left out:"
    yield from (f"  {refusal}" for refusal in refusals[:_MOST_REFUSALS])
    if len(refusals) > _MOST_REFUSALS:
        yield f"  … and {len(refusals) - _MOST_REFUSALS} more (--json has them all)"
