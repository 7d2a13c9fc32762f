"""The bundle header as dataclasses, and the numbers of the format. FORMAT.md is the specification.

`encode` writes a header, `decode` reads it.
"""

from __future__ import annotations

import enum
import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from ..gemm.problem import Problem, Signature
from ..gemm.target import Target
from .workspace import TileWorkspace

MAGIC = b"\x89NVGEMM\n"
"""First bytes of every bundle. A byte above 127 and a line feed show text-mode damage at once."""

FORMAT_VERSION = 2
"""Version of the file format that is written, independent of the package version."""

READABLE_VERSIONS = (1, 2)
"""Versions of the file format that are read."""

TILE_WORKSPACE = "tile_workspace"
TIMING_DEPENDENT = "timing_dependent"
DEVICE_RANKING = "device_ranking"
KNOWN_FEATURES: frozenset[str] = frozenset({TILE_WORKSPACE, TIMING_DEPENDENT, DEVICE_RANKING})
"""Names that a ``requires`` list may hold: what this release understands besides version 2."""

ON = " on "
"""Between a problem and a further GPU product, in the text that names a ranking's problem."""

PREFIX = struct.Struct("<8sII32s")
"""magic, format version, header bytes, sha256 of the header: 48 bytes, little-endian."""

MAX_HEADER_BYTES = 16 << 20
"""Ten times what the largest real bundle needs. All ten manifests that are shipped, in one bundle
(736 kernels and 4,267 problems of sm_100f), take 1.06 MB of header with estimates, and 1.5 MB once
each is measured with ATen and Triton beside; the largest single one, hgemm-1000, takes 0.37 MB."""
MAX_PAYLOAD_BYTES = 64 << 20
MAX_DICTIONARY_BYTES = 64 << 20
MAX_KERNEL_ALIGNMENT_BYTES = 4096
MAX_TILE_BYTES = 64 << 20
"""Of a workspace, for each tile: far more than the registers of a thread block hold."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where compressed bytes lie and what they must become.

    Attributes:
        offset: First byte, counted from the start of the file.
        stored_bytes: Length in the file.
        content_bytes: Length after decompression.
    """

    offset: int
    stored_bytes: int
    content_bytes: int

    @property
    def end(self) -> int:
        """First byte behind the span."""
        return self.offset + self.stored_bytes


@dataclass(frozen=True, kw_only=True)
class Dictionary:
    """The zstd dictionary that every kernel frame refers to.

    Attributes:
        span: Where its own zstd frame (made without a dictionary) lies.
        sha256: Digest of the decompressed dictionary.
    """

    span: Span
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ClusterLimit:
    """The device-dependent constant that a static-persistent scheduler was compiled with.

    Attributes:
        cluster_size: Thread blocks in one cluster.
        max_active: Clusters of that size that run at once on the build's device profile.
        basis: ``measured``, ``reported`` or ``estimated``: how the profile knows ``max_active``.
    """

    cluster_size: int
    max_active: int
    basis: str


@dataclass(frozen=True, kw_only=True)
class KernelDesign:
    """How a kernel works, for people and for ranking; it never changes what is computed.

    Attributes:
        tile: Extents (m, n, k) that ``ctas_per_tile`` thread blocks compute at a time.
        ctas_per_tile: 1, or 2 where pairs of thread blocks issue one matrix instruction.
        cluster: Thread blocks of a cluster along (m, n).
        fallback_cluster: Smaller cluster for where ``cluster`` does not fit, or None.
        scheduler: How tiles reach thread blocks, e.g. ``clc``, ``dynamic_persistent``.
        cluster_limits: Device-dependent constants compiled in; empty where there are none.
        swapped: Whether the kernel computes the transposed problem, out.T = B.T @ A.T. Tile and
            cluster are in the problem's orientation even so.
        splits: Thread blocks, or clusters, that share the k of one tile.
        dependent_launch: Whether it is launched so that it may begin before the kernel ahead of it
            on the stream has ended (programmatic dependent launch); it waits before it reads.
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
    """What is known of a kernel, from the provider that lists it to the header of its bundle.

    Attributes:
        signature: What it computes.
        provider, operator: Where it came from.
        design: How it works.
        alignment_bytes: Alignment that pointers, and in bytes contiguous extents and strides other
            than 1, must have; at most 4096.
        workspace_bytes: Device memory that a launch needs besides its operands, where it does not
            depend on the problem's sizes.
        workspace: How much it needs where it does; None where it does not.
        is_deterministic: Whether equal operands give equal results. A kernel that adds in the order
            in which thread blocks arrive does not.
        calling_convention: How to call it: ``tvm_ffi:gemm(a,b,out,stream)`` is a TVM-FFI function
            exported as ``__tvm_ffi_gemm`` that takes the operands in this order, then the CUDA
            stream as an opaque pointer.
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
        """Whether a launch needs memory besides its operands."""
        return self.workspace_bytes > 0 or self.workspace is not None

    @property
    def features(self) -> tuple[str, ...]:
        """What a reader must know to use the kernel, as its entry requires it."""
        needed = {
            TILE_WORKSPACE: self.workspace is not None,
            TIMING_DEPENDENT: not self.is_deterministic,
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    def facts(self) -> dict[str, Any]:
        """These fields alone, as arguments for a class that adds others to them."""
        return {one.name: getattr(self, one.name) for one in fields(KernelFacts)}


@dataclass(frozen=True, kw_only=True)
class Kernel(KernelFacts):
    """One kernel as a header lists it.

    Attributes:
        id: sha256 of the uncompressed payload, in hex: the kernel's name everywhere.
        span: Where its zstd frame lies.
        imports: Symbols that its payload leaves undefined, sorted; None where ``Header.imports``
            are its own.
    """

    id: str
    span: Span
    imports: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class UnknownKernel:
    """A kernel that this release does not understand, and so never calls.

    Attributes:
        id, span, operator: As of a `Kernel`.
        signature: The text that names what it computes.
        why: What is not understood, in words.
    """

    id: str
    span: Span
    operator: str
    signature: str
    why: str


APART, BACK_TO_BACK = "apart", "back to back"
"""How timed launches follow each other: behind a small kernel each, which waits for the launch
before it to end and lets none begin before its own end; or one behind the other, where a kernel of
programmatic dependent launch may begin before the one before it has ended."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a measurement depends on besides the GPU product.

    Attributes:
        driver: Version of the GPU's driver, e.g. ``580.95.05``.
        torch: Version of torch, whose ATen was measured beside, e.g. ``2.11.0+cu130``.
        cuda: CUDA version that torch was built for, e.g. ``13.0``; it bounds cuBLAS's version.
        date: Day of the measurement in UTC, e.g. ``2026-11-21``.
        launches: How timed launches followed each other: `APART`, `BACK_TO_BACK`, or a text that
            this release does not know.
        gpu_sha256: Digest of the GPU's UUID, such as ``GPU-8b1c…``; None where it is not known.
    """

    driver: str
    torch: str
    cuda: str
    date: str
    launches: str = BACK_TO_BACK
    gpu_sha256: str | None = None


ESTIMATE, MEASUREMENT = "estimate", "measurement"
"""Kinds of sources that are known."""


@dataclass(frozen=True, kw_only=True)
class RankingSource:
    """Where the order of a ranking comes from.

    Attributes:
        kind: ``estimate`` or ``measurement``.
        by: The model and its version, or the measuring program.
        gpu: The GPU that was modelled or measured, as its driver names it.
        conditions: Of a measurement, where they were written down.
    """

    kind: str
    by: str
    gpu: str
    conditions: Conditions | None = None


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One place of a ranking.

    Attributes:
        kernel: Position in ``Header.kernels``.
        time_ns: Estimated or measured runtime in nanoseconds; None where the source has no number.
    """

    kernel: int
    time_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A measured runtime.

    Attributes:
        time_ns: Median, in nanoseconds.
        spread_ns: The true median lies within ``time_ns`` ± this, with a confidence of 95 % for
            each timing by itself.
    """

    time_ns: int
    spread_ns: int


LEAST_CONFIRMING = 2
"""Distinct GPUs that a confirmed measurement needs."""

LEAST_REPEAT_S = 120
"""Least seconds between two measurements of a problem on one GPU that make it repeated.

Clocks and temperature settle in tens of seconds, and other programs' bursts of work end. After two
minutes the second measurement does not inherit the state that the first one found."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a problem besides its kernels' times.

    Attributes:
        spreads_ns: Of each place of the ranking; see `Timing`.
        aten: ATen's time for the problem; None where it has no operator that computes the same.
        triton: Time of the best Triton kernel that Inductor found; None where it was not
            measured.
        doubts: Why the order is not to be relied on; empty where it is.
        confirmed_by: Digests of the UUIDs of the GPUs that confirm it: at least two, or none.
        repeated: Seconds after which another process measured the same on this GPU, at least
            `LEAST_REPEAT_S`; None where none did.
    """

    spreads_ns: tuple[int, ...]
    aten: Timing | None
    triton: Timing | None
    doubts: tuple[str, ...]
    confirmed_by: tuple[str, ...] = ()
    repeated: int | None = None

    @property
    def is_confirmed(self) -> bool:
        """Whether two GPUs of the product agree on the winner, and nothing speaks against it."""
        return len(set(self.confirmed_by)) >= LEAST_CONFIRMING and not self.doubts

    @property
    def is_repeated(self) -> bool:
        """Whether two processes on one GPU agree on the winner, and nothing speaks against it."""
        return self.repeated is not None and not self.doubts

    @property
    def standing(self) -> str:
        """In words, how far the order may be relied on."""
        if self.doubts:
            return "doubtful"
        if self.is_confirmed:
            return f"confirmed by {len(set(self.confirmed_by))} GPUs"
        return "repeated" if self.is_repeated else "measured once"


@dataclass(frozen=True, kw_only=True)
class CompileFailure:
    """A kernel that was chosen for a problem and did not compile.

    Attributes:
        operator: Its operator.
        reason: Why, on one line.
        is_transient: Whether another attempt may succeed: the compiler was killed or ran out of
            time, which says nothing about the kernel.
    """

    operator: str
    reason: str
    is_transient: bool


def entry_name(problem: Problem, product: str | None = None) -> str:
    """The text that names an entry in a header: its problem, and the product if it is further."""
    return f"{problem.key}{ON}{product}" if product else problem.key


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The kernels of one problem, best first, and which source says so.

    Attributes:
        problem: The problem.
        source: Position in ``Header.sources``.
        kernels: Best first.
        measured: What was measured besides; None where the order is an estimate.
        missing: Positions in ``Header.failures``: kernels that should be ranked too.
        is_declared: Whether a manifest declares the problem. Others were measured and not declared,
            for tables that choose a kernel by m.
        product: The GPU product that it is for, as its driver names it, if it is a further ranking;
            None if it is the first ranking of its problem, for the ``gpu`` of its source.
    """

    problem: Problem
    source: int
    kernels: tuple[Ranked, ...]
    measured: Measured | None = None
    missing: tuple[int, ...] = ()
    is_declared: bool = True
    product: str | None = None

    @property
    def is_further(self) -> bool:
        """Whether the bundle has, or could have, another ranking of the problem before it."""
        return self.product is not None

    @property
    def name(self) -> str:
        """The text that names it in a header."""
        return entry_name(self.problem, self.product)


@dataclass(frozen=True, kw_only=True)
class UnknownEntry:
    """A ranking, or an entry of ``unserved``, that this release leaves out.

    Attributes:
        problem: The text that names its problem.
        why: What is not understood, in words.
    """

    problem: str
    why: str


class Scope(str, enum.Enum):
    """What a reason for having no kernel holds for."""

    SIGNATURE = "signature"
    """Every problem of the signature, whatever its sizes."""

    PROBLEM = "problem"
    """This problem alone; others of its signature may have kernels."""


@dataclass(frozen=True, kw_only=True)
class UnservedReason:
    """Why a declared problem has no kernel.

    Attributes:
        text: The reason, on one line.
        scope: What it holds for; None where that is not known: bundles of version 1 do not say.
    """

    text: str
    scope: Scope | None


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything a bundle says about itself; see FORMAT.md for each field.

    Attributes:
        target: What the kernels run on.
        device: Name of the device profile that the build used; the first, if it used several.
        generator: Program and version that wrote the file.
        build_key: Digest of all inputs of the build: equal keys, equal bundles.
        toolchain: Versions of everything that shaped the code, by distribution or tool name.
        body_sha256: Digest of all bytes behind the header.
        dictionary: The compression dictionary, or None.
        kernels: Sorted by id; those that this release understands.
        sources: Where rankings come from.
        rankings: Sorted by problem key, of one problem by product, the first product's before
            further ones; those that this release understands.
        unserved: Problems that were declared and got no kernel, each with the reason.
        imports: Symbols that each payload leaves undefined for the runtime's libraries to define,
            but for kernels that list their own, sorted; None where that is not known: bundles of
            version 1 do not say.
        failures: Kernels that were chosen and did not compile.
        unknown_kernels: Kernels that this release does not understand.
        unknown_rankings: Rankings that this release does not understand.
        unknown_sources: Of each source that this release does not understand, or takes for an
            estimate though it is none, why.
        unknown_unserved: Entries of ``unserved`` that this release does not understand.
        format_version: Version of the format that the file was written in.
        further_devices: Names of the other device profiles that the build used.
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

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of all device profiles that the build used."""
        return (self.device, *self.further_devices)

    @property
    def products(self) -> tuple[str, ...]:
        """The GPU products that rankings are for, by the driver's names, the first ones first."""
        ordered = sorted(self.rankings, key=lambda one: (one.is_further, self.gpu_of(one)))
        return tuple(dict.fromkeys(self.gpu_of(one) for one in ordered))

    @property
    def declared_count(self) -> int:
        """Number of ranked problems that a manifest declares."""
        return len({one.problem for one in self.rankings if one.is_declared})

    @property
    def not_declared_count(self) -> int:
        """Number of ranked problems that were measured and that no manifest declares."""
        return len({one.problem for one in self.rankings}) - self.declared_count

    def gpu_of(self, ranking: Ranking) -> str:
        """The GPU product that a ranking is for, as its driver names it."""
        return self.sources[ranking.source].gpu

    def rankings_on(self, gpu: str) -> tuple[Ranking, ...]:
        """The rankings that a GPU of a product uses, one a problem; see `choose_rankings`."""
        return choose_rankings(self.rankings, gpu, gpu_of=self.gpu_of)

    def is_complete(self, ranking: Ranking) -> bool:
        """Whether building a ranking again would find no further kernel."""
        return not any(self.failures[position].is_transient for position in ranking.missing)


class _Entry(Protocol):
    """A ranking, in a header or on its way into one."""

    @property
    def problem(self) -> Problem:
        """The problem."""

    @property
    def is_declared(self) -> bool:
        """Whether a manifest declares it."""

    @property
    def is_further(self) -> bool:
        """Whether another ranking of the problem may be before it."""


_E = TypeVar("_E", bound=_Entry)


def choose_rankings(
    rankings: Sequence[_E], gpu: str, *, gpu_of: Callable[[_E], str]
) -> tuple[_E, ...]:
    """Choose one ranking a problem for a GPU product: its own, else the first product's.

    A product that has rankings of its own does not use what was measured on another one at sizes
    that no manifest declares. Where none is further, all are used.
    """
    if not any(one.is_further for one in rankings):
        return tuple(rankings)
    own = {one.problem for one in rankings if gpu_of(one) == gpu}
    chosen: dict[Problem, _E] = {}
    for one in rankings:
        if gpu_of(one) == gpu:
            chosen[one.problem] = one
        elif one.problem not in own and (one.is_declared or not own):
            known = chosen.get(one.problem)
            if known is None or (known.is_further and not one.is_further):
                chosen[one.problem] = one
    return tuple(chosen.values())


def sha256_hex(data: bytes) -> str:
    """Hex sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one byte string a JSON value may be written as: sorted keys, no spaces, ASCII."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")
