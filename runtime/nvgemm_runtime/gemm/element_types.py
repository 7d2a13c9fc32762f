"""Element types of operands: the one table to extend for a new one."""

from __future__ import annotations

import enum
from typing import NamedTuple


class DType(str, enum.Enum):
    """Element type of an operand."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_E8M0 = "fp8_e8m0"
    FP4_E2M1 = "fp4_e2m1"
    INT32 = "int32"
    INT8 = "int8"
    UINT8 = "uint8"

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return _FACTS[self].bits

    @property
    def torch_name(self) -> str:
        """Name by which torch, TVM-FFI and the launchers of CuTe-DSL kernels know it."""
        return _FACTS[self].torch_name

    @property
    def packed(self) -> int:
        """Values that one element of a tensor of torch holds: 2 of fp4, 1 of all others."""
        return _FACTS[self].packed

    @property
    def is_integer(self) -> bool:
        """Whether values are whole numbers."""
        return self in (DType.INT32, DType.INT8, DType.UINT8)

    @property
    def accumulator(self) -> DType:
        """Type in which the products of such values are summed."""
        return DType.INT32 if self.is_integer else DType.FP32

    @property
    def usual_out(self) -> DType:
        """Type of a result where none is named: A's, but int32 for integers, bf16 for fp8, fp4."""
        if self.is_integer:
            return DType.INT32
        return DType.BF16 if self.bits <= 8 else self

    @property
    def is_fp8(self) -> bool:
        """Whether values are 8-bit floating-point numbers, as GEMMs multiply them."""
        return self in (DType.FP8_E4M3, DType.FP8_E5M2)

    def bytes_of(self, values: int) -> int:
        """Bytes of so many values side by side, rounded up."""
        return -(-values * self.bits // 8)


class _Facts(NamedTuple):
    bits: int
    torch_name: str
    packed: int = 1


_FACTS = {
    DType.FP32: _Facts(32, "float32"),
    DType.FP16: _Facts(16, "float16"),
    DType.BF16: _Facts(16, "bfloat16"),
    DType.FP8_E4M3: _Facts(8, "float8_e4m3fn"),
    DType.FP8_E5M2: _Facts(8, "float8_e5m2"),
    DType.FP8_E8M0: _Facts(8, "float8_e8m0fnu"),
    DType.FP4_E2M1: _Facts(4, "float4_e2m1fn_x2", packed=2),
    DType.INT32: _Facts(32, "int32"),
    DType.INT8: _Facts(8, "int8"),
    DType.UINT8: _Facts(8, "uint8"),
}
