"""PTX in the build cache, beside the objects that were assembled from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compile_tasks import tasks
from nvgemm_aot.emulator.checking.kernel_check import KernelTask
from nvgemm_aot.pipeline.cache_entries.ptx_store import ptx_key, read_ptx, store_ptx
from nvgemm_aot.pipeline.compiler import compile_all, make_tasks
from nvgemm_aot.pipeline.pipeline import BuildResult
from nvgemm_aot.providers import load_provider
from nvgemm_aot.providers.cute_dsl.kept_ptx import collected_ptx, keep_ptx
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_aot.verify.device.ptx_agreement import ptx_faults
from nvgemm_runtime.errors import StorageError
from synthetic_cubin import KERNEL, synthetic_cubin

PAYLOAD = b"\x7fELF host" + synthetic_cubin(uses=())
PTX = f".target sm_100f\n.visible .entry {KERNEL}()\n.reqntid 192, 1, 1\n{{ ret; }}\n"
KEY = "ab" * 32


def test_ptx_is_stored_under_a_key_of_its_own(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(KEY, PAYLOAD)
    assert read_ptx(KEY, cache) is None
    assert store_ptx(KEY, [PTX], PAYLOAD, cache) is None
    assert read_ptx(KEY, cache) == PTX
    assert ptx_key(KEY) != KEY
    assert cache.get(KEY) == PAYLOAD


@pytest.mark.parametrize("texts", [[], [PTX, PTX]])
def test_a_compilation_must_hand_over_one_text(texts: list[str], tmp_path: Path) -> None:
    reason = store_ptx(KEY, texts, PAYLOAD, Cache(tmp_path))
    assert reason is not None
    assert f"handed over {len(texts)} PTX texts, must be 1" in reason
    assert read_ptx(KEY, Cache(tmp_path)) is None


def test_ptx_of_an_object_that_differs_from_the_cached_one_is_refused(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(KEY, PAYLOAD + b"!")
    reason = store_ptx(KEY, [PTX], PAYLOAD, cache)
    assert reason is not None
    assert f"{len(PAYLOAD)} bytes that differ from the cached object's" in reason
    assert read_ptx(KEY, cache) is None


def test_ptx_of_other_code_is_refused(tmp_path: Path) -> None:
    reason = store_ptx(KEY, [PTX.replace("100f", "90a")], PAYLOAD, Cache(tmp_path))
    assert reason is not None
    assert "target sm_90a" in reason
    assert read_ptx(KEY, Cache(tmp_path)) is None


def test_an_entry_that_is_no_compressed_text_is_an_error(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(ptx_key(KEY), b"no frame")
    with pytest.raises(StorageError, match=r"kept PTX cannot be read: .*; delete the file"):
        read_ptx(KEY, cache)


def test_providers_hand_over_ptx_only_while_it_is_collected() -> None:
    keep_ptx("nobody asks")
    with collected_ptx() as collected:
        keep_ptx("one")
    keep_ptx("too late")
    assert collected == ["one"]


def test_a_provider_without_ptx_fails_where_ptx_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    [task] = tasks("one")
    result = compile_all([replace(task, keeps_ptx=True)], cache, jobs=1)
    assert "handed over 0 PTX texts, must be 1" in result.failures[0].reason
    assert not cache.has(task.key)
    assert compile_all([task], cache, jobs=1).compiled == 1


def test_a_cached_kernel_is_compiled_again_for_its_ptx(
    real_build: BuildResult, emulated_kernel: KernelTask, kernel_cache: Cache
) -> None:
    """Once: then both are in the cache, and the object is the same to the byte."""
    kernel, target = emulated_kernel.kernel, build_target("sm_100f")
    [built] = [one for one in real_build.bundles if one.header.target.arch == "sm_100f"]
    assert kernel.id in {one.id for one in built.header.kernels}
    assert ".target sm_100f" in emulated_kernel.ptx
    assert list(ptx_faults(emulated_kernel.ptx, kernel.payload)) == []
    provider = load_provider(kernel.provider)
    candidates = provider.enumerate(kernel.signature, target).candidates
    [candidate] = [one for one in candidates if one.operator == kernel.operator]
    [task] = make_tasks([candidate], target, provider)
    again = compile_all([replace(task, keeps_ptx=True)], kernel_cache, jobs=1)
    assert (again.compiled, again.failures) == (0, ())
