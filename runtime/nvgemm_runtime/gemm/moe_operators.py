"""Reads `nvgemm_runtime.moe` operators as grouped products.

Knows the operators by name only, so that programs can be recorded without importing torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .aten import GATHERED, AtenGemm
from .extra_operands import ExtraOperands
from .operands import MAX_ALIGNMENT_BYTES, torch_dtype
from .types import DType

if TYPE_CHECKING:
    from .operands import Operand

NAMESPACE = "nvgemm_moe"
"""Operator namespace."""

ROWS, COLUMNS = "rows", "columns"
"""Names for two operators. Both take ``(a, b, offsets)``; `ROWS` also takes ``bias`` or None."""

GATED_ROWS, PAIRED_ROWS, GATE_GRADIENT = "gated_rows", "paired_rows", "gate_gradient"
GATE_GRADIENT_SUMS, PAIRED_GATED_ROWS = "gate_gradient_sums", "paired_gated_rows"
"""Operators in compiled graphs for kernels with a gate, or for products that such a kernel reads:
`ROWS` followed by a gate, two products side by side, a product with a gate's gradient, the same
with row sums, and two products side by side followed by their gate. `GATED_ROWS` and
`PAIRED_GATED_ROWS` accept ``indices``: for each result row, its row in ``a``."""

GRADIENT_OPERATORS = (GATE_GRADIENT, GATE_GRADIENT_SUMS)
"""Operators whose first operand is ``grad``."""

ADDED_ROWS = "added_rows"
"""Sum of two `ROWS` products; ``other_a`` and ``other_b`` are the second pair. It computes the row
gradient when two weights multiply the same rows."""

GATHERED_ROWS = "gathered_rows"
"""Sum over selected matrix rows, each times its weight. Takes ``(matrix, rows, weights)``; ``rows``
or ``weights`` may be None, but not both."""

PAIRED_OPERATORS = (PAIRED_ROWS, PAIRED_GATED_ROWS, ADDED_ROWS)
"""Operators that compute two products."""

OPERATORS = (
    ROWS, COLUMNS, ADDED_ROWS, GATED_ROWS, PAIRED_ROWS, PAIRED_GATED_ROWS, *GRADIENT_OPERATORS,
    GATHERED_ROWS,
)  # fmt: skip
"""All operators that multiply; others in the namespace are built on these."""

BIAS_COLUMNS = 8
"""Columns with ones that compute the bias gradient per expert, as a product grouped along k. One
16-byte row needs this many."""


def read_products(name: str, arguments: Mapping[str, Any]) -> tuple[AtenGemm, ...]:
    """Returns the products that an operator call computes, without its gate or sum.

    Args:
        name: Operator, from `OPERATORS`.
        arguments: Call arguments by schema name, with `Operand` for tensors; None arguments may be
            omitted.

    Raises:
        KeyError: If the operator does not exist.
    """
    if name == GATHERED_ROWS:
        return (_read_gathered(arguments["matrix"], arguments.get("rows") or arguments["weights"]),)
    if name == ADDED_ROWS:
        return tuple(
            _read_compact(ROWS, arguments[a], arguments[b], arguments["offsets"], None)
            for a, b in (("other_a", "other_b"), ("a", "b"))
        )
    if name in PAIRED_OPERATORS:
        return tuple(
            _read_groups(arguments, arguments[f"b_{half}"], arguments.get(bias))
            for half, bias in (("gate", "bias_gate"), ("up", "bias_up"))
        )
    if name == GATED_ROWS:
        return (_read_groups(arguments, arguments["b"], arguments.get("bias")),)
    a = arguments["grad" if name in GRADIENT_OPERATORS else "a"]
    read = ROWS if name in GRADIENT_OPERATORS else name
    return (_read_compact(read, a, arguments["b"], arguments["offsets"], arguments.get("bias")),)


GATHERED_MAX_N = 2048
"""Largest number of gate and up columns for which a kernel gathers token rows instead of reading a
copy. Up to this limit, from-config declares the gathered problem and experts look for its kernel.

Forward time on an H100, 24,576 tokens, with such a kernel and with a copy: 3.56 and 3.64 ms for
Qwen3-30B-A3B (1,536 columns), 8.91 and 7.48 ms for gpt-oss-20b (5,760), 34.13 and 26.83 ms for
Mixtral-8x7B (28,672) (benchmarks/results/moe-h100.jsonl). Threads gather each row
again for every tile along n."""

_ROW_BYTES = 16
"""`nvgemm_runtime.moe` copies a matrix unless its rows begin at multiples of this."""


def _read_gathered(matrix: Operand, rows: Operand) -> AtenGemm:
    """Reads a gathered sum with kernel dtypes: fp32 weights and int32 rows."""
    pitch = matrix.strides[0] * matrix.element_size()
    is_read = matrix.strides[1] == 1 and (pitch | matrix.address) % _ROW_BYTES == 0
    matrix = matrix if is_read else _compact_copy(matrix)
    weights = _compact_copy(replace(rows, dtype=torch_dtype(DType.FP32)))
    indices = _compact_copy(replace(rows, dtype=torch_dtype(DType.INT32)))
    out = _compact_copy(replace(matrix, shape=(rows.shape[0], matrix.shape[1])))
    extras = ExtraOperands(rows=indices)
    return AtenGemm(op=GATHERED, a=weights, b=matrix, out=out, extras=extras)


def _read_groups(arguments: Mapping[str, Any], b: Operand, bias: Operand | None) -> AtenGemm:
    """Reads a grouped GEMM; gathers A's rows into a copy if indices are given."""
    a, indices = arguments["a"], arguments.get("indices")
    if indices is not None:
        a = _compact_copy(replace(a, shape=(indices.shape[0], a.shape[1])))
    return _read_compact(ROWS, a, b, arguments["offsets"], bias)


def _read_compact(
    name: str, a: Operand, b: Operand, offsets: Operand, bias: Operand | None
) -> AtenGemm:
    """Reads a product as `read_product` does, into a new compact result."""
    groups = (offsets.shape[0], a.shape[1]) if name == COLUMNS else (a.shape[0],)
    out = _compact_copy(replace(a, shape=(*groups, b.shape[-1])))
    return read_product(name, a, b, offsets, out, bias)


def read_product(
    name: str, a: Operand, b: Operand, offsets: Operand, out: Operand, bias: Operand | None = None
) -> AtenGemm:
    """Returns the ``torch._grouped_mm`` call that equals an operator call.

    The operator copies operands whose strides no kernel takes; the returned call has those copies.

    Args:
        name: `ROWS` or `COLUMNS`.
        a: Matrix [m, k] for rows, [m, p] for columns.
        b: Matrices [groups, k, n] for rows, a matrix [m, q] for columns.
        offsets: Group ends [groups].
        out: Matrix [m, n] for rows, matrices [groups, p, q] for columns.
        bias: Bias row per group [groups, n]; rows only.

    Raises:
        KeyError: If the operator does not exist.
    """
    if name == ROWS:
        a, b = (
            operand if 1 in operand.strides[-2:] else _compact_copy(operand) for operand in (a, b)
        )
        bias = (
            bias
            if bias is None or bias.strides == _compact_strides(bias.shape)
            else _compact_copy(bias)
        )
    elif name == COLUMNS:
        a, b = (
            operand
            if operand.strides == _compact_strides(operand.shape)
            else _compact_copy(operand)
            for operand in (a, b)
        )
        a = replace(a, shape=a.shape[::-1], strides=a.strides[::-1])
    else:
        raise KeyError(name)
    extras = ExtraOperands(offsets=offsets, addend=bias)
    return AtenGemm(op="_grouped_mm", a=a, b=b, out=out, extras=extras)


def _compact_copy(operand: Operand) -> Operand:
    return replace(operand, strides=_compact_strides(operand.shape), address=MAX_ALIGNMENT_BYTES)


def _compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
