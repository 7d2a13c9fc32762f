"""What disassembled device code proves about a kernel: its tensor-core instructions and spills.

The tables rest on the disassembly (nvdisasm 13.5) of 89 dense kernels that cutlass-dsl 4.8.1
compiled for sm_90a, sm_100a, sm_100f and sm_103a, in fp16, bf16, both fp8 types and int8.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from nvgemm_runtime.format import KernelDesign
from nvgemm_runtime.problem import DType, Layout, Signature
from nvgemm_runtime.target import Target

from .design import ONE_TILE
from .gap import Check, Gap

_FP8 = (DType.FP8_E4M3, DType.FP8_E5M2)
_INT8 = (DType.INT8, DType.UINT8)

TENSOR_CORE_INSTRUCTIONS: dict[tuple[int, DType], str] = {
    **{(9, dtype): "HGMMA" for dtype in (DType.FP16, DType.BF16)},
    **{(9, dtype): "QGMMA" for dtype in _FP8},
    **{(9, dtype): "IGMMA" for dtype in _INT8},
    **{(10, dtype): "UTCHMMA" for dtype in (DType.FP16, DType.BF16)},
    **{(10, dtype): "UTCQMMA" for dtype in _FP8},
    **{(10, dtype): "UTCIMMA" for dtype in _INT8},
}
"""By major compute capability and element type of A: the one instruction that may multiply.

Kernels written for sm_80 multiply with HMMA or IMMA wherever they run, at a fraction of the speed:
they are not what these targets call for. The names stand in the instruction tables of NVIDIA's
CUDA Binary Utilities (Hopper, Blackwell); which dtype gives which was seen, a kernel of each.
"""

LOCAL_MEMORY_INSTRUCTIONS = frozenset({"LDL", "STL"})
"""Loads and stores of local memory (CUDA Binary Utilities): registers spill where these are."""

# `        /*0240*/              @!P1 BRA 0x300 ;`: offset, optional predicate, opcode, operands.
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P(?:[0-9]+|T)\s+)?([A-Z][A-Za-z0-9_.]*)([^;\n]*)",
    re.MULTILINE,
)
_TENSOR_CORE = re.compile(r"(?:UTC)?[A-Z]+MMA")
_IMMEDIATE = re.compile(r"(?<![\w\[\]])0x([0-9a-f]{1,8})\b")

_GMMA_TYPES = {
    "F32": DType.FP32,
    "F16": DType.FP16,
    "BF16": DType.BF16,
    "E4M3": DType.FP8_E4M3,
    "E5M2": DType.FP8_E5M2,
    "S8": DType.INT8,
    "U8": DType.UINT8,
}
"""Type modifiers of HGMMA, QGMMA and IGMMA: the accumulator's (none where it is int32), then A's
and B's; HGMMA has one for both, and none where both are fp16."""

_DESCRIPTOR_ACCUMULATOR = {0: DType.FP16, 1: DType.FP32, 2: DType.INT32}
_DESCRIPTOR_TYPES = {
    "UTCHMMA": {0: DType.FP16, 1: DType.BF16},
    "UTCQMMA": {0: DType.FP8_E4M3, 1: DType.FP8_E5M2},
    "UTCIMMA": {0: DType.UINT8, 1: DType.INT8},
}
"""Type codes in a tcgen05 instruction descriptor (PTX ISA, tcgen05, table "Instruction descriptor
format for .kind::tf32, .kind::f16, .kind::f8f6f4 and .kind::i8")."""


@dataclass(frozen=True, kw_only=True, order=True)
class Multiply:
    """What one tensor-core instruction multiplies.

    Attributes:
        m, n: Extents of the result. On SM100 they are the tile's; on SM90 several warp groups,
            each with 64 rows, may share a tile.
        layout: Majors of its operands as it reads them: ``t`` for A along k and for B along n.
        a, b, accumulator: Element types.
    """

    m: int
    n: int
    layout: Layout
    a: DType
    b: DType
    accumulator: DType

    def __str__(self) -> str:
        types = f"{self.a.value}x{self.b.value}/{self.accumulator.value}"
        return f"m{self.m}n{self.n} {self.layout.value} {types}"

    @property
    def transposed(self) -> Multiply:
        """The multiplication whose result is this one's transposed: C.T = B.T @ A.T."""
        return Multiply(
            m=self.n,
            n=self.m,
            layout=_layout(
                a_row_major=not self.layout.b_row_major, b_row_major=not self.layout.a_row_major
            ),
            a=self.b,
            b=self.a,
            accumulator=self.accumulator,
        )


@dataclass(frozen=True, kw_only=True)
class Disassembly:
    """What a kernel's disassembly shows.

    Attributes:
        tensor_core: Tensor-core instructions with their modifiers, and how many of each.
        local_memory: Instructions that access local memory, and how many of each.
        multiplies: What the tensor-core instructions multiply, as far as the code shows it.
    """

    tensor_core: dict[str, int]
    local_memory: dict[str, int]
    multiplies: frozenset[Multiply]


def read_disassembly(text: str) -> Disassembly:
    """Read what ``nvdisasm -c`` prints for one cubin."""
    tensor_core: Counter[str] = Counter()
    local_memory: Counter[str] = Counter()
    warp_group: set[tuple[str, bool, bool]] = set()
    immediates: set[int] = set()
    for opcode, operands in _INSTRUCTION.findall(text):
        name = opcode.partition(".")[0]
        if _TENSOR_CORE.fullmatch(name):
            tensor_core[opcode] += 1
            warp_group.add((opcode, ".tnspA" in operands, ".tnspB" in operands))
        elif name in LOCAL_MEMORY_INSTRUCTIONS:
            local_memory[opcode] += 1
        immediates |= {int(digits, 16) for digits in _IMMEDIATE.findall(operands)}
    names = {opcode.partition(".")[0] for opcode in tensor_core}
    return Disassembly(
        tensor_core=dict(sorted(tensor_core.items())),
        local_memory=dict(sorted(local_memory.items())),
        multiplies=frozenset([*_from_modifiers(warp_group), *_from_descriptors(names, immediates)]),
    )


def check_disassembly(
    code: Disassembly, *, target: Target, signature: Signature, design: KernelDesign
) -> Iterator[Gap]:
    """Check that device code computes what its entry says, with the instruction meant for it.

    Yields:
        What does not hold.
    """
    for opcode, count in code.local_memory.items():
        yield Gap(
            check=Check.LOCAL_MEMORY, message=f"{count} x {opcode}: registers spill, must be none"
        )
    major = target.capability[0]
    wanted = TENSOR_CORE_INSTRUCTIONS.get((major, signature.a))
    if wanted is None:
        known = sorted({f"{dtype.value} on sm_{m}x" for m, dtype in TENSOR_CORE_INSTRUCTIONS})
        yield Gap(
            check=Check.TENSOR_CORE,
            message=f"no rule for {signature.a.value} on {target.arch} (known: {', '.join(known)})",
        )
        return
    observed = {opcode.partition(".")[0] for opcode in code.tensor_core}
    if observed != {wanted}:
        shown = ", ".join(sorted(observed)) or "no tensor-core instruction"
        yield Gap(
            check=Check.TENSOR_CORE,
            message=f"multiplies with {shown}; {signature.a.value} on {target.arch} calls for "
            f"{wanted}",
        )
        return
    yield from _check_pairs(code, major, design)
    yield from _check_multiplies(code, major, signature, design)


def _check_pairs(code: Disassembly, major: int, design: KernelDesign) -> Iterator[Gap]:
    """Check the modifier of tcgen05 instructions that pairs of thread blocks issue."""
    ctas = {2 if "2CTA" in opcode.split(".") else 1 for opcode in code.tensor_core}
    if ctas != {design.ctas_per_tile}:
        wanted = "every" if design.ctas_per_tile == 2 else "no"
        yield Gap(
            check=Check.CTAS_PER_TILE,
            message=f"multiplies with {', '.join(code.tensor_core)}; its entry says "
            f"{design.ctas_per_tile} thread blocks a tile, so {wanted} instruction is 2CTA",
        )


def _check_multiplies(
    code: Disassembly, major: int, signature: Signature, design: KernelDesign
) -> Iterator[Gap]:
    tile_m, tile_n, _ = design.tile
    types = (signature.a, signature.b, signature.accumulator)
    if not code.multiplies:
        yield Gap(
            check=Check.OPERAND_TYPES,
            message=f"{', '.join(code.tensor_core)} show no operand types to compare with "
            f"{signature.key}",
        )
    for observed in sorted(code.multiplies):
        # What it is of the problem that the signature names, and not of the transposed one.
        multiply = observed.transposed if design.scheduler == ONE_TILE else observed
        if (multiply.a, multiply.b, multiply.accumulator) != types:
            yield Gap(
                check=Check.OPERAND_TYPES,
                message=f"multiplies {multiply}, its signature is {signature.key}",
            )
        if multiply.layout is not signature.layout:
            yield Gap(
                check=Check.OPERAND_LAYOUT,
                message=f"multiplies {multiply}, its signature is {signature.key}",
            )
        if major == 9:
            fits = multiply.n == tile_n and tile_m % multiply.m == 0
        else:
            fits = (multiply.m, multiply.n) == (tile_m, tile_n)
        if not fits:
            yield Gap(
                check=Check.INSTRUCTION_TILE,
                message=f"multiplies {multiply}, its entry says tile {tile_m}x{tile_n}",
            )


def _layout(*, a_row_major: bool, b_row_major: bool) -> Layout:
    return Layout(("t" if a_row_major else "n") + ("t" if b_row_major else "n"))


def _from_modifiers(instructions: set[tuple[str, bool, bool]]) -> Iterator[Multiply]:
    """Read ``HGMMA.64x64x16.F32.BF16`` and its like; SM90 shows all in the instruction.

    An operand that is not contiguous along k has the suffix ``.tnspA`` or ``.tnspB``; 8-bit ones
    have no such form.
    """
    for opcode, a_transposed, b_transposed in instructions:
        name, *modifiers = opcode.split(".")
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
            layout=_layout(a_row_major=not a_transposed, b_row_major=b_transposed),
            a=types[0],
            b=types[-1],
            accumulator=accumulator,
        )


def _from_descriptors(names: set[str], immediates: set[int]) -> Iterator[Multiply]:
    """Find tcgen05 instruction descriptors among the constants of the code.

    On SM100 an instruction takes types and extents from a descriptor in a register, which the code
    builds from a constant. Few constants fit the format: each of 85 kernels shows its own types,
    majors and tile, and nothing else. Bits 15 and 16 say that A and B are not contiguous along k.
    """
    for name in names & _DESCRIPTOR_TYPES.keys():
        for value in immediates:
            reserved = value & (1 << 6 | 1 << 23 | 0b111 << 29 | 0b111)  # and sparsity
            a = _DESCRIPTOR_TYPES[name].get(value >> 7 & 0b111)
            b = _DESCRIPTOR_TYPES[name].get(value >> 10 & 0b111)
            accumulator = _DESCRIPTOR_ACCUMULATOR.get(value >> 4 & 0b11)
            m, n = (value >> 24 & 0b11111) << 4, (value >> 17 & 0b111111) << 3
            if reserved or not n or m not in (64, 128, 256):
                continue
            if a is not None and b is not None and accumulator is not None:
                layout = _layout(a_row_major=not value >> 15 & 1, b_row_major=bool(value >> 16 & 1))
                yield Multiply(m=m, n=n, layout=layout, a=a, b=b, accumulator=accumulator)
