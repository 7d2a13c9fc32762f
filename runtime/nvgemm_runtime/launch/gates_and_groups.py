"""The public functions of groups, such as experts, of gates, and of gathered rows.

Gates join columns in pairs. All compute as those of `api` do, and go through `compute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..gemm.epilogues import Addend, Epilogue, GateForm
from ..gemm.extra_operands import ExtraOperands
from ..gemm.problem import Op
from .compute import compute, enum_of
from .loader import LoadedKernel
from .select import load_kernel

if TYPE_CHECKING:
    import torch


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    epilogue: Epilogue | str | None = None,
    bias: torch.Tensor | None = None,
    product: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply the rows of one matrix, group by group, with a matrix for each group.

    A bias may be added, a row for each group, or a matrix; and a gated epilogue may join the
    columns of the product in pairs, as `gated_mm` says. For training, one whose name ends with
    ``_kept`` stores the product in front of that, and one that ends with ``_gradient`` takes the
    gradient of what the gate gave, by multiplying, to those of gates and ups. One that ends with
    ``_gradient_sums`` also gives, for each row, the sum of what the gate gave times its gradient,
    which is the gradient of the weight that a router gave the row (without a bias of the down
    projection). Of two weights, one that ends with ``_ups`` multiplies with that of ups, reads
    gates, and stores ups in front of what the gate gives.

    The ends of groups are on the device, so a call does not see them: ends that fall, or lie past
    the last row, make a kernel read and write memory outside its tensors. With NVGEMM_AOT_DEBUG=1
    they are copied and checked, for which the call waits for the device.

    Args:
        a: Matrix of shape [m, k], row-major: the rows of all groups, one group after the other.
        b: Matrices of shape [groups, k, n], each contiguous along one dimension: along k if a gated
            epilogue has columns in halves.
        offsets: The end of each group along m, rising: int32 of shape [groups]. Rows past the last
            end are not computed, and the result is undefined there.
        out: The tensor to write, [m, n] row-major, with a gated epilogue [m, n / 2], with one that
            keeps the product [m, n + n / 2], with a gradient or ups [m, 2 n]; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.
        out_dtype: Type of the result that is made; by default the kernel's, or as ``a`` (bfloat16
            for fp8).
        epilogue: A gated epilogue (an `Epilogue` or its value, such as ``swiglu_halves``); None for
            none, or for that of a kernel that is named.
        bias: What is added, [groups, n], contiguous along n, of the result's type (bfloat16 for
            fp8): needed by ``swiglu_oai``, and refused by the other gated epilogues.
        product: For a gradient: the product that was kept, [m, 2 n], row-major, of the result's
            type, with gates and ups in the order that the epilogue names.
        gates: For ups: the product of gates, [m, n], row-major, of the result's type.
        addend: A matrix that is added, [m, n], row-major, of the result's type; without a bias and
            a gated epilogue. It may be ``out`` itself, but not overlap it otherwise.
        sums: For a gradient with sums: where their parts go, fp32 [m, ceil(n / 64)], contiguous.
            A kernel writes one for each of its tiles, and the others become 0; ``sums.sum(1)`` is
            the result, 0 in rows past the last end.

    Returns:
        ``out``.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`; ValueError also
            under NVGEMM_AOT_DEBUG=1, if offsets fall or pass the last row, and if n is odd with a
            gated epilogue, or the epilogue has no gate.
    """
    added = {"bias": bias, "product": product, "gates": gates, "addend": addend}
    extras = ExtraOperands(offsets=offsets, sums=sums)
    return _compute_groups(Op.GROUPED_MM, a, b, extras, out, kernel, out_dtype, epilogue, added)


def gathered_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    epilogue: Epilogue | str | None = None,
    bias: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows of a matrix that indices name, group by group: the tokens of each expert.

    It is ``grouped_mm(a[rows], b, offsets, ...)`` without a copy of the rows. The ends of groups
    are as that function has them. Where a row is named that ``a`` does not have, kernels of quack
    take another one: nothing outside ``a`` is read, and the result is undefined in that row. With
    NVGEMM_AOT_DEBUG=1 rows and ends are copied and checked, for which the call waits for the
    device.

    Args:
        a: Matrix of shape [any number of tokens, k], row-major, bf16 or fp16.
        b: Matrices of shape [groups, k, n], each contiguous along one dimension: along k if a gated
            epilogue has columns in halves.
        offsets: The end of each group along m, rising: int32 of shape [groups]. Rows past the last
            end are not computed, and the result is undefined there.
        rows: The row of ``a`` for each row of the result: int32 of shape [m], contiguous.
        out: The tensor to write, [m, n] row-major, with a gated epilogue [m, n / 2], with one that
            keeps the product [m, n + n / 2], with ups [m, 2 n]; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.
        out_dtype: Type of the result that is made; by default the kernel's, or as ``a``.
        epilogue: A gated epilogue but a gradient (an `Epilogue` or its value, such as
            ``swiglu_halves_kept``); None for none, or for that of a kernel that is named.
        bias: What is added, [groups, n], contiguous along n, of the result's type: needed by
            ``swiglu_oai``, and refused by the other gated epilogues.
        gates: For ups: the product of gates, [m, n], row-major, of the result's type.

    Returns:
        ``out``; zeros where ``a`` has no row.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `grouped_mm`; ValueError also if
            ``rows`` have another shape than [m], and under NVGEMM_AOT_DEBUG=1, if one is negative
            or not below the number of tokens.
    """
    added = {"bias": bias, "gates": gates, "product": None, "addend": None}
    op, extras = Op.GATHERED_GROUPED_MM, ExtraOperands(offsets=offsets, rows=rows)
    return _compute_groups(op, a, b, extras, out, kernel, out_dtype, epilogue, added)


def _compute_groups(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    extras: ExtraOperands,
    out: torch.Tensor | None,
    kernel: str | LoadedKernel | None,
    out_dtype: torch.dtype | None,
    epilogue: Epilogue | str | None,
    given: Mapping[str, torch.Tensor | None],
) -> torch.Tensor:
    """Compute groups of rows with what is ``given`` to be added or read, by name."""
    where = op.value
    gated, kernel = _gated_epilogue(where, epilogue, kernel)
    if gated is not None and gated.gate is None:
        raise ValueError(
            f"{where}: epilogue is {gated.value}, must be a gated one or None; a bias or a matrix "
            "alone needs no epilogue"
        )
    if given["bias"] is not None and given["addend"] is not None:
        raise ValueError(
            f"{where}: bias and addend are given, must be one of them: add one by torch"
        )
    names: dict[Addend | None, str] = {Addend.PRODUCT: "product", Addend.GATES: "gates"}
    adds_matrix = gated is None and given["addend"] is not None
    wanted = names.get(None if gated is None else gated.addend, "addend" if adds_matrix else "bias")
    for name, owner in (
        ("bias", "neither gradients nor ups"), ("product", "gradients"), ("gates", "ups"),
        ("addend", "products without a gate"),
    ):  # fmt: skip
        if given[name] is not None and name != wanted:
            raise ValueError(
                f"{where}: {name} is given with epilogue {None if gated is None else gated.value}; "
                f"it is for {owner}"
            )
    extras = replace(extras, addend=given[wanted], adds_matrix=adds_matrix, gated=gated)
    return compute(where, op, a, b, out, kernel, extras, out_dtype)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply the rows of one fp8 matrix, group by group, and scale rows and columns.

    ``out[i, j] = scale_a[i] * scale_b[g, j] * (a @ b[g])[i, j]`` for row i of group g, computed in
    fp32 and rounded once. ``torch._scaled_grouped_mm`` computes the same into bfloat16.

    Args:
        a: Matrix of shape [m, k], row-major: the rows of all groups, one group after the other.
        b: Matrices of shape [groups, k, n], each contiguous along k.
        scale_a: fp32 of shape [m], contiguous.
        scale_b: fp32 of shape [groups, n], contiguous.
        offsets: The end of each group along m, as `grouped_mm` has it.
        out: The tensor to write, [m, n] row-major; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.
        out_dtype: Type of the result that is made; by default the kernel's, or bfloat16.

    Returns:
        ``out``.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `grouped_mm`.
    """
    extras = ExtraOperands(scale_a=scale_a, scale_b=scale_b, offsets=offsets)
    return compute("scaled_grouped_mm", Op.GROUPED_MM, a, b, out, kernel, extras, out_dtype)


def k_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply two matrices group by group along k: the gradient of experts' weights.

    ``out[g] = a[:, begin:end] @ b[begin:end, :]``, where a group begins where the one before it
    ends. A group without k gives zeros. ``torch._grouped_mm`` of two matrices computes the same.

    The ends of groups are on the device, so a call does not see them: where they fall, or lie past
    k, the result is undefined. With NVGEMM_AOT_DEBUG=1 they are copied and checked, for which the
    call waits for the device.

    Args:
        a: Matrix of shape [m, k], column-major: of a training step, the transposed gradient of a
            product's rows.
        b: Matrix of shape [k, n], row-major.
        offsets: The end of each group along k, rising: int32 of shape [groups]. What lies past the
            last end is not added.
        out: The tensor to write, [groups, m, n] row-major; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.
        out_dtype: Type of the result that is made; by default the kernel's, or as ``a``.

    Returns:
        ``out``.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`; ValueError also
            under NVGEMM_AOT_DEBUG=1, if offsets fall or pass k.
    """
    extras = ExtraOperands(offsets=offsets)
    return compute("k_grouped_mm", Op.K_GROUPED_MM, a, b, out, kernel, extras, out_dtype)


def gathered_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Add rows of a matrix, each with a weight: the sum of what a token's experts gave.

    ``out[i] = sum over j of a[i, j] * b[rows[i, j]]``, in fp32, in the order of j, rounded once. A
    row outside ``b``, such as -1, adds nothing, whatever its weight.

    Args:
        a: Weights, fp32 of shape [m, k], row-major.
        b: Matrix of shape [any number, n], bf16 or fp16, row-major.
        rows: A row of ``b`` for each weight: int32 of shape [m, k], contiguous.
        out: The tensor to write, [m, n] row-major, of the type of ``b``; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.

    Returns:
        ``out``.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`.
    """
    extras = ExtraOperands(rows=rows)
    return compute("gathered_mm", Op.GATHERED_MM, a, b, out, kernel, extras, b.dtype)


def gated_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
    *,
    epilogue: Epilogue | str | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply two matrices, and join the columns of the product in pairs: for a gated MLP.

    Of the columns gate and up of a pair, ``swiglu`` makes ``silu(gate) * up``, and ``geglu``
    ``gelu(gate) * up`` with gelu's tanh form. ``swiglu_oai`` adds the bias, cuts gates off above at
    7 and ups at -7 and 7, and makes ``gate * sigmoid(1.702 * gate) * (up + 1)``. The epilogue's
    name ends in the order of the columns: ``_halves`` where all gates stand before all ups, as in a
    weight [gate; up]; ``_interleaved`` where each gate stands before its up.

    Args:
        a: Matrix of shape [m, k], contiguous along one dimension.
        b: Matrix of shape [k, n], likewise, n even: of both weights. Contiguous along k if columns
            are in halves.
        out: The tensor to write, [m, n / 2] row-major; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked for the epilogue if None.
        epilogue: The gated epilogue (an `Epilogue` or its value, such as ``swiglu_halves``). May be
            left out where a kernel is named, which has one.
        bias: A row of n elements, in the order of the columns of ``b``, of the result's type:
            needed by ``swiglu_oai``, and refused by the others.

    Returns:
        ``out``; where it was None, of the kernel's type, or of type ``a``.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`; ValueError also
            if n is odd, or the epilogue has no gate.
    """
    where = "gated_mm"
    gated, kernel = _gated_epilogue(where, epilogue, kernel)
    if gated is None and isinstance(kernel, LoadedKernel):
        raise ValueError(
            f"{where}: kernel {kernel.kernel.id[:12]} computes {kernel.kernel.signature.key}"
        )
    if gated is None or gated.form is not GateForm.JOINED:
        known = ", ".join(one.value for one in Epilogue if one.form is GateForm.JOINED)
        given = "None" if gated is None else gated.value
        raise ValueError(f"{where}: epilogue is {given}, must be one of {known}")
    return compute(where, Op.MM, a, b, out, kernel, ExtraOperands(addend=bias, gated=gated))


def _gated_epilogue(
    where: str, epilogue: Epilogue | str | None, kernel: str | LoadedKernel | None
) -> tuple[Epilogue | None, str | LoadedKernel | None]:
    """The epilogue that is asked for, else the gated one of the named kernel; and that kernel."""
    asked = enum_of(where, Epilogue, epilogue)
    if asked is not None or not isinstance(kernel, (str, LoadedKernel)):
        return asked, kernel
    loaded = load_kernel(kernel) if isinstance(kernel, str) else kernel
    signature = loaded.kernel.signature
    return (signature.epilogue if signature.is_gated else None), loaded
