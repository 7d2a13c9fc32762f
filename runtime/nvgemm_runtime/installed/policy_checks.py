"""Checks files against the policy of this process; without a policy, everything passes.

Imported only by commands, and by processes with a policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..errors import SignatureError, StorageError
from ..settings import printable_path
from .discover import BundleFile
from .policy import current_policy
from .regular_files import read_regular
from .signatures import PREFIX_BYTES, Subject, bundle_subject, file_subject, read_signatures


def check_bundle(path: Path, prefix: bytes, *, name: str | None = None) -> None:
    """Requires that the policy accepts an open bundle.

    Args:
        path: File that its signature file is beside.
        prefix: The open file's first `PREFIX_BYTES`.
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


def with_refusals(files: Iterable[BundleFile]) -> tuple[BundleFile, ...]:
    """Returns bundle files with what the policy refuses as their problem.

    Each file comes with the prefix that was checked, which the opened file must have.
    """
    return tuple(file if file.problem is not None else _checked(file) for file in files)


def _checked(file: BundleFile) -> BundleFile:
    try:
        prefix = read_regular(file.path, PREFIX_BYTES)
    except (OSError, StorageError):
        return replace(file, checked_prefix=b"")  # opening it fails, and gives the reason
    try:
        check_bundle(file.path, prefix)
    except SignatureError as error:
        return replace(file, problem=str(error), is_refused=True)
    return replace(file, checked_prefix=prefix)
