"""Plans whose bundle no reader would take are refused before anything is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

import cpu_provider
from nvgemm_aot.pipeline import header_size
from nvgemm_aot.pipeline.header_size import planned_root_bytes
from nvgemm_aot.pipeline.pipeline import build, plan_build
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.paging.encode_pages import encode_paged
from nvgemm_runtime.errors import ManifestError

PROBLEMS = [cpu_provider.problem(sizes=(m, 32, 64)) for m in range(1, 200)]


def test_the_length_of_a_root_is_known_before_it_is_built(tmp_path: Path) -> None:
    cache, provider = Cache(tmp_path / "cache"), cpu_provider.CpuProvider()
    manifest = cpu_provider.manifest(PROBLEMS)
    (planned,) = plan_build(manifest, cache, provider=provider)
    (built,) = build(manifest, tmp_path, cache, jobs=1, provider=provider).bundles
    real = len(encode_paged(built.header)[0])
    assert planned_root_bytes(planned.target.target, planned.plan) == pytest.approx(real, rel=0.4)


def test_a_plan_that_needs_too_long_a_root_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, provider = Cache(tmp_path / "cache"), cpu_provider.CpuProvider()
    manifest = cpu_provider.manifest(PROBLEMS)
    (planned,) = plan_build(manifest, cache, provider=provider)
    size = planned_root_bytes(planned.target.target, planned.plan)
    monkeypatch.setattr(header_size, "MAX_HEADER_BYTES", size)
    plan_build(manifest, cache, provider=provider)
    monkeypatch.setattr(header_size, "MAX_HEADER_BYTES", size - 1)
    with pytest.raises(
        ManifestError,
        match=rf"cpu: 199 problems and 3 kernels for cpu\S* need a bundle root of {size} bytes; "
        rf"allowed: at most {size - 1}; declare fewer candidates, or split the manifest",
    ):
        build(manifest, tmp_path / "out", cache, provider=provider)
    assert not any(cache.has(task.key) for task in planned.tasks)
    assert not (tmp_path / "out").exists()
