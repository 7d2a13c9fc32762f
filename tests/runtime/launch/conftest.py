"""What tests of the public functions share: kernels for the CPU that are installed."""

from __future__ import annotations

import pytest

from installed_bundles import use
from nvgemm_aot.pipeline.pipeline import BuiltBundle


@pytest.fixture
def installed(fused_bundle: BuiltBundle, monkeypatch: pytest.MonkeyPatch) -> BuiltBundle:
    """Kernels that take more than A and B; the bundle, which alone is found."""
    use(monkeypatch, fused_bundle.path)
    return fused_bundle
