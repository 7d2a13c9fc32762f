"""What compiled code calls of the native launcher: it tries, and is told when a kernel cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cpu_kernels
from cpu_kernels import Register, operands, signature
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.launch import native


def misaligned() -> tuple[torch.Tensor, ...]:
    a, b, out = operands(8, 8, 8)
    return torch.zeros(65)[1:].view(8, 8).copy_(a), b, out


@pytest.mark.parametrize("op", [Op.MM, Op.BMM])
def test_a_kernel_that_serves_the_operands_computes(
    lib: native.Native, register: Register, op: Op
) -> None:
    _, handle = register(signature(op=op))
    a, b, out = operands(5, 6, 7, 2 if op is Op.BMM else None)
    assert lib.try_launch(handle, a, b, out) is True
    torch.testing.assert_close(out, a @ b)
    out.fill_(float("nan"))
    assert torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out) is True
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize(
    "wrong",
    [
        misaligned(),
        (torch.zeros(8, 8), torch.zeros(9, 8), torch.zeros(8, 8)),
        (torch.zeros(8, 8).double(), torch.zeros(8, 8), torch.zeros(8, 8)),
        (torch.zeros(8, 16)[:, ::2], torch.zeros(8, 8), torch.zeros(8, 8)),
        (torch.zeros(8), torch.zeros(8, 8), torch.zeros(8, 8)),
    ],
    ids=["unaligned", "shape", "dtype", "stride", "rank"],
)
def test_a_kernel_that_cannot_take_the_operands_leaves_them_alone(
    lib: native.Native, register: Register, wrong: tuple[torch.Tensor, ...]
) -> None:
    _, handle = register(alignment=16)
    a, b, out = wrong
    out.fill_(7)
    assert lib.try_launch(handle, a, b, out) is False
    assert torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out) is False
    assert (out == 7).all()


def test_what_goes_wrong_in_a_kernel_is_an_error(lib: native.Native, register: Register) -> None:
    _, handle = register(behaviour=cpu_kernels.RAISES)
    with pytest.raises(RuntimeError, match="kernel"):
        lib.try_launch(handle, *operands())
    a, b, out = operands()
    with pytest.raises(RuntimeError, match="try_gemm: kernel"):
        torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out)


def test_an_unknown_handle_is_an_error(lib: native.Native) -> None:
    with pytest.raises(NoKernelError, match="no kernel has the handle"):
        lib.try_launch(10**9, *operands())


def test_preparing_finds_what_is_registered(register: Register) -> None:
    id, handle = register()
    assert torch.ops.nvgemm_aot.prepare(id, "wheel 1.0") == handle


def test_preparing_tells_the_loader_what_brought_the_kernel(
    register: Register, loader: Callable[[Any], None]
) -> None:
    asked = []
    loader(lambda *texts: asked.append([str(text) for text in texts]))
    assert torch.ops.nvgemm_aot.prepare("f" * 64, "wheel 1.0") == -1
    assert asked == [["f" * 64, "wheel 1.0"]]


def test_preparing_without_a_loader_finds_nothing(loader: Callable[[Any], None]) -> None:
    loader(None)
    assert torch.ops.nvgemm_aot.prepare("e" * 64, "wheel 1.0") == -1
