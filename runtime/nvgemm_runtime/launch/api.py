"""The public functions: what bundles there are, which kernel serves a GEMM and why, running it.

Each GEMM function computes ``round(f(scale_a * scale_b * (A @ B) + addend))``: everything in the
accumulator's type, and one rounding at the end. All go through `compute`; `mm` and `bmm` skip it
where they are given an ``out`` and a loaded kernel (`fast_path`). Those of groups, and those with a
gate, which joins columns in pairs, and gathered rows are in `gates_and_groups`.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import NoKernelError, SettingError
from ..gemm.epilogues import Activation
from ..gemm.extra_operands import NO_EXTRAS, ExtraOperands
from ..gemm.operands import Request, check_kinds, op_of, requests
from ..gemm.problem import Op
from ..gemm.types import ScaleRecipe
from ..installed.registry import INSTALLATION, FoundBundle
from ..matching.device import DeviceFacts
from ..matching.index import Match, Miss
from . import native
from .compute import compute, enum_of
from .fast_path import skip_if_loaded
from .loader import LoadedKernel
from .select import choose_kernel, facts_of, find, load_kernel

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Which kernels serve one GEMM, or why none does.

    Attributes:
        request: The problem, and how its operands are aligned; None where no kernel can exist.
        facts: The device that the operands are on.
        match: The kernels that serve it, best first; None where none does.
        reasons: Every reason why none does; empty where one does.
    """

    request: Request | None
    facts: DeviceFacts
    match: Match | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        problem = "this GEMM" if self.request is None else self.request.problem.key
        if self.match is None:
            return "\n".join([f"{problem}: no kernel", *(f"  {reason}" for reason in self.reasons)])
        how = self.match.basis.value
        if self.match.ranked_as.key != problem:
            how += f", ranked as {self.match.ranked_as.key}"
        lines = [
            f"  {place}. {served.kernel.id[:12]} {served.kernel.operator}"
            for place, served in enumerate(self.match.kernels, start=1)
        ]
        return "\n".join([f"{problem}: {how}", *lines])


def bundles() -> tuple[FoundBundle, ...]:
    """Every bundle that is installed, named in NVGEMM_AOT_BUNDLES or kept, usable or not."""
    return INSTALLATION.bundles()


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    extras: ExtraOperands = NO_EXTRAS,
) -> Explanation:
    """Say which kernels serve ``a @ b``, or every reason why none does.

    Args:
        a: Matrix [m, k], or a batch of them; with rows, their weights.
        b: Matrix [k, n], or a batch of them; with rows, a matrix [any number, n].
        out_dtype: Type of the result; by default as ``a``, but int32 for integers and bfloat16 for
            fp8.
        extras: Scales, offsets, rows and addend, see
            `nvgemm_runtime.gemm.extra_operands.ExtraOperands`.
    """
    facts = facts_of(a)
    op = op_of(a, b, extras)
    try:
        check_kinds(op, a, b)
        asked = requests(op, a, b, out_dtype, extras=extras)
    except (NoKernelError, ValueError) as error:
        return Explanation(request=None, facts=facts, match=None, reasons=(str(error),))
    request, found = find(asked, facts)
    match, reasons = (None, found.reasons) if isinstance(found, Miss) else (found, ())
    return Explanation(request=request, facts=facts, match=match, reasons=reasons)


@skip_if_loaded(Op.MM)
def mm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Multiply two matrices with a prebuilt kernel.

    Torch does not see the call. Only the operators that `load_operators` registers may be traced,
    compiled into a graph, or used under the transforms of ``torch.func``.

    Args:
        a: Matrix of shape [m, k], contiguous along one dimension.
        b: Matrix of shape [k, n], likewise.
        out: The tensor to write, [m, n] row-major; made if None.
        kernel: The kernel: its id, or what `choose` gave (the quickest way); the best-ranked if
            None.

    Returns:
        ``out``. Where it was None: of the kernel's type, or, where the kernel is None too, of type
        ``a``, but int32 for integers and bfloat16 for fp8.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why, or none has this id.
        ValueError: If shapes, strides or devices are not what the kernel takes.
        TypeError: If types are not.
        RuntimeError: If an operand requires grad while gradients are recorded or carries a tangent
            of forward mode, or torch records operations: a dispatch mode is active, or
            ``torch.jit.trace`` (not looked for where ``out`` and a loaded kernel are given); or if
            the kernel's results depend on timing, and torch uses deterministic algorithms.
    """
    return compute("mm", Op.MM, a, b, out, kernel)


@skip_if_loaded(Op.BMM)
def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Multiply two batches of matrices with a prebuilt kernel; as `mm` with a leading batch."""
    return compute("bmm", Op.BMM, a, b, out, kernel)


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
        input: The addend: a row of n elements for all rows (shape [n] or [1, n], or expanded), or a
            row-major matrix [m, n]. Of the result's type, or bf16 where that is fp8.
        a: Matrix of shape [m, k], contiguous along one dimension.
        b: Matrix of shape [k, n], likewise.
        out: The tensor to write, [m, n] row-major; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.
        activation: The activation of the sum of a product and a row: ``relu``, ``gelu_tanh`` or
            ``silu``.

    Returns:
        ``out``; where it was None, of the kernel's type, or of type ``a`` (bfloat16 for fp8).

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`.
    """
    extras = ExtraOperands(addend=input, activation=enum_of("addmm", Activation, activation))
    return compute("addmm", Op.MM, a, b, out, kernel, extras)


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
    extras = ExtraOperands(addend=input, activation=enum_of("baddbmm", Activation, activation))
    return compute("baddbmm", Op.BMM, a, b, out, kernel, extras)


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
        out: The tensor to write, [m, n] row-major; made if None.
        kernel: The kernel: its id, or a loaded one; the best-ranked if None.
        out_dtype: Type of the result that is made; by default the kernel's, or bfloat16.
        bias: A row of n elements that is added.
        recipe: The kind of scales (a `ScaleRecipe` or its value); by default read off their types
            and sizes, as torch does. NVFP4 with powers of two, ``e8m0_1x16``, must be named where
            MXFP4's scales would be as many.

    Returns:
        ``out``.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`.
    """
    extras = ExtraOperands(
        scale_a=scale_a,
        scale_b=scale_b,
        recipe=enum_of("scaled_mm", ScaleRecipe, recipe),
        addend=bias,
    )
    return compute("scaled_mm", Op.MM, a, b, out, kernel, extras, out_dtype)


def choose(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands = NO_EXTRAS
) -> LoadedKernel:
    """Load the best-ranked kernel for ``out = a @ b``: `mm` of matrices, `bmm` of batches.

    Args:
        a: Matrix [m, k], or a batch of them.
        b: Matrix [k, n], or a batch of them.
        out: The tensor that the result would be written to.
        extras: Scales, offsets, rows and addend, see
            `nvgemm_runtime.gemm.extra_operands.ExtraOperands`.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why.
        ValueError: If the operands cannot be multiplied.
    """
    op = op_of(a, b, extras)
    check_kinds(op, a, b, out)
    return choose_kernel(op, a, b, out, extras)


def load_operators() -> None:
    """Register the operators ``torch.ops.nvgemm_aot.mm``, ``bmm``, ``gated_mm`` and so on.

    They take a kernel by its id, and load it from the installed bundles where it is not yet loaded.
    Other than the functions of this package they may be traced and compiled.

    Raises:
        ToolchainError: If the native launcher, torch or TVM-FFI is missing or does not fit.
    """
    _launcher()


@functools.cache
def _launcher() -> native.Native:
    launcher = native.load()
    launcher.set_loader(_load_for_operator)
    launcher.set_reporter(_report_failure)
    return launcher


def _load_for_operator(kernel_id: str, origin: str | None = None) -> None:
    if origin is None:
        load_kernel(str(kernel_id))
    else:
        from .compiled import expect, prepare

        expect(str(kernel_id), str(origin))
        try:
            prepare(str(kernel_id), str(origin))
        except SettingError as error:
            _log.error("%s", error)  # generated C++ raises another, without this text
            raise


def _report_failure(kernel_id: str, kind: str, message: str) -> None:
    from .compiled import report_failure

    report_failure(str(kernel_id), str(kind), str(message))
