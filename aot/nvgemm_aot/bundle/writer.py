"""Writes bundles; the only code that creates bundle files."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TypeVar

from nvgemm_runtime.bundle.decode import decode_header
from nvgemm_runtime.bundle.encode import encode_header, source_json
from nvgemm_runtime.bundle.format import (
    FORMAT_VERSION,
    MAGIC,
    MAX_HEADER_BYTES,
    PAGED_ABOVE_BYTES,
    PAGED_VERSION,
    PREFIX,
    Dictionary,
    Header,
    Kernel,
    Span,
    canonical_json,
    sha256_hex,
)
from nvgemm_runtime.bundle.paging.encode_pages import encode_paged
from nvgemm_runtime.bundle.paging.paged_header import PagedHeader
from nvgemm_runtime.bundle.paging.root import decode_root
from nvgemm_runtime.bundle.paging.whole_header import read_whole
from nvgemm_runtime.bundle.ranking_entries import CompileFailure, Ranked, Ranking, RankingSource
from nvgemm_runtime.errors import BundleFormatError, count_text

from ..storage.signed_files import write_signable
from .compression import Packed, compress
from .content import BuiltKernel, BundleContent, ProblemRanking

Entry = TypeVar("Entry", Kernel, Dictionary)

Pack = Callable[[Sequence[bytes]], Packed]
"""Compressor for payloads, from `compression`."""


def write_bundle(path: Path, content: BundleContent, pack: Pack = compress) -> Header:
    """Writes a bundle; equal content gives equal bytes on any machine at any time.

    Signatures of other content beside it are removed.

    Raises:
        ValueError: If a ranking names an unknown kernel, a problem is ranked twice for a product,
            or kernels with different signatures have equal payloads.
        BundleFormatError: If readers would refuse the bundle: its header is too long, or FORMAT.md
            does not allow a value.
        StorageError: If the file cannot be written; nothing is left half-written.
    """
    data, header = encode_bundle(content, pack)
    write_signable({path: data})
    return header


def encode_bundle(content: BundleContent, pack: Pack = compress) -> tuple[bytes, Header]:
    """Lays out a bundle in memory; see `write_bundle`."""
    kernels = _kernels_by_id(content.kernels)
    packed = pack([kernels[id_].payload for id_ in sorted(kernels)])
    body = packed.dictionary_frame + b"".join(packed.frames)
    return _with_final_offsets(_header_relative_to_body(content, kernels, packed, body), body)


def header_without_offsets(content: BundleContent) -> Header:
    """Builds the header without payload offsets.

    Raises:
        ValueError: See `write_bundle`.
    """
    kernels = _kernels_by_id(content.kernels)
    empty = Packed(frames=[b""] * len(kernels))
    return _header_relative_to_body(content, kernels, empty, b"")


def _header_relative_to_body(
    content: BundleContent, kernels: dict[str, BuiltKernel], packed: Packed, body: bytes
) -> Header:
    """Builds a header with offsets relative to the body."""
    ids = sorted(kernels)
    dictionary_bytes = len(packed.dictionary_frame)
    dictionary = None
    if packed.dictionary:
        content_bytes = len(packed.dictionary)
        span = Span(offset=0, stored_bytes=dictionary_bytes, content_bytes=content_bytes)
        dictionary = Dictionary(span=span, sha256=sha256_hex(packed.dictionary))
    sources = sorted({ranking.source for ranking in content.rankings}, key=_source_order)
    failures = sorted({failure for r in content.rankings for failure in r.missing}, key=astuple)
    common = _common_imports(kernels.values())
    return Header(
        target=content.target,
        device=content.device,
        generator=content.generator,
        build_key=content.build_key,
        toolchain=content.toolchain,
        body_sha256=sha256_hex(body),
        dictionary=dictionary,
        kernels=_header_kernels(ids, kernels, packed.frames, dictionary_bytes, common),
        sources=tuple(sources),
        rankings=_header_rankings(content.rankings, ids, sources, failures),
        unserved=content.unserved,
        imports=common,
        failures=tuple(failures),
        further_devices=content.further_devices,
        part_of=content.part_of,
    )


def _kernels_by_id(kernels: tuple[BuiltKernel, ...]) -> dict[str, BuiltKernel]:
    """Maps ids to kernels. Among operators with equal code, keeps the first by name."""
    by_id: dict[str, BuiltKernel] = {}
    for kernel in sorted(kernels, key=lambda kernel: (kernel.signature.key, kernel.operator)):
        first = by_id.setdefault(kernel.id, kernel)
        if first.signature != kernel.signature:
            raise ValueError(
                f"{first.operator} and {kernel.operator} have equal code but compute "
                f"{first.signature.key} and {kernel.signature.key}"
            )
    return by_id


def _common_imports(kernels: Iterable[BuiltKernel]) -> tuple[str, ...]:
    """Returns the imports that most kernels have; these kernels need no list in the header."""
    counts = Counter(kernel.imports for kernel in kernels)
    return min(counts, key=lambda imports: (-counts[imports], imports), default=())


def _source_order(source: RankingSource) -> tuple[str, str, str, bytes]:
    return (source.kind, source.by, source.gpu, canonical_json(source_json(source)))


def _header_kernels(
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
                **built.facts(),
                id=id_,
                span=Span(offset=offset, stored_bytes=len(frame), content_bytes=len(built.payload)),
                imports=None if built.imports == common_imports else built.imports,
            )
        )
        offset += len(frame)
    return tuple(entries)


def _header_rankings(
    rankings: tuple[ProblemRanking, ...],
    ids: list[str],
    sources: list[RankingSource],
    failures: list[CompileFailure],
) -> tuple[Ranking, ...]:
    position = {id_: index for index, id_ in enumerate(ids)}
    ordered = sorted(
        rankings, key=lambda ranking: (ranking.problem, ranking.gpu if ranking.is_further else "")
    )
    counts = Counter((ranking.problem, ranking.is_further and ranking.gpu) for ranking in rankings)
    if twice := [problem.key for (problem, _), count in counts.items() if count > 1]:
        raise ValueError(f"problems ranked more than once: {', '.join(twice)}")
    if missing := {id_ for r in rankings for id_, _ in r.kernels} - position.keys():
        raise ValueError(f"rankings name unknown kernels: {', '.join(sorted(missing))}")
    return tuple(
        Ranking(
            problem=ranking.problem,
            source=sources.index(ranking.source),
            kernels=tuple(
                Ranked(kernel=position[id_], time_ns=time_ns) for id_, time_ns in ranking.kernels
            ),
            measured=ranking.measured,
            missing=tuple(sorted(failures.index(failure) for failure in set(ranking.missing))),
            is_declared=ranking.is_declared,
            product=ranking.gpu if ranking.is_further else None,
        )
        for ranking in ordered
    )


def _with_final_offsets(header: Header, body: bytes) -> tuple[bytes, Header]:
    """Moves every span behind the header, whose length depends on the digits of the offsets."""
    header_bytes = 0
    while True:
        final = _shifted_header(header, PREFIX.size + header_bytes)
        encoded = encode_header(final)
        if len(encoded) > PAGED_ABOVE_BYTES:
            return _in_pages(header, body)
        if len(encoded) == header_bytes:
            base = PREFIX.size + header_bytes
            decode_header(
                encoded,
                where=_not_written(header),
                version=FORMAT_VERSION,
                body_offset=base,
                file_bytes=base + len(body),
            )
            return _prefix(FORMAT_VERSION, encoded) + encoded + body, final
        header_bytes = len(encoded)


def _in_pages(header: Header, body: bytes) -> tuple[bytes, Header]:
    """Encodes a bundle whose header is in pages; spans count from the body."""
    where = _not_written(header)
    encoded, pages = encode_paged(header)
    if len(encoded) > MAX_HEADER_BYTES:
        raise BundleFormatError(
            where,
            "header-size",
            f"its root has {len(encoded)} bytes for "
            f"{count_text(len(header.rankings), 'problem')} and "
            f"{count_text(len(header.kernels), 'kernel')}, at most {MAX_HEADER_BYTES} can be "
            "read; declare fewer candidates, or split the manifest",
        )
    data = _prefix(PAGED_VERSION, encoded) + encoded + pages + body
    root_end = PREFIX.size + len(encoded)
    root = decode_root(encoded, where=where, root_end=root_end, file_bytes=len(data))
    read_whole(root, PagedHeader(lambda offset, size: data[offset : offset + size], root))
    final = _shifted_header(header, root_end + len(pages))
    return data, replace(final, format_version=PAGED_VERSION)


def _prefix(version: int, encoded: bytes) -> bytes:
    return PREFIX.pack(MAGIC, version, len(encoded), hashlib.sha256(encoded).digest())


def _not_written(header: Header) -> str:
    """Returns a bundle's name in errors; a bundle that `Bundle` would refuse is not written."""
    return f"the bundle for {header.target.key}, which is not written"


def _shifted_header(header: Header, base: int) -> Header:
    return replace(
        header,
        dictionary=header.dictionary and _shifted(header.dictionary, base),
        kernels=tuple(_shifted(kernel, base) for kernel in header.kernels),
    )


def _shifted(entry: Entry, base: int) -> Entry:
    return replace(entry, span=replace(entry.span, offset=entry.span.offset + base))
