"""Kernels whose results depend on timing, in programs that ask for deterministic algorithms."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cpu_provider
import nvgemm_runtime
from installed_bundles import use
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.launch.api import choose, explain, load_kernel
from nvgemm_runtime.launch.compiled import gemm


@pytest.fixture
def loose(
    kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BuiltBundle]:
    """A bundle all of whose kernels depend on timing, by what their entries say."""
    built = cpu_provider.build_bundle(
        [cpu_provider.problem()], tmp_path, kernel_cache, provider=cpu_provider.TimingDependent()
    )
    assert not any(kernel.is_deterministic for kernel in built.header.kernels)
    use(monkeypatch, built.path)
    yield built
    torch.use_deterministic_algorithms(False)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(16, 64), torch.randn(64, 32), torch.full((16, 32), float("nan"))


def test_they_are_left_out_while_the_mode_is_on(loose: BuiltBundle) -> None:
    a, b, out = operands()
    for _ in range(2):
        torch.testing.assert_close(nvgemm_runtime.mm(a, b, out), a @ b)
        torch.use_deterministic_algorithms(True)
        with pytest.raises(NoKernelError, match="results depend on timing, and the program asked"):
            choose(a, b, out)
        with pytest.raises(NoKernelError, match="results depend on timing"):
            nvgemm_runtime.mm(a, b, out)
        assert explain(a, b).match is None
        torch.use_deterministic_algorithms(False)
        assert explain(a, b).match is not None


def test_one_that_is_named_is_refused(loose: BuiltBundle) -> None:
    a, b, out = operands()
    loaded = choose(a, b, out)
    torch.use_deterministic_algorithms(True)
    for kernel in (loaded, loaded.kernel.id):
        with pytest.raises(RuntimeError, match=f"{loaded.kernel.id[:12]}: results depend on timin"):
            nvgemm_runtime.mm(a, b, out, kernel=kernel)
    assert out.isnan().all()
    torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(nvgemm_runtime.mm(a, b, out, kernel=loaded), a @ b)


def test_one_that_is_named_runs_with_a_warning_where_torch_is_to_warn_only(
    loose: BuiltBundle,
) -> None:
    a, b, out = operands()
    loaded = choose(a, b, out)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kernel in (loaded, loaded.kernel.id):
        with pytest.warns(UserWarning, match=f"{loaded.kernel.id[:12]}: results depend on timing"):
            nvgemm_runtime.mm(a, b, out.fill_(float("nan")), kernel=kernel)
        torch.testing.assert_close(out, a @ b)


def test_generated_code_that_names_one_runs_on_aten(
    loose: BuiltBundle, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, out = operands()
    kernel = load_kernel(loose.header.kernels[0].id).kernel
    torch.use_deterministic_algorithms(True)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(gemm(torch.mm, kernel.id, "a wheel")(a, b, out=out), a @ b)
    assert "results depend on timing" in caplog.text
    assert "runs GEMMs on ATen instead of the kernels of a wheel" in caplog.text
