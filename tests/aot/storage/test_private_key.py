"""Private keys: what is written, who may read it, and what is no key."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nvgemm_aot.storage import private_key
from nvgemm_aot.storage.private_key import environment_key, make_key, read_key
from nvgemm_runtime.errors import SignatureError, StorageError, ToolchainError
from signing_keys import CRYPTOGRAPHY

assert CRYPTOGRAPHY


def test_a_key_is_written_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ci.pem"
    before = os.umask(0)
    try:
        key = make_key(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path).id == key.id
    assert path.read_text().splitlines()[1][22:] not in repr(key)


def test_a_key_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ci.pem"
    make_key(path)
    before = path.read_bytes()
    with pytest.raises(StorageError, match=r"ci\.pem: exists; a key is never replaced"):
        make_key(path)
    assert path.read_bytes() == before


def test_a_key_that_cannot_be_written_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_key.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device; free space there"):
        make_key(tmp_path / "ci.pem")
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written: File exists"):
        make_key(tmp_path / "file" / "ci.pem")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_a_key_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "ci.pem"
    make_key(path)
    path.chmod(mode)
    with pytest.raises(SignatureError, match=f"others can read or write it .mode {mode:04o}"):
        read_key(path)


def test_the_group_may_read_another_users_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a secret that is mounted for a process that is not root."""
    path = tmp_path / "ci.pem"
    key = make_key(path)
    monkeypatch.setattr(private_key.os, "geteuid", lambda: os.getuid() + 1)
    path.chmod(0o440)
    assert read_key(path).id == key.id
    path.chmod(0o444)
    with pytest.raises(SignatureError, match="mode 0444"):
        read_key(path)


def test_openssl_writes_the_same_kind_of_key(tmp_path: Path) -> None:
    path = tmp_path / "ci.pem"
    command = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", path]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    path.chmod(0o600)
    assert len(read_key(path).public) == 32


def encrypted() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )


def of_another_kind() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


@pytest.mark.parametrize("content", [b"", b"x" * 100_000, encrypted(), of_another_kind()])
def test_names_the_file_that_is_no_key_without_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ci.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SignatureError) as refused:
        read_key(path)
    assert str(refused.value) == (
        f"private key {path}: not an ed25519 key in PEM without a password; make one: "
        "nvgemm-aot keygen"
    )


def test_a_key_whose_slashes_a_path_joins_is_not_repeated() -> None:
    text = "A//B" * 10 + "AAA="
    assert len(base64.b64decode(text)) == 32
    with pytest.raises(SignatureError, match="looks like a private key") as refused:
        read_key(Path(text))
    assert "A/B" not in str(refused.value)


@pytest.mark.parametrize("form", ["pem", "one line", "escaped", "base64", "der", "seed", "hex"])
@pytest.mark.parametrize("source", ["--key", "NVGEMM_AOT_SIGNING_KEY"])
def test_a_key_in_place_of_its_path_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, source: str
) -> None:
    make_key(tmp_path / "ci.pem")
    pem = (tmp_path / "ci.pem").read_text()
    der = base64.b64decode(pem.splitlines()[1])
    text = {
        "pem": pem,
        "one line": " ".join(pem.split("\n")),
        "escaped": pem.replace("\n", r"\n"),
        "base64": base64.b64encode(pem.encode()).decode(),
        "der": pem.splitlines()[1],
        "seed": base64.b64encode(der[-32:]).decode(),
        "hex": der[-32:].hex(),
    }[form]
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", text)
    with pytest.raises(SignatureError) as refused:
        environment_key() if source != "--key" else read_key(Path(text))
    assert str(refused.value) == (
        f"{source} holds what looks like a private key instead of the path of its file; "
        f"write the key to a file of mode 0600 and set {source} to its path"
    )
    assert refused.value.__suppress_context__


def test_a_key_may_come_through_a_pipe_with_a_writer(tmp_path: Path) -> None:
    key = make_key(tmp_path / "ci.pem")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(SignatureError, match=r"cannot read: .*a pipe without a writer"):
        read_key(pipe)
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = threading.Thread(
        target=lambda: pipe.write_bytes((tmp_path / "ci.pem").read_bytes()), daemon=True
    )
    writer.start()
    writer.join()
    try:
        assert read_key(pipe).id == key.id
    finally:
        os.close(held)


def test_the_environment_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVGEMM_AOT_SIGNING_KEY", raising=False)
    assert environment_key() is None
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", str(tmp_path / "ci.pem"))
    with pytest.raises(SignatureError, match=r"ci\.pem: cannot read: No such file or directory"):
        environment_key()
    key = make_key(tmp_path / "ci.pem")
    found = environment_key()
    assert found is not None
    assert found.id == key.id


def test_without_cryptography_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    for act in (make_key, read_key):
        with pytest.raises(ToolchainError, match=r"needs cryptography: .*pip install '\.\[fleet"):
            act(tmp_path / "ci.pem")
    assert [*tmp_path.iterdir()] == []
