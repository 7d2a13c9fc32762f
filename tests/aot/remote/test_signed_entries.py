"""The bytes of a remote cache's entries, which any server may have made up."""

from __future__ import annotations

import contextlib
import hashlib
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nvgemm_aot.storage.remote.signed_entries import (
    MAX_ENTRY_BYTES,
    EntryError,
    decode_entry,
    encode_entry,
)
from nvgemm_runtime.installed.signatures import KeySignature

PAYLOAD = b"a kernel" * 1000
DIGEST = hashlib.sha256(PAYLOAD).hexdigest()
SIGNED = (
    KeySignature(key_id="ab" * 32, value=b"s" * 64),
    KeySignature(key_id="cd" * 32, value=bytes(64)),
)
DATA = encode_entry(PAYLOAD, DIGEST, SIGNED)


def with_header(*, size: int = len(PAYLOAD), payload: bytes = PAYLOAD, **fields: object) -> bytes:
    """An entry whose header states something else."""
    header = {"magic": b"NVGEMMRC", "version": 1, "signatures": 0} | fields
    digest = hashlib.sha256(payload).digest()
    return struct.pack("<8sHHQ32s", *header.values(), size, digest) + zstandard.compress(payload)


@pytest.mark.parametrize("signatures", [(), SIGNED[:1], SIGNED])
@pytest.mark.parametrize("payload", [b"", b"x", PAYLOAD, bytes(3_000_000)], ids=len)
def test_reads_what_it_wrote(payload: bytes, signatures: tuple[KeySignature, ...]) -> None:
    digest = hashlib.sha256(payload).hexdigest()
    entry = decode_entry(encode_entry(payload, digest, signatures))
    assert (entry.sha256, entry.signatures) == (digest, signatures)
    assert entry.open() == payload


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has 0 bytes, its header has 52"),
        (with_header(magic=b"SOMETHIN"), "its first bytes differ from NVGEMMRC"),
        (with_header(version=2), "its version is 2"),
        (with_header(signatures=17), "it has 17 signatures, at most 16"),
        (DATA[:100], "it ends after 100 bytes, within its 2 signatures"),
        (with_header(size=1 << 40), "its payload has 1099511627776 bytes, at most 16777216"),
        (bytes(MAX_ENTRY_BYTES + 1), "it has more than"),
    ],
)
def test_refuses_a_header_that_breaks_a_rule(data: bytes, reason: str) -> None:
    with pytest.raises(EntryError, match=reason):
        decode_entry(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (with_header(size=len(PAYLOAD) - 1), "its frame states 8000 bytes, its header 7999"),
        (with_header(size=10, payload=bytes(1 << 27)), "its frame states 134217728 bytes"),
        (DATA[:-5], "cannot be decompressed"),
        (DATA + b"more", "cannot be decompressed"),
        (encode_entry(PAYLOAD, "00" * 32, ()), "its payload differs from its digest"),
    ],
)
def test_refuses_a_payload_that_is_not_the_stated_one(data: bytes, reason: str) -> None:
    with pytest.raises(EntryError, match=reason):
        decode_entry(data).open()


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255), st.binary(max_size=30))
def test_changed_bytes_give_the_payload_or_an_error(place: int, bits: int, more: bytes) -> None:
    changed = DATA[:place] + bytes([DATA[place] ^ bits]) + DATA[place + 1 :] + more
    with contextlib.suppress(EntryError):
        assert decode_entry(changed).open() == PAYLOAD
