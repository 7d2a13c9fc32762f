"""Tests that run kernels on this machine's GPU, from the kernel wheels that are installed.

They need torch, nvgemm-aot, pytest and kernel wheels for the GPU, and nothing of the builder. Where
there is no GPU they are skipped. ``tests/gpu/run`` runs them part by part, with the wheels that
each needs. By hand, run them alone, so that the other tests' needs are not theirs::

    pytest --confcutdir=tests/gpu -m gpu tests/gpu
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from installed import installed_kernels

from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.epilogues import ADD
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import extra_roles


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each kernel with its bundle: of all, or of those that a test is for.

    ``sharing`` have a workspace, ``adding`` add a matrix to groups, ``plain`` take A and B alone.
    """
    kernels = installed_kernels()
    some_of_them: dict[str, Callable[[Kernel], bool]] = {
        "installed": lambda kernel: True,
        "sharing": lambda kernel: kernel.workspace is not None,
        "adding": lambda kernel: (
            (kernel.signature.op, kernel.signature.epilogue) == (Op.GROUPED_MM, ADD)
        ),
        "plain": lambda kernel: not extra_roles(kernel.signature),
    }
    for name, is_meant in some_of_them.items():
        some = [one for one in kernels if is_meant(one[1])]
        if name in metafunc.fixturenames:
            ids = [f"{kernel.id[:12]}-{kernel.signature.key}" for _, kernel in some]
            metafunc.parametrize(name, some, ids=ids)


def pytest_report_header() -> list[str]:
    """Which signatures are tested: only those of the wheels that happen to be installed."""
    kernels = Counter(kernel.signature.key for _, kernel in installed_kernels())
    return [f"{count} kernels for {key}" for key, count in sorted(kernels.items())]


@pytest.fixture(scope="session", autouse=True)
def kernels_are_installed() -> None:
    if torch.cuda.is_available():
        assert installed_kernels(), "no installed bundle serves this GPU; install a kernel wheel"


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """By the first digits of their ids, as generated code calls them."""
    found = {kernel.id[:12]: kernel for _, kernel in installed_kernels()}
    keys = {kernel.signature.key for kernel in found.values()}
    for layout in ("mm/tn", "mm/tt", "mm/nt", "bmm/tn"):
        if f"{layout}/bf16xbf16/fp32/bf16" not in keys:
            pytest.skip(f"no installed kernel for {layout} in bf16; install the quickstart wheel")
    return found
