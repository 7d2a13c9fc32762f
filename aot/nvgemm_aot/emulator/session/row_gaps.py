"""Bytes between the rows of a result that is part of a wider buffer, which no kernel may change."""

from __future__ import annotations

import ctypes

import numpy as np

from ..emulation_errors import MemoryAccessError
from .ffi_structs import TensorStruct


class RowGaps:
    """The bytes in a tensor's span that belong to none of its elements, as they are now."""

    def __init__(self, name: str, tensor: TensorStruct) -> None:
        self._name = name
        start, size = tensor.span()
        self._memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        self._positions = np.flatnonzero(self._outside_elements(tensor, size))
        self._before = self._memory[self._positions]

    @staticmethod
    def _outside_elements(
        tensor: TensorStruct, size: int
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        outside = np.ones(size, dtype=np.bool_)
        if size:
            element_bytes = max(1, tensor.bits * tensor.lanes // 8)
            strides = [stride * element_bytes for stride in tensor.element_strides()]
            shape = tensor.shape[: tensor.rank]
            np.lib.stride_tricks.as_strided(outside, (*shape, element_bytes), (*strides, 1))[
                ...
            ] = False
        return outside

    def check(self) -> None:
        """Raises MemoryAccessError if one of them has changed."""
        changed = np.flatnonzero(self._memory[self._positions] != self._before)
        if len(changed):
            raise MemoryAccessError(
                f"writes {len(changed)} bytes between the rows of {self._name}, the first at byte "
                f"{self._positions[changed[0]]} behind its first element"
            )
