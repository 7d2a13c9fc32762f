"""What tests of experts share: kernels that are installed, and those that are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expert_kernels import Installed, build_kernels
from installed_bundles import use
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.moe import kernels


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels, none looked up yet, and no warning to come."""
    use(monkeypatch)
    monkeypatch.setattr(kernels, "_warned", {*kernels.WARNINGS})


@pytest.fixture(scope="session")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds kernels once a session for the same arguments, which are those of `build_kernels`."""
    paths: dict[str, Path] = {}

    def build(
        layouts: str | dict[str, list[Epilogue | None]],
        epilogues: tuple[Epilogue | None, ...],
        **options: Any,
    ) -> Path:
        key = repr((layouts, epilogues, options))
        if key not in paths:
            directory = tmp_path_factory.mktemp("experts")
            paths[key] = build_kernels(layouts, epilogues, directory, kernel_cache, **options)
        return paths[key]

    return build


@pytest.fixture
def install(
    new_process: None, built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Installed]:
    """Installs kernels; arguments are those of `build_kernels`."""

    def install(
        layouts: str | dict[str, list[Epilogue | None]], *epilogues: Epilogue | None, **options: Any
    ) -> Installed:
        return Installed(built(layouts, epilogues, **options), monkeypatch)

    return install
