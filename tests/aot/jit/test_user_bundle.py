"""User bundles: merging, taking out, and the same bytes however they have grown."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.jit.user_bundle import UserBundle, merge, read_user_bundle, remove_problems, without
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.bundle.ranking_entries import CompileFailure
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem
from synthetic_content import SIGNATURE, synthetic_content

KERNELS = synthetic_content(kernels=6, problems=1).kernels
IDS = [sha256_hex(kernel.payload) for kernel in KERNELS]


def problem(m: int) -> Problem:
    return Problem(signature=SIGNATURE, m=m, n=512, k=256)


def content(rankings: dict[int, list[int]], time_ns: int | None = 10) -> BundleContent:
    """By m, the kernels of a problem."""
    base = synthetic_content(kernels=1, problems=1)
    return replace(
        base,
        kernels=tuple(KERNELS[i] for i in sorted({i for some in rankings.values() for i in some})),
        rankings=tuple(
            ProblemRanking(
                problem=problem(m),
                source=base.rankings[0].source,
                kernels=tuple((IDS[i], time_ns) for i in some),
            )
            for m, some in rankings.items()
        ),
    )


def summary(held: BundleContent | None) -> dict[int, list[int]]:
    """The inverse of `content`; every kernel is ranked by some problem."""
    assert held is not None
    assert {sha256_hex(k.payload) for k in held.kernels} == {
        id_ for ranking in held.rankings for id_, _ in ranking.kernels
    }
    return {r.problem.m: [IDS.index(id_) for id_, _ in r.kernels] for r in held.rankings}


@pytest.fixture
def bundle(tmp_path: Path) -> UserBundle:
    def fail(text: str) -> None:
        raise AssertionError(text)

    return UserBundle(Cache(tmp_path), build_target("sm_90a"), {"dsl": "1"}, "test", fail)


def test_what_is_appended_is_held(bundle: UserBundle) -> None:
    assert not bundle.holds(problem(1))
    bundle.append(content({1: [0, 1]}))
    bundle.append(content({2: [1, 2]}))
    assert bundle.holds(problem(1))
    assert bundle.holds(problem(2))
    assert not bundle.holds(problem(3))
    assert summary(read_user_bundle(bundle.path)) == {1: [0, 1], 2: [1, 2]}


@pytest.mark.parametrize("is_transient", [True, False])
def test_a_ranking_whose_compiler_was_killed_does_not_count_as_held(
    bundle: UserBundle, is_transient: bool
) -> None:
    failure = CompileFailure(operator="third", reason="why", is_transient=is_transient)
    made = content({1: [0, 1]})
    (ranking,) = made.rankings
    bundle.append(replace(made, rankings=(replace(ranking, missing=(failure,)),)))
    assert bundle.holds(problem(1)) is not is_transient
    bundle.append(content({2: [2]}))
    assert bundle.holds(problem(1)) is not is_transient, "still, after another was added"
    bundle.append(made)
    assert bundle.holds(problem(1))


def test_a_newer_ranking_takes_the_place_of_the_older() -> None:
    merged = merge(content({1: [0, 1], 2: [1]}), content({1: [3, 1]}, time_ns=5))
    assert summary(merged) == {2: [1], 1: [3, 1]}
    newest = next(ranking for ranking in merged.rankings if ranking.problem == problem(1))
    assert newest.kernels[0] == (IDS[3], 5)


def test_a_problem_goes_with_the_kernels_that_it_alone_has() -> None:
    assert summary(without(content({1: [0, 1], 2: [1, 2]}), {problem(1)})) == {2: [1, 2]}


def test_the_bytes_do_not_tell_how_a_bundle_has_grown(tmp_path: Path) -> None:
    target = build_target("sm_90a")
    paths = []
    for name, steps in (
        ("a", [{1: [0, 1]}, {2: [1, 2]}, {3: [4]}]),
        ("b", [{3: [4], 2: [1, 2]}, {1: [5]}, {1: [0, 1]}]),
    ):
        grown = UserBundle(Cache(tmp_path / name), target, {"dsl": "1"}, "test", print)
        for step in steps:
            grown.append(content(step))
        paths.append(grown.path)
    assert paths[0].name == paths[1].name
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_it_says_another_key_for_other_content(bundle: UserBundle) -> None:
    keys = set()
    for step in ({1: [0, 1]}, {2: [1]}, {1: [0]}):
        bundle.append(content(step))
        with Bundle(bundle.path) as opened:
            keys.add(opened.header.build_key)
    assert len(keys) == 3


def test_readers_go_on_with_what_they_opened(bundle: UserBundle) -> None:
    bundle.append(content({1: [0]}))
    with Bundle(bundle.path) as opened:
        remove_problems(Cache(bundle.path.parent.parent), bundle.path, {problem(1)})
        assert not bundle.path.exists()
        assert sha256_hex(opened.payload(opened.header.kernels[0])) == IDS[0]


def test_what_a_killed_writer_left_is_swept_by_the_next(bundle: UserBundle) -> None:
    bundle.append(content({1: [0]}))
    left = bundle.path.with_name(f".{bundle.path.name}.0123456789ab.partial")
    of_another = bundle.path.with_name(".other.nvgemm.0123456789ab.partial")
    left.touch()
    of_another.touch()
    bundle.append(content({2: [0]}))
    assert not left.exists()
    assert of_another.exists(), "it may be being written"


def test_taking_out_what_is_not_there_changes_nothing(bundle: UserBundle) -> None:
    cache = Cache(bundle.path.parent.parent)
    remove_problems(cache, bundle.path, {problem(1)})
    assert not bundle.path.exists()
    bundle.append(content({1: [0], 2: [1]}))
    before = bundle.path.read_bytes()
    remove_problems(cache, bundle.path, {problem(3)})
    assert bundle.path.read_bytes() == before


def test_writers_at_once_lose_nothing(bundle: UserBundle) -> None:
    with ThreadPoolExecutor(24) as threads:
        list(threads.map(lambda m: bundle.append(content({m: [m % 6]})), range(1, 25)))
    assert summary(read_user_bundle(bundle.path)) == {m: [m % 6] for m in range(1, 25)}


def test_files_differ_by_target_device_toolchain_and_writer(tmp_path: Path) -> None:
    def name(arch: str = "sm_90a", device: str = "H200", dsl: str = "1", writer: str = "x") -> str:
        target = build_target(arch, device)
        return UserBundle(Cache(tmp_path), target, {"dsl": dsl}, writer, print).path.name

    names = [name(), name(device="H100"), name(dsl="2"), name(writer="y")]
    names += [name("sm_100f", "B200"), name("sm_100a", "B200")]
    assert len(set(names)) == len(names)
    assert all(found.endswith(".nvgemm") for found in names)
