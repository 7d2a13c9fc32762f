"""Compresses a bundle's payloads: one zstd frame each, with one shared dictionary.

The dictionary is the plain content of a few payloads, chosen to hold as much of the shared content
as possible. For 400 SM100 kernels the result is 1.7 kB per kernel, against 3.9 kB with the best
trained dictionary and 12.6 kB with none. benchmarks/build/compression.py compares these and others;
its output is benchmarks/results/build-cpu.jsonl.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard

LEVEL = 19

MAX_MEMBERS = 64
"""Most payloads in a dictionary. Twice as many give 1.4 kB per kernel for those 400, but a reader
keeps the whole dictionary in memory: about 4 MB with 64."""

SCHEME = f"cover-{MAX_MEMBERS}-zstd-{LEVEL}"
"""Name of the compression scheme, which is part of every build key."""

WORD_BYTES = 16
"""Unit of comparison between payloads: a GPU instruction has 16 bytes and is aligned to them."""


QUICK_LEVEL = 3
"""Level for the user's own bundle, which is rewritten at every addition and never downloaded."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Compressed payloads.

    ``dictionary`` is empty if no dictionary helps; ``dictionary_frame`` is its compressed form.
    ``frames`` are independent zstd frames, one per payload.
    """

    frames: list[bytes]
    dictionary: bytes = b""
    dictionary_frame: bytes = b""


def compress(payloads: Sequence[bytes]) -> Packed:
    """Compresses payloads so that each decompresses alone. The result depends on nothing else."""
    members = cover(payloads, _member_count(len(payloads)))
    dictionary = b"".join(payloads[index] for index in members)
    if not dictionary:
        return Packed(frames=_frames(payloads, LEVEL))
    shared = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    alone = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    return Packed(
        dictionary=dictionary,
        dictionary_frame=alone.compress(dictionary),
        frames=_frames(payloads, LEVEL, shared),
    )


def compress_quickly(payloads: Sequence[bytes]) -> Packed:
    """Compresses payloads without a dictionary: faster, with a larger result."""
    return Packed(frames=_frames(payloads, QUICK_LEVEL))


def cover(payloads: Sequence[bytes], members: int) -> list[int]:
    """Chooses the payloads that hold most of the shared content.

    A word in n payloads is worth n - 1. A greedy loop takes the payload that adds the most worth
    not yet covered; the lower index wins a tie.

    Returns:
        Indices of the chosen payloads, the most valuable last: zstd reaches the end most cheaply.
    """
    words = [frozenset(_words(payload)) for payload in payloads]
    holders = Counter(word for held in words for word in held)
    covered: set[bytes] = set()
    chosen: list[int] = []
    # Worth only shrinks as words are covered, so an entry that is still best when recomputed is the
    # best overall (lazy greedy).
    heap = [(-sum(holders[word] - 1 for word in held), index) for index, held in enumerate(words)]
    heapq.heapify(heap)
    while heap and len(chosen) < members:
        _, index = heapq.heappop(heap)
        worth = sum(holders[word] - 1 for word in words[index] - covered)
        if worth == 0:
            continue
        if heap and (-worth, index) > heap[0]:
            heapq.heappush(heap, (-worth, index))
            continue
        chosen.append(index)
        covered |= words[index]
    return chosen[::-1]


def _member_count(payloads: int) -> int:
    # Small bundles are smallest at two thirds: more members cost more than they save.
    return min(MAX_MEMBERS, -(-payloads * 2 // 3)) if payloads > 1 else 0


def _words(payload: bytes) -> list[bytes]:
    last = len(payload) - WORD_BYTES
    return [payload[start : start + WORD_BYTES] for start in range(0, last + 1, WORD_BYTES)]


def _frames(
    payloads: Sequence[bytes], level: int, shared: zstandard.ZstdCompressionDict | None = None
) -> list[bytes]:
    compressor = zstandard.ZstdCompressor(
        level=level, dict_data=shared, write_checksum=False, write_dict_id=False
    )
    return [compressor.compress(payload) for payload in payloads]
