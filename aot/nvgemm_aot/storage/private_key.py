"""Private ed25519 keys: made, read from a PEM file that only this user can read, and used."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.errors import SignatureError, StorageError, ToolchainError, install_command
from nvgemm_runtime.installed.policy import key_id
from nvgemm_runtime.installed.signatures import Signature, Subject
from nvgemm_runtime.settings import SIGNING_KEY_VARIABLE

from .files import make_directories

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MAX_BYTES = 16 << 10


@dataclass(frozen=True)
class SigningKey:
    """A private key in memory. Its text form shows only the public key's id."""

    _key: Ed25519PrivateKey

    def __repr__(self) -> str:
        return f"SigningKey({key_id(self.public)[:12]})"

    @property
    def public(self) -> bytes:
        """The raw public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, subject: Subject) -> Signature:
        """Signs a subject."""
        return Signature(key_id=key_id(self.public), value=self._key.sign(subject.message))


def environment_key() -> SigningKey | None:
    """Returns the key that ``$NVGEMM_AOT_SIGNING_KEY`` names, or None.

    Raises:
        SignatureError, ToolchainError: As `read_key`.
    """
    name = os.environ.get(SIGNING_KEY_VARIABLE)
    return read_key(Path(name)) if name else None


def read_key(path: Path) -> SigningKey:
    """Reads a private key, in PEM without a password, as `make_key` and OpenSSL write it.

    Raises:
        SignatureError: If it cannot be read, others can read it, or it is no ed25519 key.
        ToolchainError: If the package cryptography is missing.
    """
    ed25519, serialization = _libraries()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_BYTES)
    except OSError as error:
        raise SignatureError(f"private key {path}: cannot read: {error.strerror}") from None
    if mode & 0o077:
        raise SignatureError(
            f"private key {path}: others can read it (mode {mode:04o}); replace the key, and run: "
            f"chmod 600 on the new one"
        )
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise SignatureError(
            f"private key {path}: not an ed25519 key in PEM without a password; make one: "
            "nvgemm-aot keygen"
        )
    return SigningKey(key)


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
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise StorageError(f"{path}: exists; a key is never replaced: name another file") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return SigningKey(key)


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
