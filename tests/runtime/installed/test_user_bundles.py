"""User bundles as the runtime finds them: late, growing, damaged, evicted, not to be trusted."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from inductor_session import warnings_of
from nvgemm_aot.bundle.writer import encode_bundle, write_bundle
from nvgemm_aot.storage.files import write_atomic
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.installed import registry as installation_module
from nvgemm_runtime.installed.jit_cache import find_user_bundles
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.matching.matches import Match
from synthetic_content import synthetic_content
from synthetic_facts import B200


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of user bundles; nothing is installed or named."""
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NVGEMM_AOT_BUNDLES", raising=False)
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
    kept = tmp_path / "cache" / "jit"
    kept.mkdir(parents=True)
    return kept


def write(directory: Path, kernels: int = 2, *, seed: int = 0, name: str = "a") -> Path:
    path = directory / f"{name}.nvgemm"
    write_bundle(path, synthetic_content(kernels=kernels, problems=kernels, seed=seed))
    return path


def declared(path: Path) -> list[Problem]:
    with Bundle(path) as bundle:
        return [ranking.problem for ranking in bundle.header.rankings]


def serves(installation: Installation, problem: Problem) -> bool:
    match = installation.index(B200).match(problem, 256)
    return isinstance(match, Match) and match.ranked_as == problem


def test_an_absent_directory_is_no_error(directory: Path) -> None:
    assert find_user_bundles() == ()
    directory.rmdir()
    assert find_user_bundles() == ()
    installation = Installation()
    installation.refresh_user_bundles()
    assert installation.bundles() == ()


def test_a_user_without_a_home_has_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NVGEMM_AOT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert find_user_bundles() == ()


def test_they_say_where_they_come_from(directory: Path) -> None:
    path = write(directory)
    [candidate] = find_user_bundles()
    assert (candidate.path, candidate.problem) == (path, None)
    assert candidate.origin == f"the JIT cache {directory}"


@pytest.mark.parametrize("place", ["a.nvgemm", ".", ".."])
def test_what_others_can_write_is_refused(directory: Path, place: str) -> None:
    write(directory)
    (directory / place).resolve().chmod(0o777)
    [candidate] = find_user_bundles()
    assert "can be written by others" in str(candidate.problem)
    [found] = Installation().bundles()
    assert found.bundle is None


def test_nothing_but_bundles_is_looked_at(directory: Path) -> None:
    path = write(directory)
    (directory / "used").mkdir()
    path.with_name("a.nvgemm.damaged-1").touch()
    (directory / ".a.nvgemm.1.partial").touch()
    assert [candidate.path for candidate in find_user_bundles()] == [path]


def test_what_is_appended_is_found_after_a_refresh_only(directory: Path) -> None:
    path = write(directory, 2)
    installation = Installation()
    (before,) = installation.bundles()
    write(directory, 5)
    added = declared(path)[-1]
    assert not serves(installation, added)
    installation.refresh_user_bundles()
    assert serves(installation, added)
    assert len(installation.kernels()) == 5
    assert before.origin == f"the JIT cache {directory}"
    assert before.bundle is not None
    assert len(before.bundle.header.rankings) == 2
    assert before.bundle.payload(before.bundle.header.kernels[0])


def test_files_that_are_as_they_were_stay_open(directory: Path) -> None:
    write(directory, name="a")
    write(directory, name="b", seed=1)
    installation = Installation()
    first = {found.path.name: found.bundle for found in installation.bundles()}
    write(directory, 3, name="b", seed=1)
    installation.refresh_user_bundles()
    second = {found.path.name: found.bundle for found in installation.bundles()}
    assert second["a.nvgemm"] is first["a.nvgemm"]
    assert second["b.nvgemm"] is not first["b.nvgemm"]


def test_kernels_of_an_evicted_bundle_can_still_be_loaded(directory: Path) -> None:
    path = write(directory, 4)
    installation = Installation()
    known = set(installation.kernels())
    write(directory, 2)
    installation.refresh_user_bundles()
    assert set(installation.kernels()) >= known
    path.unlink()
    installation.refresh_user_bundles()
    assert installation.bundles() == ()
    for bundle, kernel in installation.kernels().values():
        assert bundle.payload(kernel)
    assert set(installation.kernels()) >= known


@pytest.mark.parametrize("byte", [60, -1])
def test_a_damaged_one_is_left_out_and_said_once(
    directory: Path, caplog: pytest.LogCaptureFixture, byte: int
) -> None:
    path = write(directory)
    broken = bytearray(path.read_bytes())
    broken[byte] ^= 1
    path.write_bytes(broken)
    installation = Installation()
    with caplog.at_level(logging.WARNING, "nvgemm_runtime"):
        [found] = installation.bundles()
        installation.refresh_user_bundles()
        installation.refresh_user_bundles()
    assert found.bundle is None
    [warning] = warnings_of(caplog)
    assert "-digest]" in warning
    assert warning.endswith("; it is rebuilt when kernels are next compiled")
    write(directory)
    installation.refresh_user_bundles()
    assert serves(installation, declared(path)[0])


def test_one_that_is_found_anyway_comes_once(directory: Path) -> None:
    path = write(directory)
    installation = Installation()
    installation.refresh_user_bundles(path)
    installation.refresh_user_bundles(path)
    assert [found.path for found in installation.bundles()] == [path]


def test_a_temporary_one_comes_in_as_well(directory: Path, tmp_path: Path) -> None:
    write(directory)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = write(elsewhere, 3, seed=7)
    for installation in (Installation(), Installation()):
        installation.refresh_user_bundles(path)
        assert serves(installation, declared(path)[0])
        installation.refresh_user_bundles()
        assert len(installation.bundles()) == 2


def test_a_temporary_one_is_served_though_its_file_has_gone(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = write(elsewhere)
    installation = Installation()
    installation.refresh_user_bundles(path)
    [problem, _] = declared(path)
    assert serves(installation, problem)
    path.unlink()
    installation.refresh_user_bundles()
    assert serves(installation, problem)
    assert not warnings_of(caplog)


def test_wheels_are_indexed_once_however_often_the_cache_grows(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    named.mkdir()
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", str(write(named)))
    indexed = []
    real = installation_module.Index

    def counted(views: list[object], *arguments: object, **options: object) -> object:
        indexed.append(options["from_jit"])
        return real(views, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(installation_module, "Index", counted)
    installation = Installation()
    for kernels in (1, 2, 3):
        write(directory, kernels, seed=1)
        installation.refresh_user_bundles()
        installation.index(B200)
    assert indexed == [False, True, True, True]


def test_readers_and_writers_at_once_see_whole_bundles(directory: Path) -> None:
    contents = [
        encode_bundle(synthetic_content(kernels=count, problems=count))[0] for count in (1, 2, 3)
    ]
    path = directory / "a.nvgemm"
    write_atomic(path, contents[0])
    problem = declared(path)[0]
    installation, stop = Installation(), threading.Event()
    failures: list[str] = []

    def write_on() -> None:
        while not stop.is_set():
            for data in contents:
                write_atomic(path, data)

    def read_on() -> None:
        for _ in range(100):
            installation.refresh_user_bundles()
            match = installation.index(B200).match(problem, 256)
            if not isinstance(match, Match):
                failures.append(str(match))

    writer = threading.Thread(target=write_on)
    readers = [threading.Thread(target=read_on) for _ in range(4)]
    for thread in (writer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    writer.join()
    assert failures == []


def test_no_descriptor_is_left_open_for_bundles_that_were_replaced(directory: Path) -> None:
    installation = Installation()
    installation.bundles()
    write(directory, 1)
    installation.refresh_user_bundles()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for kernels in range(2, 12):
        write(directory, kernels)
        installation.refresh_user_bundles()
        installation.index(B200)
    # Contents of this size hold those of smaller ones, so that nothing is missed.
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208
