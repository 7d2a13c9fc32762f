"""Compares the bundles of distributed ranks, through torch's store.

Only keys are set and read: a collective would wait for ever for a rank without this plug-in.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from ..installed.digest import installed_digest
from ..settings import CONFIRMED_VARIABLE

_KEY = "nvgemm_aot/bundles/"
"""Prefix of a rank's key, whose value is the digest of its bundles."""

_PATIENCE = timedelta(seconds=5)
"""Longest wait for other ranks: they capture graphs at about the same time."""

_SHOWN = 12
"""Digits of a digest in a message."""


def publish() -> None:
    """Stores the digest of this rank's bundles, if torch.distributed is initialised."""
    store = _store()
    if store is not None:
        store.set(f"{_KEY}{_rank()}", installed_digest())


def find_difference() -> str | None:
    """Returns which ranks have other bundles than rank 0; None on other ranks and if all agree.

    Waits up to `_PATIENCE` for ranks that start later.
    """
    store = _store()
    if store is None or _rank() != 0:
        return None
    own = installed_digest()
    with contextlib.suppress(RuntimeError):  # a rank without the plug-in publishes nothing
        store.wait([f"{_KEY}{rank}" for rank in range(1, _world_size())], _PATIENCE)
    ranks: dict[str, list[int]] = {}
    for rank in range(1, _world_size()):
        key = f"{_KEY}{rank}"
        digest = store.get(key).decode() if store.check([key]) else "no plug-in"
        if digest != own:
            ranks.setdefault(digest, []).append(rank)
    if not ranks:
        return None
    others = "; ".join(
        f"rank {', '.join(map(str, numbers))}: {digest[:_SHOWN]}"
        for digest, numbers in ranks.items()
    )
    return (
        f"ranks have different kernel wheels or confirmations, so their results are rounded "
        f"differently (rank 0: {own[:_SHOWN]}; {others}); install the same wheels on every "
        f"machine, and the same files in {CONFIRMED_VARIABLE}"
    )


def _store() -> Any:
    """Returns torch's store, or None if there is one rank or none."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized() or _world_size() < 2:
        return None
    return distributed.distributed_c10d._get_default_store()


def _rank() -> int:
    from torch import distributed

    return int(distributed.get_rank())


def _world_size() -> int:
    from torch import distributed

    return int(distributed.get_world_size())
