"""Reads from disassembled code what a kernel does with its products before it stores them.

The tables rest on the disassembly (nvdisasm 13.5) of kernels that cutlass-dsl 4.8.1 compiled: those
of `tensor_core`, and for each epilogue several tiles, layouts and element types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nvgemm_runtime.gemm.problem import DType, Signature
from nvgemm_runtime.gemm.types import Activation

from .findings import Check, Finding

_RESULTS = {dtype.row.rounded_by: dtype for dtype in DType if dtype.row.rounded_by}
"""How an instruction begins that turns sums into results, and which ones."""

_HALF_PRECISION = frozenset({"HADD2", "HFMA2", "HMUL2", "HMNMX2"})
"""Arithmetic on pairs of 16-bit numbers. ``HADD2.F32`` only widens them, and HFMA2 of zeros
(``-RZ, RZ``) only loads a constant."""

_MAXIMUM_THAT_KEEPS_NAN = "FSETP.GEU"
"""Comparison of a maximum (a selection follows) that also holds for NaN."""

_GELU_CONSTANT = "0.0447149"
"""How the constant 0.044715 of the tanh form of GELU begins, as an fp32 number."""


@dataclass(frozen=True, kw_only=True)
class EpilogueCode:
    """What the code of a kernel shows of its epilogue.

    Attributes:
        half_precision: Instructions that compute in 16 bits.
        maximum: Whether it takes maxima of fp32 numbers.
        drops_nan: Whether the instruction for that gives the other operand for NaN, where torch
            gives NaN.
        exponential: Whether it takes exponentials or hyperbolic tangents.
        gelu_constant: Whether it multiplies by 0.044715.
        results: Types that sums are turned into: none where they are stored as they are.
    """

    half_precision: frozenset[str]
    maximum: bool
    drops_nan: bool
    exponential: bool
    gelu_constant: bool
    results: frozenset[DType]

    @property
    def activation(self) -> Activation | None:
        """The activation that the code looks like."""
        if self.exponential:
            return Activation.GELU_TANH if self.gelu_constant else Activation.SILU
        return Activation.RELU if self.maximum else None


def read_epilogue_code(instructions: Iterable[tuple[str, str]]) -> EpilogueCode:
    """Read what instructions, each an opcode and its operands, do with products."""
    half_precision = set()
    names = set()
    results = set()
    gelu_constant = keeps_nan = drops_nan = False
    for opcode, operands in instructions:
        name, *modifiers = opcode.split(".")
        names.add(".".join([name, *modifiers[:1]]) if name == "MUFU" else name)
        if name in _HALF_PRECISION and "F32" not in modifiers and "-RZ, RZ" not in operands:
            half_precision.add(opcode)
        results |= {
            dtype for start, dtype in _RESULTS.items() if f"{opcode}.".startswith(f"{start}.")
        }
        gelu_constant |= _GELU_CONSTANT in operands
        keeps_nan |= opcode.startswith(_MAXIMUM_THAT_KEEPS_NAN)
        drops_nan |= name.startswith("FMNMX") and "NAN" not in modifiers
    return EpilogueCode(
        half_precision=frozenset(half_precision),
        maximum=keeps_nan or any(name.startswith("FMNMX") for name in names),
        drops_nan=drops_nan,
        exponential=not names.isdisjoint({"MUFU.EX2", "MUFU.TANH"}),
        gelu_constant=gelu_constant,
        results=frozenset(results),
    )


def check_epilogue_code(code: EpilogueCode, signature: Signature) -> Iterator[Finding]:
    """Check that the epilogue computes in the accumulator's type, and the type of its results.

    Yields:
        What does not hold.
    """
    if code.half_precision:
        yield Finding(
            check=Check.EPILOGUE,
            message=f"computes with {', '.join(sorted(code.half_precision))}: an epilogue must "
            f"compute in {signature.accumulator.value} and round once",
        )
    if code.drops_nan:
        yield Finding(
            check=Check.EPILOGUE,
            message="takes maxima by FMNMX, which drops NaN: relu of NaN must be NaN",
        )
    wanted = signature.epilogue.activation if signature.epilogue is not None else None
    if code.activation is not wanted:
        yield Finding(
            check=Check.EPILOGUE,
            message=f"computes what {_activation_name(code.activation)} takes, its signature is "
            f"{signature.key}: {_activation_name(wanted)}",
        )
    results = _expected_results(signature)
    if code.results != results:
        yield Finding(
            check=Check.RESULT_TYPE,
            message=f"turns sums into {_type_names(code.results)}, its signature is "
            f"{signature.key}: {_type_names(results)}",
        )


def _expected_results(signature: Signature) -> frozenset[DType]:
    """Types that sums must be converted to; none if they are stored as they are or cut (int8)."""
    kept = (signature.accumulator, DType.INT8, DType.UINT8)
    return frozenset() if signature.out in kept else frozenset({signature.out})


def _activation_name(activation: Activation | None) -> str:
    return activation.value if activation is not None else "no activation"


def _type_names(results: frozenset[DType]) -> str:
    return ", ".join(sorted(dtype.value for dtype in results)) or "nothing else"
