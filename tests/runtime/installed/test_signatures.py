"""Signature files: what they sign to the byte, and files that are none."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from nvgemm_aot.storage.private_key import SigningKey
from nvgemm_runtime.errors import SignatureError
from nvgemm_runtime.installed.signatures import (
    MAX_FILE_BYTES,
    KeySignature,
    bundle_subject,
    decode_signatures,
    encode_signatures,
    entry_subject,
    file_subject,
    read_signatures,
    signature_path,
)
from signing_keys import new_key

SUBJECT = file_subject(b"content")


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return new_key(tmp_path, "key")


def test_signs_these_bytes() -> None:
    digest = hashlib.sha256(b"p").hexdigest().encode()
    assert bundle_subject(b"p").message == b"signature 1 of nvgemm-aot\nbundle\n" + digest
    assert file_subject(b"p").message == b"signature 1 of nvgemm-aot\nfile\n" + digest
    assert entry_subject("k", "d").message == b"signature 1 of nvgemm-aot\ncache entry\nk\nd"


def test_a_known_key_makes_a_known_signature() -> None:
    """RFC 8032, 7.1, test 1: an empty message."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    key = SigningKey(Ed25519PrivateKey.from_private_bytes(private))
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    assert key.public == public
    assert key.id == public.hex()
    assert key.public_text == base64.b64encode(public).decode()
    assert key.sign(SUBJECT) == key.sign(SUBJECT), "deterministic"
    assert key.sign(SUBJECT).is_for(SUBJECT)
    assert not key.sign(SUBJECT).is_for(file_subject(b"other"))
    assert repr(key) == f"SigningKey({key.public_text})"


def test_reads_what_it_writes_sorted_by_key(tmp_path: Path, key: SigningKey) -> None:
    other = new_key(tmp_path, "other")
    signatures = (key.sign(SUBJECT), other.sign(SUBJECT))
    data = encode_signatures(signatures)
    assert encode_signatures(signatures[::-1]) == data
    assert sorted(decode_signatures(data, "a.sig"), key=hash) == sorted(signatures, key=hash)


def document(key: SigningKey, **changes: Any) -> bytes:
    content = json.loads(encode_signatures([key.sign(SUBJECT)]))
    return json.dumps({**content, **changes}).encode()


def test_unknown_members_are_ignored(key: SigningKey) -> None:
    (signature,) = decode_signatures(document(key, note="x"), "a.sig")
    assert signature == key.sign(SUBJECT)
    assert decode_signatures(document(key, signatures=[]), "a.sig") == ()


ENTRY = {
    "key": base64.b64encode(bytes(32)).decode(),
    "ed25519": base64.b64encode(bytes(64)).decode(),
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": "other"}, "its format and version are not 'signatures of nvgemm-aot' and 1"),
        ({"version": 2}, "its format and version are not"),
        ({"signatures": {}}, "signatures must be a list"),
        ({"signatures": [1]}, "signatures[0]: not a signature file: no member 'key'"),
        ({"signatures": [ENTRY, {"key": ENTRY["key"]}]}, "signatures[1]: not a signature file: no"),
        ({"signatures": [{**ENTRY, "key": "AAAA"}]}, "key must be 32 bytes in base64"),
        ({"signatures": [{**ENTRY, "key": 1}]}, "key must be 32 bytes in base64"),
        ({"signatures": [{**ENTRY, "ed25519": ENTRY["key"]}]}, "ed25519 must be 64 bytes in base6"),
        ({"signatures": [{**ENTRY, "ed25519": "é"}]}, "ed25519 must be 64 bytes in base64"),
    ],
)
def test_names_what_is_wrong_with_a_document(
    key: SigningKey, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SignatureError) as refused:
        decode_signatures(document(key, **changes), "a.sig")
    assert str(refused.value).startswith("a.sig: ")
    assert expected in str(refused.value)
    assert str(refused.value).endswith("sign again: nvgemm-aot sign")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 60_000, b'{"version": ' + b"9" * 5000 + b"}"]
)
def test_other_bytes_are_no_signature_file(data: bytes) -> None:
    with pytest.raises(SignatureError, match="not a signature file"):
        decode_signatures(data, "a.sig")


def test_every_truncation_is_refused(key: SigningKey) -> None:
    data = encode_signatures([key.sign(SUBJECT)])
    for length in range(len(data.rstrip())):
        with pytest.raises(SignatureError, match="not a signature file"):
            decode_signatures(data[:length], "a.sig")


def test_a_file_without_signatures_has_none(tmp_path: Path) -> None:
    assert read_signatures(tmp_path / "a.nvgemm") == ()


def test_a_huge_file_is_not_read_whole(tmp_path: Path, key: SigningKey) -> None:
    path = tmp_path / "a.nvgemm"
    with signature_path(path).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SignatureError, match=f"more than {MAX_FILE_BYTES} bytes"):
        read_signatures(path)
    most = encode_signatures([key.sign(SUBJECT)]).ljust(MAX_FILE_BYTES)
    signature_path(path).write_bytes(most)
    assert len(read_signatures(path)) == 1


def test_pipes_and_directories_are_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "a.nvgemm"
    os.mkfifo(signature_path(path))
    with pytest.raises(SignatureError, match=r"a\.nvgemm\.sig: not a regular file; sign again"):
        read_signatures(path)
    signature_path(path).unlink()
    signature_path(path).mkdir()
    with pytest.raises(SignatureError, match=r"a\.nvgemm\.sig: not a regular file; sign again"):
        read_signatures(path)
    signature_path(path).rmdir()
    signature_path(path).symlink_to(signature_path(path))
    with pytest.raises(SignatureError, match="cannot read: Too many levels"):
        read_signatures(path)


def test_a_signature_by_no_point_of_the_curve_is_for_nothing() -> None:
    for raw in (bytes(32), b"\xff" * 32, b"\x02" + bytes(31)):
        assert not KeySignature(key_id=raw.hex(), value=b"\x01" * 64).is_for(SUBJECT)


def test_every_flipped_bit_changes_nothing_or_is_refused(key: SigningKey) -> None:
    data = encode_signatures([key.sign(SUBJECT)])
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                signatures = decode_signatures(bytes(changed), "a.sig")
            except SignatureError:
                continue
            assert all(one == key.sign(SUBJECT) or not one.is_for(SUBJECT) for one in signatures), (
                position,
                bit,
            )
