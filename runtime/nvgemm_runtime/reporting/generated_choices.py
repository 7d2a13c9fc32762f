"""Choices that generated code and `linear` make in this process, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

_kernels: set[str] = set()
_failed: set[str] = set()
_tables: set[tuple[tuple[int, ...], tuple[str, ...]]] = set()


def note_kernel(kernel_id: str) -> None:
    """Notes that generated code or `linear` may call a kernel."""
    _kernels.add(kernel_id)


def note_table(bounds: Sequence[int], kernels: Sequence[str]) -> None:
    """Notes a dispatch by m; arguments as in `launch.dispatched.dispatched`."""
    _tables.add((tuple(bounds), tuple(kernels)))


def note_failure(kernel_id: str) -> None:
    """Notes that ATen computes a kernel's GEMMs from now on."""
    _failed.add(kernel_id)


def choices_digest() -> str:
    """Returns the SHA-256 digest of this process's choices, to compare with other processes'.

    Processes and ranks that run the same graphs on one GPU product with the same bundles, torch and
    settings have equal digests, whether they compiled the graphs or found them in a cache. The
    digest covers the kernels and dispatch tables in generated code and in `nvgemm_runtime.linear`,
    and the kernels that failed, so that ATen computes their GEMMs. Generated C++ counts its kernels
    from their first call on, but not its tables.

    Returns:
        64 hexadecimal digits.
    """
    document = [sorted(_kernels), sorted(_tables), sorted(_failed & _kernels)]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()
