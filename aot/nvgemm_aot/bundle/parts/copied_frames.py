"""Copies compressed payloads between bundles, which is faster than compressing them again.

A part of a bundle keeps the bundle's dictionary and frames, so that merging all parts gives the
bundle's own bytes, whatever zstd is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zstandard

from nvgemm_runtime.bundle.format import PREFIX, Header, Whole, sha256_hex
from nvgemm_runtime.bundle.reader import Bundle

from ..compression import Packed, compress
from ..content import BundleContent, read_content


@dataclass(frozen=True, kw_only=True)
class OpenedBundle:
    """A bundle in memory, all of it checked.

    Attributes:
        bundle: The open file.
        content: Everything that it holds.
        data: The file's bytes.
    """

    bundle: Bundle
    content: BundleContent
    data: bytes

    @property
    def header(self) -> Header:
        """The file's header."""
        return self.bundle.header

    @property
    def whole(self) -> Whole:
        """The bundle, as its parts name it."""
        return Whole(
            build_key=self.header.build_key, prefix_sha256=sha256_hex(self.data[: PREFIX.size])
        )

    @property
    def dictionary_frame(self) -> bytes:
        """The dictionary's frame; empty if there is none."""
        dictionary = self.header.dictionary
        if dictionary is None:
            return b""
        return self.data[dictionary.span.offset : dictionary.span.end]

    @property
    def frames(self) -> dict[str, bytes]:
        """Every kernel's frame, by id."""
        return {
            kernel.id: self.data[kernel.span.offset : kernel.span.end]
            for kernel in self.header.kernels
        }


def open_whole(bundle: Bundle) -> OpenedBundle:
    """Reads and checks everything in a bundle.

    Raises:
        BundleFormatError: If the bundle is damaged, or has entries unknown to this release.
        StorageError: If the file cannot be read.
    """
    bundle.check_body()
    return OpenedBundle(bundle=bundle, content=read_content(bundle), data=bundle.content())


def pack_by_copying(
    bundles: Sequence[OpenedBundle], content: BundleContent, *, are_parts: bool
) -> Packed:
    """Packs a content's kernels with the frames of bundles, or compresses them again.

    Frames are copied if all bundles have one dictionary, or if one bundle has all kernels. Without
    a dictionary, they are copied only for ``are_parts``: kernels of one bundle, which had none. The
    order of bundles changes nothing.
    """
    ids = sorted(kernel.id for kernel in content.kernels)
    holders = [one for one in bundles if [kernel.id for kernel in one.header.kernels] == ids]
    dictionaries = {one.dictionary_frame for one in bundles}
    if holders:
        source = [min(holders, key=lambda one: one.data)]
    elif len(dictionaries) == 1 and (are_parts or dictionaries != {b""}):
        source = list(bundles)
    else:
        payloads = {kernel.id: kernel.payload for kernel in content.kernels}
        return compress([payloads[id_] for id_ in ids])
    frames: dict[str, bytes] = {}
    for one in source:
        for id_, frame in one.frames.items():
            frames[id_] = min(frame, frames.get(id_, frame))
    dictionary_frame = source[0].dictionary_frame
    return Packed(
        frames=[frames[id_] for id_ in ids],
        dictionary=zstandard.ZstdDecompressor().decompress(dictionary_frame)
        if dictionary_frame
        else b"",
        dictionary_frame=dictionary_frame,
    )


def as_is(packed: Packed) -> Callable[[Sequence[bytes]], Packed]:
    """Returns a compressor for the writer that returns what is packed already."""
    return lambda _: packed
