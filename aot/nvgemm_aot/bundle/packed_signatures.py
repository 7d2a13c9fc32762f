"""Reads signature files that a wheel takes beside the files that they sign."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nvgemm_runtime.bundle.format import PREFIX
from nvgemm_runtime.errors import SignatureError, StorageError
from nvgemm_runtime.installed.policy import current_policy
from nvgemm_runtime.installed.signatures import (
    SIGNATURE_SUFFIX,
    Subject,
    bundle_subject,
    encode_signatures,
    read_signatures,
)

from ..storage.files import open_regular


def packed_signatures(bundles: Sequence[Path], contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the signature files of bundles, by path inside a wheel.

    Args:
        bundles: Bundle files.
        contents: The bundles' bytes, by path inside the wheel.

    Raises:
        SignatureError: If a signature is for other content, or the policy refuses a bundle.
        StorageError: If a file cannot be read.
    """
    inner_by_prefix = {data[: PREFIX.size]: inner for inner, data in contents.items()}
    packed = {}
    for path in bundles:
        try:
            with open_regular(path) as file:
                prefix = file.read(PREFIX.size)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error
        signatures = encoded_signatures(path, bundle_subject(prefix))
        if signatures is None:
            continue
        inner = inner_by_prefix.get(prefix)
        if inner is None:
            raise SignatureError(
                f"{path}: the wheel does not hold what its signature is for; sign again the "
                "bundles that are packed: nvgemm-aot sign"
            )
        packed[f"{inner}{SIGNATURE_SUFFIX}"] = signatures
    return dict(sorted(packed.items()))


def encoded_signatures(path: Path, subject: Subject) -> bytes | None:
    """Returns the signatures beside a file, or None without any.

    Raises:
        SignatureError: If one is for other content, or the policy refuses the file.
    """
    signatures = read_signatures(path)
    policy = current_policy()
    if policy is not None:
        policy.check(str(path), subject, signatures)
    for signature in signatures:
        if not signature.is_for(subject):
            raise SignatureError(
                f"{path}: the signature of key {signature.public_text} is for another content, "
                "and no process would accept it; sign again: nvgemm-aot sign"
            )
    return encode_signatures(signatures) if signatures else None
