"""Ranges of correct results, and the check for tunings that reject too many kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvgemm_runtime.errors import count_text
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import Role, extra_roles, has_sums

from ...rankings.agreement import contender_name
from ..outcome import TuningOutcome
from .block_scales import block_scaled_product
from .gate_results import row_sums, stored, stored_error

if TYPE_CHECKING:
    import torch

FRACTION_BITS = 23
"""Least number of fraction bits in an accumulator for 16-bit floats: those of fp32, its dtype.
Undocumented. On an H200 every correct kernel passed with it: 120 random sizes each in bf16 and
fp16, m and n up to 16384, k up to 65536 (benchmarks/results/correctness-h200.jsonl).
Assumed for Blackwell."""

FRACTION_BITS_OF_FEW = 13
"""Least number of fraction bits in an accumulator for inputs with 8 bits or fewer: Hopper's tensor
cores keep 14 bits in total for fp8 sums (arXiv 2412.19437, section 3.3.2). Assumed for
Blackwell."""

CUTS_PER_PRODUCT = 3
"""Truncations per product: the product, the partial sum and the new sum. Each loses less than the
last bit kept in the largest of the three, which is at most the sum of all magnitudes."""

EPILOGUE_ERROR = 4 * 2.0**-24
"""Relative error in the fp32 steps after the sum: two scales, their product and the addition."""

CURVE_ERROR = 2.0**-10
"""Activation error with tanh or sigmoid, relative to its input: twice the 2**-11 that PTX states
for ``tanh.approx.f32``."""

STEEPEST = 1.2
"""Upper bound for activation slopes, which amplify an error (gelu's is 1.13)."""

LIKENESS = 0.05
"""Largest accepted relative norm of the difference from torch's own result. Torch may round partial
sums to the output dtype; programs without this package get the same."""


MOST_AT_ONCE = 2**28
"""Grouped result elements computed or compared at once: 2 GiB in fp64. A layer's experts may have
eight times as many."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Range of correct values per element, in the output dtype; NaN where a NaN is correct."""

    low: torch.Tensor
    high: torch.Tensor


def expect(operands: Sequence[torch.Tensor], signature: Signature, *, terms: int) -> Expected:
    """Returns the range of correct results for these operands.

    ``terms`` is the largest number of nonzero products per element; 0 if every partial sum is exact
    in the accumulator, which allows no error. Grouped rows are computed `MOST_AT_ONCE` elements at
    a time.
    """
    import torch

    out = operands[2]
    if not signature.op.groups_rows or out.numel() <= MOST_AT_ONCE:
        return _expect_at_once(operands, signature, terms=terms)
    parts = [
        _expect_at_once(_rows_of_groups(operands, signature, begin, end), signature, terms=terms)
        for begin, end in _row_ranges(out)
    ]
    return Expected(
        low=torch.cat([part.low for part in parts]), high=torch.cat([part.high for part in parts])
    )


def expect_sums(
    operands: Sequence[torch.Tensor], signature: Signature, *, terms: int
) -> Expected | None:
    """Returns the range of correct row sums [m], or None for a signature without sums.

    Takes the same arguments as `expect`.
    """
    import torch

    if not has_sums(signature):
        return None
    parts = []
    for begin, end in _row_ranges(operands[2]):
        part_operands = _rows_of_groups(operands, signature, begin, end)
        value, error = _product_and_error(part_operands, signature, terms=terms)
        gate_input = _gate_input(part_operands, signature)
        assert gate_input is not None
        sums, off = row_sums(error, value, signature, gate_input, curve=CURVE_ERROR)
        parts.append(expect_between(sums, off, torch.float32))
    return Expected(
        low=torch.cat([part.low for part in parts]), high=torch.cat([part.high for part in parts])
    )


def _row_ranges(values: torch.Tensor) -> list[tuple[int, int]]:
    """Splits the first dimension into ranges with at most `MOST_AT_ONCE` elements."""
    rows = values.shape[0]
    step = max(1, MOST_AT_ONCE * rows // max(1, values.numel()))
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def _rows_of_groups(
    operands: Sequence[torch.Tensor], signature: Signature, begin: int, end: int
) -> list[torch.Tensor]:
    """Returns a grouped product's operands for the rows ``begin`` to ``end``."""
    a, b, out, *extras = operands
    roles_by_row = {Role.SCALE_A, Role.ROWS, Role.SUMS}
    roles_by_row |= {Role.ADDEND} if _addend_has_rows(signature) else set()
    sliced = [a if signature.op.is_gathered else a[begin:end], b, out[begin:end]]
    for role, operand in zip(extra_roles(signature), extras):
        if role is Role.OFFSETS:
            sliced.append((operand - begin).clamp(0, end - begin))
        else:
            sliced.append(operand[begin:end] if role in roles_by_row else operand)
    return sliced


def _expect_at_once(
    operands: Sequence[torch.Tensor], signature: Signature, *, terms: int
) -> Expected:
    value, error = _product_and_error(operands, signature, terms=terms)
    gate_input = _gate_input(operands, signature)
    error = activation_error(error, value, signature, gate_input)
    return expect_between(
        _apply_activation(value, signature, gate_input), error, torch_dtype(signature.out)
    )


def _product_and_error(
    operands: Sequence[torch.Tensor], signature: Signature, *, terms: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the activation's or gate's input, and its largest error."""
    value = _activation_input(operands, signature)
    if not terms:
        return value, value.new_zeros(())
    magnitude = _activation_input(operands, signature, of_magnitudes=True)
    return value, sum_error(magnitude, signature, terms=terms)


def sum_error(magnitude: torch.Tensor, signature: Signature, *, terms: int) -> torch.Tensor:
    """Returns the largest error of sums of ``terms`` nonzero products, including scales and addend.

    ``magnitude`` holds sums over all magnitudes, in fp64.
    """
    bits = FRACTION_BITS_OF_FEW if signature.a.bits <= 8 else FRACTION_BITS
    return magnitude * (CUTS_PER_PRODUCT * terms * 2.0**-bits + EPILOGUE_ERROR)


def activation_error(
    error: torch.Tensor,
    value: torch.Tensor,
    signature: Signature,
    gate_input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the largest error after a signature's activation or gate, for inputs with ``error``.

    ``gate_input`` is the tensor that a gate reads: the saved product, or gates.
    """
    if signature.is_gated:
        return stored_error(error, value, signature, gate_input, slope=STEEPEST, curve=CURVE_ERROR)
    activation = signature.epilogue.activation if signature.epilogue is not None else None
    if activation is None or activation.row.commutes_with_rounding:
        return error
    return STEEPEST * error + CURVE_ERROR * value.abs()


def expect_between(value: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> Expected:
    """Returns the values in ``dtype`` that ``value``, with an absolute error, may round to.

    Both are fp64. The error's shape broadcasts; it is at least 0 where the value is finite.
    """
    import torch

    exact = ~value.isfinite()
    ends = (torch.where(exact, value, end) for end in (value - error, value + error))
    low, high = (end.to(dtype) for end in ends)
    return Expected(low=low, high=high)


def reference(operands: Sequence[torch.Tensor], signature: Signature) -> torch.Tensor:
    """Returns ``f(scale_a * scale_b * (a @ b) + addend)`` in fp64; exact for integers without f."""
    value = _activation_input(operands, signature)
    return _apply_activation(value, signature, _gate_input(operands, signature))


def _gate_reads_addend(signature: Signature) -> bool:
    """Returns True if a gate reads the addend operand, so nothing is added."""
    return signature.epilogue is not None and signature.epilogue.reads_addend


def _addend_has_rows(signature: Signature) -> bool:
    """Returns True if the addend operand has a row per result row."""
    return signature.epilogue is not None and signature.epilogue.addend_has_rows


def _gate_input(operands: Sequence[torch.Tensor], signature: Signature) -> torch.Tensor | None:
    """Returns the operand that a gate reads besides its product, or None."""
    if not _gate_reads_addend(signature):
        return None
    return dict(zip(extra_roles(signature), operands[3:]))[Role.ADDEND]


def _activation_input(
    operands: Sequence[torch.Tensor], signature: Signature, *, of_magnitudes: bool = False
) -> torch.Tensor:
    """Returns ``scale_a * scale_b * (a @ b) + addend``, optionally with magnitudes only."""
    a, b, _, *extras = operands
    if signature.scales is not None and signature.scales.block is not None:
        scale_a, scale_b = extras  # never with an addend (`nvgemm_runtime.gemm.support`)
        return block_scaled_product(a, b, scale_a, scale_b, signature, of_magnitudes=of_magnitudes)

    def values(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double().abs_() if of_magnitudes else tensor.double()

    operand_by_role = dict(zip(extra_roles(signature), extras))
    if signature.op.groups_rows:
        if Role.ROWS in operand_by_role:
            a = a[operand_by_role[Role.ROWS].long()]
        result = _product_of_groups(values(a), values(b), operand_by_role[Role.OFFSETS])
        if Role.ADDEND in operand_by_role and not _gate_reads_addend(signature):
            added = values(operand_by_role[Role.ADDEND])
            if not _addend_has_rows(signature):
                added = _repeat_group_rows(added, operand_by_role[Role.OFFSETS], len(result))
            result += added
        if Role.SCALE_A in operand_by_role:  # never with an addend (`nvgemm_runtime.gemm.support`)
            result *= operand_by_role[Role.SCALE_A].double()[:, None]
            result *= _repeat_group_rows(
                operand_by_role[Role.SCALE_B].double(), operand_by_role[Role.OFFSETS], len(result)
            )
        return result
    if signature.op is Op.K_GROUPED_MM:
        return _products_along_k(values(a), values(b), operand_by_role[Role.OFFSETS])
    if signature.op is Op.GATHERED_MM:
        return _sums_of_rows(values(a), b, operand_by_role[Role.ROWS], values)
    result = values(a) @ values(b)
    for role in (Role.SCALE_A, Role.SCALE_B):
        if role in operand_by_role:
            result *= operand_by_role[role].double()
    if Role.ADDEND in operand_by_role:
        result += values(operand_by_role[Role.ADDEND])
    return result


def _product_of_groups(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    result = a.new_empty((a.shape[0], b.shape[-1]))
    begin = 0
    for group, end in enumerate(offsets.tolist()):
        result[begin:end] = a[begin:end] @ b[group]
        begin = end
    return result


def _repeat_group_rows(rows: torch.Tensor, offsets: torch.Tensor, count: int) -> torch.Tensor:
    """Repeats each group's row for ``count`` rows of A; rows past the end get the last group's."""
    import torch

    row_indices = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    owners = torch.searchsorted(offsets, row_indices, right=True).clamp(max=len(offsets) - 1)
    return rows[owners]


def _products_along_k(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    result = a.new_empty((len(offsets), a.shape[0], b.shape[-1]))
    begin = 0
    for group, end in enumerate(offsets.tolist()):
        result[group] = a[:, begin:end] @ b[begin:end]
        begin = end
    return result


def _sums_of_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: torch.Tensor,
    values: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sums the rows of B selected by ``rows``, weighted; out-of-range rows contribute zero."""
    result = a.new_zeros((a.shape[0], b.shape[1]))
    for column in range(a.shape[1]):
        indices = rows[:, column].long()
        inside = (indices >= 0) & (indices < b.shape[0])
        selected = values(b[indices[inside]])
        result[inside] += a[inside, column, None] * selected
    return result


def _apply_activation(
    values: torch.Tensor, signature: Signature, gate_input: torch.Tensor | None = None
) -> torch.Tensor:
    import torch

    if signature.is_gated:
        return stored(values, signature, gate_input)
    if signature.epilogue is None or signature.epilogue.activation is None:
        return values
    row = signature.epilogue.activation.row
    function = getattr(torch.nn.functional, row.torch_name)
    result: torch.Tensor = function(values, **row.torch_options)
    return result


def find_fault(out: torch.Tensor, expected: Expected) -> str | None:
    """Describes a result's wrong elements, or returns None."""
    count, example = 0, ""
    for begin, end in _row_ranges(out):
        results, low, high = (
            tensor[begin:end].double() for tensor in (out, expected.low, expected.high)
        )
        is_correct = (results >= low) & (results <= high)
        is_correct |= results.isnan() & low.isnan()
        wrong = int((~is_correct).sum())
        if wrong and not count:
            index = (~is_correct).nonzero()[0].tolist()
            texts = [f"{float(tensor[tuple(index)]):.6g}" for tensor in (results, low, high)]
            allowed = texts[1] if texts[1] == texts[2] else f"{texts[1]} to {texts[2]}"
            index[0] += begin
            example = f"that at {index} is {texts[0]}, must be {allowed}"
        count += wrong
    return f"{count} of {out.numel()} elements are wrong; {example}" if count else None


def agrees_roughly(out: torch.Tensor, expected: Expected) -> bool:
    """Returns True if torch's result is the same computation, ignoring elements expected as NaN."""
    difference, total = 0.0, 0.0
    for begin, end in _row_ranges(out):
        low, high = (tensor[begin:end].double() for tensor in (expected.low, expected.high))
        middle = (low + high) / 2
        is_compared = ~low.isnan()
        difference += float((out[begin:end].double() - middle)[is_compared].square().sum())
        total += float(middle[is_compared].square().sum())
    return difference <= LIKENESS**2 * total


MOST_SHARE = 0.5
"""Share of a bundle's kernels found wrong beyond which the measurement itself is suspect."""

_EXAMPLES = 5
"""Most signatures named in a message, each with one fault."""


def rejected_kernels(
    outcomes: Mapping[str, TuningOutcome], broken: Mapping[str, str]
) -> dict[str, str]:
    """Returns the kernels that no bundle may contain, by id, with the fault.

    ``broken`` has the contenders that left the GPU unusable, and the error.
    """
    wrong = {
        id_: f"{key}: {fault}"
        for key, outcome in outcomes.items()
        for id_, fault in outcome.wrong.items()
    }
    return wrong | dict(broken)


def suspicion(kernels: Iterable[tuple[str, Signature]], wrong: Mapping[str, str]) -> str | None:
    """Returns the reason to suspect the measurement instead of the ``wrong`` kernels, or None."""
    by_signature: dict[Signature, list[str]] = {}
    for id_, signature in kernels:
        by_signature.setdefault(signature, []).append(id_)
    ids = [id_ for signature_ids in by_signature.values() for id_ in signature_ids]
    wrong_ids = [id_ for id_ in ids if id_ in wrong]
    rejected_signatures = {
        signature.key: signature_ids
        for signature, signature_ids in by_signature.items()
        if all(id_ in wrong for id_ in signature_ids)
    }
    if not rejected_signatures and len(wrong_ids) <= MOST_SHARE * len(ids):
        return None
    head = f"{len(wrong_ids)} of {count_text(len(ids), 'kernel')} were dropped"

    def example(id_: str) -> str:
        return f"{contender_name(id_)} for {wrong[id_]}"

    if not rejected_signatures:
        return f"{head}, more than half; {example(wrong_ids[0])}"
    examples = [
        f"all {len(signature_ids)} of {key}, {example(signature_ids[0])}"
        for key, signature_ids in rejected_signatures.items()
    ]
    if len(examples) > _EXAMPLES:
        examples[_EXAMPLES:] = [f"all of {count_text(len(examples) - _EXAMPLES, 'more signature')}"]
    return f"{head}, among them {'; '.join(examples)}"
