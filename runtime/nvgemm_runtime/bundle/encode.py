"""Writes a bundle's header as canonical JSON; `decode` reads it back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..gemm.problem import Problem
from .format import DEVICE_RANKING, Header, Kernel, KernelDesign, Span, canonical_json
from .ranking_entries import (
    BACK_TO_BACK,
    Conditions,
    Measured,
    Ranking,
    RankingSource,
    Timing,
    UnservedReason,
)
from .workspace import TileWorkspace


def encode_header(header: Header) -> bytes:
    """Returns a header as canonical JSON in version `FORMAT_VERSION`."""
    document = facts_json(header)
    document["kernels"] = [kernel_json(kernel) for kernel in header.kernels]
    document["rankings"] = [ranking_json(ranking) for ranking in header.rankings]
    if header.unserved:
        document["unserved"] = unserved_json(header.unserved)
    if header.failures:
        document["failures"] = [asdict(failure) for failure in header.failures]
    return canonical_json(document)


def facts_json(header: Header) -> dict[str, Any]:
    """Returns the header's JSON without the lists that grow with its kernels and problems."""
    document: dict[str, Any] = {
        "target": asdict(header.target),
        "device": header.device,
        "generator": header.generator,
        "build_key": header.build_key,
        "toolchain": header.toolchain,
        "body_sha256": header.body_sha256,
        "dictionary": None
        if header.dictionary is None
        else {"span": _span_json(header.dictionary.span), "sha256": header.dictionary.sha256},
        "sources": [source_json(source) for source in header.sources],
        "imports": list(header.imports or ()),
    }
    if header.further_devices:
        document["further_devices"] = list(header.further_devices)
    if header.part_of:
        document["part_of"] = [[whole.build_key, whole.prefix_sha256] for whole in header.part_of]
    return document


def unserved_json(unserved: dict[Problem, UnservedReason]) -> list[dict[str, str]]:
    """Returns the header's JSON for problems without a kernel."""
    return [
        _without_none(
            {
                "problem": problem.key,
                "reason": reason.text,
                "scope": reason.scope and reason.scope.value,
            }
        )
        for problem, reason in sorted(unserved.items(), key=lambda item: item[0])
    ]


def design_json(design: KernelDesign) -> dict[str, Any]:
    """Returns the header's JSON for a design, without optional facts that have their default."""
    fields = asdict(design)
    for name in ("swapped", "splits", "dependent_launch"):
        if fields[name] == KernelDesign.__dataclass_fields__[name].default:
            del fields[name]
    return fields


def workspace_json(workspace: TileWorkspace | None) -> dict[str, Any] | None:
    """Returns the header's JSON for a workspace whose size is a formula."""
    if workspace is None:
        return None
    return {
        "tile": list(workspace.tile),
        "tiles_multiple": list(workspace.tiles_multiple),
        "zeroed_bytes": [workspace.zeroed_once, workspace.zeroed_per_tile],
        "scratch_bytes": workspace.scratch_per_tile,
    }


def source_json(source: RankingSource) -> dict[str, Any]:
    """Returns the header's JSON for a source, without unknown facts."""
    fields = asdict(source)
    if source.conditions is not None:
        fields["conditions"] = conditions_json(source.conditions)
    return _without_none(fields)


def conditions_json(conditions: Conditions) -> dict[str, Any]:
    """Returns the header's JSON for conditions, without ``launches`` if they are back to back."""
    fields = asdict(conditions)
    if conditions.launches == BACK_TO_BACK:
        del fields["launches"]
    return _without_none(fields)


def measured_json(measured: Measured) -> dict[str, Any]:
    """Returns the header's JSON for a measurement."""
    fields: dict[str, Any] = {
        "spreads_ns": list(measured.spreads_ns),
        "aten": timing_json(measured.aten),
        "triton": timing_json(measured.triton),
        "doubts": list(measured.doubts),
    }
    if measured.confirmed_by:
        fields["confirmed_by"] = list(measured.confirmed_by)
    if measured.repeated is not None:
        fields["repeated"] = measured.repeated
    return fields


def ranking_json(ranking: Ranking) -> dict[str, Any]:
    """Returns the header's JSON for a ranking."""
    return _without_none(
        {
            "problem": ranking.name,
            "requires": [DEVICE_RANKING] if ranking.is_further else None,
            "source": ranking.source,
            "kernels": [[ranked.kernel, ranked.time_ns] for ranked in ranking.kernels],
            "measured": None if ranking.measured is None else measured_json(ranking.measured),
            "missing": list(ranking.missing) or None,
            "declared": None if ranking.is_declared else False,
        }
    )


def timing_json(timing: Timing | None) -> list[int] | None:
    """Returns the header's JSON for a timing: nanoseconds and spread."""
    return None if timing is None else [timing.time_ns, timing.spread_ns]


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _span_json(span: Span) -> list[int]:
    return [span.offset, span.stored_bytes, span.content_bytes]


def kernel_json(kernel: Kernel) -> dict[str, Any]:
    """Returns the header's JSON for a kernel."""
    facts = kernel.facts()
    del facts["is_deterministic"]
    return _without_none(
        {
            **facts,
            "workspace": workspace_json(kernel.workspace),
            "deterministic": None if kernel.is_deterministic else False,
            "requires": list(kernel.features) or None,
            "signature": kernel.signature.key,
            "design": design_json(kernel.design),
            "id": kernel.id,
            "span": _span_json(kernel.span),
            "imports": kernel.imports,
        }
    )
