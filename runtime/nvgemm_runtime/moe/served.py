"""Whether a kernel serves a product of experts, of tensors that have no memory yet.

While torch.compile traces, sizes may be symbols and addresses are unknown. A kernel serves any
number of rows, so an example of one decides; addresses are taken to be aligned. Where the call's
are not, the operator that was traced computes without the kernel.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..errors import NvgemmError
from ..gemm.epilogues import Epilogue
from ..gemm.extra_operands import ExtraOperands
from ..gemm.operands import MAX_ALIGNMENT_BYTES, Operand, Request, check_shapes, requests
from ..gemm.problem import Op
from ..gemm.roles import sum_parts
from ..launch.select import find
from ..matching.device import device_facts
from ..matching.index import Match
from ..settings import COMPILE_OPTION, Mode, checked_mode, named_mode

_EXAMPLE = 4096
"""For a size or stride of which torch knows no example."""

_log = logging.getLogger(__name__)


def is_served(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    addend: torch.Tensor | None,
    epilogue: Epilogue | None,
    *,
    pitch: int | None = None,
    adds_matrix: bool = False,
    indices: torch.Tensor | None = None,
) -> bool:
    """Whether torch.compile may use a kernel for `nvgemm_runtime.moe.products.rows` and the like.

    Args:
        a: Matrix [m, k].
        b: Matrices [groups, k, n].
        offsets: End of each group along m, int32 [groups].
        addend: A row of n for each group, the product that a gradient reads, gates, or a matrix.
        epilogue: The gated epilogue; None for the product itself.
        pitch: Elements from a row of the result to the next, if there are gaps between.
        adds_matrix: Whether the addend is that matrix, [m, n], which is added.
        indices: The row of ``a`` for each row of the result, [m]; None for each in order.
    """
    given = (a, b, offsets, addend, epilogue, pitch, adds_matrix, indices)
    return _is_found(a.device, lambda: _asked(*given))


def is_sum_served(matrix: torch.Tensor, count: int, each: int) -> bool:
    """Whether torch.compile may use a kernel for `nvgemm_runtime.moe.row_sums.gathered_rows`.

    Args:
        matrix: As the one that has the rows, but of any number of rows: [any, n].
        count: How many sums.
        each: Of how many rows each.
    """

    def asked() -> tuple[Request, ...]:
        added = _copied(_operand(matrix))
        sums = _example(count) or 1
        factors = _copied(replace(added, dtype=torch.float32, shape=(sums, _example(each))))
        named = replace(factors, dtype=torch.int32)
        out = _copied(replace(added, shape=(sums, added.shape[1])))
        return requests(Op.GATHERED_MM, factors, added, out=out, extras=ExtraOperands(rows=named))

    return _is_found(matrix.device, asked)


def _is_found(device: torch.device, asked: Callable[[], tuple[Request, ...]]) -> bool:
    """Whether a kernel serves one of the requests, and is not kept out; what fails is logged."""
    if _is_off() or (device.type == "cuda" and not torch.cuda.is_available()):
        return False
    try:
        facts = device_facts(device.type, device.index or 0)
        return isinstance(find(asked(), facts)[1], Match)
    except NvgemmError as error:
        _log.debug("experts are traced without a kernel: %s", error)
    except Exception as error:  # It is the user's compilation: without kernels it goes on.
        _log.warning("experts are traced without a kernel: %r", error)
    return False


def _is_off() -> bool:
    """Whether the user keeps kernels out of this compilation, or of all."""
    config = sys.modules.get("torch._inductor.config")
    mode = checked_mode(getattr(config, COMPILE_OPTION, named_mode()), COMPILE_OPTION)
    return mode is Mode.OFF


def _asked(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    addend: torch.Tensor | None,
    epilogue: Epilogue | None,
    pitch: int | None,
    adds_matrix: bool,
    indices: torch.Tensor | None,
) -> tuple[Request, ...]:
    left, right = _with_unit_stride(_operand(a)), _with_unit_stride(_operand(b))
    added = None if addend is None else _operand(addend)
    if added is not None and added.strides[-1] != 1:
        added = _copied(added)
    form = None if epilogue is None else epilogue.form
    rows = None if indices is None else replace(_copied(_operand(indices)), dtype=torch.int32)
    op = Op.GROUPED_MM if rows is None else Op.GATHERED_GROUPED_MM
    count = None if rows is None else rows.shape[0]
    shape = check_shapes(op, left, right, form=form, rows=count)
    out = _made(left, shape, (shape[-1] if pitch is None else _example(pitch), 1))
    has_sums = form is not None and form.row.has_sums
    extras = ExtraOperands(
        offsets=_operand(offsets),
        rows=rows,
        addend=added,
        sums=_sums(left, right) if has_sums else None,
        adds_matrix=adds_matrix,
        gated=epilogue,
    )
    return requests(op, left, right, out=out, extras=extras)


def _sums(a: Operand, b: Operand) -> Operand:
    shape = (a.shape[0], sum_parts(b.shape[-1]))
    return replace(_made(a, shape, (shape[1], 1)), dtype=torch.float32)


def _operand(tensor: torch.Tensor) -> Operand:
    """A tensor as it may lie, with examples of sizes that are symbols; 0 rows count as one."""
    shape = tuple(_example(extent) or 1 for extent in tensor.shape)
    return _made(tensor, shape, tuple(_example(step) for step in tensor.stride()))


def _example(extent: int | torch.SymInt) -> int:
    """A size, or what torch saw of it, without a guard."""
    known: Any = extent if isinstance(extent, int) else extent.node.hint
    return _EXAMPLE if known is None else int(known)


def _made(like: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Operand:
    return Operand(
        dtype=like.dtype,
        device=like.device,
        shape=shape,
        strides=strides,
        address=MAX_ALIGNMENT_BYTES,
    )


def _with_unit_stride(operand: Operand) -> Operand:
    """An operand, or the copy that is made of it at the call."""
    return operand if 1 in operand.strides[-2:] else _copied(operand)


def _copied(operand: Operand) -> Operand:
    strides = torch.empty(operand.shape, device="meta").stride()
    return _made(operand, operand.shape, strides)
