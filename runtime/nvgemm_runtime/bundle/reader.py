"""Bundle reader: opens a file, checks it, and returns verified payloads."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import zstandard

from ..errors import UPGRADE, BundleFormatError, StorageError
from .decode import decode_header
from .format import (
    MAGIC,
    MAX_HEADER_BYTES,
    PAGED_VERSION,
    PREFIX,
    READABLE_VERSIONS,
    Dictionary,
    Header,
    Kernel,
    Span,
    UnknownKernel,
    sha256_hex,
)
from .paging.paged_header import PagedHeader
from .paging.root import Root, decode_root
from .paging.whole_header import read_whole

_CHUNK_BYTES = 1 << 20

_dictionary_lock = threading.Lock()
"""Held while a bundle's dictionary is read: once per bundle, so all bundles share a lock."""


def _renew_lock() -> None:
    """Replaces the lock in a forked child, where its holder may be a thread that is gone."""
    global _dictionary_lock
    _dictionary_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def file_identity(status: os.stat_result) -> tuple[int, int, int]:
    """Returns what tells a file from its replacement: device, inode and modification time."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


class Bundle:
    """Open bundle that keeps every FORMAT.md rule which its format version has at opening.

    The file stays open, so replacing it on disk does not change what this object reads. Safe to use
    from several threads.

    Attributes:
        path: Path at opening.
        prefix: The open file's first bytes, up to the header, which hold the header's digest.
        facts: Header facts; without kernels and rankings if `is_paged`.
        is_paged: True if kernels and rankings are in pages, which are checked when they are read.
        file_bytes: File length.
        identity: The open file's device, inode and modification time.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens and validates ``path``.

        Raises:
            StorageError: If the file cannot be read.
            BundleFormatError: If it breaks a rule in FORMAT.md.
        """
        self._descriptor = -1  # first, because __del__ runs even if this fails
        self.path = Path(path)
        self._local = threading.local()
        self._dictionary: zstandard.ZstdCompressionDict | None = None
        try:
            # Non-blocking, because opening a named pipe would wait for a writer.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor = os.open(self.path, flags)
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot open the bundle: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{self.path}: not a regular file; name a bundle")
        self.file_bytes = status.st_size
        self.identity = file_identity(status)
        read = self._read_header()
        self._root = read if isinstance(read, Root) else None
        self._header = None if isinstance(read, Root) else read
        self.facts = read.facts if isinstance(read, Root) else read
        self.is_paged = self._root is not None

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; payloads can no longer be read."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def header(self) -> Header:
        """Whole header; all pages of a paged one are read and checked the first time.

        Raises:
            BundleFormatError: If a page breaks a rule in FORMAT.md.
            StorageError: If the file cannot be read.
        """
        if self._header is None:
            assert self._root is not None
            self._header = read_whole(self._root, PagedHeader(self._read, self._root))
        return self._header

    def pages(self) -> PagedHeader | None:
        """Returns look-ups that read no more pages than they need; None if not `is_paged`."""
        return None if self._root is None else PagedHeader(self._read, self._root)

    def payload(self, kernel: Kernel | UnknownKernel) -> bytes:
        """Decompresses a kernel and checks its digest.

        Returns:
            ELF shared object whose sha256 is ``kernel.id``.

        Raises:
            BundleFormatError: If the frame is damaged or the content does not match the id.
        """
        name = f"kernel {kernel.id[:12]}"
        content = self._decompress(name, kernel.span, self._decompressor())
        if sha256_hex(content) != kernel.id:
            self._fail(
                "payload-digest", f"{name} at byte {kernel.span.offset} has different content"
            )
        return content

    def check_body(self) -> None:
        """Checks the digests over everything after the header or root.

        Raises:
            BundleFormatError: If a byte there was changed.
        """
        if self._root is not None:
            PagedHeader(self._read, self._root).check_pages()
        digest = hashlib.sha256()
        for chunk in self._chunks(self._body_offset):
            digest.update(chunk)
        if (observed := digest.hexdigest()) != self.facts.body_sha256:
            self._fail(
                "body-digest", f"the body's sha256 is {observed}, must be {self.facts.body_sha256}"
            )

    def content(self) -> bytes:
        """Returns the whole file, as it was opened."""
        return b"".join(self._chunks(0))

    def _chunks(self, offset: int) -> Iterator[bytes]:
        for start in range(offset, self.file_bytes, _CHUNK_BYTES):
            yield self._read(start, min(_CHUNK_BYTES, self.file_bytes - start))

    def _fail(self, rule: str, message: str) -> NoReturn:
        raise BundleFormatError(str(self.path), rule, message)

    def _read(self, offset: int, size_bytes: int) -> bytes:
        if self._descriptor < 0:
            raise StorageError(f"{self.path}: the bundle is closed")
        try:
            data = os.pread(self._descriptor, size_bytes, offset)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot read: {error.strerror}") from error
        if len(data) != size_bytes:
            self._fail("truncated", f"{len(data)} bytes at byte {offset}, {size_bytes} expected")
        return data

    def _read_header(self) -> Header | Root:
        """Returns the header, or the root of one in pages."""
        if self.file_bytes < PREFIX.size:
            self._fail("truncated", f"{self.file_bytes} bytes, a bundle has at least {PREFIX.size}")
        self.prefix = self._read(0, PREFIX.size)
        magic, version, header_bytes, digest = PREFIX.unpack(self.prefix)
        if magic != MAGIC:
            self._fail("magic", f"the file starts with {magic!r}, a bundle with {MAGIC!r}")
        if version not in READABLE_VERSIONS:
            known = ", ".join(map(str, READABLE_VERSIONS))
            self._fail(
                "version", f"format version {version}; this release reads {known}; {UPGRADE}"
            )
        body_offset = PREFIX.size + header_bytes
        if header_bytes > MAX_HEADER_BYTES or body_offset > self.file_bytes:
            self._fail(
                "header-size",
                f"a header of {header_bytes} bytes in a file of {self.file_bytes} "
                f"(at most {MAX_HEADER_BYTES})",
            )
        data = self._read(PREFIX.size, header_bytes)
        if sha256_hex(data) != digest.hex():
            self._fail("header-digest", "the header's sha256 differs from the one before it")
        self._body_offset = body_offset
        if version == PAGED_VERSION:
            root = decode_root(
                data, where=str(self.path), root_end=body_offset, file_bytes=self.file_bytes
            )
            self._body_offset = root.body_offset
            return root
        return decode_header(
            data,
            where=str(self.path),
            version=version,
            body_offset=body_offset,
            file_bytes=self.file_bytes,
        )

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        # One per thread: a ZstdDecompressor must not be used by two threads at once.
        decompressor: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if decompressor is None:
            if self.facts.dictionary is not None:
                with _dictionary_lock:
                    if self._dictionary is None:
                        self._dictionary = self._load_dictionary(self.facts.dictionary)
            decompressor = zstandard.ZstdDecompressor(dict_data=self._dictionary)
            self._local.decompressor = decompressor
        return decompressor

    def _load_dictionary(self, dictionary: Dictionary) -> zstandard.ZstdCompressionDict:
        content = self._decompress("dictionary", dictionary.span, zstandard.ZstdDecompressor())
        if sha256_hex(content) != dictionary.sha256:
            self._fail("dictionary-digest", "the dictionary has different content")
        return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)

    def _decompress(self, name: str, span: Span, decompressor: zstandard.ZstdDecompressor) -> bytes:
        frame = self._read(span.offset, span.stored_bytes)
        try:
            declared = zstandard.frame_content_size(frame)
            if declared != span.content_bytes:
                self._fail(
                    "frame-size",
                    f"{name} declares {declared} bytes, its entry {span.content_bytes}",
                )
            return decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            self._fail("frame", f"{name} at byte {span.offset} does not decompress: {error}")
