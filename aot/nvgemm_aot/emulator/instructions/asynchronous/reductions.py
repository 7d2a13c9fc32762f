"""Element-wise reductions that bulk copies make (PTX ISA, "cp.reduce.async.bulk")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...emulation_errors import EmulationError
from ...machine.global_memory import Bytes
from ..numbers.float_forms import flushed

_INTEGERS: dict[str, Any] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
}
_FLOATS: dict[str, Any] = {
    "f16": np.float16,
    "f32": np.float32,
    "f32.ftz": np.float32,
    "f64": np.float64,
}

_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "inc": lambda old, limit: np.where(old >= limit, 0, old + np.uint32(1)),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - np.uint32(1)),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

_FLOAT_FUNCTIONS = {"add": np.add, "min": np.fmin, "max": np.fmax}

OPERATIONS = tuple(_FUNCTIONS)


def reduce(operation: str, kind: str, old: Bytes, new: Bytes) -> Bytes:
    """Returns the bytes of elements that are reduced with others of a type such as ``bf16``.

    Raises:
        EmulationError: If the type has no such reduction.
    """
    if kind in _INTEGERS:
        dtype = _INTEGERS[kind]
        result = _FUNCTIONS[operation](old.view(dtype), new.view(dtype)).astype(dtype)
    elif operation not in _FLOAT_FUNCTIONS:
        raise EmulationError(f"there is no reduction .{operation} of {kind}")
    elif kind == "bf16":
        wide = _FLOAT_FUNCTIONS[operation](_bf16_to_f32(old), _bf16_to_f32(new))
        result = _f32_to_bf16(wide)
    elif kind in _FLOATS:
        dtype = _FLOATS[kind]
        operands = [old.view(dtype), new.view(dtype)]
        if kind == "f32.ftz":
            operands = list(map(_flushed, operands))
        result = _FLOAT_FUNCTIONS[operation](*operands).astype(dtype, copy=False)
        if kind == "f32.ftz":
            result = _flushed(result)
    else:
        raise EmulationError(f"there is no reduction of {kind}")
    return np.ascontiguousarray(result).view(np.uint8)


def _flushed(values: Any) -> Any:
    """Makes subnormal float32 values zero."""
    # An atomic has a few values, which Python looks through more quickly than numpy.
    if len(values) <= _FEW and not any(value and abs(value) < _TINY for value in values.tolist()):
        return values
    return flushed(values, "f32")


_FEW, _TINY = 8, 2.0**-126


def _bf16_to_f32(data: Bytes) -> Any:
    wide = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def _f32_to_bf16(values: Any) -> Any:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(values), 0x7FFF, rounded >> np.uint32(16)).astype(np.uint16)
