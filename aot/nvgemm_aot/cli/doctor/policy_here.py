"""Describes this machine's policy: its keys, and what it refuses or would refuse."""

from __future__ import annotations

import datetime
from typing import Any

from nvgemm_runtime.errors import SignatureError, count_text
from nvgemm_runtime.installed.jit_cache import JIT_ORIGIN
from nvgemm_runtime.installed.policy import Policy, utc_today
from nvgemm_runtime.installed.registry import FoundBundle
from nvgemm_runtime.installed.signatures import bundle_subject, read_signatures
from nvgemm_runtime.settings import printable_path

Document = dict[str, Any]

SOON_DAYS = 30
"""Days before a key's end from which `doctor` asks for another."""


def policy_document(policy: Policy, today: datetime.date | None = None) -> Document:
    """Describes a policy; ``days_left`` is negative after a key's end, and None without one."""
    day = today or utc_today()
    return {
        "path": str(policy.path),
        "required": policy.is_required,
        "revoked": len(policy.revoked),
        "keys": [
            {
                "name": key.name,
                "until": key.until and key.until.isoformat(),
                "days_left": key.days_left(day),
                "revoked": key.id in policy.revoked,
            }
            for key in policy.keys.values()
        ],
    }


def policy_rows(document: Document | None) -> list[list[str]]:
    """Returns table rows for a policy and each of its keys."""
    if document is None:
        return []
    unsigned = "unsigned files are " + ("refused" if document["required"] else "accepted")
    keys = count_text(len(document["keys"]), "key")
    where = printable_path(document["path"])
    return [
        ["policy", f"{where}: {keys}, {document['revoked']} revoked; {unsigned}"],
        *(["policy key", f"{key['name']}: {_end_text(key)}"] for key in document["keys"]),
    ]


def _end_text(key: Document) -> str:
    if key["revoked"]:
        return "revoked"
    days = key["days_left"]
    if days is None:
        return "without an end"
    if days < 0:
        return f"ended on {key['until']}"
    if days <= SOON_DAYS:
        return f"ends on {key['until']}, {count_text(days, 'day')} from now: sign with another"
    return f"until {key['until']}"


def signer(policy: Policy | None, entry: FoundBundle) -> str | None:
    """Returns who signed an open bundle, for the lines about it.

    None without a policy, and for kernels compiled here, which need no signature.
    """
    if policy is None or entry.bundle is None or entry.origin.startswith(JIT_ORIGIN):
        return None
    try:
        signatures = read_signatures(entry.path)
        name = policy.check(str(entry.path), bundle_subject(entry.bundle.prefix), signatures)
    except SignatureError as error:
        return str(error)  # changed since it was opened
    return f"signed by {name}" if name else "not signed by a key of the policy, which accepts that"
