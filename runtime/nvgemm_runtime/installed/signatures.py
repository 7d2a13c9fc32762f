"""Ed25519 signatures: what they sign, and the files that hold them.

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

from ..errors import SignatureError

SIGNATURE_SUFFIX = ".sig"
"""Suffix that a signature file adds to the name of the file that it signs."""

MAX_FILE_BYTES = 64 << 10
"""Largest signature file: some hundred signatures."""

FORMAT, VERSION = "nvgemm-aot signatures", 1

_CONTEXT = "nvgemm-aot signature 1"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a signature vouches for.

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
class Signature:
    """A signature, and the key that made it.

    Attributes:
        key_id: sha256 of the raw public key, in hex.
        value: 64 bytes.
    """

    key_id: str
    value: bytes


def bundle_subject(prefix: bytes) -> Subject:
    """Returns the subject for a bundle, whose prefix holds the digest of everything behind it."""
    return Subject(kind="bundle", digests=(hashlib.sha256(prefix).hexdigest(),))


def file_subject(content: bytes) -> Subject:
    """Returns the subject for a file of rankings or confirmations."""
    return Subject(kind="file", digests=(hashlib.sha256(content).hexdigest(),))


def entry_subject(key: str, payload_sha256: str) -> Subject:
    """Returns the subject for a cache entry: its key, which its payload alone does not show."""
    return Subject(kind="cache entry", digests=(key, payload_sha256))


def signature_path(path: Path) -> Path:
    """Returns where a file's signatures are."""
    return path.with_name(path.name + SIGNATURE_SUFFIX)


def encode_signatures(signatures: Sequence[Signature]) -> bytes:
    """Encodes signatures as a signature file's bytes."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "signatures": [
            {"key": one.key_id, "ed25519": base64.b64encode(one.value).decode()}
            for one in signatures
        ],
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def decode_signatures(data: bytes, where: str) -> tuple[Signature, ...]:
    """Reads a signature file's bytes.

    Raises:
        SignatureError: If they are no signature file, with the reason.
    """
    try:
        document = json.loads(data)
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise ValueError(f"its format is not {FORMAT} {VERSION}")
        return tuple(
            Signature(
                key_id=str(entry["key"]), value=base64.b64decode(entry["ed25519"], validate=True)
            )
            for entry in document["signatures"]
        )
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise SignatureError(
            f"{where}: not a signature file: {error!r:.200}; sign again: nvgemm-aot sign"
        ) from None


def read_signatures(path: Path) -> tuple[Signature, ...]:
    """Reads the signatures of the file ``path``; none if it has no signature file.

    Raises:
        SignatureError: If its signature file cannot be read.
    """
    beside = signature_path(path)
    try:
        with beside.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise SignatureError(f"{beside}: cannot read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise SignatureError(f"{beside}: more than {MAX_FILE_BYTES} bytes; sign again")
    return decode_signatures(data, str(beside))
