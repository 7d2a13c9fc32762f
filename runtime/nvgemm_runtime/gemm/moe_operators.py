"""The operators of torch that `nvgemm_runtime.moe` defines, as the grouped products that they are.

It knows the operators by name alone, so that programs can be recorded without importing torch here.
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
"""Namespace of the operators."""

ROWS, COLUMNS = "rows", "columns"
"""Names of two operators; both take ``(a, b, offsets)``, the first a ``bias`` or None besides."""

GATED_ROWS, PAIRED_ROWS, GATE_GRADIENT = "gated_rows", "paired_rows", "gate_gradient"
GATE_GRADIENT_SUMS, PAIRED_GATED_ROWS = "gate_gradient_sums", "paired_gated_rows"
"""Names of those in compiled graphs that kernels with a gate compute, or write for one to read:
`ROWS` with a gate behind it, two products side by side, a product with a gate's gradient, that with
sums of rows, and two products side by side with their gate behind them. The first and the last may
take ``indices``, the row of ``a`` for each row of the result."""

OF_GRADIENTS = (GATE_GRADIENT, GATE_GRADIENT_SUMS)
"""Those whose first operand is ``grad``."""

ADDED_ROWS = "added_rows"
"""Name of `ROWS` added to another product of them, of ``other_a`` and ``other_b``: the gradient of
rows that two weights multiply."""

GATHERED_ROWS = "gathered_rows"
"""Name of the one that adds rows of a matrix that ``rows`` name, each times one of ``weights``; it
takes ``(matrix, rows, weights)``, of which one of the last two may be None."""

OF_TWO_WEIGHTS = (PAIRED_ROWS, PAIRED_GATED_ROWS, ADDED_ROWS)
"""Those that compute two products."""

OPERATORS = (
    ROWS, COLUMNS, ADDED_ROWS, GATED_ROWS, PAIRED_ROWS, PAIRED_GATED_ROWS, *OF_GRADIENTS,
    GATHERED_ROWS,
)  # fmt: skip
"""Names of all operators that multiply; others of the namespace are made of these."""

BIAS_COLUMNS = 8
"""Columns of ones by which the gradient of an expert's bias is computed, as a product by groups
along k: as many as one row of 16 bytes needs."""


def read_products(name: str, given: Mapping[str, Any]) -> tuple[AtenGemm, ...]:
    """The products that a call of one of the operators computes, without its gate or sum.

    Args:
        name: One of `OPERATORS`.
        given: The call's arguments by their names in the schema, with `Operand` for tensors; those
            that are None may be left out.

    Raises:
        KeyError: If there is no operator of that name.
    """
    if name == GATHERED_ROWS:
        return (_read_gathered(given["matrix"], given.get("rows") or given["weights"]),)
    if name == ADDED_ROWS:
        return tuple(
            _read_compact(ROWS, given[a], given[b], given["offsets"], None)
            for a, b in (("other_a", "other_b"), ("a", "b"))
        )
    if name in OF_TWO_WEIGHTS:
        return tuple(
            _read_groups(given, given[f"b_{one}"], given.get(bias))
            for one, bias in (("gate", "bias_gate"), ("up", "bias_up"))
        )
    if name == GATED_ROWS:
        return (_read_groups(given, given["b"], given.get("bias")),)
    a = given["grad" if name in OF_GRADIENTS else "a"]
    read = ROWS if name in OF_GRADIENTS else name
    return (_read_compact(read, a, given["b"], given["offsets"], given.get("bias")),)


GATHERED_MAX_N = 2048
"""Most columns of gates and ups for which a kernel takes tokens' rows where they are, and no copy
is made first: for so many, from-config declares it, and experts look for it.

On an H100, from 24,576 tokens to tokens, the forward of Qwen3-30B-A3B's experts, with 1,536, took
3.56 ms with such a kernel and 3.64 ms with a copy; that of gpt-oss-20b's, with 5,760, 8.91 and 7.48
ms, and that of Mixtral-8x7B's, with 28,672, 34.13 and 26.83 ms
(benchmarks/results/moe-gather-h100-2026-11-27.txt). The threads that gather a row do so again for
each tile of columns."""

_ROW_BYTES = 16
"""`nvgemm_runtime.moe` copies a matrix whose rows begin at no multiple of it."""


def _read_gathered(matrix: Operand, rows: Operand) -> AtenGemm:
    """What a kernel is given: weights in fp32, and rows in int32, whatever the call has."""
    pitch = matrix.strides[0] * matrix.element_size()
    is_read = matrix.strides[1] == 1 and (pitch | matrix.address) % _ROW_BYTES == 0
    matrix = matrix if is_read else _copied(matrix)
    weights = _copied(replace(rows, dtype=torch_dtype(DType.FP32)))
    named = _copied(replace(rows, dtype=torch_dtype(DType.INT32)))
    out = _copied(replace(matrix, shape=(rows.shape[0], matrix.shape[1])))
    extras = ExtraOperands(rows=named)
    return AtenGemm(op=GATHERED, a=weights, b=matrix, out=out, extras=extras)


def _read_groups(given: Mapping[str, Any], b: Operand, bias: Operand | None) -> AtenGemm:
    """A product of groups of the rows of ``a``; of those that indices name, as of a copy."""
    a, indices = given["a"], given.get("indices")
    if indices is not None:
        a = _copied(replace(a, shape=(indices.shape[0], a.shape[1])))
    return _read_compact(ROWS, a, b, given["offsets"], bias)


def _read_compact(
    name: str, a: Operand, b: Operand, offsets: Operand, bias: Operand | None
) -> AtenGemm:
    """As `read_product`, into a result of its own."""
    groups = (offsets.shape[0], a.shape[1]) if name == COLUMNS else (a.shape[0],)
    out = _copied(replace(a, shape=(*groups, b.shape[-1])))
    return read_product(name, a, b, offsets, out, bias)


def read_product(
    name: str, a: Operand, b: Operand, offsets: Operand, out: Operand, bias: Operand | None = None
) -> AtenGemm:
    """The call of ``torch._grouped_mm`` that a call of one of the operators equals.

    Operands that the operator copies, because no kernel takes their strides, are those copies.

    Args:
        name: `ROWS` or `COLUMNS`.
        a: Matrix [m, k] for rows, [m, p] for columns.
        b: Matrices [groups, k, n] for rows, a matrix [m, q] for columns.
        offsets: Ends of groups [groups].
        out: Matrix [m, n] for rows, matrices [groups, p, q] for columns.
        bias: A row for each group [groups, n], for rows alone.

    Raises:
        KeyError: If there is no operator of that name.
    """
    if name == ROWS:
        a, b = (one if 1 in one.strides[-2:] else _copied(one) for one in (a, b))
        bias = bias if bias is None or bias.strides == _compact(bias.shape) else _copied(bias)
    elif name == COLUMNS:
        a, b = (one if one.strides == _compact(one.shape) else _copied(one) for one in (a, b))
        a = replace(a, shape=a.shape[::-1], strides=a.strides[::-1])
    else:
        raise KeyError(name)
    extras = ExtraOperands(offsets=offsets, addend=bias)
    return AtenGemm(op="_grouped_mm", a=a, b=b, out=out, extras=extras)


def _copied(operand: Operand) -> Operand:
    return replace(operand, strides=_compact(operand.shape), address=MAX_ALIGNMENT_BYTES)


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
