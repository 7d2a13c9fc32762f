"""Checks files against the policy of this process; without a policy, everything passes.

Imported only by commands, and by processes with a policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..bundle.reader import Bundle
from ..settings import printable_path
from .policy import current_policy
from .signatures import Subject, bundle_subject, file_subject, read_signatures


@contextlib.contextmanager
def open_checked(path: Path) -> Iterator[Bundle]:
    """Opens a bundle that the policy accepts, for the block.

    Raises:
        NvgemmError: As `Bundle`, and as `check_bundle`.
    """
    with Bundle(path) as bundle:
        check_bundle(path, bundle.prefix)
        yield bundle


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
