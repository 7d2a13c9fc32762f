"""The public functions of GEMMs that take more than A and B: biases, scales, groups.

Each computes ``round(f(scale_a * scale_b * (A @ B) + addend))``: everything in the accumulator's
type, and one rounding at the end. Torch does not see the calls; see `nvgemm_runtime.mm`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeVar

from ..gemm.extra_operands import ExtraOperands
from ..gemm.problem import Op
from ..gemm.types import Activation, ScaleRecipe
from .calls import run_with_extras, unseen_by_dynamo
from .library import LoadedKernel

if TYPE_CHECKING:
    import torch

Named = TypeVar("Named", bound=enum.Enum)


def addmm(
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
    *,
    activation: Activation | str | None = None,
) -> torch.Tensor:
    """Multiply two matrices, add to the product, and apply an activation.

    Args:
        input: What is added: a row of n elements for all rows (shape [n] or [1, n], or expanded),
            or a row-major matrix [m, n]. Of the result's type, or bf16 where that is fp8.
        a: Matrix of shape [m, k], contiguous along one dimension.
        b: Matrix of shape [k, n], likewise.
        out: Where the result goes, [m, n] row-major; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.
        activation: What follows the sum of a product and a row: ``relu``, ``gelu_tanh`` or
            ``silu``.

    Returns:
        ``out``; where it was None, of the kernel's type, or of type ``a`` (bfloat16 for fp8).

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why.
        ValueError: If shapes, strides or devices are not what the kernel takes.
        TypeError: If types are not.
        RuntimeError: As for `nvgemm_runtime.mm`.
    """
    extras = ExtraOperands(addend=input, activation=_named("addmm", Activation, activation))
    return unseen_by_dynamo(run_with_extras)("addmm", Op.MM, a, b, out, kernel, extras)


def baddbmm(
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
    *,
    activation: Activation | str | None = None,
) -> torch.Tensor:
    """As `addmm` with a leading batch; a row is one for all matrices."""
    extras = ExtraOperands(addend=input, activation=_named("baddbmm", Activation, activation))
    return unseen_by_dynamo(run_with_extras)("baddbmm", Op.BMM, a, b, out, kernel, extras)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    recipe: ScaleRecipe | str | None = None,
) -> torch.Tensor:
    """Multiply two scaled matrices of fp8 or fp4.

    Args:
        a: Matrix of shape [m, k] (fp4: [m, k / 2], two values an element), row-major.
        b: Matrix of shape [k, n] (fp4: [k / 2, n]), column-major.
        scale_a: Scales of ``a``. Block scales: one for each 32 (MX) or 16 (NVFP4) values along k,
            swizzled 32 x 4 x 4 and padded (`nvgemm_runtime.gemm.types.swizzled_elements`), in any
            contiguous shape. Row-wise: fp32 of shape [m, 1]. Tensor-wise: fp32, one element.
        scale_b: Scales of ``b``, likewise; row-wise ones of shape [1, n].
        out: Where the result goes, [m, n] row-major; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.
        out_dtype: Type of the result that is made; by default the kernel's, or bfloat16.
        bias: A row of n elements that is added.
        recipe: What the scales are (a `ScaleRecipe` or its name); by default read off their types
            and sizes, as torch does. NVFP4 with powers of two, ``e8m0_1x16``, must be named where
            MXFP4's scales would be as many.

    Returns:
        ``out``.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why.
        ValueError: If shapes, strides or devices are not what the kernel takes.
        TypeError: If types are not.
        RuntimeError: As for `nvgemm_runtime.mm`.
    """
    extras = ExtraOperands(
        scale_a=scale_a,
        scale_b=scale_b,
        recipe=_named("scaled_mm", ScaleRecipe, recipe),
        addend=bias,
    )
    return unseen_by_dynamo(run_with_extras)(
        "scaled_mm", Op.MM, a, b, out, kernel, extras, out_dtype
    )


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply the rows of one matrix, group by group, with a matrix for each group.

    The ends of groups are on the device, so a call does not see them: ends that fall, or lie behind
    the last row, make a kernel read and write memory that is not its own. With NVGEMM_AOT_DEBUG=1
    they are copied and checked, for which the call waits for the device.

    Args:
        a: Matrix of shape [m, k], row-major: the rows of all groups, one group after the other.
        b: Matrices of shape [groups, k, n], each column-major.
        offsets: Where each group ends along m, rising: int32 of shape [groups]. What lies behind
            the last end is not computed, and the result undefined there.
        out: Where the result goes, [m, n] row-major; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.
        out_dtype: Type of the result that is made; by default the kernel's, or as ``a`` (bfloat16
            for fp8).

    Returns:
        ``out``.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why.
        ValueError: If shapes, strides or devices are not what the kernel takes; under
            NVGEMM_AOT_DEBUG=1, if offsets fall or pass the last row.
        TypeError: If types are not.
        RuntimeError: As for `nvgemm_runtime.mm`.
    """
    extras = ExtraOperands(offsets=offsets)
    return unseen_by_dynamo(run_with_extras)(
        "grouped_mm", Op.GROUPED_MM, a, b, out, kernel, extras, out_dtype
    )


def _named(where: str, kind: type[Named], value: Named | str | None) -> Named | None:
    """A value that may be given by its name."""
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(one.value) for one in kind)
        raise ValueError(f"{where}: no such {kind.__name__}: {value!r} (known: {known})") from None
