"""A bundle's content, as input for the writer and as read from an open bundle."""

from __future__ import annotations

import functools
from dataclasses import InitVar, dataclass, field

from nvgemm_runtime.bundle.format import KernelFacts, Whole, sha256_hex
from nvgemm_runtime.bundle.ranking_entries import (
    CompileFailure,
    Measured,
    RankingSource,
    UnservedReason,
)
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target

from ..verify.host.elf import MalformedElfError
from ..verify.host.host_object import read_host_object


@dataclass(frozen=True, kw_only=True)
class BuiltKernel(KernelFacts):
    """A linked kernel on its way into a bundle.

    ``id``, the kernel's name everywhere, is the digest of the payload, a shared object. Callers
    that have just computed or checked the digest pass it as ``sha256``, in hex, and those that
    know the payload's undefined symbols as ``known_imports``.
    """

    payload: bytes
    id: str = field(init=False)
    sha256: InitVar[str | None] = None
    known_imports: InitVar[tuple[str, ...] | None] = None

    def __post_init__(self, sha256: str | None, known_imports: tuple[str, ...] | None) -> None:
        object.__setattr__(self, "id", sha256 or sha256_hex(self.payload))
        if known_imports is not None:
            object.__setattr__(self, "imports", known_imports)

    @functools.cached_property
    def imports(self) -> tuple[str, ...]:
        """Undefined symbols of the payload; empty if it is no shared object."""
        try:
            return read_host_object(self.payload).imports
        except MalformedElfError:  # `verify` reports it
            return ()


@dataclass(frozen=True, kw_only=True)
class ProblemRanking:
    """The kernels for one problem, best first.

    ``kernels`` are pairs of a kernel id (sha256 of the payload, hex) and a time in nanoseconds, or
    None if the source has no number. The spreads in ``measured`` have the same order. ``missing``
    are chosen kernels that did not compile. ``is_declared`` and ``is_further`` are as in
    `nvgemm_runtime.bundle.format.Ranking`.
    """

    problem: Problem
    source: RankingSource
    kernels: tuple[tuple[str, int | None], ...]
    measured: Measured | None = None
    missing: tuple[CompileFailure, ...] = ()
    is_declared: bool = True
    is_further: bool = False

    @property
    def gpu(self) -> str:
        """Driver name of the GPU product that the ranking is for."""
        return self.source.gpu


@dataclass(frozen=True, kw_only=True)
class BundleContent:
    """Everything that determines a bundle's bytes, except the order of kernels and rankings.

    ``part_of`` is as in `nvgemm_runtime.bundle.format.Header`. `read_content` leaves it empty,
    because a changed copy is no part of the original's whole.
    """

    target: Target
    device: str
    generator: str
    build_key: str
    toolchain: dict[str, str]
    kernels: tuple[BuiltKernel, ...]
    rankings: tuple[ProblemRanking, ...]
    unserved: dict[Problem, UnservedReason] = field(default_factory=dict)
    further_devices: tuple[str, ...] = ()
    part_of: tuple[Whole, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of all device profiles that the build used, as in a header."""
        return (self.device, *self.further_devices)


def read_content(bundle: Bundle) -> BundleContent:
    """Reads everything a bundle holds. A copy written from it has the same kernels and rankings.

    Raises:
        BundleFormatError: If a payload is damaged, or the header holds entries that this release
            does not understand and would lose.
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
            f"{len(unknown)} kernels, rankings, sources and unserved entries are unknown to this "
            f"release and would be lost in a copy, the first because it {unknown[0]}",
        )
    return BundleContent(
        target=header.target,
        device=header.device,
        generator=header.generator,
        build_key=header.build_key,
        toolchain=header.toolchain,
        kernels=tuple(
            BuiltKernel(
                **kernel.facts(),
                payload=bundle.payload(kernel),
                sha256=kernel.id,
                known_imports=header.imports if kernel.imports is None else kernel.imports,
            )
            for kernel in header.kernels
        ),
        rankings=tuple(
            ProblemRanking(
                problem=ranking.problem,
                source=header.sources[ranking.source],
                kernels=tuple(
                    (header.kernels[ranked.kernel].id, ranked.time_ns) for ranked in ranking.kernels
                ),
                measured=ranking.measured,
                missing=tuple(header.failures[position] for position in ranking.missing),
                is_declared=ranking.is_declared,
                is_further=ranking.is_further,
            )
            for ranking in header.rankings
        ),
        unserved=dict(header.unserved),
        further_devices=header.further_devices,
    )
