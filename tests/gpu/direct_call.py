"""Calls a kernel's function by its C interface, with operands that the launcher refuses."""

from __future__ import annotations

import ctypes

import torch
import tvm_ffi.libinfo

_TENSOR_POINTER, _OPAQUE_POINTER = 7, 4
"""kTVMFFIDLTensorPtr and kTVMFFIOpaquePtr in tvm/ffi/c_api.h."""

_OBJECT_BYTES = 24
"""Size of TVMFFIObject, which an error's cell follows."""

_CODES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float8_e4m3fn: (10, 8)}
"""DLPack's type codes and bits."""


class _Any(ctypes.Structure):
    """TVMFFIAny."""

    _fields_ = (
        ("type_index", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("value", ctypes.c_void_p),
    )


class _Tensor(ctypes.Structure):
    """DLTensor; its device and type are spread out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Text(ctypes.Structure):
    """TVMFFIByteArray."""

    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t))


class _Error(ctypes.Structure):
    """The begin of TVMFFIErrorCell."""

    _fields_ = (("kind", _Text), ("message", _Text))


def raised_on(device: int, address: int, *tensors: torch.Tensor) -> str:
    """Call a function ``(a, b, out, stream)`` as if CUDA tensors were on some device.

    Returns the kind and the text of its error; empty without one.
    """
    numbers = [
        (ctypes.c_int64 * x.ndim)(*sizes) for x in tensors for sizes in (x.shape, x.stride())
    ]
    described = [
        _Tensor(
            x.data_ptr(), 2, device, x.ndim, *_CODES[x.dtype], 1, *map(ctypes.addressof, sizes), 0
        )
        for x, *sizes in zip(tensors, numbers[::2], numbers[1::2])
    ]
    operands = [_Any(_TENSOR_POINTER, 0, ctypes.addressof(one)) for one in described]
    arguments = (_Any * (len(tensors) + 1))(*operands, _Any(_OPAQUE_POINTER, 0, None))
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
    )
    result = _Any()
    if not prototype(address)(
        None, ctypes.addressof(arguments), len(arguments), ctypes.addressof(result)
    ):
        return ""
    error = ctypes.c_void_p()
    ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()).TVMFFIErrorMoveFromRaised(ctypes.byref(error))
    assert error.value is not None
    cell = _Error.from_address(error.value + _OBJECT_BYTES)
    return f"{cell.kind.data.decode()}: {cell.message.data.decode()}"
