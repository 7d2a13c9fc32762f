"""Search results for operands: cached as long as they stay true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from installed_bundles import use
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.launch import select
from nvgemm_runtime.launch.loading.loader import LoadedKernel
from nvgemm_runtime.launch.select import UnservedOperands, choose_kernel, find_kernel

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def installation(cpu_bundle: BuiltBundle, monkeypatch: pytest.MonkeyPatch) -> Installation:
    return use(monkeypatch, cpu_bundle.path)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """Operations that were not answered from the cache."""
    seen: list[Op] = []
    search = select._match_and_load

    def watched(op: Op, *operands: Any) -> Any:
        seen.append(op)
        return search(op, *operands)

    monkeypatch.setattr(select, "_match_and_load", watched)
    return seen


def operands(dtype: torch.dtype = torch.float32) -> Tensors:
    """Returns operands at equally aligned addresses."""
    shapes = (16, 64), (64, 32), (16, 32)
    a, b, out = (_aligned(torch.ones(shape, dtype=dtype)) for shape in shapes)
    return a, b, out


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(tensor.nbytes + 256, dtype=torch.uint8)
    begin = -memory.data_ptr() % 256
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def test_a_kernel_is_searched_once(installation: Installation, searches: list[Op]) -> None:
    kernel = find_kernel(Op.MM, *operands())
    assert isinstance(kernel, LoadedKernel)
    assert choose_kernel(Op.MM, *operands()) is kernel
    assert searches == [Op.MM]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_miss_is_searched_once(
    dtype: torch.dtype, installation: Installation, searches: list[Op]
) -> None:
    """By bundles that lack a kernel, and by operands that no kernel can have."""
    miss = find_kernel(Op.MM, *operands(dtype))
    assert isinstance(miss, UnservedOperands)
    for _ in range(2):
        with pytest.raises(NoKernelError) as caught:
            choose_kernel(Op.MM, *operands(dtype))
        assert (str(caught.value), caught.value.reasons) == (miss.message, miss.reasons)
    assert searches == [Op.MM]


def test_addresses_of_one_alignment_share_a_search(
    installation: Installation, searches: list[Op]
) -> None:
    a, b, out = operands()
    memory = _aligned(torch.ones(a.numel() + 128))
    for offset in (4, 12, 20, 8):  # elements; 16-byte units but for the last
        find_kernel(Op.MM, memory[offset : offset + a.numel()].view(a.shape), b, out)
    assert len(searches) == 2


def test_a_miss_is_searched_again_after_the_bundles_change(
    installation: Installation, searches: list[Op]
) -> None:
    find_kernel(Op.MM, *operands(torch.float64))
    kernel = find_kernel(Op.MM, *operands())
    installation.refresh_user_bundles()
    assert isinstance(find_kernel(Op.MM, *operands(torch.float64)), UnservedOperands)
    assert find_kernel(Op.MM, *operands()) is kernel
    assert len(searches) == 3


def test_a_kernel_in_a_new_kept_bundle_ends_a_miss(
    cpu_bundle: BuiltBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation = use(monkeypatch)
    assert isinstance(find_kernel(Op.MM, *operands()), UnservedOperands)
    kept = tmp_path / "kept.nvgemm"
    kept.write_bytes(cpu_bundle.path.read_bytes())
    installation.refresh_user_bundles(kept)
    assert isinstance(find_kernel(Op.MM, *operands()), LoadedKernel)
