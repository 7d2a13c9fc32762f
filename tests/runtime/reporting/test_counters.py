"""Counting what becomes of GEMMs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

import nvgemm_runtime
from nvgemm_runtime.reporting.counters import COUNTERS, MOST_REASONS, OTHER_REASONS, Counters, Stats


@pytest.fixture
def counters() -> Counters:
    return Counters()


def test_each_basis_each_reason_and_each_winner_is_counted(counters: Counters) -> None:
    for basis in ("declared", "declared", "signature"):
        counters.hit(basis)
    counters.hit("jit")
    counters.compiled(3)
    counters.hit("jit")
    counters.miss("a bias")
    counters.miss("a bias")
    counters.miss("a type")
    counters.win("k1")
    counters.win("k1")
    stats = counters.stats()
    assert (stats.declared, stats.signature, stats.jit, stats.jit_kernels) == (2, 1, 2, 3)
    assert stats.misses == {"a bias": 2, "a type": 1}
    assert stats.won == {"k1": 2}
    assert (stats.missed, stats.met) == (3, 8)
    counters.reset()
    assert counters.stats() == Stats()


def test_a_process_that_compiles_for_ever_keeps_a_bounded_number_of_reasons(
    counters: Counters,
) -> None:
    for number in range(MOST_REASONS + 500):
        counters.miss(f"reason {number}")
    counters.miss("reason 0")
    stats = counters.stats()
    assert len(stats.misses) == MOST_REASONS + 1
    assert (stats.misses["reason 0"], stats.misses[OTHER_REASONS]) == (2, 500)
    assert stats.missed == MOST_REASONS + 501


def test_time_adds_up_by_name_also_where_the_work_fails(counters: Counters) -> None:
    for _ in range(2):
        with counters.spending("matching"):
            pass
    once = counters.stats().milliseconds["matching"]
    with pytest.raises(KeyError), counters.spending("matching"):
        raise KeyError
    stats = counters.stats()
    assert stats.milliseconds.keys() == {"matching"}
    assert 0 < once < stats.milliseconds["matching"]


def test_time_in_a_nested_block_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 8.0, 10.0])  # timing [ loading, loading ]
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    counters = Counters()
    with counters.spending("timing"):
        for _ in range(2):
            with counters.spending("loading"):
                pass
    assert counters.stats().milliseconds == {"loading": 6000, "timing": 4000}


def test_what_was_given_out_does_not_change(counters: Counters) -> None:
    counters.miss("a type")
    before = counters.stats()
    counters.miss("a type")
    counters.hit("declared")
    assert (before.met, before.misses) == (1, {"a type": 1})


def test_a_difference_has_what_was_added(counters: Counters) -> None:
    counters.hit("declared")
    counters.miss("a type")
    counters.win("k1")
    with counters.spending("timing"):
        pass
    before = counters.stats()
    assert counters.stats().since(before) == Stats(milliseconds={"timing": 0.0})
    counters.hit("jit")
    counters.compiled(2)
    counters.miss("a type")
    counters.miss("a bias")
    counters.win("k2")
    added = counters.stats().since(before)
    assert added == Stats(
        jit=1,
        jit_kernels=2,
        misses={"a type": 1, "a bias": 1},
        won={"k2": 1},
        milliseconds={"timing": 0.0},
    )


def test_news_are_told_once(counters: Counters) -> None:
    counters.miss("a type")
    assert counters.news() == Stats(misses={"a type": 1})
    assert counters.news() == Stats()
    counters.miss("a type")
    counters.reset()
    counters.miss("a type")
    assert counters.news() == Stats(misses={"a type": 1})


def test_many_threads_lose_nothing(counters: Counters) -> None:
    def count() -> None:
        for _ in range(500):
            counters.hit("signature")
            counters.miss("a type")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = counters.stats()
    assert (stats.signature, stats.misses) == (4000, {"a type": 4000})


def test_one_line_says_it() -> None:
    stats = Stats(
        declared=8, signature=2, misses={"a bias": 3}, won={"k": 7}, milliseconds={"matching": 4.4}
    )
    assert str(stats) == (
        "13 GEMMs: 8 declared, 2 by signature, 0 by JIT (0 kernels compiled), 3 missed; "
        "bundled kernels won 7; 4 ms matching"
    )


@pytest.fixture
def clean() -> Iterator[None]:
    nvgemm_runtime.reset_stats()
    yield
    nvgemm_runtime.reset_stats()


@pytest.mark.usefixtures("clean")
def test_the_public_functions_are_of_this_process() -> None:
    COUNTERS.hit("declared")
    assert nvgemm_runtime.stats() == Stats(declared=1)
    nvgemm_runtime.reset_stats()
    assert nvgemm_runtime.stats() == Stats()


def test_tables_by_m_are_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvgemm_runtime.reporting.counters.MOST_REASONS", 1)
    counters = Counters()
    for table in ("g: ATen, from m 8 Cpu", "h: Cpu", "g: ATen, from m 8 Cpu", "i: Cpu"):
        counters.dispatch(table)
    stats = counters.stats()
    assert stats.dispatched == {"g: ATen, from m 8 Cpu": 2, "other tables": 2}
    assert str(stats).splitlines() == [
        stats.summary,
        "  g: ATen, from m 8 Cpu (calls: 2)",
        "  other tables (calls: 2)",
    ]
    assert counters.news().dispatched == stats.dispatched
    assert counters.news().dispatched == {}


def test_kernels_that_fail_are_kept_with_their_first_reason(counters: Counters) -> None:
    assert counters.fail("k1", "out of patience")
    assert not counters.fail("k1", "still out of patience")
    assert counters.news().failed == {"k1": "out of patience"}
    assert counters.fail("k2", "missing")
    assert counters.news().failed == {"k2": "missing"}
    text = str(counters.stats())
    assert "won 0 and failed 2" in text
    assert "kernel k1 failed, and ATen computes its GEMMs: out of patience" in text
