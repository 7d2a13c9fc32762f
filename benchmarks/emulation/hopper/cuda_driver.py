"""Runs cases on a GPU by the CUDA driver, which compiles their PTX."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from benchmarks.emulation.hopper.instruction_case import Bytes, Case, TensorMapSpec

FILL = 0xAA
"""Byte with which outputs are filled first."""

_CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""
_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


class DriverCallError(Exception):
    """A call of the driver failed."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with the dimensions of a cluster."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("dimensions", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class CudaDriver:
    """Device 0 and its primary context."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, 100, device)
        self.device = name.value.decode()
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise DriverCallError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def _encode(self, spec: TensorMapSpec, address: int) -> Any:
        """Returns the tensor map that `cuTensorMapEncodeTiled` makes."""
        raw = (ctypes.c_uint8 * 192)()
        begin = ctypes.addressof(raw) + -ctypes.addressof(raw) % 64
        rank = len(spec.sizes)
        self._call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(begin),
            ctypes.c_int(spec.type),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address + spec.offset),
            (ctypes.c_uint64 * rank)(*spec.sizes),
            (ctypes.c_uint64 * rank)(*spec.strides),
            (ctypes.c_uint32 * rank)(*spec.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),
            ctypes.c_int(spec.swizzle),
            ctypes.c_int(0),
            ctypes.c_int(int(spec.fills_nan)),
        )
        return raw, begin

    def run(self, case: Case) -> tuple[Bytes, list[bytes]]:
        """Returns a case's output, and its tensor maps as the driver encodes them.

        Raises:
            DriverCallError: If the PTX does not compile, or the kernel fails.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), case.ptx().encode() + b"\0")
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"kernel")
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, case.shared)
        given = case.input()
        buffers = {}
        for name, size in (("input", len(given)), ("output", case.output_bytes)):
            pointer = ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
            buffers[name] = pointer
        self._call(
            "cuMemcpyHtoD_v2", buffers["input"], ctypes.c_void_p(given.ctypes.data),
            ctypes.c_size_t(len(given)),
        )  # fmt: skip
        self._call(
            "cuMemsetD8_v2", buffers["output"], ctypes.c_ubyte(FILL),
            ctypes.c_size_t(case.output_bytes),
        )  # fmt: skip
        maps = [self._encode(spec, buffers[spec.buffer].value) for spec in case.maps]
        addresses = [begin for _, begin in maps]
        addresses += [ctypes.addressof(buffers[name]) for name in ("input", "output")]
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        attribute = _Attribute(id=_CLUSTER_DIMENSION)
        attribute.dimensions[:] = (case.cluster, 1, 1)
        config = _Config(
            shared_bytes=case.shared, attributes=ctypes.pointer(attribute), attribute_count=1
        )
        config.grid[:] = (case.blocks, 1, 1)
        config.block[:] = (case.threads, 1, 1)
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, parameters, None)
        self._call("cuCtxSynchronize")
        output = np.empty(case.output_bytes, np.uint8)
        self._call(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(output.ctypes.data), buffers["output"],
            ctypes.c_size_t(len(output)),
        )  # fmt: skip
        for pointer in buffers.values():
            self._call("cuMemFree_v2", pointer)
        self._call("cuModuleUnload", module)
        return output, [ctypes.string_at(begin, 128) for _, begin in maps]
