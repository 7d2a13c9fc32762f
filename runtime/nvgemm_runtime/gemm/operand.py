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

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}, strides {list(self.strides)}"

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        """Its strides, in elements."""
        return self.strides

    def data_ptr(self) -> int:
        """Its address, as far as alignment goes."""
        return self.address

    def element_size(self) -> int:
        """Bytes of one element."""
        return int(self.dtype.itemsize)
