"""Element types and scale recipes: all that is known of each, in one row.

These are the tables to extend for another one; every other part of the project reads its columns.
The native part's build runs this module to make its copy (`runtime/csrc/element_types.py`), so it
imports nothing of this package.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True)
class ElementType:
    """What is known of an element type.

    Attributes:
        bits: Bits of one value.
        torch_name: Name by which torch, TVM-FFI and the launchers of CuTe-DSL kernels know it.
        torch_number: Its number in ``c10::ScalarType`` (``torch/headeronly/core/ScalarType.h``).
        dlpack_code: Its number in ``DLDataTypeCode`` (``dlpack.h``).
        packed: Values that one element of a tensor of torch holds: 2 of fp4, 1 of all others.
        is_integer: Whether values are whole numbers.
        fraction_bits: Bits of a float behind its leading one; None for integers.
        exponent_bias: What a float's stored exponent is above its exponent; None for integers.
        needs_scales: Whether GEMMs multiply it with block scales alone.
        in_groups: Whether operators multiply groups of it.
        is_part_of_complex: Whether torch has a complex type of two of it, whose ``.imag`` may be a
            lazily negated view.
        result_deviation: Standard deviation of sums of which most have an exact value in it.
        heuristics_letter: What nvMatmulHeuristics calls it; None where its model does not know it.
        multiplied_by: By major compute capability: the one tensor-core instruction that may
            multiply it; empty where none does. The names stand in the instruction tables of
            NVIDIA's CUDA Binary Utilities (Hopper, Blackwell); which type gives which was seen, a
            kernel of each.
        sass_name: What modifiers of HGMMA, QGMMA and IGMMA call it.
        operand_code, accumulator_code: Its number as A or B, and as the accumulator, in a tcgen05
            instruction descriptor (PTX ISA, tcgen05, tables "Instruction descriptor format for
            .kind::tf32, .kind::f16, .kind::f8f6f4 and .kind::i8", "… for .kind::mxf8f6f4" and "…
            for .kind::mxf4 and .kind::mxf4nvf4").
        scale_code: Its number as the type of scales in the descriptor of a block-scaled one.
        rounded_by: How the instruction begins that turns sums into it.
        aliases: What people call it who look for its name.
    """

    bits: int
    torch_name: str
    torch_number: int
    dlpack_code: int
    packed: int = 1
    is_integer: bool = False
    fraction_bits: int | None = None
    exponent_bias: int | None = None
    needs_scales: bool = False
    in_groups: bool = False
    is_part_of_complex: bool = False
    result_deviation: float = 500.0
    heuristics_letter: str | None = None
    multiplied_by: Mapping[int, str] = field(default_factory=dict)
    sass_name: str | None = None
    operand_code: int | None = None
    accumulator_code: int | None = None
    scale_code: int | None = None
    rounded_by: str | None = None
    aliases: tuple[str, ...] = ()


Member = TypeVar("Member", bound="RowEnum")


class RowEnum(str, enum.Enum):
    """An enumeration whose members are rows: each has a value, its name, and a `row` of columns."""

    _value_: str

    def __new__(cls: type[Member], value: Any, row: object = None) -> Member:
        """Make a member of its name and its row; afterwards, a name alone finds its member."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.row = row  # type: ignore[attr-defined]
        return member


class DType(RowEnum):
    """Element type of an operand; `row` has all that is known of it."""

    row: ElementType

    FP32 = "fp32", ElementType(
        bits=32, torch_name="float32", torch_number=6, dlpack_code=2,
        fraction_bits=23, exponent_bias=127, is_part_of_complex=True, heuristics_letter="S",
        sass_name="F32", accumulator_code=1, rounded_by="I2FP.F32.S32", aliases=("float", "f32"),
    )  # fmt: skip
    FP16 = "fp16", ElementType(
        bits=16, torch_name="float16", torch_number=5, dlpack_code=2,
        fraction_bits=10, exponent_bias=15, in_groups=True, is_part_of_complex=True,
        heuristics_letter="H", multiplied_by={9: "HGMMA", 10: "UTCHMMA"}, sass_name="F16",
        operand_code=0, accumulator_code=0, rounded_by="F2FP.F16.F32", aliases=("half", "f16"),
    )  # fmt: skip
    BF16 = "bf16", ElementType(
        bits=16, torch_name="bfloat16", torch_number=15, dlpack_code=4,
        fraction_bits=7, exponent_bias=127, in_groups=True, result_deviation=80.0,
        heuristics_letter="T", multiplied_by={9: "HGMMA", 10: "UTCHMMA"}, sass_name="BF16",
        operand_code=1, rounded_by="F2FP.BF16.F32",
    )  # fmt: skip
    FP8_E4M3 = "fp8_e4m3", ElementType(
        bits=8, torch_name="float8_e4m3fn", torch_number=24, dlpack_code=10,
        fraction_bits=3, exponent_bias=7, in_groups=True,
        result_deviation=5.0, heuristics_letter="Q", multiplied_by={9: "QGMMA", 10: "UTCQMMA"},
        sass_name="E4M3", operand_code=0, scale_code=0, rounded_by="F2FP.SATFINITE.E4M3.F32",
        aliases=("fp8", "e4m3"),
    )  # fmt: skip
    FP8_E5M2 = "fp8_e5m2", ElementType(
        bits=8, torch_name="float8_e5m2", torch_number=23, dlpack_code=12,
        fraction_bits=2, exponent_bias=15, in_groups=True,
        result_deviation=2.2, heuristics_letter="R", multiplied_by={9: "QGMMA", 10: "UTCQMMA"},
        sass_name="E5M2", operand_code=1, rounded_by="F2FP.SATFINITE.E5M2.F32",
        aliases=("fp8", "e5m2"),
    )  # fmt: skip
    FP8_E8M0 = "fp8_e8m0", ElementType(
        bits=8, torch_name="float8_e8m0fnu", torch_number=44, dlpack_code=14,
        fraction_bits=0, exponent_bias=127, scale_code=1,
    )  # fmt: skip
    FP4_E2M1 = "fp4_e2m1", ElementType(
        bits=4, torch_name="float4_e2m1fn_x2", torch_number=45, dlpack_code=17,
        packed=2, fraction_bits=1, exponent_bias=1, needs_scales=True,
        heuristics_letter="O", multiplied_by={10: "UTCOMMA"}, operand_code=1,
        aliases=("fp4", "e2m1"),
    )  # fmt: skip
    INT32 = "int32", ElementType(
        bits=32, torch_name="int32", torch_number=3, dlpack_code=0,
        is_integer=True, heuristics_letter="I", accumulator_code=2, aliases=("int", "i32"),
    )  # fmt: skip
    INT8 = "int8", ElementType(
        bits=8, torch_name="int8", torch_number=1, dlpack_code=0,
        is_integer=True, result_deviation=12.0, heuristics_letter="B",
        multiplied_by={9: "IGMMA", 10: "UTCIMMA"}, sass_name="S8", operand_code=1,
        aliases=("s8", "i8"),
    )  # fmt: skip
    # nvMatmulHeuristics knows one 8-bit integer type.
    UINT8 = "uint8", ElementType(
        bits=8, torch_name="uint8", torch_number=0, dlpack_code=1,
        is_integer=True, heuristics_letter="B", multiplied_by={9: "IGMMA", 10: "UTCIMMA"},
        sass_name="U8", operand_code=0, aliases=("u8",),
    )  # fmt: skip

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return self.row.bits

    @property
    def torch_name(self) -> str:
        """Name by which torch, TVM-FFI and the launchers of CuTe-DSL kernels know it."""
        return self.row.torch_name

    @property
    def packed(self) -> int:
        """Values that one element of a tensor of torch holds."""
        return self.row.packed

    @property
    def is_integer(self) -> bool:
        """Whether values are whole numbers."""
        return self.row.is_integer

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
    def is_operand(self) -> bool:
        """Whether tensor cores multiply it."""
        return bool(self.row.multiplied_by)

    @property
    def is_fp8(self) -> bool:
        """Whether values are 8-bit floating-point numbers, as GEMMs multiply them."""
        return self.bits == 8 and not self.is_integer and self.is_operand

    def bytes_of(self, values: int) -> int:
        """Bytes of so many values side by side, rounded up."""
        return -(-values * self.bits // 8)


class TorchScaling(enum.IntEnum):
    """Values of ``torch.nn.functional.ScalingType``; those behind are scales of 128 values."""

    TENSOR_WISE = 0
    ROW_WISE = 1
    BLOCKS_OF_16 = 2
    BLOCKS_OF_32 = 3


@dataclass(frozen=True, kw_only=True)
class ScaleRecipeRow:
    """What is known of a scale recipe.

    Attributes:
        dtype: Element type of the scales.
        block: How many values along k share a scale; None where all along k do.
        operands: Element types of A and B that it scales.
        torch_scaling: What torch calls it.
        native_kind: Its number in ``ScaleKind`` of csrc/gemm.h.
        aliases: What people call it who look for its name.
    """

    dtype: DType
    block: int | None
    operands: tuple[DType, ...]
    torch_scaling: TorchScaling
    native_kind: int
    aliases: tuple[str, ...] = ()


_FP8 = (DType.FP8_E4M3, DType.FP8_E5M2)


class ScaleRecipe(RowEnum):
    """What the scale factors of A and B are: their element type, and which values share one.

    The product is ``sum over k of (a * scale of a) * (b * scale of b)``. Block scales are those of
    the OCP Microscaling Formats specification (MX: one power of two for 32 values along k) and of
    NVFP4 (one fp8 number for 16). `row` has all that is known of a recipe.
    """

    row: ScaleRecipeRow

    E8M0_1X32 = "e8m0_1x32", ScaleRecipeRow(
        dtype=DType.FP8_E8M0, block=32, operands=(*_FP8, DType.FP4_E2M1),
        torch_scaling=TorchScaling.BLOCKS_OF_32, native_kind=3,
        aliases=("mxfp8", "mxfp4", "mx", "1x32"),
    )  # fmt: skip
    """MXFP8 and MXFP4."""
    E4M3_1X16 = "e4m3_1x16", ScaleRecipeRow(
        dtype=DType.FP8_E4M3, block=16, operands=(DType.FP4_E2M1,),
        torch_scaling=TorchScaling.BLOCKS_OF_16, native_kind=3, aliases=("nvfp4", "1x16"),
    )  # fmt: skip
    """NVFP4."""
    E8M0_1X16 = "e8m0_1x16", ScaleRecipeRow(
        dtype=DType.FP8_E8M0, block=16, operands=(DType.FP4_E2M1,),
        torch_scaling=TorchScaling.BLOCKS_OF_16, native_kind=3, aliases=("1x16",),
    )  # fmt: skip
    """NVFP4 with powers of two."""
    FP32_TENSOR = "fp32_tensor", ScaleRecipeRow(
        dtype=DType.FP32, block=None, operands=_FP8, torch_scaling=TorchScaling.TENSOR_WISE,
        native_kind=1, aliases=("tensor", "tensorwise", "per_tensor"),
    )  # fmt: skip
    """One scale for all of A, one for all of B."""
    FP32_ROW = "fp32_row", ScaleRecipeRow(
        dtype=DType.FP32, block=None, operands=_FP8, torch_scaling=TorchScaling.ROW_WISE,
        native_kind=2, aliases=("row", "rowwise", "per_row", "per_channel"),
    )  # fmt: skip
    """One scale for each row of A and each column of B."""

    @property
    def dtype(self) -> DType:
        """Element type of the scales."""
        return self.row.dtype

    @property
    def block(self) -> int | None:
        """How many values along k share a scale; None where all along k do."""
        return self.row.block

    @property
    def is_swizzled(self) -> bool:
        """Whether scales lie in the 32 x 4 x 4 swizzle: those of blocks do."""
        return self.block is not None


SWIZZLE_ROWS = 128
SWIZZLE_COLUMNS = 4
"""Scales come in blocks of so many rows (of A, or columns of B) by so many along k, padded to whole
ones (CUDA documentation of cuBLAS, "1D Block Scaling Factors Layout"). Tensor cores take them in
one fixed order within a block, the 32 x 4 x 4 swizzle."""

SWIZZLED_ALIGNMENT_BYTES = 32
"""Alignment of swizzled scales that block-scaled kernels assume: ``assumed_align`` of the scale
pointers in cutlass.operators 0.3.0."""


def swizzled_elements(recipe: ScaleRecipe, rows: int, k: int) -> int:
    """How many scales a swizzled scale tensor holds, padding included.

    Args:
        recipe: A recipe with blocks.
        rows: m for A, n for B.
        k: Values of a row.
    """
    assert recipe.block is not None
    columns = -(-k // recipe.block)
    return _round_up(rows, SWIZZLE_ROWS) * _round_up(columns, SWIZZLE_COLUMNS)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
