"""How long a bundle's header becomes, from the plan, before hours are spent on its kernels."""

from __future__ import annotations

from nvgemm_runtime.bundle.format import (
    MAX_HEADER_BYTES,
    Header,
    Kernel,
    Ranked,
    Ranking,
    Span,
    encode_header,
    sha256_hex,
)
from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.target import Target

from .plan import Plan

_TYPICAL_SPAN = Span(offset=10_000_000, stored_bytes=10_000, content_bytes=100_000)
"""Of a kernel that is not there yet, with as many digits as most have."""


def require_readable_size(manifest: str, target: Target, plan: Plan) -> None:
    """Refuse a plan whose bundle no reader would take, for its header is too long.

    What did not compile comes on top, so that the writer checks the finished header again.

    Args:
        manifest: Name of the manifest, for the message.
        target: What is built for.
        plan: What is built.

    Raises:
        ManifestError: If the header is longer than `MAX_HEADER_BYTES`.
    """
    size_bytes = planned_header_bytes(target, plan)
    if size_bytes > MAX_HEADER_BYTES:
        raise ManifestError(
            f"{manifest}: {len(plan.problems)} problems and {len(plan.candidates)} kernels for "
            f"{target.key} need a header of {size_bytes} bytes; allowed: at most "
            f"{MAX_HEADER_BYTES}; declare fewer candidates, or split the manifest"
        )


def planned_header_bytes(target: Target, plan: Plan) -> int:
    """Length of the header of a plan's bundle, up to what is only known once it is built."""
    digest = sha256_hex(b"")
    header = Header(
        target=target,
        device="",
        generator="",
        build_key=digest,
        toolchain={},
        body_sha256=digest,
        dictionary=None,
        kernels=tuple(
            Kernel(**candidate.facts(), id=digest, span=_TYPICAL_SPAN)
            for candidate in plan.candidates
        ),
        sources=(plan.source,),
        rankings=tuple(
            Ranking(
                problem=planned.problem,
                source=0,
                kernels=tuple(
                    Ranked(kernel=position, time_ns=time_ns)
                    for position, time_ns in planned.choices
                ),
            )
            for planned in plan.problems
        ),
        unserved=dict(plan.unserved),
    )
    return len(encode_header(header))
