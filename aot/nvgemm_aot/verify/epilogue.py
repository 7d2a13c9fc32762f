"""Reads from disassembled code what a kernel does with its products before it stores them.

The tables rest on the disassembly (nvdisasm 13.5) of kernels that cutlass-dsl 4.8.1 compiled: those
of `tensor_core`, and for each epilogue several tiles, layouts and element types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nvgemm_runtime.gemm.epilogues import Activation, Gate
from nvgemm_runtime.gemm.problem import DType, Signature

from .findings import Check, Finding

_RESULTS = {dtype.row.rounded_by: dtype for dtype in DType if dtype.row.rounded_by}
"""How an instruction begins that turns sums into results, and which ones."""

_HALF_PRECISION = frozenset({"HADD2", "HFMA2", "HMUL2", "HMNMX2"})
"""Arithmetic on pairs of 16-bit numbers. ``HADD2.F32`` only widens them, and HFMA2 of zeros
(``-RZ, RZ``) only loads a constant."""

_MAXIMUM_THAT_KEEPS_NAN = "FSETP.GEU"
"""Comparison of a maximum (a selection follows) that also holds for NaN."""

_RELU = "RELU"
"""Modifier of a conversion that turns what is negative into 0. NaN stays NaN (PTX ISA, ``cvt``,
``.relu``)."""

_GELU_CONSTANT = "0.0447149"
"""How the constant 0.044715 of the tanh form of GELU begins, as an fp32 number."""

_CURVES = frozenset({"EX2", "TANH"})
"""Modifiers of MUFU that compute the curve of an activation."""

_PAIRS = frozenset({"PACK_AB"})
"""Modifiers of a conversion of two fp32 numbers into one register."""

_ALPHAS = {f"{gate.row.alpha:.6f}": gate for gate in Gate if gate.row.alpha != 1}
"""How a gate's own constant begins, as an fp32 number."""


@dataclass(frozen=True, kw_only=True)
class EpilogueCode:
    """What the code of a kernel shows of its epilogue.

    Attributes:
        half_precision: Instructions that compute in 16 bits.
        drops_nan: Whether its instruction for maxima gives the other operand for NaN, where torch
            gives NaN.
        activation: The activation that the code looks like.
        results: Types that sums are turned into: none where they are stored as they are.
        gate: The gate whose constant the code has. Other gates show as their activation, which no
            epilogue without a gate applies to a bare product.
        curves: How many exponentials and hyperbolic tangents are taken: one for each gate.
        rounded: How many values are rounded to 16 bits, two by one instruction.
    """

    half_precision: frozenset[str]
    drops_nan: bool
    activation: Activation | None
    results: frozenset[DType]
    gate: Gate | None = None
    curves: int = 0
    rounded: int = 0


def read_epilogue_code(instructions: Iterable[tuple[str, str]]) -> EpilogueCode:
    """Read what instructions, each an opcode and its operands, do with products."""
    half_precision = set()
    names = set()
    results = set()
    gate: Gate | None = None
    gelu_constant = keeps_nan = drops_nan = False
    curves = rounded = 0
    for opcode, operands in instructions:
        name, *modifiers = opcode.split(".")
        if name == "F2FP" and _RELU in modifiers:
            keeps_nan = True
            modifiers.remove(_RELU)
            opcode = ".".join([name, *modifiers])
        names.add(".".join([name, *modifiers[:1]]) if name == "MUFU" else name)
        curves += name == "MUFU" and not _CURVES.isdisjoint(modifiers)
        rounded += 2 * (name == "F2FP" and not _PAIRS.isdisjoint(modifiers))
        if name in _HALF_PRECISION and "F32" not in modifiers and "-RZ, RZ" not in operands:
            half_precision.add(opcode)
        results |= {
            dtype for start, dtype in _RESULTS.items() if f"{opcode}.".startswith(f"{start}.")
        }
        gelu_constant |= _GELU_CONSTANT in operands
        gate = next((one for start, one in _ALPHAS.items() if start in operands), gate)
        keeps_nan |= opcode.startswith(_MAXIMUM_THAT_KEEPS_NAN)
        drops_nan |= name.startswith("FMNMX") and "NAN" not in modifiers
    activation = None
    if not names.isdisjoint({f"MUFU.{curve}" for curve in _CURVES}):
        activation = Activation.GELU_TANH if gelu_constant else Activation.SILU
    elif keeps_nan or any(name.startswith("FMNMX") for name in names):
        activation = Activation.RELU
    return EpilogueCode(
        half_precision=frozenset(half_precision),
        drops_nan=drops_nan,
        activation=activation,
        results=frozenset(results),
        gate=gate,
        curves=curves,
        rounded=rounded,
    )


def check_epilogue_code(code: EpilogueCode, signature: Signature) -> Iterator[Finding]:
    """Check that the epilogue computes in the accumulator's type, and the type of its results."""
    if code.half_precision:
        yield Check.EPILOGUE.finding(
            f"computes with {', '.join(sorted(code.half_precision))}: an epilogue must "
            f"compute in {signature.accumulator.value} and round once"
        )
    if code.drops_nan:
        yield Check.EPILOGUE.finding(
            "takes maxima by FMNMX, which drops NaN: relu of NaN must be NaN"
        )
    wanted = signature.epilogue.activation if signature.epilogue is not None else None
    if code.activation is not wanted:
        yield Check.EPILOGUE.finding(
            f"computes what {_activation_name(code.activation)} takes, its signature is "
            f"{signature.key}: {_activation_name(wanted)}"
        )
    own = signature.epilogue.gate if signature.epilogue is not None else None
    own = own if own in _ALPHAS.values() else None
    if code.gate is not own:
        yield Check.EPILOGUE.finding(
            f"has the constant of {_gate_name(code.gate)}, its signature is {signature.key}: must "
            f"have that of {_gate_name(own)}"
        )
    yield from _check_form(code, signature)
    stored_as_they_are = (signature.accumulator, DType.INT8, DType.UINT8)  # the latter cut
    results = frozenset({signature.out} - {*stored_as_they_are})
    if code.results != results:
        yield Check.RESULT_TYPE.finding(
            f"turns sums into {_type_names(code.results)}, its signature is "
            f"{signature.key}: {_type_names(results)}"
        )


def _check_form(code: EpilogueCode, signature: Signature) -> Iterator[Finding]:
    """Check how many values are stored for each gate.

    That tells forms apart, but for a gradient and ups, of which both store two.
    """
    form = signature.form
    if form is None or not code.curves:
        return  # no form, or a finding of its own
    if code.rounded != code.curves * form.row.out_columns:
        yield Check.EPILOGUE.finding(
            f"rounds {code.rounded} values for {code.curves} gates, its signature is "
            f"{signature.key}: must round {form.row.out_columns} for each"
        )


def _activation_name(activation: Activation | None) -> str:
    return activation.value if activation is not None else "no activation"


def _gate_name(gate: Gate | None) -> str:
    return gate.value if gate is not None else "no gate"


def _type_names(results: frozenset[DType]) -> str:
    return ", ".join(sorted(dtype.value for dtype in results)) or "nothing else"
