"""Memory that emulated kernels may touch, from the arguments of their functions."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import tvm_ffi

from nvgemm_aot.emulator.emulation_errors import MemoryAccessError
from nvgemm_aot.emulator.machine.global_memory import GlobalMemory, Region
from nvgemm_aot.emulator.session.ffi_structs import AnyStruct, TensorStruct
from nvgemm_aot.emulator.session.kernel_regions import kernel_regions
from nvgemm_runtime.gemm.problem import Signature

PLAIN = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
SCALED = Signature.parse("mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e8m0_1x32")


class Arguments:
    """Arguments of a kernel's function, which keep alive what they point to."""

    def __init__(self) -> None:
        self._alive: list[Any] = []

    def tensor(self, tensor: torch.Tensor, *, compact: bool = False) -> AnyStruct:
        """A tensor; ``compact`` leaves out strides, as DLPack allows."""
        extents = ctypes.c_int64 * tensor.dim()
        dtype = tvm_ffi.dtype(str(tensor.dtype).removeprefix("torch."))
        made = TensorStruct(
            data=tensor.untyped_storage().data_ptr(),
            rank=tensor.dim(),
            bits=dtype.bits,
            lanes=dtype.lanes,
            shape=extents(*tensor.shape),
            strides=None if compact else extents(*tensor.stride()),
            byte_offset=tensor.storage_offset() * tensor.element_size(),
        )
        self._alive += [tensor, made]
        return AnyStruct(value=ctypes.addressof(made))

    def integers(self, *values: int) -> AnyStruct:
        """TVM-FFI's array, behind its object header."""
        items = (AnyStruct * len(values))(*(AnyStruct(value=value) for value in values))
        array = (ctypes.c_int64 * 5)(0, 0, 0, ctypes.addressof(items), len(values))
        self._alive += [items, array]
        return AnyStruct(value=ctypes.addressof(array))


@pytest.fixture
def arguments() -> Arguments:
    return Arguments()


def spans(regions: tuple[Region, ...]) -> dict[str, tuple[int, int, bool]]:
    return {each.name: (each.address, len(each.data), each.writable) for each in regions}


def test_tensors_span_from_their_first_to_their_last_element(arguments: Arguments) -> None:
    buffer = torch.zeros(16, 24, dtype=torch.bfloat16)
    a, b, out = buffer[:4, :8], torch.zeros(12, 8).bfloat16().t(), torch.zeros(4, 12).bfloat16()
    regions = kernel_regions(
        PLAIN,
        ("a", "b", "out", "stream"),
        [
            *(arguments.tensor(tensor) for tensor in (a, b)),
            arguments.tensor(out, compact=True),
            AnyStruct(value=0),
        ],
    )
    assert spans(regions) == {
        "a": (buffer.data_ptr(), 2 * (3 * 24 + 8), False),
        "b": (b.data_ptr(), 2 * 8 * 12, False),
        "out": (out.data_ptr(), 2 * 4 * 12, True),
    }


def test_a_region_is_the_tensors_memory(arguments: Arguments) -> None:
    a, b, buffer = torch.zeros(4, 8), torch.zeros(8, 12), torch.zeros(6, 12)
    out = buffer[1:5]
    regions = kernel_regions(
        PLAIN, ("a", "b", "out"), [arguments.tensor(tensor) for tensor in (a, b, out)]
    )
    memory = GlobalMemory(regions)
    region = memory.find(out.data_ptr(), out.data_ptr() + 3, writes=True)
    region.data[:] = 255
    assert buffer[1:5].isnan().all()
    assert not buffer[[0, 5]].any()
    for first, name in ((out.data_ptr() - 4, "no tensor"), (a.data_ptr(), "writes a")):
        with pytest.raises(MemoryAccessError, match=name):
            memory.find(first, first + 3, writes=True)
    with pytest.raises(MemoryAccessError, match="no tensor"):
        memory.find(out.data_ptr() + 4 * 48 - 4, out.data_ptr() + 4 * 48 + 3)


def test_operands_may_share_memory(arguments: Arguments) -> None:
    a, out = torch.zeros(8, 8), torch.zeros(8, 8)
    tensors = [arguments.tensor(tensor) for tensor in (a, a[2:].t(), out)]
    assert spans(kernel_regions(PLAIN, ("a", "b", "out"), tensors)) == {
        "a and b": (a.data_ptr(), 256, False),
        "out": (out.data_ptr(), 256, True),
    }


def test_empty_tensors_have_no_memory(arguments: Arguments) -> None:
    tensors = [arguments.tensor(torch.zeros(*shape)) for shape in ((0, 8), (8, 4), (0, 4))]
    assert list(spans(kernel_regions(PLAIN, ("a", "b", "out"), tensors))) == ["b"]


def test_pointers_have_the_sizes_of_compact_operands(arguments: Arguments) -> None:
    """Two fp4 values a byte, and scales in their swizzled layout: blocks of 128 rows by 4."""
    addresses = {"a": 0, "b": 1, "scale_a": 2, "scale_b": 3, "out": 4}
    buffer = torch.zeros(5, 1 << 16, dtype=torch.uint8)
    pointers = [AnyStruct(value=buffer[row].data_ptr()) for row in addresses.values()]
    parameters = (*(f"{name}*" for name in addresses), "mnkl", "stream")
    m, n, k = 40, 96, 128
    regions = kernel_regions(
        SCALED, parameters, [*pointers, arguments.integers(m, n, k, 1), AnyStruct(value=0)]
    )
    assert {name: (size, writable) for name, (_, size, writable) in spans(regions).items()} == {
        "a": (m * k // 2, False),
        "b": (n * k // 2, False),
        "scale_a": (128 * 4, False),
        "scale_b": (128 * 4, False),
        "out": (2 * m * n, True),
    }
