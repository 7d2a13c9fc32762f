"""TVM-FFI's and DLPack's structures, as kernels' functions receive arguments."""

from __future__ import annotations

import ctypes

from nvgemm_runtime.errors import DriverError

CUDA = 2
"""kDLCUDA (dlpack.h, DLDeviceType)."""

_OBJECT_HEADER_BYTES = 24
"""Size of TVMFFIObject (tvm/ffi/c_api.h), behind which an array's TVMFFISeqCell lies."""


class TensorStruct(ctypes.Structure):
    """DLTensor (dlpack.h)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )

    def span(self) -> tuple[int, int]:
        """Returns the address of the first byte, and the bytes to the end of the last element."""
        start = (self.data or 0) + self.byte_offset
        extents = self.shape[: self.rank]
        if 0 in extents:
            return start, 0
        strides = self.element_strides()
        last = sum((extent - 1) * stride for extent, stride in zip(extents, strides))
        return start, (last + 1) * self.bits * self.lanes // 8

    def element_strides(self) -> list[int]:
        """Returns the strides in elements; without any, the tensor is compact and row-major."""
        if self.strides:
            return list(self.strides[: self.rank])
        strides, step = [0] * self.rank, 1
        for dimension in reversed(range(self.rank)):
            strides[dimension] = step
            step *= self.shape[dimension]
        return strides


class AnyStruct(ctypes.Structure):
    """TVMFFIAny (tvm/ffi/c_api.h): a type, and a number or pointer."""

    _fields_ = (
        ("type_index", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("value", ctypes.c_int64),
    )


class _SequenceStruct(ctypes.Structure):
    _fields_ = (("data", ctypes.POINTER(AnyStruct)), ("size", ctypes.c_int64))


FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(AnyStruct),
    ctypes.c_int,
    ctypes.POINTER(AnyStruct),
)
"""A kernel's function: unused handle, arguments and their number, result; returns 0 or -1."""


def array_integers(argument: AnyStruct) -> list[int]:
    """Returns the integers in an ``ffi.Array``."""
    cell = _SequenceStruct.from_address(argument.value + _OBJECT_HEADER_BYTES)
    return [cell.data[number].value for number in range(cell.size)]


def set_raised(kind: str, message: str) -> None:
    """Sets the error that a function raises by returning -1."""
    try:
        library = ctypes.CDLL("libtvm_ffi.so", mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise DriverError(f"libtvm_ffi.so is not loaded: {error}") from error
    library.TVMFFIErrorSetRaisedFromCStr(kind.encode(), message.encode())
