from __future__ import annotations

import random

import pytest
import zstandard

from nvgemm_aot.bundle.compression import MAX_MEMBERS, Packed, compress, cover


def families(count: int, each: int, seed: int = 0) -> list[bytes]:
    """Payloads in families: members of one share most 16-byte words, and none with another."""
    source = random.Random(seed)
    payloads = []
    for _ in range(count):
        words = [source.randbytes(16) for _ in range(200)]
        for _ in range(each):
            own = list(words)
            for place in source.sample(range(200), 10):
                own[place] = source.randbytes(16)
            payloads.append(b"".join(own))
    return payloads


def decompress(packed: Packed, index: int) -> bytes:
    dictionary = zstandard.ZstdCompressionDict(
        packed.dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )
    return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(packed.frames[index])


def test_each_payload_decompresses_alone() -> None:
    payloads = families(4, 5)
    packed = compress(payloads)
    assert zstandard.ZstdDecompressor().decompress(packed.dictionary_frame) == packed.dictionary
    for index in random.Random(1).sample(range(20), 20):
        assert decompress(packed, index) == payloads[index]


def test_covers_every_family_before_a_second_of_one() -> None:
    payloads = families(4, 5)
    chosen = cover(payloads, 4)
    assert {index // 5 for index in chosen} == {0, 1, 2, 3}


def test_chooses_nothing_that_shares_nothing() -> None:
    loners = [random.Random(seed).randbytes(1600) for seed in range(5)]
    assert cover(loners, 3) == []
    packed = compress(loners)
    assert packed.dictionary == b""
    assert [zstandard.ZstdDecompressor().decompress(f) for f in packed.frames] == loners


def test_dictionary_has_at_most_so_many_members() -> None:
    payloads = families(MAX_MEMBERS + 10, 2)
    packed = compress(payloads)
    assert len(packed.dictionary) == MAX_MEMBERS * len(payloads[0])


def test_one_payload_gets_no_dictionary() -> None:
    packed = compress([b"x" * 1000])
    assert (packed.dictionary, packed.dictionary_frame) == (b"", b"")


@pytest.mark.parametrize("seed", range(3))
def test_same_payloads_same_bytes(seed: int) -> None:
    assert compress(families(5, 3, seed)) == compress(families(5, 3, seed))
