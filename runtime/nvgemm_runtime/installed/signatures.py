"""Ed25519 signatures: what they sign, and the files that hold them; FORMAT.md specifies both.

A signature signs a `Subject`: a kind, and digests of what it vouches for. The kind keeps a
signature of one kind from counting for another. Signatures state no time, so clocks that differ
change nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import SignatureError, StorageError, install_command
from ..settings import printable_path
from .regular_files import read_regular

SIGNATURE_SUFFIX = ".sig"
"""Suffix that a signature file adds to the name of the file that it signs."""

MAX_FILE_BYTES = 64 << 10
"""Largest signature file: some 300 signatures."""

KEY_BYTES, SIGNATURE_BYTES = 32, 64
"""Sizes of a raw public key and of a signature (RFC 8032)."""

FORMAT, VERSION = "signatures of nvgemm-aot", 1

_CONTEXT = "signature 1 of nvgemm-aot"

_NEXT_STEP = "sign again: nvgemm-aot sign"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Content that a signature vouches for.

    Attributes:
        kind: ``bundle``, ``file`` or ``cache entry``.
        digests: Digests and names that identify it, without line breaks.
    """

    kind: str
    digests: tuple[str, ...]

    @property
    def message(self) -> bytes:
        """The signed bytes."""
        return "\n".join((_CONTEXT, self.kind, *self.digests)).encode()


@dataclass(frozen=True, kw_only=True)
class KeySignature:
    """A signature, and the key that made it.

    Attributes:
        key_id: The raw public key in hex, as `key_id` writes it.
        value: 64 bytes.
    """

    key_id: str
    value: bytes

    @property
    def public_text(self) -> str:
        """Its key, as `public_text` writes it."""
        return public_text(bytes.fromhex(self.key_id))

    def is_for(self, subject: Subject) -> bool:
        """Returns True if its key signed ``subject``. Whether the key counts is a policy's matter.

        Raises:
            SignatureError: If the package cryptography is missing, or fails.
        """
        try:
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        except ImportError as error:
            raise SignatureError(
                f"signatures cannot be checked: {error}; {install_command('fleet')}"
            ) from None
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.key_id))
            key.verify(self.value, subject.message)
        except InvalidSignature:
            return False
        except Exception as error:  # such as a build of OpenSSL without ed25519
            raise SignatureError(f"signatures cannot be checked: {error!r}") from None
        return True


def key_id(raw: bytes) -> str:
    """Returns a raw public key in hex, for comparisons."""
    return raw.hex()


def public_text(raw: bytes) -> str:
    """Returns a raw public key in base64: its text in policies, signature files and messages."""
    return base64.b64encode(raw).decode()


def bundle_subject(prefix: bytes) -> Subject:
    """Returns the subject for a bundle.

    Args:
        prefix: The file's first bytes, `nvgemm_runtime.bundle.format.PREFIX`, which hold the
            header's digest. The header holds the digest of all else.
    """
    return Subject(kind="bundle", digests=(hashlib.sha256(prefix).hexdigest(),))


def file_subject(content: bytes) -> Subject:
    """Returns the subject for a file of rankings or confirmations."""
    return Subject(kind="file", digests=(hashlib.sha256(content).hexdigest(),))


def entry_subject(key: str, payload_sha256: str) -> Subject:
    """Returns the subject for a cache entry: its key, which its payload alone does not show."""
    return Subject(kind="cache entry", digests=(key, payload_sha256))


def signature_path(path: Path) -> Path:
    """Returns the path of a file's signature file."""
    return path.with_name(path.name + SIGNATURE_SUFFIX)


def encode_signatures(signatures: Sequence[KeySignature]) -> bytes:
    """Encodes signatures as a signature file's bytes, sorted by key."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "signatures": [
            {"key": one.public_text, "ed25519": base64.b64encode(one.value).decode()}
            for one in sorted(signatures, key=lambda one: one.public_text)
        ],
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def decode_signatures(data: bytes, where: str) -> tuple[KeySignature, ...]:
    """Reads a signature file's bytes.

    Raises:
        SignatureError: If they are no signature file, with the reason.
    """
    if len(data) > MAX_FILE_BYTES:
        raise SignatureError(
            f"{where}: more than {MAX_FILE_BYTES} bytes, the most that signatures take; "
            f"{_NEXT_STEP}"
        )
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        _fail(where, f"not JSON: {type(error).__name__}")
    observed = tuple(_member(document, name, where) for name in ("format", "version"))
    if observed != (FORMAT, VERSION):
        _fail(where, f"its format and version are not {FORMAT!r} and {VERSION}")
    entries = _member(document, "signatures", where)
    if not isinstance(entries, list):
        _fail(where, "signatures must be a list")
    return tuple(
        KeySignature(
            key_id=key_id(_bytes(entry, "key", KEY_BYTES, f"{where}: signatures[{index}]")),
            value=_bytes(entry, "ed25519", SIGNATURE_BYTES, f"{where}: signatures[{index}]"),
        )
        for index, entry in enumerate(entries)
    )


def read_signatures(path: Path) -> tuple[KeySignature, ...]:
    """Reads the signatures of the file ``path``; none if it has no signature file.

    Raises:
        SignatureError: If its signature file cannot be read.
    """
    beside = signature_path(path)
    name = printable_path(beside)
    try:
        data = read_regular(beside, MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise SignatureError(f"{name}: cannot read: {error.strerror}") from None
    except StorageError as error:
        raise SignatureError(f"{error}; {_NEXT_STEP}") from None
    return decode_signatures(data, name)


def _member(value: Any, name: str, where: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        _fail(where, f"no member {name!r}")
    return value[name]


def _bytes(entry: Any, name: str, size_bytes: int, where: str) -> bytes:
    text = _member(entry, name, where)
    try:
        value = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        value = b""
    if len(value) != size_bytes:
        _fail(where, f"{name} must be {size_bytes} bytes in base64")
    return value


def _fail(where: str, fault: str) -> NoReturn:
    raise SignatureError(f"{where}: not a signature file: {fault}; {_NEXT_STEP}") from None
