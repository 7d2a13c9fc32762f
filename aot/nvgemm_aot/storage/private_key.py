"""Private ed25519 keys, in PEM files that only their user can read."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.errors import SignatureError, StorageError, ToolchainError, install_command
from nvgemm_runtime.installed.signatures import KeySignature, Subject, key_id, public_text
from nvgemm_runtime.settings import SIGNING_KEY_VARIABLE

from .files import make_directories, read_start, remove_file, space_hint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MAX_BYTES = 16 << 10


@dataclass(frozen=True)
class SigningKey:
    """A private key in memory. Its text form shows only the public key."""

    _key: Ed25519PrivateKey

    def __repr__(self) -> str:
        return f"SigningKey({self.public_text})"

    @property
    def id(self) -> str:
        """The public key in hex, as signatures name it."""
        return key_id(self.public)

    @property
    def public_text(self) -> str:
        """The public key in base64, as policies name it."""
        return public_text(self.public)

    @property
    def public(self) -> bytes:
        """The raw public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, subject: Subject) -> KeySignature:
        """Signs a subject."""
        return KeySignature(key_id=self.id, value=self._key.sign(subject.message))


def environment_key() -> SigningKey | None:
    """Returns the key that ``$NVGEMM_AOT_SIGNING_KEY`` names, or None.

    Raises:
        SignatureError, ToolchainError: As `read_key`.
    """
    name = os.environ.get(SIGNING_KEY_VARIABLE)
    return read_key(Path(name), named_by=SIGNING_KEY_VARIABLE) if name else None


def read_key(path: Path, *, named_by: str = "--key") -> SigningKey:
    """Reads a private key, in PEM without a password, as `make_key` and OpenSSL write it.

    Args:
        path: The key's file.
        named_by: The option or variable that has the path, for messages.

    Raises:
        SignatureError: If it cannot be read, others can read it, or it is no ed25519 key. No
            message repeats a path that may be the key itself.
        ToolchainError: If the package cryptography is missing.
    """
    ed25519, serialization = _libraries()
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        refusal = _readable_by_others(path)
        data = b"" if refusal else read_start(path, _MAX_BYTES)
    except (OSError, StorageError) as error:
        if _may_be_key(os.fspath(path)):
            raise SignatureError(
                f"{named_by} holds what looks like a private key instead of the path of its file; "
                f"write the key to a file of mode 0600 and set {named_by} to its path"
            ) from None
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SignatureError(
            f"private key {path}: cannot read: {reason}; make one: nvgemm-aot keygen"
        ) from None
    if refusal:
        raise SignatureError(f"private key {path}: {refusal}")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise SignatureError(
            f"private key {path}: not an ed25519 key in PEM without a password; make one: "
            "nvgemm-aot keygen"
        )
    return SigningKey(key)


def _may_be_key(text: str) -> bool:
    """Tells if a text that names no file may be a key: PEM, or base64 or hex of a key.

    As a path, a key in base64 has lost characters: each // is one slash.
    """
    return (
        any(mark in text for mark in ("\n", "-----", "PRIVATE KEY"))
        or text.startswith(("LS0tLS", "MC4CAQAw"))  # base64 of PEM, and of the DER in it
        or re.fullmatch(r"[A-Za-z0-9+/_-]{32,43}=|[0-9A-Fa-f]{64}", text) is not None  # 32 bytes
    )


def _readable_by_others(path: Path) -> str | None:
    """Returns the reason that others can read a key, or None; ssh(1) has the same rule for a group.

    A group may read the key of another user, such as root: secrets are mounted so.
    """
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    refused = 0o077 if status.st_uid == os.geteuid() else 0o007
    if not mode & refused:
        return None
    return (
        f"others can read or write it (mode {mode:04o}), so it may be known; make another key, "
        f"revoke this one, and keep the new file's mode at 0600"
    )


def make_key(path: Path) -> SigningKey:
    """Makes a key and writes it to a new file, which only this user can read.

    Raises:
        StorageError: If the file exists or cannot be written.
        ToolchainError: If the package cryptography is missing.
    """
    ed25519, serialization = _libraries()
    key = ed25519.Ed25519PrivateKey.generate()
    data = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        make_directories(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise StorageError(f"{path}: exists; a key is never replaced: name another file") from None
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remove_file(path)  # half a key
        raise _unwritable(path, error) from None
    return SigningKey(key)


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be written: {error.strerror}; {space_hint(error)}")


def _libraries() -> tuple[Any, Any]:
    """Returns the modules ``ed25519`` and ``serialization`` of the package cryptography."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ToolchainError(
            f"signing needs cryptography: {error}; {install_command('fleet')}"
        ) from None
    return ed25519, serialization
