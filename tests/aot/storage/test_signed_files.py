"""Files with signatures beside them: which stay, and which are dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvgemm_aot.storage import signed_files
from nvgemm_aot.storage.private_key import SigningKey
from nvgemm_aot.storage.signed_files import sign_file, write_signable
from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.installed.signatures import file_subject, read_signatures, signature_path
from signing_keys import new_key, sign_content


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return new_key(tmp_path, "key")


@pytest.fixture
def path(tmp_path: Path, key: SigningKey) -> Path:
    path = tmp_path / "some.json"
    path.write_bytes(b"content")
    return sign_content(path, key)


def signers(path: Path) -> set[str]:
    return {one.key_id for one in read_signatures(path)}


def test_another_content_drops_the_signatures(path: Path) -> None:
    write_signable({path: b"content!"})
    assert path.read_bytes() == b"content!"
    assert not signature_path(path).exists()


def test_the_same_content_keeps_them(path: Path, key: SigningKey) -> None:
    write_signable({path: b"content"})
    assert signers(path) == {key.id}


def test_a_signature_of_a_file_that_is_gone_does_not_stay(path: Path) -> None:
    path.unlink()
    write_signable({path: b"content!"})
    assert not signature_path(path).exists()


def test_a_dangling_link_is_dropped_too(path: Path) -> None:
    beside = signature_path(path)
    beside.unlink()
    beside.symlink_to("nowhere")
    write_signable({path: b"content!"})
    assert not beside.is_symlink()


def test_a_failed_write_keeps_file_and_signature(
    path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(contents: dict[Path, bytes]) -> None:
        raise StorageError(f"{[*contents]}: cannot write")

    monkeypatch.setattr(signed_files, "write_all", full)
    with pytest.raises(StorageError):
        write_signable({path: b"content!"})
    assert path.read_bytes() == b"content"
    assert signers(path) == {key.id}


def test_signing_twice_is_the_same_to_the_byte(path: Path, key: SigningKey) -> None:
    before = signature_path(path).read_bytes()
    sign_content(path, key)
    assert signature_path(path).read_bytes() == before


def test_another_key_adds_its_signature(path: Path, key: SigningKey, tmp_path: Path) -> None:
    other = new_key(tmp_path, "other")
    sign_content(path, other)
    assert signers(path) == {key.id, other.id}
    subject = file_subject(b"content")
    assert all(one.is_for(subject) for one in read_signatures(path))


def test_signatures_of_other_content_and_damage_are_dropped(
    path: Path, key: SigningKey, tmp_path: Path
) -> None:
    other = new_key(tmp_path, "other")
    path.write_bytes(b"content!")
    sign_content(path, other)
    assert signers(path) == {other.id}
    signature_path(path).write_bytes(b"damage")
    assert sign_file(path, file_subject(b"content!"), key) == read_signatures(path)
    assert signers(path) == {key.id}
