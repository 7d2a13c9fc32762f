"""Shows who signed a file, and if the policy accepts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvgemm_runtime.errors import SignatureError
from nvgemm_runtime.installed.policy import Policy, Verdict, current_policy
from nvgemm_runtime.installed.signatures import KeySignature, Subject, read_signatures

Document = dict[str, Any]


def signatures_document(path: Path, subject: Subject, *, name: str | None = None) -> Document:
    """Describes the signatures beside a file.

    Args:
        path: File that its signature file is beside.
        subject: The file's subject.
        name: The file's name in messages, if not the path.

    Returns:
        ``signatures``: for each the ``key``, its ``name`` in the policy and the ``fault``, or None.
        ``policy``: the policy's path, or None. ``refusal``: the reason that the file must not be
        used, or None.

    Raises:
        SignatureError: If the policy cannot be used.
    """
    policy = current_policy()
    shown = name or str(path)
    try:
        signatures = read_signatures(path)
        verdicts = _judge(policy, subject, signatures)
        refusal = _refusal(policy, shown, subject, signatures, verdicts)
    except SignatureError as error:
        verdicts, refusal = (), str(error)
    return {
        "signatures": [
            {"key": one.public, "name": one.name, "fault": one.fault} for one in verdicts
        ],
        "policy": policy and str(policy.path),
        "refusal": refusal,
    }


def _judge(
    policy: Policy | None, subject: Subject, signatures: Sequence[KeySignature]
) -> tuple[Verdict, ...]:
    if policy is not None:
        return policy.judge(subject, signatures)
    return tuple(
        Verdict(
            public=signature.public_text,
            name=None,
            fault=None if signature.is_for(subject) else "it is for another content",
        )
        for signature in signatures
    )


def _refusal(
    policy: Policy | None,
    name: str,
    subject: Subject,
    signatures: Sequence[KeySignature],
    verdicts: Sequence[Verdict],
) -> str | None:
    """Returns the policy's reason, or the first fault without a policy."""
    if policy is not None:
        try:
            policy.check(name, subject, signatures)
        except SignatureError as error:
            return str(error)
        return None
    wrong = next((one for one in verdicts if one.fault is not None), None)
    if wrong is None:
        return None
    return (
        f"{name}: the signature of key {wrong.public} is for another content; sign again: "
        "nvgemm-aot sign"
    )


def signatures_text(document: Document) -> str:
    """Renders who signed a file, and the policy's verdict, in one line."""
    signers = ", ".join(
        (one["name"] or f"key {one['key']}") + ("" if one["fault"] is None else " (does not count)")
        for one in document["signatures"]
    )
    text = f"signed by {signers}" if signers else "not signed"
    if document["refusal"] is not None:
        return f"{text}; refused: {document['refusal']}"
    return f"{text}; {'the policy accepts it' if document['policy'] else 'no policy is set'}"
