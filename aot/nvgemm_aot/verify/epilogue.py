"""What a kernel does with its products before it stores them, as far as disassembled code shows it.

The tables rest on the disassembly (nvdisasm 13.5) of kernels that cutlass-dsl 4.8.1 compiled: those
of `tensor_core`, and for each epilogue several tiles, layouts and element types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nvgemm_runtime.gemm.epilogue import Activation
from nvgemm_runtime.gemm.problem import DType, Signature

from .findings import Check, Gap

_RESULTS = {
    "F2FP.BF16.F32": DType.BF16,
    "F2FP.F16.F32": DType.FP16,
    "F2FP.SATFINITE.E4M3.F32": DType.FP8_E4M3,
    "F2FP.SATFINITE.E5M2.F32": DType.FP8_E5M2,
    "I2FP.F32.S32": DType.FP32,
}
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
    """What of an epilogue is seen in a kernel.

    Attributes:
        half_precision: Instructions that compute in 16 bits.
        maximum: Whether it takes maxima of fp32 numbers.
        drops_nan: Whether it does so by an instruction that gives the other operand for NaN, where
            torch gives NaN.
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


def check_epilogue_code(code: EpilogueCode, signature: Signature) -> Iterator[Gap]:
    """Check that sums are finished in the accumulator's type, and become what they should.

    Yields:
        What does not hold.
    """
    if code.half_precision:
        yield Gap(
            check=Check.EPILOGUE,
            message=f"computes with {', '.join(sorted(code.half_precision))}: an epilogue must "
            f"compute in {signature.accumulator.value} and round once",
        )
    if code.drops_nan:
        yield Gap(
            check=Check.EPILOGUE,
            message="takes maxima by FMNMX, which drops NaN: relu of NaN must be NaN",
        )
    wanted = signature.epilogue.activation if signature.epilogue is not None else None
    if code.activation is not wanted:
        yield Gap(
            check=Check.EPILOGUE,
            message=f"computes what {_words(code.activation)} takes, its signature is "
            f"{signature.key}: {_words(wanted)}",
        )
    results = _results(signature)
    if code.results != results:
        yield Gap(
            check=Check.RESULT_TYPE,
            message=f"turns sums into {_listed(code.results)}, its signature is {signature.key}: "
            f"{_listed(results)}",
        )


def _results(signature: Signature) -> frozenset[DType]:
    """What sums must be turned into; nothing where they are stored as they are, or cut (int8)."""
    kept = (signature.accumulator, DType.INT8, DType.UINT8)
    return frozenset() if signature.out in kept else frozenset({signature.out})


def _words(activation: Activation | None) -> str:
    return activation.value if activation is not None else "no activation"


def _listed(results: frozenset[DType]) -> str:
    return ", ".join(sorted(dtype.value for dtype in results)) or "nothing else"
