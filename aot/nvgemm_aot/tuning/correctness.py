"""What results must be, element by element, and whether too many kernels fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvgemm_runtime.gemm.epilogue import Activation
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import Role, extra_roles

from .operands import block_scaled_product
from .outcome import TuningOutcome, contender_name

if TYPE_CHECKING:
    import torch

FRACTION_BITS = 23
"""Bits behind the leading one that an accumulator of products of 16-bit floats keeps at least:
those of fp32, the type that it is written into. No document says so. It rests on an H200: at 120
random sizes each of bf16 and fp16, m and n up to 16384 and k up to 65536, every right kernel passed
(benchmarks/results/correctness-h200-2026-11-22.txt). For Blackwell it is assumed."""

FRACTION_BITS_OF_FEW = 13
"""Likewise of values of 8 bits and less: Hopper's tensor cores keep 14 bits in all for sums of fp8
(arXiv 2412.19437, section 3.3.2). Blackwell's were not seen; as many are assumed."""

CUTS_PER_PRODUCT = 3
"""How often bits are dropped for each product: from it, from the sum so far, and from the new sum.
Each time it is less than the last bit kept of the largest value among them, and none of these is
larger than the sum of all magnitudes."""

EPILOGUE_ERROR = 4 * 2.0**-24
"""Relative error of what follows the sum in fp32: both scales, their product, and the addition."""

CURVE_ERROR = 2.0**-10
"""Error of an activation with tanh or sigmoid, over the value that goes into it: twice the 2**-11
that PTX states of ``tanh.approx.f32``."""

STEEPEST = 1.2
"""Upper bound of the slopes of the activations, by which they pass an error on (1.13 of gelu)."""

LIKENESS = 0.05
"""Norm of the difference, over that of the result, up to which torch's own result is taken: it may
sum in parts that are rounded to the output's type, and programs get it in stock torch."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a result must be, element by element.

    Attributes:
        low: The least right value, in the output's type; NaN where the result must be NaN.
        high: The largest one.
    """

    low: torch.Tensor
    high: torch.Tensor


def expect(operands: Sequence[torch.Tensor], signature: Signature, *, terms: int) -> Expected:
    """What a result of these operands must be.

    Args:
        operands: See `operands.Operands`.
        signature: What is computed.
        terms: How many products of an element are not zero, at most. 0 where every sum and every
            partial sum has an exact value in the accumulator, and so no error is allowed.
    """
    value = _before_activation(operands, signature)
    error = value.new_zeros(())
    if terms:
        magnitude = _before_activation(operands, signature, of_magnitudes=True)
        error = sum_error(magnitude, signature, terms=terms)
    error = activation_error(error, value, signature)
    activation = signature.epilogue.activation if signature.epilogue is not None else None
    if activation is not None:
        value = _ACTIVATIONS[activation](value)
    return expect_between(value, error, torch_dtype(signature.out))


def sum_error(magnitude: torch.Tensor, signature: Signature, *, terms: int) -> torch.Tensor:
    """Largest error of sums of products, with scales and addend.

    Args:
        magnitude: The sums of all magnitudes, in fp64.
        signature: What is computed.
        terms: How many products of an element are not zero, at most.
    """
    bits = FRACTION_BITS_OF_FEW if signature.a.bits <= 8 else FRACTION_BITS
    return magnitude * (CUTS_PER_PRODUCT * terms * 2.0**-bits + EPILOGUE_ERROR)


def activation_error(
    error: torch.Tensor, value: torch.Tensor, signature: Signature
) -> torch.Tensor:
    """Largest error behind a signature's activation, if it has one.

    Args:
        error: That of what goes into it.
        value: What goes into it.
        signature: What is computed.
    """
    activation = signature.epilogue.activation if signature.epilogue is not None else None
    return STEEPEST * error + CURVE_ERROR * value.abs() if activation in _CURVES else error


def expect_between(value: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> Expected:
    """What ``value``, known to an absolute error, rounds to.

    Args:
        value: In fp64, any shape.
        error: In fp64, of a shape that broadcasts to it, at least 0 where the value is finite.
        dtype: Of the output.
    """
    import torch

    exact = ~value.isfinite()
    ends = (torch.where(exact, value, end) for end in (value - error, value + error))
    low, high = (end.to(dtype) for end in ends)
    return Expected(low=low, high=high)


def reference(operands: Sequence[torch.Tensor], signature: Signature) -> torch.Tensor:
    """``f(scale_a * scale_b * (a @ b) + addend)`` in fp64, exact for whole numbers.

    Args:
        operands: See `operands.Operands`.
        signature: What is computed.
    """
    value = _before_activation(operands, signature)
    activation = signature.epilogue.activation if signature.epilogue is not None else None
    return value if activation is None else _ACTIVATIONS[activation](value)


def _before_activation(
    operands: Sequence[torch.Tensor], signature: Signature, *, of_magnitudes: bool = False
) -> torch.Tensor:
    """``scale_a * scale_b * (a @ b) + addend``, or the same of A, B and addend without signs."""
    a, b, _, *extras = operands
    if signature.scales is not None and signature.scales.block is not None:
        scale_a, scale_b = extras  # nothing is added behind them (`nvgemm_runtime.gemm.support`)
        return block_scaled_product(a, b, scale_a, scale_b, signature, of_magnitudes=of_magnitudes)

    def values(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double().abs_() if of_magnitudes else tensor.double()

    given = dict(zip(extra_roles(signature), extras))
    if signature.op is Op.GROUPED_MM:
        return _product_of_groups(values(a), values(b), given[Role.OFFSETS])
    result = values(a) @ values(b)
    for role in (Role.SCALE_A, Role.SCALE_B):
        if role in given:
            result *= given[role].double()
    if signature.epilogue is not None:
        result += values(given[Role.ADDEND])
    return result


def _product_of_groups(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    result = a.new_empty((a.shape[0], b.shape[-1]))
    begin = 0
    for group, end in enumerate(offsets.tolist()):
        result[begin:end] = a[begin:end] @ b[group]
        begin = end
    return result


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + ((2.0 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.RELU: lambda x: x.clamp(min=0.0),
    Activation.GELU_TANH: _gelu_tanh,
    Activation.SILU: lambda x: x * x.sigmoid(),
}

_CURVES = (Activation.GELU_TANH, Activation.SILU)


def find_fault(out: torch.Tensor, expected: Expected) -> str | None:
    """What is wrong with a result, or None.

    Args:
        out: The result.
        expected: What it must be.
    """
    found, low, high = out.double(), expected.low.double(), expected.high.double()
    right = (found >= low) & (found <= high)
    right |= found.isnan() & low.isnan()
    wrong = int((~right).sum())
    if not wrong:
        return None
    place = (~right).nonzero()[0].tolist()
    example = [f"{float(one[tuple(place)]):.6g}" for one in (found, low, high)]
    allowed = example[1] if example[1] == example[2] else f"{example[1]} to {example[2]}"
    return (
        f"{wrong} of {out.numel()} elements are wrong; that at {place} is {example[0]}, must be "
        f"{allowed}"
    )


def is_like(out: torch.Tensor, expected: Expected) -> bool:
    """Whether a result of torch's own is the same computation; what must be NaN does not count."""
    low, high = expected.low.double(), expected.high.double()
    wanted = (low + high) / 2
    difference = (out.double() - wanted)[~low.isnan()]
    return bool(difference.norm() <= LIKENESS * wanted[~low.isnan()].norm())


MOST_SHARE = 0.5
"""Share of a bundle's kernels beyond which it is suspect that they are wrong."""

_EXAMPLES = 5
"""Signatures that are named, each with one fault."""


def thrown_out(outcomes: Mapping[str, TuningOutcome], broken: Mapping[str, str]) -> dict[str, str]:
    """By id, kernels that no bundle may have, and what is wrong with each.

    Args:
        outcomes: By problem key.
        broken: By name, contenders that left the GPU unusable, and how.
    """
    wrong = {
        id_: f"{key}: {fault}"
        for key, outcome in outcomes.items()
        for id_, fault in outcome.wrong.items()
    }
    return wrong | dict(broken)


def suspicion(kernels: Iterable[tuple[str, Signature]], wrong: Mapping[str, str]) -> str | None:
    """Why a tuning is suspect, or None.

    Args:
        kernels: Ids and signatures of all kernels that there are.
        wrong: By id, what is wrong with those that were thrown out.
    """
    by_signature: dict[Signature, list[str]] = {}
    for id_, signature in kernels:
        by_signature.setdefault(signature, []).append(id_)
    ids = [id_ for some in by_signature.values() for id_ in some]
    gone = [id_ for id_ in ids if id_ in wrong]
    lost = {
        signature: some
        for signature, some in by_signature.items()
        if all(id_ in wrong for id_ in some)
    }
    if not lost and len(gone) <= MOST_SHARE * len(ids):
        return None
    head = f"{len(gone)} of {len(ids)} kernels were thrown out"
    if not lost:
        return "; ".join([f"{head}, more than half", *_examples(gone[:1], wrong)])
    named = [
        f"all {len(some)} of {signature.key}, {_examples(some[:1], wrong)[0]}"
        for signature, some in [*lost.items()][:_EXAMPLES]
    ]
    if len(lost) > _EXAMPLES:
        named.append(f"all of {len(lost) - _EXAMPLES} more signatures")
    return f"{head}, among them {'; '.join(named)}"


def _examples(ids: Sequence[str], wrong: Mapping[str, str]) -> list[str]:
    return [f"{contender_name(id_)} for {wrong[id_]}" for id_ in ids]
