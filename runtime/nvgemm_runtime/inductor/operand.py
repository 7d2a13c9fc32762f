"""An operand without a tensor: as Inductor knows it while it compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Operand:
    """What `operands.requests` asks of a tensor.

    Attributes:
        dtype: Its element type.
        device: Where it will be.
        shape: Its extents.
        strides: In elements.
        address: Any address that is aligned as the first element will be.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int

    def dim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return self.dtype.itemsize
