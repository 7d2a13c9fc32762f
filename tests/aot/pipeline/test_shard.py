"""Shards of a build: each kernel is compiled by one of them, and a build joins their caches."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from fake_provider import FakeProvider
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.pipeline.compile_shard import CompiledShard, compile_shard
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.pipeline.shard import Shard
from nvgemm_aot.storage.build_cache import Cache, entry_files
from nvgemm_runtime.errors import CompileError, NoCandidateError, StorageError

TEXT = """
version: 1
name: some
targets: [sm_100f, {arch: sm_90a, device: H200}]
gemms:
  - {dtype: bf16, mnk: [[1, 512, DEPTH], [16, 512, DEPTH]]}
"""

pytestmark = pytest.mark.usefixtures("compiled_here")


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "one two three")


def manifest(directory: Path, depth: int = 256) -> Manifest:
    path = directory / "some.yaml"
    path.write_text(TEXT.replace("DEPTH", str(depth)))
    return load_manifest(path)


def shard(
    directory: Path, text: str, cache: Path, *, strict: bool = False, depth: int = 256
) -> CompiledShard:
    return compile_shard(
        manifest(directory, depth),
        Cache(cache),
        Shard.parse(text),
        jobs=1,
        strict=strict,
        provider=FakeProvider(),
    )


def kernels(cache: Path) -> set[str]:
    return {path.name for path in entry_files(cache) if path.read_bytes()[32:36] == b"\x7fELF"}


def bundles(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.glob("*.nvgemm")
    }


def test_a_build_joins_the_caches_of_all_shards(tmp_path: Path) -> None:
    """Shards on three machines, each with a cache of its own, then copied together."""
    done = [shard(tmp_path, f"{i}/3", tmp_path / f"cache{i}") for i in (1, 2, 3)]
    assert [each.kernels for each in done] == [each.compiled for each in done] == [2, 2, 2]
    assert {each.all_kernels for each in done} == {6}
    parts = [kernels(tmp_path / f"cache{i}") for i in (1, 2, 3)]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 6
    for i in (1, 2, 3):
        shutil.copytree(tmp_path / f"cache{i}", tmp_path / "joined", dirs_exist_ok=True)
    declared = manifest(tmp_path)
    joined = build(
        declared, tmp_path / "joined-out", Cache(tmp_path / "joined"), provider=FakeProvider()
    )
    assert joined.compiled == 0
    build(declared, tmp_path / "alone-out", Cache(tmp_path / "alone"), provider=FakeProvider())
    assert bundles(tmp_path / "joined-out") == bundles(tmp_path / "alone-out") != {}


def test_what_the_cache_has_moves_no_kernel_to_another_shard(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shard(tmp_path, "1/2", cache)
    first = kernels(cache)
    assert shard(tmp_path, "1/2", cache).compiled == 0
    assert kernels(cache) == first
    assert shard(tmp_path, "2/2", cache).compiled == 3
    assert len(kernels(cache)) == 6


def test_more_shards_than_kernels_leave_some_with_nothing(tmp_path: Path) -> None:
    done = shard(tmp_path, "9/9", tmp_path / "cache")
    assert (done.kernels, done.compiled, done.failures) == (0, 0, ())


def test_a_failure_is_reported_and_fatal_if_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "fail_one two")
    done = shard(tmp_path, "1/1", tmp_path / "cache")
    assert (done.kernels, done.compiled, len(done.failures)) == (4, 2, 2)
    with pytest.raises(CompileError, match=r"shard 1/1: 2 kernels failed \(--strict\)"):
        shard(tmp_path, "1/1", tmp_path / "cache", strict=True)


def test_a_problem_without_operator_fails_in_every_shard(tmp_path: Path) -> None:
    with pytest.raises(NoCandidateError, match="no kernel for 2 problems"):
        shard(tmp_path, "2/2", tmp_path / "cache", depth=250)


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """It would not be used, and the shard's work would be lost."""
    cache = tmp_path / "cache"
    (cache / "entries").mkdir(parents=True)
    (cache / "entries").chmod(0o777)
    with pytest.raises(StorageError, match="others could change the kernels in this cache"):
        shard(tmp_path, "1/2", cache)
    assert not kernels(cache)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "1", "a/b", "-1/2", "1/2/3", "", "1/ 2"])
def test_other_texts_are_no_shards(text: str) -> None:
    with pytest.raises(ValueError, match="is not a shard such as 2/8"):
        Shard.parse(text)
