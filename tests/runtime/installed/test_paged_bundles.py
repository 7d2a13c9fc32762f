"""Bundles in pages, in a process: found by id and by problem without reading them whole."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_runtime.bundle.paging.paged_header import PagedHeader
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.matching.combined import paged_index
from nvgemm_runtime.matching.combined.paged_index import PagedIndex
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import Basis, Match, Miss
from paged_bundles import in_pages, write_in_pages
from synthetic_content import synthetic_content
from synthetic_facts import B200, H200

CONTENT = synthetic_content(kernels=6, problems=6)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that NVGEMM_AOT_BUNDLES names; no wheel is installed."""
    named = tmp_path / "named"
    named.mkdir()
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", str(named))
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
    return named


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts whole headers that are read from pages."""
    whole: list[str] = []
    right = PagedHeader.entries

    def entries(pages: PagedHeader, name: str) -> object:
        whole.append(name)
        return right(pages, name)

    monkeypatch.setattr(PagedHeader, "entries", entries)
    return whole


def damage_pages(path: Path) -> None:
    """Changes every page, and neither the root nor the body."""
    with Bundle(path) as bundle:
        data = bytearray(path.read_bytes())
        root_end = 48 + int.from_bytes(data[12:16], "little")
        body = bundle.header.kernels[0].span.offset
        if bundle.facts.dictionary is not None:
            body = bundle.facts.dictionary.span.offset
    for place in range(root_end, body):
        data[place] ^= 1
    path.write_bytes(data)


def test_problems_and_kernels_are_found_without_reading_all_pages(
    directory: Path, reads: list[str]
) -> None:
    write_in_pages(directory / "a.nvgemm", CONTENT)
    write_bundle(directory / "b.nvgemm", synthetic_content(kernels=2, problems=2, seed=1))
    reads.clear()
    installation = Installation()
    index = installation.index(B200)
    assert isinstance(index, PagedIndex)
    declared = CONTENT.rankings[3].problem
    for problem, basis in (
        (declared, Basis.DECLARED),
        (replace(declared, m=3, n=4104), Basis.SIGNATURE),
    ):
        match = index.match(problem, 256)
        assert isinstance(match, Match)
        assert match.basis is basis
    for kernel in CONTENT.kernels:
        entry = installation.kernel(kernel.id)
        assert entry is not None
        assert entry[0].payload(entry[1]) == kernel.payload
    assert installation.kernel("0" * 64) is None
    assert [found.refusal(B200) for found in installation.bundles()] == [None, None]
    assert "do not run on" in str(installation.bundles()[0].refusal(H200))
    assert not reads


def test_rows_in_memory_are_limited(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_index, "MAX_ROWS_KEPT", 4)
    write_in_pages(directory / "a.nvgemm", CONTENT)
    installation = Installation()
    problem = CONTENT.rankings[0].problem
    index = installation.index(B200)
    assert isinstance(index, PagedIndex)
    answers = [index.match(replace(problem, n=8 * n), 256) for n in range(1, 20)]
    assert all(isinstance(answer, Match) for answer in answers)
    assert len(index._rows) <= 4


def test_bundles_of_version_2_alone_have_an_index_of_their_own(directory: Path) -> None:
    write_bundle(directory / "a.nvgemm", CONTENT)
    assert isinstance(Installation().index(B200), Index)


def test_a_kernel_is_found_first_where_it_can_be_launched(directory: Path) -> None:
    old = [replace(one, calling_convention="tvm_ffi:gemm(a,b,out)") for one in CONTENT.kernels]
    write_in_pages(directory / "a.nvgemm", replace(CONTENT, kernels=tuple(old)))
    write_in_pages(directory / "b.nvgemm", CONTENT)
    installation = Installation()
    entry = installation.kernel(CONTENT.kernels[0].id)
    assert entry is not None
    assert entry[0].path.name == "b.nvgemm"
    useless, useful = installation.bundles()
    assert str(useless.refusal(B200)).startswith("none of its 6 kernels can be launched: calling")
    assert useful.refusal(B200) is None


def test_damaged_pages_are_said_once_and_other_bundles_are_used(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_in_pages(directory / "a.nvgemm", CONTENT)
    damage_pages(directory / "a.nvgemm")
    write_bundle(directory / "b.nvgemm", synthetic_content(kernels=2, problems=2, seed=1))
    installation = Installation()
    with caplog.at_level(logging.WARNING):
        index = installation.index(B200)
        for m in (1, 2, 3):
            problem = replace(CONTENT.rankings[0].problem, m=m)
            match = index.match(problem, 256)
            assert isinstance(match, Match)
            assert match.kernels[0].bundle.name.endswith("b.nvgemm")
            missed = index.match(problem, 1)
            assert isinstance(missed, Miss)
        assert installation.kernel(CONTENT.kernels[0].id) is None
    assert "[page-digest]" in caplog.text
    assert len([one for one in caplog.records if "pages are damaged" in one.getMessage()]) == 1
    assert "[page-digest]" in str(installation.bundles()[0].refusal(B200))


def test_threads_look_up_in_one_index(directory: Path) -> None:
    write_in_pages(directory / "a.nvgemm", CONTENT)
    index = Installation().index(B200)
    barrier = threading.Barrier(6)
    answers: list[object] = []

    def ask() -> None:
        barrier.wait()
        for ranking in CONTENT.rankings:
            answers.append(isinstance(index.match(ranking.problem, 256), Match))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 6 * len(CONTENT.rankings)


def test_a_user_bundle_that_was_cut_short_does_not_stop_a_refresh(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "cache" / "jit"
    kept.mkdir(parents=True)
    other = synthetic_content(kernels=2, problems=2, seed=1)
    with in_pages():
        write_bundle(kept / "a.nvgemm", CONTENT)
        write_bundle(kept / "b.nvgemm", other)
    installation = Installation()
    assert len([one for one in installation.bundles() if one.bundle is not None]) == 2
    os.truncate(kept / "a.nvgemm", 60)
    installation.refresh_user_bundles()
    assert installation.kernel(other.kernels[0].id) is not None
    assert installation.kernel(CONTENT.kernels[0].id) is None
    assert "bundle left out (" in caplog.text


def test_user_bundles_may_be_in_pages(directory: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "jit"
    kept.mkdir(parents=True)
    with in_pages():
        write_bundle(kept / "user.nvgemm", CONTENT)
    installation = Installation()
    (ranking, *_) = CONTENT.rankings
    match = installation.index(B200).match(ranking.problem, 256)
    assert isinstance(match, Match)
    assert match.from_jit
    best = match.kernels[0].kernel.id
    assert ranking.problem in installation.user_bundle_problems(best)
    assert installation.user_bundle_problems("0" * 64) == ()
    damage_pages(kept / "user.nvgemm")
    found = Installation().bundles()[-1]
    assert "[page-digest]" in str(found.problem)
    assert "it is rebuilt" in str(found.problem)
