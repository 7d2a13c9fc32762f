"""Writes confirmations where processes find them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from nvgemm_runtime.bundle.confirmations import (
    Confirmations,
    decode_confirmations,
    encode_confirmations,
)
from nvgemm_runtime.errors import (
    RankingsError,
    SignatureError,
    StorageError,
    TuningError,
)
from nvgemm_runtime.installed.confirmed_files import confirmed_directory, confirmed_name
from nvgemm_runtime.installed.ownership import writable_by_others
from nvgemm_runtime.installed.policy_checks import check_file
from nvgemm_runtime.settings import CONFIRMED_VARIABLE

from ...storage.files import require_writable
from ...storage.signed_files import write_signable
from .confirm_kernels import Confirmed


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


def refuse_uncounted(confirmed: Confirmed) -> None:
    """Refuses to write times of which none can count.

    Raises:
        TuningError: If every problem is in doubt or was left out.
    """
    problems, left_out = confirmed.confirmations.problems, confirmed.left_out
    if any(not times.doubts for times in problems.values()):
        return
    reasons = Counter(left_out.values())
    reasons.update(doubt for times in problems.values() for doubt in times.doubts)
    ((reason, count),) = reasons.most_common(1)
    raise TuningError(
        f"nothing is confirmed, and no file is written or changed: {reason} ({count} of "
        f"{len(problems) + len(left_out)} problems); free the GPU, or allow more time, and run the "
        "same command again"
    )


def write_confirmations(
    confirmations: Confirmations, path: Path | None, rejected: Collection[str] = ()
) -> Path:
    """Writes a file whole or not at all; without a path, into this user's directory.

    A file in this user's directory keeps its problems that were not measured now, as of bundles in
    another environment, and its times without doubts for problems that are in doubt now.

    Args:
        confirmations: Times to write.
        path: File to replace; None for this user's directory.
        rejected: Ids of kernels whose earlier times must not stay.

    Returns:
        The file's path.

    Raises:
        StorageError: If it cannot be written.
    """
    if path is None:
        conditions = confirmations.conditions
        name = confirmed_name(confirmations.gpu, conditions.torch, conditions.cuda)
        path = confirmed_directory().absolute() / name
        confirmations = _with_earlier(confirmations, path, rejected)
    write_signable({path: encode_confirmations(confirmations)})
    return path


def _with_earlier(
    confirmations: Confirmations, path: Path, rejected: Collection[str]
) -> Confirmations:
    try:
        data = path.read_bytes()
        check_file(path, data)  # what is signed from now on must have counted
        earlier = decode_confirmations(data, str(path))
    except (OSError, RankingsError, SignatureError):
        return confirmations  # there is none, or one that does not count, which is replaced
    problems = {
        key: times
        for key, times in earlier.problems.items()
        if set(rejected).isdisjoint(times.kernels)
    }
    for key, times in confirmations.problems.items():
        known = problems.get(key)
        if known is None or known.doubts or not times.doubts:
            problems[key] = times
    return replace(confirmations, problems=problems)
