"""Writes files that can have signatures beside them, and those signatures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nvgemm_runtime.errors import SignatureError
from nvgemm_runtime.installed.signatures import (
    KeySignature,
    Subject,
    encode_signatures,
    read_signatures,
    signature_path,
)

from .files import remove_file, write_all, write_atomic
from .private_key import SigningKey


def write_signable(contents: Mapping[Path, bytes]) -> None:
    """Writes files as `write_all` does, and removes the signatures of other content beside them.

    Raises:
        StorageError: If a file cannot be written or removed.
    """
    stale = [
        path
        for path, data in contents.items()
        if os.path.lexists(signature_path(path)) and not _holds(path, data)
    ]
    write_all(contents)
    for path in stale:
        remove_file(signature_path(path))


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


def sign_file(path: Path, subject: Subject, key: SigningKey) -> tuple[KeySignature, ...]:
    """Writes a key's signature beside a file; other keys' signatures of the same content stay.

    A signature of other content, and a damaged signature file, are dropped: they never count.

    Args:
        path: The signed file.
        subject: Its subject.
        key: The key.

    Returns:
        All signatures beside the file.

    Raises:
        StorageError: If the signature file cannot be written.
    """
    own = key.sign(subject)
    try:
        others = [
            signature
            for signature in read_signatures(path)
            if signature.key_id != own.key_id and signature.is_for(subject)
        ]
    except SignatureError:
        others = []
    signatures = (own, *others)
    write_atomic(signature_path(path), encode_signatures(signatures))
    return signatures
