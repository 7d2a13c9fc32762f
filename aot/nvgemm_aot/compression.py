"""How a bundle's payloads are compressed: one zstd frame each, against one shared dictionary."""

from __future__ import annotations

from dataclasses import dataclass

import zstandard

SCHEME = "none-19"
"""Names the way of compressing; part of what determines a bundle's bytes."""

LEVEL = 19


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Compressed payloads.

    Attributes:
        dictionary: The shared dictionary; empty where none helps.
        dictionary_frame: The dictionary, compressed by itself; empty where there is none.
        frames: One independent zstd frame a payload, in the order of the payloads.
    """

    dictionary: bytes
    dictionary_frame: bytes
    frames: list[bytes]


def compress(payloads: list[bytes]) -> Packed:
    """Compress payloads so that each decompresses alone; the result depends on nothing else."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    return Packed(dictionary=b"", dictionary_frame=b"", frames=[compressor.compress(p) for p in payloads])
