"""Reads a kernel's epilogue from disassembled code.

The tables rest on the disassembly (nvdisasm 13.5) of kernels compiled by cutlass-dsl 4.8.1: those
from `tensor_core`, and for each epilogue several tiles, layouts and element types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nvgemm_runtime.gemm.epilogues import Activation, Gate
from nvgemm_runtime.gemm.problem import DType, Signature

from ..findings import Check, Finding

_RESULTS = {dtype.row.rounded_by: dtype for dtype in DType if dtype.row.rounded_by}
"""Result dtypes by the start of the instruction that converts sums to them."""

_HALF_PRECISION = frozenset({"HADD2", "HFMA2", "HMUL2", "HMNMX2"})
"""Arithmetic on 16-bit number pairs. ``HADD2.F32`` only widens them, and HFMA2 on zeros (``-RZ,
RZ``) only loads a constant."""

_MAXIMUM_THAT_KEEPS_NAN = "FSETP.GEU"
"""Comparison for a maximum (a selection follows) that also holds for NaN."""

_RELU = "RELU"
"""Conversion modifier that turns negative values into 0. NaN stays NaN (PTX ISA, ``cvt``,
``.relu``)."""

_GELU_CONSTANT = "0.0447149"
"""First digits of the constant 0.044715 in GELU's tanh form, as an fp32 number."""

_CURVES = frozenset({"EX2", "TANH"})
"""MUFU modifiers that compute an activation's curve."""

_PAIRS = frozenset({"PACK_AB"})
"""Modifiers for converting two fp32 numbers into one register."""

_ALPHAS = {f"{gate.row.alpha:.6f}": gate for gate in Gate if gate.row.alpha != 1}
"""Gates by the first digits of their own constant, as an fp32 number."""


@dataclass(frozen=True, kw_only=True)
class EpilogueCode:
    """Epilogue facts shown by a kernel's code.

    Attributes:
        half_precision: Instructions that compute in 16 bits.
        drops_nan: True if its maximum instruction returns the other operand for NaN, where torch
            returns NaN.
        activation: Activation that the code resembles.
        results: Dtypes that sums are converted to; empty if they are stored unconverted.
        gate: Gate whose constant the code has. Other gates show as their activation, which no
            epilogue without a gate applies to a bare product.
        curves: Number of exponentials and hyperbolic tangents: one per gate.
        rounded: Number of values rounded to 16 bits, two per instruction.
    """

    half_precision: frozenset[str]
    drops_nan: bool
    activation: Activation | None
    results: frozenset[DType]
    gate: Gate | None = None
    curves: int = 0
    rounded: int = 0


def read_epilogue_code(instructions: Iterable[tuple[str, str]]) -> EpilogueCode:
    """Reads epilogue facts from instructions, each an opcode and its operands."""
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
        gate = next(
            (known_gate for start, known_gate in _ALPHAS.items() if start in operands), gate
        )
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
    """Checks that the epilogue computes in the accumulator dtype, and checks its result dtype."""
    if code.half_precision:
        yield Check.EPILOGUE.finding(
            f"computes with {', '.join(sorted(code.half_precision))}: an epilogue must "
            f"compute in {signature.accumulator.value} and round once"
        )
    if code.drops_nan:
        yield Check.EPILOGUE.finding(
            "takes maxima by FMNMX, which drops NaN: relu of NaN must be NaN"
        )
    activation = signature.epilogue.activation if signature.epilogue is not None else None
    if code.activation is not activation:
        yield Check.EPILOGUE.finding(
            f"computes {_activation_name(code.activation)}, its signature is "
            f"{signature.key}: {_activation_name(activation)}"
        )
    gate = signature.epilogue.gate if signature.epilogue is not None else None
    gate = gate if gate in _ALPHAS.values() else None
    if code.gate is not gate:
        yield Check.EPILOGUE.finding(
            f"has the constant of {_gate_name(code.gate)}, its signature is {signature.key}: must "
            f"have that of {_gate_name(gate)}"
        )
    yield from _check_form(code, signature)
    stored_as_they_are = (signature.accumulator, DType.INT8, DType.UINT8)  # integers truncate
    results = frozenset({signature.out} - {*stored_as_they_are})
    if code.results != results:
        yield Check.RESULT_TYPE.finding(
            f"converts sums to {_type_names(code.results)}, its signature is "
            f"{signature.key}: {_type_names(results)}"
        )


def _check_form(code: EpilogueCode, signature: Signature) -> Iterator[Finding]:
    """Checks how many values are stored per gate.

    The number tells forms apart, except gradient and ups, which both store two.
    """
    form = signature.form
    if form is None or not code.curves:
        return  # no form, or reported elsewhere
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
