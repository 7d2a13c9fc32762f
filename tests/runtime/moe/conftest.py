"""What tests of experts share: kernels that are installed, and those that are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from expert_kernels import Installed, build_kernels
from installed_bundles import use
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.moe import launching


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels, none looked up yet, and no warning to come."""
    use(monkeypatch)
    monkeypatch.setattr(launching, "_warned", {*launching.WARNINGS})


@pytest.fixture
def install(
    new_process: None, tmp_path: Path, kernel_cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Installed]:
    """Builds and installs kernels; arguments are those of `build_kernels`."""

    def build(
        layouts: str | dict[str, list[Epilogue | None]], *epilogues: Epilogue | None, **options: int
    ) -> Installed:
        built = build_kernels(layouts, epilogues, tmp_path, kernel_cache, **options)
        return Installed(built, monkeypatch)

    return build
