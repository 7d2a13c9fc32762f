"""Estimates the length of a bundle's root from its plan, before any kernel is compiled."""

from __future__ import annotations

from collections.abc import Sequence

from nvgemm_runtime.bundle.format import MAX_HEADER_BYTES, Header, Kernel, Span, sha256_hex
from nvgemm_runtime.bundle.paging.encode_pages import estimate_root_bytes
from nvgemm_runtime.bundle.ranking_entries import Ranked, Ranking
from nvgemm_runtime.errors import ManifestError, count_text
from nvgemm_runtime.gemm.target import Target

from .target_plan import Plan

_TYPICAL_SPAN = Span(offset=10_000_000, stored_bytes=10_000, content_bytes=100_000)
"""Placeholder span for a kernel that is not compiled yet, with a typical number of digits."""


def require_readable_size(
    manifest: str, target: Target, plan: Plan, further: Sequence[Plan] = ()
) -> None:
    """Refuses a plan whose bundle's root would be too long for readers.

    A header that is too long for format version 2 is written in pages, whose root has to be short.
    ``further`` are the same bundle's plans for other products. Compile failures lengthen a root,
    so the writer checks the final one again.

    Raises:
        ManifestError: If the root is longer than `MAX_HEADER_BYTES`.
    """
    size_bytes = planned_root_bytes(target, plan, further)
    if size_bytes > MAX_HEADER_BYTES:
        fewer = "candidates or devices" if further else "candidates"
        raise ManifestError(
            f"{manifest}: {count_text(len(plan.problems), 'problem')} and "
            f"{count_text(len(plan.candidates), 'kernel')} for "
            f"{target.key} need a bundle root of {size_bytes} bytes; allowed: at most "
            f"{MAX_HEADER_BYTES}; declare fewer {fewer}, or split the manifest"
        )


def planned_root_bytes(target: Target, plan: Plan, further: Sequence[Plan] = ()) -> int:
    """Returns the approximate root length for a plan's bundle; ignores compile failures."""
    digest = sha256_hex(b"")
    candidates = dict.fromkeys(
        c for device_plan in (plan, *further) for c in device_plan.candidates
    )
    header = Header(
        target=target,
        device="",
        generator="",
        build_key=digest,
        toolchain={},
        body_sha256=digest,
        dictionary=None,
        kernels=tuple(
            Kernel(**candidate.facts(), id=digest, span=_TYPICAL_SPAN) for candidate in candidates
        ),
        sources=tuple(device_plan.source for device_plan in (plan, *further)),
        rankings=tuple(
            Ranking(
                problem=planned.problem,
                source=index,
                kernels=tuple(
                    Ranked(kernel=position, time_ns=time_ns)
                    for position, time_ns in planned.choices
                ),
                is_declared=planned.is_declared,
                product=device_plan.source.gpu if index else None,
            )
            for index, device_plan in enumerate((plan, *further))
            for planned in device_plan.problems
        ),
        unserved=dict(plan.unserved),
    )
    return estimate_root_bytes(header)
