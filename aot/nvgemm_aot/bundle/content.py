"""What an open bundle holds, as the bundle writer takes it."""

from __future__ import annotations

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError

from .writer import BuiltKernel, BundleContent, ProblemRanking


def read_content(bundle: Bundle) -> BundleContent:
    """Everything a bundle holds; written again, it has the same kernels and rankings.

    Raises:
        BundleFormatError: If a payload is damaged, or the header holds what this release does not
            understand, and so would lose.
        StorageError: If the file cannot be read.
    """
    header = bundle.header
    unknown = [
        *(kernel.why for kernel in header.unknown_kernels),
        *(ranking.why for ranking in header.unknown_rankings),
        *header.unknown_sources,
        *(entry.why for entry in header.unknown_unserved),
    ]
    if unknown:
        raise BundleFormatError(
            str(bundle.path),
            "feature",
            f"{len(unknown)} kernels, rankings, sources and entries of unserved are unknown to "
            f"this release and would be lost in a copy, the first because it {unknown[0]}",
        )
    return BundleContent(
        target=header.target,
        device=header.device,
        generator=header.generator,
        build_key=header.build_key,
        toolchain=header.toolchain,
        kernels=tuple(
            BuiltKernel(
                payload=bundle.payload(kernel),
                signature=kernel.signature,
                provider=kernel.provider,
                operator=kernel.operator,
                design=kernel.design,
                alignment_bytes=kernel.alignment_bytes,
                workspace_bytes=kernel.workspace_bytes,
                calling_convention=kernel.calling_convention,
            )
            for kernel in header.kernels
        ),
        rankings=tuple(
            ProblemRanking(
                problem=ranking.problem,
                source=header.sources[ranking.source],
                kernels=tuple(
                    (header.kernels[place.kernel].id, place.time_ns) for place in ranking.kernels
                ),
                measured=ranking.measured,
                missing=tuple(header.failures[position] for position in ranking.missing),
            )
            for ranking in header.rankings
        ),
        unserved=dict(header.unserved),
    )
