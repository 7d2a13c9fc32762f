"""What compiled code calls of the native launcher: it tries, and is told when a kernel cannot."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cpu_kernels
from cpu_kernels import Register, operands, signature
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.launch import api
from nvgemm_runtime.launch.loading import native


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


@pytest.fixture
def reported(lib: native.Native) -> Iterator[list[tuple[str, ...]]]:
    """What is said of kernels that compiled code leaves to ATen."""
    said: list[tuple[str, ...]] = []
    lib.set_reporter(lambda *texts: said.append(tuple(map(str, texts))))
    yield said
    lib.set_reporter(None)
    api._launcher.cache_clear()  # the product sets its own once


def test_compiled_code_gives_up_a_kernel_that_fails_before_it_has_run(
    register: Register, reported: list[tuple[str, ...]]
) -> None:
    id, handle = register(behaviour=cpu_kernels.RAISES)
    a, b, out = operands()
    for _ in range(2):
        assert torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out) is False
    ((kernel, kind, text),) = reported
    assert (kernel, kind) == (id, "RuntimeError")
    assert text.startswith(f"kernel {id[:12]}: ")


def test_compiled_code_tries_again_where_memory_was_short(
    register: Register, reported: list[tuple[str, ...]]
) -> None:
    _, handle = register(workspace_bytes=2**62)
    a, b, out = operands()
    for _ in range(2):
        assert torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out) is False
    assert [kind for _, kind, _ in reported] == ["OutOfMemoryError"] * 2


def test_an_empty_result_says_nothing_of_a_kernel(
    register: Register, reported: list[tuple[str, ...]]
) -> None:
    _, handle = register(behaviour=cpu_kernels.RAISES)
    a, b, out = operands()
    assert torch.ops.nvgemm_aot.try_gemm(a[:0], b, handle, out=out[:0]) is True
    assert torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out) is False
    assert len(reported) == 1


def test_a_failure_that_cannot_be_reported_is_none_of_the_gemm(
    lib: native.Native, register: Register, reported: list[tuple[str, ...]]
) -> None:
    def report(*_: str) -> None:
        raise ValueError("no log")

    _, handle = register(behaviour=cpu_kernels.RAISES)
    lib.set_reporter(report)
    a, b, out = operands()
    assert torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out) is False


def test_a_kernel_that_has_run_and_then_fails_is_an_error(
    register: Register, reported: list[tuple[str, ...]]
) -> None:
    _, handle = register(behaviour=cpu_kernels.RAISES_LATER)
    a, b, out = operands()
    assert torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out) is True
    with pytest.raises(RuntimeError, match="try_gemm: kernel"):
        torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out)
    assert reported == []


def test_an_unknown_handle_is_an_error(lib: native.Native) -> None:
    with pytest.raises(NoKernelError, match="no kernel has the handle"):
        lib.try_launch(10**9, *operands())


def test_packages_that_were_made_before_call_what_they_were_made_for(lib: native.Native) -> None:
    """Generated C++ compares the number, and then calls these two operators without a schema."""
    calls = torch.ops.nvgemm_aot
    assert [str(one.default._schema) for one in (calls.prepare, calls.try_gemm)] == [
        "nvgemm_aot::prepare(str kernel, str origin) -> int",
        "nvgemm_aot::try_gemm(Tensor a, Tensor b, int kernel, *, Tensor(a!) out, "
        "Tensor? scale_a=None, Tensor? scale_b=None, Tensor? offsets=None, Tensor? addend=None) "
        "-> bool",
    ]
    number = ctypes.CDLL("libnvgemm_aot.so", mode=os.RTLD_NOLOAD).nvgemm_aot_operators_abi
    number.restype = ctypes.c_int64
    assert number() == native.CALLED_ABI == 3


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


def test_preparing_tells_the_loader_of_a_kernel_that_is_there(
    register: Register, loader: Callable[[Any], None]
) -> None:
    """It may be new to a device, and `preload` knows what the loader was told."""
    asked = []
    loader(lambda *texts: asked.append([str(text) for text in texts]))
    id, handle = register()
    assert torch.ops.nvgemm_aot.prepare(id, "wheel 1.0") == handle
    assert asked == [[id, "wheel 1.0"]]


def test_preparing_without_a_loader_finds_nothing(loader: Callable[[Any], None]) -> None:
    loader(None)
    assert torch.ops.nvgemm_aot.prepare("e" * 64, "wheel 1.0") == -1
