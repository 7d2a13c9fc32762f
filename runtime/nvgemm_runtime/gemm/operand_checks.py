"""Checks that operands can be multiplied, by any kernel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from .epilogues import GateForm
from .problem import Op

if TYPE_CHECKING:
    import torch

RANKS = {
    Op.MM: (2, 2),
    Op.BMM: (3, 3),
    Op.GROUPED_MM: (2, 3),
    Op.K_GROUPED_MM: (2, 2),
    Op.GATHERED_MM: (2, 2),
    Op.GATHERED_GROUPED_MM: (2, 3),
}
"""Ranks of A and B. The result has A's rank, except for ``k_grouped_mm``: 3."""


def check_shapes(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    form: GateForm | None = None,
    groups: int | None = None,
    rows: int | None = None,
) -> tuple[int, ...]:
    """Checks that operands can be multiplied, by any kernel, and returns the result shape.

    A has shape [m, k] and B [k, n]. For ``bmm`` both have a leading batch. For ``grouped_mm``, B
    has leading groups. For ``k_grouped_mm`` the result is [groups, m, n], with ``groups`` from the
    offsets. For ``gathered_mm``, B may have any number of rows. For ``gathered_grouped_mm``, A may
    have any number of rows, and the result has ``rows``. With a gate, its ``form`` gives the number
    of result columns.

    Raises:
        ValueError: If ranks, shapes or devices do not match, or n is odd and the gate needs pairs.
    """
    ranks = RANKS[op]
    if (a.dim(), b.dim()) != ranks:
        expected = (
            f"rank {ranks[0]}" if ranks[0] == ranks[1] else f"ranks {ranks[0]} and {ranks[1]}"
        )
        raise ValueError(f"{op.value} takes tensors of {expected} (got {a.dim()} and {b.dim()})")
    k_matches = op is Op.GATHERED_MM or a.shape[-1] == b.shape[-2]
    if not k_matches or (op is Op.BMM and a.shape[0] != b.shape[0]):
        raise ValueError(f"{op.value}: shapes {list(a.shape)} and {list(b.shape)} do not multiply")
    if a.device != b.device:
        raise ValueError(f"{op.value}: operands are on two devices ({a.device} and {b.device})")
    columns = b.shape[-1]
    if form is not None:
        if columns % form.row.product_columns:
            raise ValueError(
                f"{op.value}: b has {columns} columns, must have an even number for a gate"
            )
        columns = columns // form.row.product_columns * form.row.out_columns
    shape: tuple[int, ...] = (*a.shape[:-1], columns)
    if op is Op.GATHERED_GROUPED_MM:
        if rows is None:
            raise ValueError(f"{op.value}: rows are missing or not one-dimensional")
        shape = (rows, columns)
    if op is Op.K_GROUPED_MM:
        if groups is None:
            raise ValueError(f"{op.value}: offsets are missing or not one-dimensional")
        shape = (groups, *shape)
    if out is not None and out.shape != shape:
        raise ValueError(f"{op.value}: out has shape {list(out.shape)}, must have {list(shape)}")
    if out is not None and out.device != a.device:
        raise ValueError(f"{op.value}: out is on {out.device}, the operands on {a.device}")
    return shape


def check_kinds(op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """Checks that operands are plain strided tensors in memory, whatever their shapes.

    Raises:
        ValueError: If one is sparse, in another library's layout, quantized, fake, or inside a
            ``torch.func`` transform.
    """
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if tensor is not None:
            check_kind(op.value, name, tensor)


def check_kind(where: str, name: str, tensor: torch.Tensor) -> None:
    """Checks one operand like `check_kinds`."""
    import torch

    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{where}: {name} has layout {tensor.layout}, must have torch.strided; "
            "call .to_dense() on it"
        )
    if tensor.is_quantized:
        raise ValueError(f"{where}: {name} is quantized ({tensor.dtype}); call .int_repr() on it")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        kind = "inside a transform of torch.func"
    elif isinstance(tensor, _fake_tensor()) or torch._is_functional_tensor(tensor):
        kind = "a fake or functional tensor"
    else:
        return
    raise ValueError(
        f"{where}: {name} is {kind}, which this function cannot read; call "
        f"torch.ops.nvgemm_aot.{where} (registered by nvgemm_runtime.load_operators())"
    )


@functools.cache
def _fake_tensor() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    kind: type = FakeTensor
    return kind
