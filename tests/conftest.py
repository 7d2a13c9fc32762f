"""What several test files share: real kernels, compiled once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvgemm_aot.cache import Cache
from nvgemm_aot.manifest import load_manifest
from nvgemm_aot.pipeline import BuildResult, build

REAL_MANIFEST = """
version: 1
name: real
targets: [sm_100f, sm_90a]
candidates: 2
gemms:
  - {dtype: bf16, mnk: [[8, 4096, 4096]]}
  - {dtype: fp16, layout: nt, op: bmm, batch: 4, mnk: [[2048, 2048, 512]], candidates: 1}
"""
"""Two kernels for each bf16 problem (TGV and a narrow tile on sm_100f) and one for each fp16."""


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """The build cache of the session: what one test compiled, no other compiles again."""
    return Cache(tmp_path_factory.mktemp("kernel-cache"))


@pytest.fixture(scope="session")
def real_build(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """Bundles of six real kernels, three a target, from the whole pipeline."""
    directory = tmp_path_factory.mktemp("real")
    (directory / "real.yaml").write_text(REAL_MANIFEST)
    return build(load_manifest(directory / "real.yaml"), directory / "out", kernel_cache)


@pytest.fixture(scope="session")
def real_bundles(real_build: BuildResult) -> dict[str, Path]:
    """The bundle of each architecture."""
    return {bundle.header.target.arch: bundle.path for bundle in real_build.bundles}
