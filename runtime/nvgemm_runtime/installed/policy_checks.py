"""Checks files against the policy of this process; without a policy, everything passes.

Imported only by commands, and by processes with a policy.
"""

from __future__ import annotations

from pathlib import Path

from ..settings import printable_path
from .policy import current_policy
from .signatures import Subject, bundle_subject, file_subject, read_signatures


def check_bundle(path: Path, prefix: bytes, *, name: str | None = None) -> None:
    """Requires that the policy accepts an open bundle.

    Args:
        path: File that its signature file is beside.
        prefix: The open file's prefix, as `bundle_subject` takes it.
        name: Name in messages; the path if not given.

    Raises:
        SignatureError: If it does not, or is no usable policy.
    """
    _check(path, bundle_subject(prefix), name)


def check_file(path: Path, content: bytes) -> None:
    """Requires that the policy accepts a file of rankings or confirmations.

    Raises:
        SignatureError: See `check_bundle`.
    """
    _check(path, file_subject(content), None)


def _check(path: Path, subject: Subject, name: str | None) -> None:
    policy = current_policy()
    if policy is not None:
        policy.check(name or printable_path(path), subject, read_signatures(path))
