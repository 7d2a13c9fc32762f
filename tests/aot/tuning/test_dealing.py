"""Shards of a tuning: what each measures, and how their measurements are joined."""

from __future__ import annotations

import pytest
from test_grid import at
from tuner import Tuner

import cpu_provider
from nvgemm_aot.pipeline.shard import Shard
from nvgemm_aot.rankings.entries import merge
from nvgemm_aot.rankings.export import export
from nvgemm_aot.tuning.measuring.dealing import deal
from nvgemm_runtime.errors import TuningError
from tuning_bench import header_of

KERNELS = ("a", "b", "c")


def shards(count: int) -> list[Shard]:
    return [Shard(number=number, count=count) for number in range(1, count + 1)]


def test_each_problem_is_in_one_shard_and_those_of_an_n_and_k_stay_together() -> None:
    rankings = [at(m, *KERNELS, n=n) for n in (16, 32, 48, 64, 80) for m in (8, 16, 32)]
    parts = [deal(rankings, shard) for shard in shards(3)]
    assert sorted(one.problem for part in parts for one in part) == sorted(
        one.problem for one in rankings
    )
    sizes = [{one.problem.n for one in part} for part in parts]
    assert sorted(map(len, sizes)) == [1, 2, 2]
    assert all(len(part) == 3 * len(some) for part, some in zip(parts, sizes))


def test_shards_have_as_many_kernels_to_time_whatever_the_sizes() -> None:
    rankings = [at(8, *"abcdefghijk", n=16), *(at(8, *KERNELS, n=n) for n in (4096, 8192, 64))]
    parts = [deal(rankings, shard) for shard in shards(2)]
    assert [sum(len(one.kernels) + 1 for one in part) for part in parts] == [12, 12]


def test_order_of_problems_changes_no_shard() -> None:
    rankings = [at(m, *KERNELS, n=n) for n in (16, 32, 48, 64) for m in (8, 16)]
    for shard in shards(3):
        forwards = {one.problem for one in deal(rankings, shard)}
        assert {one.problem for one in deal(rankings[::-1], shard)} == forwards


def test_shards_measure_all_problems_between_them_and_export_joins_them(tuner: Tuner) -> None:
    problems = [cpu_provider.problem(sizes=(m, n, 64)) for n in (32, 64, 96) for m in (8, 16)]
    given = tuner.build(problems)
    outputs = [tuner.beside(f"part{shard.number}.nvgemm") for shard in shards(2)]
    measured = [
        set(tuner(given, output, shard=shard).outcomes) for output, shard in zip(outputs, shards(2))
    ]
    assert measured[0] | measured[1] == {problem.key for problem in problems}
    assert not measured[0] & measured[1]
    joined = merge(export([header_of(output)]) for output in outputs)
    assert {entry.problem for entry in joined.entries} == set(problems)
    alone = tuner.beside("alone.nvgemm")
    tuner(given, alone)
    assert joined == export([header_of(alone)])


def test_more_shards_than_sizes_leave_some_with_nothing_to_measure(tuner: Tuner) -> None:
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in (8, 16)]
    tuned = tuner(tuner.build(problems), shard=Shard(number=2, count=2))
    assert (dict(tuned.outcomes), dict(tuned.unmeasured)) == ({}, {})
    assert tuned.is_complete


def test_a_shards_measurements_are_not_continued_as_another_shards(tuner: Tuner) -> None:
    tuner(shard=Shard(number=1, count=2))
    for other, found in ((Shard(number=2, count=2), "2/2"), (None, "none")):
        with pytest.raises(TuningError, match=f"its shard is 1/2, here it is {found};"):
            tuner(shard=other)
