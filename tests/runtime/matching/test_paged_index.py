"""Bundles in pages give the answers that their whole headers give."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paged_bundles
from nvgemm_aot.bundle.content import BundleContent
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_runtime.bundle.confirmations import Confirmations, ConfirmedTimes
from nvgemm_runtime.bundle.format import UnknownKernel
from nvgemm_runtime.bundle.ranking_entries import APART, Timing
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.matching.combined.layered_index import LayeredIndex
from nvgemm_runtime.matching.combined.nearest_rows import nearest_rows
from nvgemm_runtime.matching.combined.paged_index import PagedIndex
from nvgemm_runtime.matching.device import TorchVersions
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView, Match, Miss, newest_compiler_first
from nvgemm_runtime.matching.nearest import NearestSizes
from nvgemm_runtime.matching.usable_rankings import UsableRanking
from paged_bundles import LEFT_OUT, SIGNATURES, made_content, some_problem, write_in_pages
from synthetic_facts import B200, H200

H100 = replace(H200, name=paged_bundles.PRODUCTS[1])
DEVICES = (
    H200,
    H100,
    replace(H200, name="NVIDIA H20"),
    replace(H200, wants_determinism=True),
    B200,
)
VERSIONS = TorchVersions(torch="2.11.0+cu130", cuda="13.0")


def views(bundles: Sequence[Bundle]) -> list[BundleView]:
    return newest_compiler_first(
        BundleView(name=bundle.path.name, header=bundle.facts, opened=bundle, pages=bundle.pages())
        for bundle in bundles
    )


def whole(bundles: Sequence[Bundle]) -> list[BundleView]:
    return newest_compiler_first(
        BundleView(name=bundle.path.name, header=bundle.header, opened=bundle) for bundle in bundles
    )


def ranking_facts(usable: UsableRanking) -> Any:
    """A ranking by what it names, since positions differ in a part of a header."""
    header, ranking = usable.bundle.header, usable.ranking
    return (
        usable.bundle.name,
        replace(ranking, kernels=(), source=0, missing=()),
        [(header.kernels[one.kernel].id, one.time_ns) for one in ranking.kernels],
        [header.failures[position] for position in ranking.missing],
        usable.source,
        kernel_facts(usable.kernels),
        kernel_facts(usable.kernels_for_gaps),
        usable.least_excluded_ns,
    )


def kernel_facts(kernels: Sequence[Any]) -> list[Any]:
    return [(one.bundle.name, one.kernel, one.rank, one.time_ns) for one in kernels]


def match_facts(outcome: Match | Miss, *, with_reasons: bool) -> Any:
    if isinstance(outcome, Match):
        return replace(outcome, kernels=()), kernel_facts(outcome.kernels)
    return outcome.reasons if with_reasons else None


def sizes_facts(sizes: Mapping[int, Sequence[UsableRanking]]) -> Any:
    return {m: [ranking_facts(usable) for usable in rankings] for m, rankings in sizes.items()}


def confirmations(source: random.Random, contents: Sequence[BundleContent]) -> Confirmations:
    """Times of kernels beside another torch's ATen, for some ranked problems, by any kernels."""
    ids = [kernel.id for content in contents for kernel in content.kernels]
    problems = [ranking.problem for content in contents for ranking in content.rankings]
    return Confirmations(
        gpu=H200.name,
        by="confirm",
        conditions=replace(paged_bundles.CONDITIONS, launches=APART),
        problems={
            problem.key: ConfirmedTimes(
                kernels={
                    id_: Timing(time_ns=900 + place, spread_ns=1)
                    for place, id_ in enumerate(source.sample(ids, min(8, len(ids))))
                },
                aten=Timing(time_ns=1300, spread_ns=1),
                doubts=("busy",) if source.random() < 0.3 else (),
            )
            for problem in source.sample(problems, min(6, len(problems)))
        },
    )


def asked(source: random.Random, contents: Sequence[BundleContent]) -> list[Problem]:
    """Ranked, unserved and other problems."""
    declared = [ranking.problem for content in contents for ranking in content.rankings]
    unserved = [problem for content in contents for problem in content.unserved]
    others = [
        replace(some_problem(source, signature), **{source.choice("mnk"): source.randrange(1, 999)})
        for signature in (*SIGNATURES, LEFT_OUT)
        for _ in range(3)
    ]
    return [*declared, *unserved, *others]


@pytest.mark.parametrize("seed", [0, 41, 553, 3078])
def test_answers_are_those_of_an_index_over_whole_headers(seed: int) -> None:
    require_equal_answers(seed)


@pytest.mark.slow
@settings(max_examples=100)
@given(seed=st.integers(0, 10**6))
def test_answers_over_many_contents_are_those_of_an_index_over_whole_headers(seed: int) -> None:
    require_equal_answers(seed)


def require_equal_answers(seed: int) -> None:
    source = random.Random(seed)
    all_usable = (
        source.random() < 0.5
    )  # else reasons may name kernels and rankings that are left out
    contents = [made_content(source.randrange(10**6), all_usable=all_usable) for _ in range(3)]
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{number}.nvgemm" for number in range(3)]
        bundles = [
            write_in_pages(path, content, entries=source.randint(1, 5))
            for path, content in zip(paths, contents)
        ]
        if source.random() < 0.5:  # a bundle of version 2 among them
            write_bundle(paths[2], contents[2])
            bundles[2] = Bundle(paths[2])
        confirmed = [confirmations(source, contents) for _ in range(source.randint(0, 2))]
        for facts in DEVICES:
            how: dict[str, Any] = {"versions": VERSIONS, "confirmations": confirmed}
            pairs: list[tuple[Any, Any]] = [
                (
                    Index(whole(bundles), facts, **how),
                    PagedIndex(views(bundles), facts, **how),
                ),
            ]
            cached: dict[str, Any] = {"from_jit": True, "versions": VERSIONS}
            pairs.append(
                (
                    LayeredIndex(
                        Index(whole(bundles[:1]), facts), Index(whole(bundles[1:]), facts, **cached)
                    ),
                    LayeredIndex(
                        PagedIndex(views(bundles[:1]), facts),
                        PagedIndex(views(bundles[1:]), facts, **cached),
                    ),
                )
            )
            for problem in asked(source, contents):
                alignment = source.choice((1, 4, 8, 16, 32))
                is_compact = source.random() < 0.7
                for eager, paged in pairs:
                    arguments = problem, alignment, is_compact
                    facts_of = functools.partial(match_facts, with_reasons=all_usable)
                    assert facts_of(paged.match(*arguments)) == facts_of(eager.match(*arguments))
                    assert sizes_facts(paged.ranked_sizes(problem)) == sizes_facts(
                        eager.ranked_sizes(problem)
                    )
                    assert set(paged.missing_sizes(problem)) == set(eager.missing_sizes(problem))


def test_unknown_kernels_of_a_bundle_of_version_2_are_told(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.nvgemm" for number in range(2)]
    write_in_pages(paths[0], made_content(1, all_usable=True))
    write_bundle(paths[1], made_content(2, all_usable=True))
    pages, plain = views([Bundle(path) for path in paths])
    unknown = [
        UnknownKernel(
            id=f"{number:064x}",
            span=plain.header.kernels[0].span,
            operator="later",
            signature=signature.key,
            why=f"reason {number}",
        )
        for number, signature in enumerate((LEFT_OUT, SIGNATURES[0]))
    ]
    plain = replace(plain, header=replace(plain.header, unknown_kernels=tuple(unknown)))
    problem = Problem(signature=LEFT_OUT, m=8, n=64, k=64)
    missed = PagedIndex([pages, plain], H200).match(problem, 256)
    assert isinstance(missed, Miss)
    assert "reason 0" in str(missed.reasons)
    assert "reason 1" not in str(missed.reasons)


@given(
    rows=st.sets(st.tuples(*(st.integers(1, 2**31 - 1) | st.integers(1, 9),) * 3), min_size=1),
    sizes=st.tuples(*(st.integers(1, 2**31 - 1) | st.integers(1, 9),) * 3),
)
def test_the_first_of_the_nearest_rows_is_the_nearest_size(
    rows: set[tuple[int, int, int]], sizes: tuple[int, int, int]
) -> None:
    def problem(row: tuple[int, int, int]) -> Problem:
        n, k, batch = row
        return Problem(signature=SIGNATURES[0], m=1, n=n, k=k, batch=batch)

    below = sorted((row for row in rows if row[0] < sizes[0]), reverse=True)
    above = sorted(row for row in rows if row[0] >= sizes[0])
    ordered = list(nearest_rows(sizes, below=iter(below), above=iter(above)))
    assert sorted(ordered) == sorted(rows)
    while ordered:
        nearest = NearestSizes([(problem(row), row) for row in ordered])
        assert nearest.around(problem(sizes)).nearest == ordered.pop(0)
