"""Tables for element types and scale recipes, one row each.

To support another one, add a row here; the rest of the project reads the columns. The native build
runs this module to generate its copy (`runtime/csrc/checks/element_types.py`), so it imports
nothing from this package.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar


class Mma(enum.Enum):
    """Kind of tensor-core instruction, which a GPU architecture's kernels multiply with.

    Kernels for one kind neither compile for nor run on another. `target.ARCHITECTURES` has each
    architecture's.
    """

    WGMMA = "wgmma"
    """Issued by warp groups, which hold accumulators in registers (Hopper)."""
    TCGEN05 = "tcgen05"
    """Issued by one thread, or by a pair of thread blocks; accumulators are in tensor memory
    (Blackwell, compute capability 10.x)."""


@dataclass(frozen=True, kw_only=True)
class ElementType:
    """Facts about an element type.

    Attributes:
        bits: Bits per value.
        torch_name: Name in torch, TVM-FFI and CuTe-DSL launchers.
        torch_number: Number in ``c10::ScalarType`` (``torch/headeronly/core/ScalarType.h``).
        dlpack_code: Number in ``DLDataTypeCode`` (``dlpack.h``).
        packed: Values per torch tensor element: 2 for fp4, 1 for all others.
        is_integer: True for integers.
        fraction_bits: Float mantissa bits after the leading one; None for integers.
        exponent_bias: Stored exponent minus actual exponent; None for integers.
        needs_scales: True if GEMMs multiply it only with block scales.
        in_groups: True if grouped operators take it.
        is_part_of_complex: True if torch has a complex dtype with two such parts, whose ``.imag``
            may be a lazily negated view.
        result_deviation: Standard deviation for sums that mostly have exact values in this dtype.
        heuristics_letter: Letter in nvMatmulHeuristics; None if its model lacks the dtype.
        multiplied_by: Instruction in disassembled code that may multiply it, by its kind; empty if
            none. Names come from the instruction tables in NVIDIA's CUDA Binary Utilities (Hopper,
            Blackwell); the dtype mapping was observed in one kernel each.
        sass_name: Modifier name in HGMMA, QGMMA and IGMMA.
        operand_code, accumulator_code: Number as A or B, and as the accumulator, in a tcgen05
            instruction descriptor (PTX ISA, tcgen05, tables "Instruction descriptor format for
            .kind::tf32, .kind::f16, .kind::f8f6f4 and .kind::i8", "… for .kind::mxf8f6f4" and "…
            for .kind::mxf4 and .kind::mxf4nvf4").
        scale_code: Number as the scale type in a block-scaled descriptor.
        rounded_by: Opcode prefix of the instruction that converts sums to it.
        aliases: Other names, for suggestions in error messages.
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
    multiplied_by: Mapping[Mma, str] = field(default_factory=dict)
    sass_name: str | None = None
    operand_code: int | None = None
    accumulator_code: int | None = None
    scale_code: int | None = None
    rounded_by: str | None = None
    aliases: tuple[str, ...] = ()


Member = TypeVar("Member", bound="RowEnum")


class RowEnum(str, enum.Enum):
    """Enumeration whose members have a value, which is their name, and a `row` with columns."""

    _value_: str

    def __new__(cls: type[Member], value: Any, row: object = None) -> Member:
        """Creates a member from a name and a row; afterwards the name alone finds it."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.row = row  # type: ignore[attr-defined]
        return member


class DType(RowEnum):
    """Operand element type; `row` has its facts."""

    row: ElementType

    FP32 = "fp32", ElementType(
        bits=32, torch_name="float32", torch_number=6, dlpack_code=2,
        fraction_bits=23, exponent_bias=127, is_part_of_complex=True, heuristics_letter="S",
        sass_name="F32", accumulator_code=1, rounded_by="I2FP.F32.S32", aliases=("float", "f32"),
    )  # fmt: skip
    FP16 = "fp16", ElementType(
        bits=16, torch_name="float16", torch_number=5, dlpack_code=2,
        fraction_bits=10, exponent_bias=15, in_groups=True, is_part_of_complex=True,
        heuristics_letter="H", multiplied_by={Mma.WGMMA: "HGMMA", Mma.TCGEN05: "UTCHMMA"},
        sass_name="F16", operand_code=0, accumulator_code=0, rounded_by="F2FP.F16.F32",
        aliases=("half", "f16"),
    )  # fmt: skip
    BF16 = "bf16", ElementType(
        bits=16, torch_name="bfloat16", torch_number=15, dlpack_code=4,
        fraction_bits=7, exponent_bias=127, in_groups=True, result_deviation=80.0,
        heuristics_letter="T", multiplied_by={Mma.WGMMA: "HGMMA", Mma.TCGEN05: "UTCHMMA"},
        sass_name="BF16", operand_code=1, rounded_by="F2FP.BF16.F32",
    )  # fmt: skip
    FP8_E4M3 = "fp8_e4m3", ElementType(
        bits=8, torch_name="float8_e4m3fn", torch_number=24, dlpack_code=10,
        fraction_bits=3, exponent_bias=7, in_groups=True,
        result_deviation=5.0, heuristics_letter="Q",
        multiplied_by={Mma.WGMMA: "QGMMA", Mma.TCGEN05: "UTCQMMA"},
        sass_name="E4M3", operand_code=0, scale_code=0, rounded_by="F2FP.SATFINITE.E4M3.F32",
        aliases=("fp8", "e4m3"),
    )  # fmt: skip
    FP8_E5M2 = "fp8_e5m2", ElementType(
        bits=8, torch_name="float8_e5m2", torch_number=23, dlpack_code=12,
        fraction_bits=2, exponent_bias=15, in_groups=True,
        result_deviation=2.2, heuristics_letter="R",
        multiplied_by={Mma.WGMMA: "QGMMA", Mma.TCGEN05: "UTCQMMA"},
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
        heuristics_letter="O", multiplied_by={Mma.TCGEN05: "UTCOMMA"}, operand_code=1,
        aliases=("fp4", "e2m1"),
    )  # fmt: skip
    INT32 = "int32", ElementType(
        bits=32, torch_name="int32", torch_number=3, dlpack_code=0,
        is_integer=True, heuristics_letter="I", accumulator_code=2, aliases=("int", "i32"),
    )  # fmt: skip
    INT8 = "int8", ElementType(
        bits=8, torch_name="int8", torch_number=1, dlpack_code=0,
        is_integer=True, result_deviation=12.0, heuristics_letter="B",
        multiplied_by={Mma.WGMMA: "IGMMA", Mma.TCGEN05: "UTCIMMA"}, sass_name="S8", operand_code=1,
        aliases=("s8", "i8"),
    )  # fmt: skip
    # nvMatmulHeuristics has one 8-bit integer type.
    UINT8 = "uint8", ElementType(
        bits=8, torch_name="uint8", torch_number=0, dlpack_code=1,
        is_integer=True, heuristics_letter="B",
        multiplied_by={Mma.WGMMA: "IGMMA", Mma.TCGEN05: "UTCIMMA"}, sass_name="U8", operand_code=0,
        aliases=("u8",),
    )  # fmt: skip

    @property
    def bits(self) -> int:
        """Bits per value."""
        return self.row.bits

    @property
    def torch_name(self) -> str:
        """Name in torch, TVM-FFI and CuTe-DSL launchers."""
        return self.row.torch_name

    @property
    def packed(self) -> int:
        """Values per torch tensor element."""
        return self.row.packed

    @property
    def is_integer(self) -> bool:
        """True for integers."""
        return self.row.is_integer

    @property
    def accumulator(self) -> DType:
        """Dtype in which products are summed."""
        return DType.INT32 if self.is_integer else DType.FP32

    @property
    def usual_out(self) -> DType:
        """Default result dtype: A's, but int32 for integers and bf16 for fp8 and fp4."""
        if self.is_integer:
            return DType.INT32
        return DType.BF16 if self.bits <= 8 else self

    @property
    def is_operand(self) -> bool:
        """True if tensor cores multiply it."""
        return bool(self.row.multiplied_by)

    @property
    def is_fp8(self) -> bool:
        """True for 8-bit floats that GEMMs multiply."""
        return self.bits == 8 and not self.is_integer and self.is_operand

    def bytes_of(self, values: int) -> int:
        """Returns the bytes that contiguous values take, rounded up."""
        return -(-values * self.bits // 8)


class TorchScaling(enum.IntEnum):
    """Values from ``torch.nn.functional.ScalingType``; later values are 128-value block scales."""

    TENSOR_WISE = 0
    ROW_WISE = 1
    BLOCKS_OF_16 = 2
    BLOCKS_OF_32 = 3


@dataclass(frozen=True, kw_only=True)
class ScaleRecipeRow:
    """Facts about a scale recipe.

    Attributes:
        dtype: Scale dtype.
        block: Values along k that share a scale; None if all do.
        operands: Dtypes of A and B that it scales.
        torch_scaling: torch's scaling type.
        native_kind: Number in ``ScaleKind`` (csrc/core/gemm.h).
        aliases: Other names, for suggestions in error messages.
    """

    dtype: DType
    block: int | None
    operands: tuple[DType, ...]
    torch_scaling: TorchScaling
    native_kind: int
    aliases: tuple[str, ...] = ()


_FP8 = (DType.FP8_E4M3, DType.FP8_E5M2)


class ScaleRecipe(RowEnum):
    """Scale factors for A and B: their dtype, and the values that share one.

    The product is ``sum over k of (a * scale of a) * (b * scale of b)``. Block scales follow the
    OCP Microscaling Formats specification (MX: one power of two per 32 values along k) or NVFP4
    (one fp8 number per 16). `row` has a recipe's facts.
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
    """One scale for all A, one for all B."""
    FP32_ROW = "fp32_row", ScaleRecipeRow(
        dtype=DType.FP32, block=None, operands=_FP8, torch_scaling=TorchScaling.ROW_WISE,
        native_kind=2, aliases=("row", "rowwise", "per_row", "per_channel"),
    )  # fmt: skip
    """One scale per row in A and per column in B."""

    @property
    def dtype(self) -> DType:
        """Scale dtype."""
        return self.row.dtype

    @property
    def block(self) -> int | None:
        """Values along k that share a scale; None if all do."""
        return self.row.block

    @property
    def is_swizzled(self) -> bool:
        """True if scales use the 32 x 4 x 4 swizzle, as all block scales do."""
        return self.block is not None


SWIZZLE_ROWS = 128
SWIZZLE_COLUMNS = 4
"""Scale block extents: rows (in A, or columns in B) and columns along k. Scales are padded to whole
blocks (cuBLAS documentation, "1D Block Scaling Factors Layout"); tensor cores read a block in a
fixed order, the 32 x 4 x 4 swizzle."""

SWIZZLED_ALIGNMENT_BYTES = 32
"""Swizzled scale alignment that block-scaled kernels assume: ``assumed_align`` for the scale
pointers in cutlass.operators 0.3.0."""


def swizzled_elements(recipe: ScaleRecipe, rows: int, k: int) -> int:
    """Returns the number of scales in a swizzled scale tensor, with padding.

    Args:
        recipe: Block-scale recipe.
        rows: m for A, n for B.
        k: Values per row.
    """
    assert recipe.block is not None
    columns = -(-k // recipe.block)
    return _round_up(rows, SWIZZLE_ROWS) * _round_up(columns, SWIZZLE_COLUMNS)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
