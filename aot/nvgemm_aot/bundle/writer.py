"""The bundle writer: the only code that creates bundle files."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nvgemm_runtime.bundle.decode import decode_header
from nvgemm_runtime.bundle.encode import encode_header, source_json
from nvgemm_runtime.bundle.format import (
    FORMAT_VERSION,
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX,
    CompileFailure,
    Dictionary,
    Header,
    Kernel,
    KernelDesign,
    Measured,
    Ranked,
    Ranking,
    RankingSource,
    Span,
    UnservedReason,
    canonical_json,
    sha256_hex,
)
from nvgemm_runtime.errors import BundleFormatError
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.target import Target

from ..storage.files import write_atomic
from ..verify.elf import MalformedElfError
from ..verify.host_elf_reading import imported_symbols
from .compression import Packed, compress


@dataclass(frozen=True, kw_only=True)
class BuiltKernel:
    """A linked kernel on its way into a bundle; its fields are those of the header's `Kernel`."""

    payload: bytes
    signature: Signature
    provider: str
    operator: str
    design: KernelDesign
    alignment_bytes: int
    workspace_bytes: int
    calling_convention: str

    @functools.cached_property
    def id(self) -> str:
        """The kernel's name everywhere: sha256 of the payload, in hex."""
        return sha256_hex(self.payload)

    @functools.cached_property
    def imports(self) -> tuple[str, ...]:
        """Symbols that the payload leaves undefined; none of one that is no shared object."""
        try:
            return imported_symbols(self.payload)
        except MalformedElfError:  # which `verify` finds
            return ()


@dataclass(frozen=True, kw_only=True)
class ProblemRanking:
    """The kernels of one problem, best first.

    Attributes:
        kernels: Pairs of a kernel's id (sha256 of its payload, hex) and its time in nanoseconds, or
            None where the source has no number.
        measured: What was measured besides; its spreads are in the order of ``kernels``.
        missing: Kernels that were chosen too and did not compile.
    """

    problem: Problem
    source: RankingSource
    kernels: tuple[tuple[str, int | None], ...]
    measured: Measured | None = None
    missing: tuple[CompileFailure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BundleContent:
    """Everything that determines a bundle's bytes. The order of kernels and rankings does not.

    Attributes:
        unserved: Declared problems without a kernel, each with the reason.
    """

    target: Target
    device: str
    generator: str
    build_key: str
    toolchain: dict[str, str]
    kernels: tuple[BuiltKernel, ...]
    rankings: tuple[ProblemRanking, ...]
    unserved: dict[Problem, UnservedReason] = field(default_factory=dict)


Pack = Callable[[Sequence[bytes]], Packed]
"""How payloads are compressed: a function of `compression`."""


def write_bundle(path: Path, content: BundleContent, pack: Pack = compress) -> Header:
    """Write a bundle; the same content gives the same bytes wherever and whenever it is written.

    Returns:
        The header that was written.

    Raises:
        ValueError: If a ranking names a kernel that is not among the kernels, a problem is ranked
            twice, or kernels of different signatures have equal payloads.
        BundleFormatError: If readers would refuse the bundle: its header is too long, or a value is
            not one that FORMAT.md allows.
        StorageError: If the file cannot be written; nothing is left half-written.
    """
    data, header = encode_bundle(content, pack)
    write_atomic(path, data)
    return header


def encode_bundle(content: BundleContent, pack: Pack = compress) -> tuple[bytes, Header]:
    """Lay out a bundle in memory; see `write_bundle`."""
    kernels = _by_id(content.kernels)
    ids = sorted(kernels)
    packed = pack([kernels[id_].payload for id_ in ids])
    dictionary_bytes = len(packed.dictionary_frame)
    sources = sorted({ranking.source for ranking in content.rankings}, key=_source_order)
    failures = sorted({one for r in content.rankings for one in r.missing}, key=_failure_order)
    common = _common_imports(kernels.values())
    body = packed.dictionary_frame + b"".join(packed.frames)
    header = Header(
        target=content.target,
        device=content.device,
        generator=content.generator,
        build_key=content.build_key,
        toolchain=content.toolchain,
        body_sha256=sha256_hex(body),
        dictionary=Dictionary(
            span=Span(
                offset=0, stored_bytes=dictionary_bytes, content_bytes=len(packed.dictionary)
            ),
            sha256=sha256_hex(packed.dictionary),
        )
        if packed.dictionary
        else None,
        kernels=_entries(ids, kernels, packed.frames, dictionary_bytes, common),
        sources=tuple(sources),
        rankings=_rankings(content.rankings, ids, sources, failures),
        unserved=content.unserved,
        imports=common,
        failures=tuple(failures),
    )
    return _with_final_offsets(header, body)


def _by_id(kernels: tuple[BuiltKernel, ...]) -> dict[str, BuiltKernel]:
    """Kernels by id. Of operators with equal code, the first by name stands for all."""
    found: dict[str, BuiltKernel] = {}
    for kernel in sorted(kernels, key=lambda kernel: (kernel.signature.key, kernel.operator)):
        id_ = sha256_hex(kernel.payload)
        first = found.setdefault(id_, kernel)
        if first.signature != kernel.signature:
            raise ValueError(
                f"{first.operator} and {kernel.operator} have equal code but compute "
                f"{first.signature.key} and {kernel.signature.key}"
            )
    return found


def _common_imports(kernels: Iterable[BuiltKernel]) -> tuple[str, ...]:
    """What most kernels import: those that import it need no list of their own."""
    counts = Counter(kernel.imports for kernel in kernels)
    return min(counts, key=lambda imports: (-counts[imports], imports), default=())


def _source_order(source: RankingSource) -> tuple[str, str, str, bytes]:
    return (source.kind, source.by, source.gpu, canonical_json(source_json(source)))


def _failure_order(failure: CompileFailure) -> tuple[str, str, bool]:
    return (failure.operator, failure.reason, failure.is_transient)


def _entries(
    ids: list[str],
    kernels: dict[str, BuiltKernel],
    frames: list[bytes],
    offset: int,
    common_imports: tuple[str, ...],
) -> tuple[Kernel, ...]:
    entries = []
    for id_, frame in zip(ids, frames):
        built = kernels[id_]
        entries.append(
            Kernel(
                id=id_,
                span=Span(offset=offset, stored_bytes=len(frame), content_bytes=len(built.payload)),
                signature=built.signature,
                provider=built.provider,
                operator=built.operator,
                design=built.design,
                alignment_bytes=built.alignment_bytes,
                workspace_bytes=built.workspace_bytes,
                calling_convention=built.calling_convention,
                imports=None if built.imports == common_imports else built.imports,
            )
        )
        offset += len(frame)
    return tuple(entries)


def _rankings(
    rankings: tuple[ProblemRanking, ...],
    ids: list[str],
    sources: list[RankingSource],
    failures: list[CompileFailure],
) -> tuple[Ranking, ...]:
    position = {id_: index for index, id_ in enumerate(ids)}
    declared = Counter(ranking.problem for ranking in rankings)
    if twice := [problem.key for problem, count in declared.items() if count > 1]:
        raise ValueError(f"problems ranked more than once: {', '.join(twice)}")
    if missing := {id_ for r in rankings for id_, _ in r.kernels} - position.keys():
        raise ValueError(f"rankings name kernels that are not there: {', '.join(sorted(missing))}")
    return tuple(
        Ranking(
            problem=ranking.problem,
            source=sources.index(ranking.source),
            kernels=tuple(
                Ranked(kernel=position[id_], time_ns=time_ns) for id_, time_ns in ranking.kernels
            ),
            measured=ranking.measured,
            missing=tuple(sorted(failures.index(failure) for failure in set(ranking.missing))),
        )
        for ranking in sorted(rankings, key=lambda ranking: ranking.problem)
    )


def _with_final_offsets(header: Header, body: bytes) -> tuple[bytes, Header]:
    """Shift every span behind the header, whose length depends on the digits of the offsets."""
    header_bytes = 0
    while True:
        base = PREFIX.size + header_bytes
        final = replace(
            header,
            dictionary=header.dictionary
            and replace(header.dictionary, span=_shift(header.dictionary.span, base)),
            kernels=tuple(
                replace(kernel, span=_shift(kernel.span, base)) for kernel in header.kernels
            ),
        )
        encoded = encode_header(final)
        if len(encoded) == header_bytes:
            _require_readable(encoded, final, len(body))
            prefix = PREFIX.pack(
                MAGIC, FORMAT_VERSION, header_bytes, bytes.fromhex(sha256_hex(encoded))
            )
            return prefix + encoded + body, final
        header_bytes = len(encoded)


def _require_readable(encoded: bytes, header: Header, body_bytes: int) -> None:
    """Refuse to write what `Bundle` would refuse to read."""
    where = f"the bundle for {header.target.key}, which is not written"
    if len(encoded) > MAX_HEADER_BYTES:
        raise BundleFormatError(
            where,
            "header-size",
            f"its header has {len(encoded)} bytes for {len(header.rankings)} problems and "
            f"{len(header.kernels)} kernels, at most {MAX_HEADER_BYTES} can be read; declare fewer "
            "candidates, or split the manifest",
        )
    base = PREFIX.size + len(encoded)
    decode_header(
        encoded,
        where=where,
        version=FORMAT_VERSION,
        body_offset=base,
        file_bytes=base + body_bytes,
    )


def _shift(span: Span, base: int) -> Span:
    return replace(span, offset=span.offset + base)
