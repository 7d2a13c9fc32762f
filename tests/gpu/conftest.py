"""Tests that run kernels on this machine's GPU, from the kernel wheels that are installed.

They need torch, nvgemm-aot, pytest and kernel wheels for the GPU, and nothing of the builder. Where
there is no GPU they are skipped. Run them alone, so that the other tests' needs are not theirs::

    pytest --confcutdir=tests/gpu -m gpu tests/gpu
"""

from __future__ import annotations

import pytest
import torch

from nvgemm_runtime import bundles
from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.facts import device_facts
from nvgemm_runtime.format import Kernel


def installed_kernels() -> list[tuple[Bundle, Kernel]]:
    """Every kernel of the installed bundles that this GPU can run."""
    if not torch.cuda.is_available():
        return []
    facts = device_facts("cuda", 0)
    usable = [found.bundle for found in bundles() if found.refusal(facts) is None]
    kernels = {
        kernel.id: (bundle, kernel)
        for bundle in usable
        if bundle is not None
        for kernel in bundle.header.kernels
    }
    return [kernels[key] for key in sorted(kernels)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "installed" in metafunc.fixturenames:
        kernels = installed_kernels()
        ids = [f"{kernel.id[:12]}-{kernel.signature.key}" for _, kernel in kernels]
        metafunc.parametrize("installed", kernels, ids=ids)


@pytest.fixture(scope="session", autouse=True)
def kernels_are_installed() -> None:
    if torch.cuda.is_available():
        assert installed_kernels(), "no installed bundle serves this GPU; install a kernel wheel"
