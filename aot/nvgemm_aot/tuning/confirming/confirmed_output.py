"""Writes confirmations where processes find them."""

from __future__ import annotations

from pathlib import Path

from nvgemm_runtime.bundle.confirmations import Confirmations, encode_confirmations
from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.installed.confirmed_files import confirmed_directory, confirmed_name
from nvgemm_runtime.installed.ownership import writable_by_others
from nvgemm_runtime.settings import CONFIRMED_VARIABLE

from ...storage.files import require_writable, write_atomic


def refuse_unread() -> None:
    """Refuses to measure if this user's confirmations could not be written, or would not be read.

    Raises:
        StorageError: If the directory cannot be written, or others can write it.
    """
    directory = confirmed_directory().absolute()
    require_writable(directory)
    reason = writable_by_others(directory)
    if reason is not None:
        raise StorageError(
            f"{reason}; no process would read confirmations there; or set {CONFIRMED_VARIABLE} to "
            "another directory"
        )


def write_confirmations(confirmations: Confirmations, path: Path | None) -> Path:
    """Writes a file whole or not at all; without a path, into this user's directory.

    Returns:
        The file's path.

    Raises:
        StorageError: If it cannot be written.
    """
    if path is None:
        conditions = confirmations.conditions
        name = confirmed_name(confirmations.gpu, conditions.torch, conditions.cuda)
        path = confirmed_directory().absolute() / name
    write_atomic(path, encode_confirmations(confirmations))
    return path
