"""Bytes of a remote cache's entry: a header, signatures, and the payload as one zstd frame.

Header, little-endian: magic, version, number of signatures, payload size, payload sha256. A
signature is the sha256 of its key and 64 bytes. Nothing is allocated by an unchecked size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard

from nvgemm_runtime.installed.signatures import KeySignature

MAX_PAYLOAD_BYTES = 16 << 20
"""Largest payload; a kernel has about 50 kB. Bounds what unchecked entries hold in memory."""

_MAGIC, _VERSION = b"NVGEMMRC", 1
_HEADER = struct.Struct("<8sHHQ32s")
_SIGNATURE = struct.Struct("<32s64s")
_MAX_SIGNATURES = 16
_LEVEL = 3
"""zstd level: a kernel of 49 kB becomes 13 kB in 0.2 ms."""

MAX_ENTRY_BYTES = (
    _HEADER.size + _MAX_SIGNATURES * _SIGNATURE.size + MAX_PAYLOAD_BYTES + (MAX_PAYLOAD_BYTES >> 7)
)
"""Largest entry: payloads that do not compress grow by less than a 128th."""


class EntryError(Exception):
    """Bytes are no entry of a remote cache; the text says why."""


@dataclass(frozen=True, kw_only=True)
class SealedEntry:
    """An entry whose payload is still compressed, so that its signatures are checked first.

    Attributes:
        sha256: The payload's, in hex, as stated.
        size_bytes: The payload's size, as stated, at most `MAX_PAYLOAD_BYTES`.
        signatures: Signatures for it.
        frame: The payload, compressed.
    """

    sha256: str
    size_bytes: int
    signatures: tuple[KeySignature, ...]
    frame: bytes

    def open(self) -> bytes:
        """Returns the payload.

        Raises:
            EntryError: If it is not what the entry states.
        """
        try:
            stated = zstandard.get_frame_parameters(self.frame).content_size
            if stated != self.size_bytes:
                raise EntryError(f"its frame states {stated} bytes, its header {self.size_bytes}")
            payload = zstandard.ZstdDecompressor().decompress(
                self.frame, max_output_size=self.size_bytes, allow_extra_data=False
            )
        except (zstandard.ZstdError, MemoryError) as error:
            raise EntryError(f"its payload cannot be decompressed: {error}") from None
        if len(payload) != self.size_bytes or hashlib.sha256(payload).hexdigest() != self.sha256:
            raise EntryError("its payload differs from its digest")
        return payload


def encode_entry(payload: bytes, sha256: str, signatures: Sequence[KeySignature]) -> bytes:
    """Encodes an entry; ``payload`` has at most `MAX_PAYLOAD_BYTES`."""
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(payload)
    header = _HEADER.pack(_MAGIC, _VERSION, len(signatures), len(payload), bytes.fromhex(sha256))
    signed = (_SIGNATURE.pack(bytes.fromhex(one.key_id), one.value) for one in signatures)
    return b"".join((header, *signed, frame))


def decode_entry(data: bytes) -> SealedEntry:
    """Reads an entry's bytes, without its payload.

    Raises:
        EntryError: If they break a rule.
    """
    if len(data) > MAX_ENTRY_BYTES:
        raise EntryError(f"it has more than {MAX_ENTRY_BYTES} bytes")
    if len(data) < _HEADER.size:
        raise EntryError(f"it has {len(data)} bytes, its header has {_HEADER.size}")
    magic, version, count, size_bytes, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise EntryError(f"its first bytes differ from {_MAGIC.decode()}")
    if version != _VERSION:
        raise EntryError(f"its version is {version}, this nvgemm-aot reads {_VERSION}")
    if count > _MAX_SIGNATURES:
        raise EntryError(f"it has {count} signatures, at most {_MAX_SIGNATURES} are allowed")
    if size_bytes > MAX_PAYLOAD_BYTES:
        raise EntryError(f"its payload has {size_bytes} bytes, at most {MAX_PAYLOAD_BYTES}")
    end = _HEADER.size + count * _SIGNATURE.size
    if len(data) < end:
        raise EntryError(f"it ends after {len(data)} bytes, within its {count} signatures")
    signatures = tuple(
        KeySignature(key_id=key.hex(), value=value)
        for key, value in _SIGNATURE.iter_unpack(data[_HEADER.size : end])
    )
    return SealedEntry(
        sha256=digest.hex(), size_bytes=size_bytes, signatures=signatures, frame=data[end:]
    )
