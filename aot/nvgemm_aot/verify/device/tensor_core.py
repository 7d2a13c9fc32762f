"""Tensor-core instruction operands, as far as disassembled code shows them.

The tables rest on the disassembly (nvdisasm 13.5) of kernels that cutlass-dsl 4.8.1 compiled for
sm_90a, sm_100a, sm_100f and sm_103a: dense, grouped and block-scaled kernels for each dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from nvgemm_runtime.gemm.problem import DType, Layout
from nvgemm_runtime.gemm.types import Mma, ScaleRecipe

_GMMA_TYPES = {dtype.row.sass_name: dtype for dtype in DType if dtype.row.sass_name}
"""Type modifiers in HGMMA, QGMMA and IGMMA: the accumulator's (omitted for int32), then A's and
B's. HGMMA has one for both, and none if both are fp16."""

_DESCRIPTOR_ACCUMULATOR = {dtype.row.accumulator_code: dtype for dtype in DType}
_DESCRIPTOR_TYPES = {
    (dtype.row.multiplied_by.get(Mma.TCGEN05), dtype.row.operand_code): dtype for dtype in DType
}
"""Dtype codes in a tcgen05 instruction descriptor: for the accumulator, and by instruction for A
and B."""

_SCALE_TYPES = {dtype.row.scale_code: dtype for dtype in DType}
"""Scale dtype codes in the descriptor of a block-scaled instruction."""

_BLOCKS_OF_16 = frozenset({"4X", "BLOCK16"})
"""Modifiers in block-scaled instructions in which 16 values share a scale: the first in code for
sm_100a and sm_100f, the other in code for sm_103a. Blocks of 32 have no modifier."""

# A tcgen05 instruction's last operand but one: the tensor-memory address of the scales of A and B,
# or a register without scales.
_SCALES_ADDRESS = re.compile(r"idesc\[[^\]]+\], tmem\[")


class Instruction(NamedTuple):
    """Tensor-core instruction: its opcode with all modifiers, and its operands."""

    opcode: str
    operands: str

    @property
    def scaled(self) -> bool:
        """True if it takes block scales."""
        return _SCALES_ADDRESS.search(self.operands) is not None


@dataclass(frozen=True, kw_only=True)
class Multiply:
    """Operands multiplied by a tensor-core instruction.

    Attributes:
        m, n: Result extents. On SM100 they are the tile's; on SM90 several warp groups, each with
            64 rows, may share a tile.
        layout: Operand majors as the instruction reads them: ``t`` for A along k and for B along n.
        a, b, accumulator: Element dtypes.
        scales: Block scales, if any.
    """

    m: int
    n: int
    layout: Layout
    a: DType
    b: DType
    accumulator: DType
    scales: ScaleRecipe | None = None

    def __str__(self) -> str:
        types = f"{self.a.value}x{self.b.value}/{self.accumulator.value}"
        scales = f"/{self.scales.value}" if self.scales else ""
        return f"m{self.m}n{self.n} {self.layout.value} {types}{scales}"

    @property
    def transposed(self) -> Multiply:
        """Multiplication with the transposed result: C.T = B.T @ A.T."""
        layout = _layout(
            a_row_major=not self.layout.b_row_major, b_row_major=not self.layout.a_row_major
        )
        return replace(self, m=self.n, n=self.m, layout=layout, a=self.b, b=self.a)


def read_multiplies(instructions: set[Instruction], immediates: set[int]) -> frozenset[Multiply]:
    """Reads a kernel's multiplications from its tensor-core instructions and constants."""
    return frozenset([*_from_modifiers(instructions), *_from_descriptors(instructions, immediates)])


def warp_types(opcode: str) -> tuple[DType, DType, DType] | None:
    """Returns A, B and accumulator dtypes for a warp's floating-point instruction, mma.sync.

    ``HMMA.16816.F32.BF16`` names the accumulator, then the operand dtype unless it is fp16. Returns
    None for any other instruction, and for operands that no signature has, such as TF32.
    """
    name, *modifiers = opcode.split(".")
    if name != "HMMA" or "TF32" in modifiers:
        return None
    operand = DType.BF16 if "BF16" in modifiers else DType.FP16
    return operand, operand, DType.FP32 if "F32" in modifiers else DType.FP16


def _layout(*, a_row_major: bool, b_row_major: bool) -> Layout:
    return Layout(("t" if a_row_major else "n") + ("t" if b_row_major else "n"))


def _from_modifiers(instructions: set[Instruction]) -> Iterator[Multiply]:
    """Reads ``HGMMA.64x64x16.F32.BF16`` and the like; on SM90 the instruction shows everything.

    An operand that is not contiguous along k has the suffix ``.tnspA`` or ``.tnspB``; 8-bit
    operands have no such form.
    """
    for instruction in instructions:
        name, *modifiers = instruction.opcode.split(".")
        shape = re.fullmatch(r"([0-9]+)x([0-9]+)x[0-9]+", modifiers[0]) if modifiers else None
        if shape is None or name not in ("HGMMA", "QGMMA", "IGMMA"):
            continue
        types = [_GMMA_TYPES[part] for part in modifiers[1:] if part in _GMMA_TYPES]
        accumulator = DType.INT32 if name == "IGMMA" else types.pop(0) if types else DType.FP16
        if not types:
            types = [DType.FP16]
        yield Multiply(
            m=int(shape[1]),
            n=int(shape[2]),
            layout=_layout(
                a_row_major=".tnspA" not in instruction.operands,
                b_row_major=".tnspB" in instruction.operands,
            ),
            a=types[0],
            b=types[-1],
            accumulator=accumulator,
        )


def _from_descriptors(instructions: set[Instruction], immediates: set[int]) -> Iterator[Multiply]:
    """Finds tcgen05 instruction descriptors among the code's constants.

    On SM100 an instruction takes dtypes and extents from a descriptor in a register, which the code
    builds from a constant. Few constants fit the format: each of 971 kernels shows its own dtypes,
    majors, scales and tile, and nothing else.
    """
    for opcode, scaled in {(item.opcode, item.scaled) for item in instructions}:
        name, *modifiers = opcode.split(".")
        for value in immediates:
            a, b = (_DESCRIPTOR_TYPES.get((name, value >> shift & 0b111)) for shift in (7, 10))
            n = (value >> 17 & 0b111111) << 3
            # Bits 15 and 16 say that A and B are not contiguous along k.
            layout = _layout(a_row_major=not value >> 15 & 1, b_row_major=bool(value >> 16 & 1))
            if a is None or b is None or not n:
                continue
            block = (32 if _BLOCKS_OF_16.isdisjoint(modifiers) else 16) if scaled else None
            for m, accumulator, scales in _scaled(value, block) if block else _unscaled(value):
                yield Multiply(
                    m=m, n=n, layout=layout, a=a, b=b, accumulator=accumulator, scales=scales
                )


_DescriptorRest = tuple[int, DType, ScaleRecipe | None]


def _unscaled(value: int) -> Iterator[_DescriptorRest]:
    """Yields m, accumulator and no scales, if the value is a descriptor."""
    reserved = value & (1 << 6 | 1 << 23 | 0b111 << 29 | 0b111)  # and sparsity
    accumulator = _DESCRIPTOR_ACCUMULATOR.get(value >> 4 & 0b11)
    m = (value >> 24 & 0b11111) << 4
    if not reserved and m in (64, 128, 256) and accumulator is not None:
        yield m, accumulator, None


def _scaled(value: int, block: int) -> Iterator[_DescriptorRest]:
    """Yields m, accumulator and scales, if the value is a block-scaled descriptor.

    All such instructions sum products in fp32, and ``block`` values share a scale. The code adds an
    instruction's quarter of a scale column to the constant (bits 4, 5, 29 and 30).
    """
    reserved = value & (0b1111111 | 0b111 << 24 | 0b111 << 29)
    m = (value >> 27 & 0b11) << 7
    dtype = _SCALE_TYPES[value >> 23 & 1]
    for scales in ScaleRecipe:
        if not reserved and m in (128, 256) and (scales.block, scales.dtype) == (block, dtype):
            yield m, DType.FP32, scales
