"""Reads signature files that a wheel takes beside the files that they sign."""

from __future__ import annotations

from pathlib import Path

from nvgemm_runtime.bundle.format import PREFIX
from nvgemm_runtime.errors import SignatureError
from nvgemm_runtime.installed.policy import current_policy
from nvgemm_runtime.installed.signatures import (
    Subject,
    bundle_subject,
    encode_signatures,
    read_signatures,
)
from nvgemm_runtime.settings import SIGNING_KEY_VARIABLE

from ..storage.private_key import SigningKey


def packed_signatures(path: Path, subject: Subject) -> bytes | None:
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


def part_signatures(whole: Path, data: bytes, key: SigningKey | None) -> bytes:
    """Signs a part of a signed bundle, and returns the part's signature file.

    Args:
        whole: The bundle, for messages.
        data: The part's bytes.
        key: The key to sign with.

    Raises:
        SignatureError: If there is no key, or the policy refuses it.
    """
    if key is None:
        raise SignatureError(
            f"{whole}: it is signed and too large for one wheel, and its parts need signatures of "
            f"their own: set {SIGNING_KEY_VARIABLE}, or pack parts that are signed: "
            "nvgemm-aot split, sign, wheel"
        )
    subject = bundle_subject(data[: PREFIX.size])
    signatures = [key.sign(subject)]
    policy = current_policy()
    if policy is not None:
        policy.check(f"a part of {whole}", subject, signatures)
    return encode_signatures(signatures)
