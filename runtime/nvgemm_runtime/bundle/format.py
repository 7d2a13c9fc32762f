"""Bundle header as dataclasses, and the format's numbers. FORMAT.md is the specification.

`encode` writes a header, `decode` reads it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field, fields
from typing import Any

from ..gemm.problem import Problem, Signature
from ..gemm.target import Target
from .ranking_entries import (
    CompileFailure,
    Ranking,
    RankingSource,
    UnknownEntry,
    UnservedReason,
    choose_rankings,
)
from .workspace import TileWorkspace

MAGIC = b"\x89NVGEMM\n"
"""First bytes in every bundle. A byte above 127 and a line feed reveal text-mode damage at once."""

FORMAT_VERSION = 2
"""File format version to write, independent of the package version."""

PAGED_VERSION = 3
"""File format version to write if a version 2 header would be longer than `PAGED_ABOVE_BYTES`."""

READABLE_VERSIONS = (1, 2, 3)
"""File format versions that this release reads."""

TILE_WORKSPACE = "tile_workspace"
TIMING_DEPENDENT = "timing_dependent"
DEVICE_RANKING = "device_ranking"
KNOWN_FEATURES: frozenset[str] = frozenset({TILE_WORKSPACE, TIMING_DEPENDENT, DEVICE_RANKING})
"""Names allowed in a ``requires`` list: features that this release knows besides version 2."""

PREFIX = struct.Struct("<8sII32s")
"""Magic, format version, header bytes, header sha256: 48 bytes, little-endian."""

MAX_HEADER_BYTES = 16 << 20
"""Largest header: ten times what the largest real bundle needs. All ten shipped manifests in one
bundle (736 kernels and 4,267 problems for sm_100f) take a 1.06 MB header with estimates, and 1.5 MB
with each problem measured, ATen and Triton included. The largest single manifest, hgemm-1000, takes
0.37 MB."""
PAGED_ABOVE_BYTES = 2 << 20
"""Longest header in version 2 that is written. The longest of a shipped manifest has 1.5 MB; a
reader takes about a second for 8 MB."""
MAX_PAGE_BYTES = 1 << 20
"""Largest page, stored and decompressed."""
MAX_PAGE_ENTRIES = 4096
MAX_PAGES_BYTES = 256 << 20
"""Largest sum of all pages after decompression."""
MAX_PAYLOAD_BYTES = 64 << 20
MAX_DICTIONARY_BYTES = 64 << 20
MAX_KERNEL_ALIGNMENT_BYTES = 4096
MAX_TILE_BYTES = 64 << 20
"""Largest workspace per tile: far more than a thread block's registers hold."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Position of compressed bytes, and their size after decompression.

    Attributes:
        offset: First byte, counted from the file's start.
        stored_bytes: Length in the file.
        content_bytes: Length after decompression.
    """

    offset: int
    stored_bytes: int
    content_bytes: int

    @property
    def end(self) -> int:
        """First byte after the span."""
        return self.offset + self.stored_bytes


@dataclass(frozen=True, kw_only=True)
class Dictionary:
    """zstd dictionary that every kernel frame refers to.

    Attributes:
        span: Its own zstd frame (made without a dictionary).
        sha256: Digest after decompression.
    """

    span: Span
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ClusterLimit:
    """Device-dependent constant that a static-persistent scheduler was compiled with.

    Attributes:
        cluster_size: Thread blocks per cluster.
        max_active: Clusters of that size that run at once on the build's device profile.
        basis: Evidence for ``max_active`` in the profile: ``measured``, ``reported`` or
            ``estimated``.
    """

    cluster_size: int
    max_active: int
    basis: str


@dataclass(frozen=True, kw_only=True)
class KernelDesign:
    """Kernel design, for people and for ranking; it never changes the result.

    Attributes:
        tile: Extents (m, n, k) that ``ctas_per_tile`` thread blocks compute at a time.
        ctas_per_tile: 1, or 2 if thread block pairs issue one matrix instruction.
        cluster: Thread blocks per cluster along (m, n).
        fallback_cluster: Smaller cluster, used if ``cluster`` does not fit, or None.
        scheduler: Assignment of tiles to thread blocks, e.g. ``clc``, ``dynamic_persistent``.
        cluster_limits: Device-dependent constants compiled in; may be empty.
        swapped: True if the kernel computes the transposed problem, out.T = B.T @ A.T. Tile and
            cluster keep the problem's orientation.
        splits: Thread blocks, or clusters, that share a tile's k.
        dependent_launch: True if it may begin before the previous kernel on the stream has ended
            (programmatic dependent launch); it waits before it reads.
    """

    tile: tuple[int, int, int]
    ctas_per_tile: int
    cluster: tuple[int, int]
    fallback_cluster: tuple[int, int] | None
    scheduler: str
    cluster_limits: tuple[ClusterLimit, ...] = ()
    swapped: bool = False
    splits: int = 1
    dependent_launch: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """Facts about a kernel, from the provider that lists it to its bundle's header.

    Attributes:
        signature: Signature that it computes.
        provider, operator: Origin.
        design: Kernel design.
        alignment_bytes: Alignment for pointers, and for contiguous extents and strides other than 1
            in bytes; at most 4096.
        workspace_bytes: Device memory for a launch besides its operands, if independent of the
            problem's sizes.
        workspace: Formula for that memory if it depends on the sizes, or None.
        is_deterministic: True if equal operands give equal results. A kernel whose thread blocks
            add in order of arrival is not deterministic.
        calling_convention: ``tvm_ffi:gemm(a,b,out,stream)`` is a TVM-FFI function exported as
            ``__tvm_ffi_gemm`` that takes the operands in this order, then the CUDA stream as an
            opaque pointer.
    """

    signature: Signature
    provider: str
    operator: str
    design: KernelDesign
    alignment_bytes: int
    workspace_bytes: int
    calling_convention: str
    workspace: TileWorkspace | None = None
    is_deterministic: bool = True

    @property
    def has_workspace(self) -> bool:
        """True if a launch needs memory besides its operands."""
        return self.workspace_bytes > 0 or self.workspace is not None

    @property
    def features(self) -> tuple[str, ...]:
        """Features that a reader must know to use the kernel, for its entry's ``requires``."""
        needed = {
            TILE_WORKSPACE: self.workspace is not None,
            TIMING_DEPENDENT: not self.is_deterministic,
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    def facts(self) -> dict[str, Any]:
        """Returns these fields alone, as arguments for a class that adds others."""
        return {fact.name: getattr(self, fact.name) for fact in fields(KernelFacts)}


@dataclass(frozen=True, kw_only=True)
class Kernel(KernelFacts):
    """Kernel entry in a header.

    Attributes:
        id: Uncompressed payload's sha256, in hex: the kernel's name everywhere.
        span: Its zstd frame.
        imports: Symbols that its payload leaves undefined, sorted; None if equal to
            ``Header.imports``.
    """

    id: str
    span: Span
    imports: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class UnknownKernel:
    """Kernel that this release does not understand, and so never calls.

    Attributes:
        id, span, operator: As for a `Kernel`.
        signature: Signature text.
        why: Reason that it is unknown, in words.
    """

    id: str
    span: Span
    operator: str
    signature: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Bundle that another one is a part of, as ``nvgemm-aot split`` makes it.

    Attributes:
        build_key: Its build key.
        prefix_sha256: Digest of its prefix, which holds the digest of everything behind it.
    """

    build_key: str
    prefix_sha256: str


@dataclass(frozen=True, kw_only=True)
class Header:
    """Bundle header; see FORMAT.md for each field.

    Attributes:
        target: Kernel target.
        device: Device profile name used in the build; the first, if several.
        generator: Program and version that wrote the file.
        build_key: Digest over all build inputs: equal keys, equal bundles.
        toolchain: Versions of everything that shaped the code, by distribution or tool name.
        body_sha256: Digest over all bytes after the header.
        dictionary: Compression dictionary, or None.
        kernels: Known kernels, sorted by id.
        sources: Ranking sources.
        rankings: Known rankings, sorted by problem key, then by product; a problem's first ranking
            precedes its further ones.
        unserved: Declared problems without a kernel, with the reasons.
        imports: Symbols that payloads leave undefined for the runtime's libraries, sorted; kernels
            with their own list are excepted. None if unknown, as in bundles of version 1.
        failures: Kernels that were chosen and did not compile.
        unknown_kernels: Kernels that this release does not understand.
        unknown_rankings: Rankings that this release does not understand.
        unknown_sources: Reasons for sources that this release does not understand, or counts as
            estimates though they are none.
        unknown_unserved: Entries in ``unserved`` that this release does not understand.
        format_version: File format version.
        further_devices: Other device profiles used in the build, by name.
        part_of: Bundles that this one is a part of, the smallest first.
        ranked_products: In a part of a header: GPU products with rankings in the whole; None if no
            ranking is for a further product, and in a whole header.
    """

    target: Target
    device: str
    generator: str
    build_key: str
    toolchain: dict[str, str]
    body_sha256: str
    dictionary: Dictionary | None
    kernels: tuple[Kernel, ...]
    sources: tuple[RankingSource, ...]
    rankings: tuple[Ranking, ...]
    unserved: dict[Problem, UnservedReason] = field(default_factory=dict)
    imports: tuple[str, ...] | None = None
    failures: tuple[CompileFailure, ...] = ()
    unknown_kernels: tuple[UnknownKernel, ...] = ()
    unknown_rankings: tuple[UnknownEntry, ...] = ()
    unknown_sources: tuple[str, ...] = ()
    unknown_unserved: tuple[UnknownEntry, ...] = ()
    format_version: int = FORMAT_VERSION
    further_devices: tuple[str, ...] = ()
    part_of: tuple[Whole, ...] = ()
    ranked_products: frozenset[str] | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """All device profiles used in the build, by name."""
        return (self.device, *self.further_devices)

    @property
    def products(self) -> tuple[str, ...]:
        """GPU products with rankings, by driver name; products with first rankings lead."""
        ordered = sorted(
            self.rankings, key=lambda ranking: (ranking.is_further, self.gpu_of(ranking))
        )
        return tuple(dict.fromkeys(self.gpu_of(ranking) for ranking in ordered))

    @property
    def declared_count(self) -> int:
        """Number of ranked problems that a manifest declares."""
        return len({ranking.problem for ranking in self.rankings if ranking.is_declared})

    @property
    def undeclared_count(self) -> int:
        """Number of ranked problems that were measured and that no manifest declares."""
        return len({ranking.problem for ranking in self.rankings}) - self.declared_count

    def gpu_of(self, ranking: Ranking) -> str:
        """Returns a ranking's GPU product, as its driver names it."""
        return self.sources[ranking.source].gpu

    def rankings_on(self, gpu: str) -> tuple[Ranking, ...]:
        """Returns the rankings that a GPU product uses, one per problem; see `choose_rankings`."""
        has_own = None if self.ranked_products is None else gpu in self.ranked_products
        return choose_rankings(self.rankings, gpu, gpu_of=self.gpu_of, has_own=has_own)

    def is_complete(self, ranking: Ranking) -> bool:
        """Returns True if building a ranking again would find no further kernel."""
        return not any(self.failures[position].is_transient for position in ranking.missing)


def sha256_hex(data: bytes) -> str:
    """Returns the sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """Returns the only valid encoding of a JSON value: sorted keys, no spaces, ASCII."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")
