"""Checks disassembled device code: tensor-core instructions, their operands, and spills.

`tensor_core` reads these instructions' operands, `stored_values` the code that follows, and `order`
how thread blocks and kernels wait for each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.gemm.problem import DType, Signature
from nvgemm_runtime.gemm.target import MMA_BY_MAJOR, Target
from nvgemm_runtime.gemm.types import Mma

from ..findings import Check, Finding
from .kernel_design import computes_transposed
from .order import OrderCode, check_order_code, read_order_code
from .stored_values import EpilogueCode, check_epilogue_code, read_epilogue_code
from .tensor_core import Instruction, Multiply, read_multiplies, warp_types

TENSOR_CORE_INSTRUCTIONS: dict[tuple[int, DType], str] = {
    (major, dtype): dtype.row.multiplied_by[mma]
    for dtype in DType
    for major, mma in MMA_BY_MAJOR.items()
    if mma in dtype.row.multiplied_by
}
"""Allowed multiplying instruction, by major compute capability and element dtype of A.

Kernels written for sm_80 multiply with HMMA or IMMA wherever they run, at a fraction of the speed,
so these targets do not allow them."""

LOCAL_MEMORY_INSTRUCTIONS = frozenset({"LDL", "STL"})
"""Loads and stores in local memory (CUDA Binary Utilities), which mean spilled registers."""

_SUM_CHECKS = frozenset({Check.SPLITS, Check.DETERMINISM})
"""Checks about thread blocks that add to a tile's sum."""

# `        /*0240*/              @!P1 BRA 0x300 ;`: offset, optional predicate, opcode, operands.
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P(?:[0-9]+|T)\s+)?([A-Z][A-Za-z0-9_.]*)([^;\n]*)",
    re.MULTILINE,
)
_TENSOR_CORE = re.compile(r"(?:UTC)?[A-Z]+MMA")
_IMMEDIATE = re.compile(r"(?<![\w\[\]])0x([0-9a-f]{1,8})\b")


@dataclass(frozen=True, kw_only=True)
class Disassembly:
    """Evidence in a kernel's disassembly.

    Attributes:
        tensor_core: Tensor-core instructions with their modifiers, and their counts.
        local_memory: Instructions that access local memory, and their counts.
        scaled: True for tensor-core instructions that take block scales; both values if mixed.
        multiplies: Tensor-core instruction operands, as far as the code shows them.
        epilogue: Epilogue applied to the products.
        order: Evidence for waits between thread blocks, and between kernels.
    """

    tensor_core: dict[str, int]
    local_memory: dict[str, int]
    scaled: frozenset[bool]
    multiplies: frozenset[Multiply]
    epilogue: EpilogueCode
    order: OrderCode


def read_disassembly(text: str) -> Disassembly:
    """Reads ``nvdisasm -c`` output for a cubin."""
    tensor_core: Counter[str] = Counter()
    local_memory: Counter[str] = Counter()
    multiplying: set[Instruction] = set()
    immediates: set[int] = set()
    instructions = _INSTRUCTION.findall(text)
    for opcode, operands in instructions:
        name = opcode.partition(".")[0]
        if _TENSOR_CORE.fullmatch(name):
            tensor_core[opcode] += 1
            multiplying.add(Instruction(opcode, operands))
        elif name in LOCAL_MEMORY_INSTRUCTIONS:
            local_memory[opcode] += 1
        immediates |= {int(digits, 16) for digits in _IMMEDIATE.findall(operands)}
    return Disassembly(
        tensor_core=dict(sorted(tensor_core.items())),
        local_memory=dict(sorted(local_memory.items())),
        scaled=frozenset(instruction.scaled for instruction in multiplying),
        multiplies=read_multiplies(multiplying, immediates),
        epilogue=read_epilogue_code(instructions),
        order=read_order_code(instructions),
    )


def check_disassembly(
    code: Disassembly,
    *,
    target: Target,
    signature: Signature,
    design: KernelDesign,
    is_deterministic: bool = True,
    provider: str = "cutlass_operators",
) -> Iterator[Finding]:
    """Checks that device code computes what its entry says, with the intended instruction.

    ``provider`` is the kernel's; `computes_transposed` needs it to read the design.
    """
    for finding in check_order_code(code.order, design, is_deterministic=is_deterministic):
        # Known kernels that split k add floats atomically. Others may share a sum another way.
        is_shared_otherwise = finding.check in _SUM_CHECKS and not code.order.adds_floats
        yield replace(finding, is_unseen=True) if is_shared_otherwise else finding
    for opcode, count in code.local_memory.items():
        yield Check.LOCAL_MEMORY.finding(f"{count} x {opcode}: registers spill, must be none")
    if not signature.a.is_operand:
        if code.tensor_core:
            yield Check.TENSOR_CORE.finding(
                f"multiplies with {', '.join(code.tensor_core)}; no tensor core multiplies "
                f"{signature.a.value}, and {signature.key} calls for none"
            )
        yield from check_epilogue_code(code.epilogue, signature)
        return
    major = target.capability[0]
    expected = TENSOR_CORE_INSTRUCTIONS.get((major, signature.a))
    if expected is None:
        known = sorted({f"{dtype.value} on sm_{m}x" for m, dtype in TENSOR_CORE_INSTRUCTIONS})
        yield Check.TENSOR_CORE.finding(
            f"no rule for {signature.a.value} on {target.arch} (known: {', '.join(known)})"
        )
        return
    observed = {opcode.partition(".")[0] for opcode in code.tensor_core}
    if observed != {expected}:
        shown = ", ".join(sorted(observed)) or "no tensor-core instruction"
        yield Check.TENSOR_CORE.unseen(
            f"multiplies with {shown}; {signature.a.value} on {target.arch} calls for {expected}, "
            "the one instruction that shows layouts and tile"
        )
        if observed:
            yield from _check_warp_types(code, signature)
            yield from check_epilogue_code(code.epilogue, signature)
        return
    yield from _check_pairs(code, design)
    yield from _check_multiplies(code, MMA_BY_MAJOR[major], signature, design, provider)
    yield from check_epilogue_code(code.epilogue, signature)


def _check_warp_types(code: Disassembly, signature: Signature) -> Iterator[Finding]:
    """Compares the dtypes that a warp's floating-point instruction shows, if it is used."""
    types = (signature.a, signature.b, signature.accumulator)
    for opcode in code.tensor_core:
        shown = warp_types(opcode)
        if shown is not None and shown != types:
            yield Check.OPERAND_TYPES.finding(
                f"multiplies {shown[0].value}x{shown[1].value} into {shown[2].value} ({opcode}), "
                f"its signature is {signature.key}"
            )


def _check_pairs(code: Disassembly, design: KernelDesign) -> Iterator[Finding]:
    ctas = {2 if "2CTA" in opcode.split(".") else 1 for opcode in code.tensor_core}
    if ctas != {design.ctas_per_tile}:
        quantifier = "every" if design.ctas_per_tile == 2 else "no"
        yield Check.CTAS_PER_TILE.finding(
            f"multiplies with {', '.join(code.tensor_core)}; its entry says "
            f"{design.ctas_per_tile} thread blocks a tile, so {quantifier} instruction is 2CTA"
        )


def _check_multiplies(
    code: Disassembly, mma: Mma, signature: Signature, design: KernelDesign, provider: str
) -> Iterator[Finding]:
    tile_m, tile_n, _ = design.tile
    types = (signature.a, signature.b, signature.accumulator)
    scales = signature.scales if signature.scales and signature.scales.is_swizzled else None
    if code.scaled != {scales is not None}:
        yield Check.BLOCK_SCALES.finding(
            f"{_quantifier(code.scaled)} of {', '.join(code.tensor_core)} take block "
            f"scales, its signature is {signature.key}: {_quantifier({scales is not None})} must"
        )
    if not code.multiplies:
        yield Check.OPERAND_TYPES.finding(
            f"{', '.join(code.tensor_core)} show no operand types to compare with {signature.key}"
        )
    for observed in sorted(code.multiplies, key=str):
        swapped = computes_transposed(design, provider)
        multiply = observed.transposed if swapped else observed
        differences = {
            Check.OPERAND_TYPES: (multiply.a, multiply.b, multiply.accumulator) != types,
            Check.BLOCK_SCALES: multiply.scales and scales and multiply.scales is not scales,
            Check.OPERAND_LAYOUT: multiply.layout is not signature.layout,
        }
        for check, differs in differences.items():
            if differs:
                yield check.finding(f"multiplies {multiply}, its signature is {signature.key}")
        if mma is Mma.WGMMA:
            # A tile spans the instruction's whole n and several m, transposed or not.
            m, n = (tile_n, tile_m) if swapped else (tile_m, tile_n)
            fits = observed.n == n and m % observed.m == 0
        else:
            assert mma is Mma.TCGEN05, f"{mma} has no rule for the tile of its instructions"
            fits = (multiply.m, multiply.n) == (tile_m, tile_n)
        if not fits:
            fault = f"multiplies {multiply}, its entry says tile {tile_m}x{tile_n}"
            # Known kernels issue one instruction along n, so several mean an unknown kernel.
            is_part = not tile_m % multiply.m and not tile_n % multiply.n
            check = Check.INSTRUCTION_TILE
            yield check.unseen(fault) if is_part else check.finding(fault)


def _quantifier(scaled: Set[bool]) -> str:
    return {frozenset({True}): "all", frozenset({False}): "none"}.get(frozenset(scaled), "some")
