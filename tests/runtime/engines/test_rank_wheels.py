"""Ranks with different bundles."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch import distributed

from nvgemm_runtime.engines import rank_wheels


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> distributed.HashStore:
    """Torch's store while four ranks are initialised, of which this is the first."""
    store = distributed.HashStore()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
    return store


def publish(monkeypatch: pytest.MonkeyPatch, rank: int, digest: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "get_rank", lambda: rank)
        patch.setattr(rank_wheels, "installed_digest", lambda: digest)
        rank_wheels.publish()
        assert rank_wheels.find_difference() is None or rank == 0


def test_names_the_ranks_that_differ(
    store: distributed.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_wheels, "installed_digest", lambda: "a" * 64)
    monkeypatch.setattr(rank_wheels, "_PATIENCE", timedelta(milliseconds=10))
    rank_wheels.publish()
    publish(monkeypatch, 1, "a" * 64)
    publish(monkeypatch, 2, "b" * 64)
    assert rank_wheels.find_difference() == (
        "ranks have different kernel wheels or confirmations, so their results are rounded "
        "differently (rank 0: aaaaaaaaaaaa; rank 2: bbbbbbbbbbbb; rank 3: no plug-in); install the "
        "same wheels on every machine, and the same files in NVGEMM_AOT_CONFIRMED"
    )
    publish(monkeypatch, 2, "a" * 64)
    publish(monkeypatch, 3, "a" * 64)
    assert rank_wheels.find_difference() is None


def test_waits_for_ranks_that_start_later(
    store: distributed.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_wheels, "installed_digest", lambda: "a" * 64)
    rank_wheels.publish()
    others = [f"{rank_wheels._KEY}{rank}" for rank in (1, 2, 3)]

    class Late:
        """The store, in which the others publish while this rank waits."""

        get, check = store.get, store.check

        def wait(self, keys: list[str], patience: timedelta) -> None:
            assert keys == others
            for key in keys:
                store.set(key, "a" * 64)

    monkeypatch.setattr(rank_wheels, "_store", Late)
    assert rank_wheels.find_difference() is None
    assert all(store.check([key]) for key in others)


def test_one_process_alone_compares_nothing() -> None:
    rank_wheels.publish()
    assert rank_wheels.find_difference() is None
