"""Public functions: list bundles, explain kernel choices, compute GEMMs.

Each GEMM function computes ``round(f(scale_a * scale_b * (A @ B) + addend))`` in the accumulator's
dtype and rounds once at the end. All go through `compute`; `mm` and `bmm` skip it if they get an
``out`` and a loaded kernel (`fast_path`). Grouped, gated and gathered products are in
`gates_and_groups`.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import NoKernelError, SettingError
from ..gemm.epilogues import Activation
from ..gemm.extra_operands import NO_EXTRAS, ExtraOperands
from ..gemm.operand_checks import check_kinds
from ..gemm.operands import Request, operation_of, requests
from ..gemm.problem import Op
from ..gemm.types import ScaleRecipe
from ..installed.registry import INSTALLATION, FoundBundle
from ..matching.device import DeviceFacts
from ..matching.matches import Match, Miss
from .compute import compute, enum_of
from .fast_path import skip_if_loaded
from .loading import native
from .loading.loader import LoadedKernel
from .select import choose_kernel, facts_of, find, load_kernel

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Kernels that serve one GEMM, or the reasons for a miss.

    Attributes:
        request: Problem and operand alignment; None if no kernel can exist.
        facts: Operands' device.
        match: Kernels that serve it, best first; None after a miss.
        reasons: Reasons for the miss; empty after a match.
    """

    request: Request | None
    facts: DeviceFacts
    match: Match | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        problem = "this GEMM" if self.request is None else self.request.problem.key
        if self.match is None:
            return "\n".join([f"{problem}: no kernel", *(f"  {reason}" for reason in self.reasons)])
        basis = self.match.basis.value
        if self.match.ranked_as.key != problem:
            basis += f", ranked as {self.match.ranked_as.key}"
        lines = [
            f"  {rank}. {served.kernel.id[:12]} {served.kernel.operator}"
            for rank, served in enumerate(self.match.kernels, start=1)
        ]
        return "\n".join([f"{problem}: {basis}", *lines])


def bundles() -> tuple[FoundBundle, ...]:
    """Returns every bundle that is installed, in NVGEMM_AOT_BUNDLES or cached, usable or not."""
    return INSTALLATION.bundles()


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    extras: ExtraOperands = NO_EXTRAS,
) -> Explanation:
    """Returns the kernels that serve ``a @ b``, or every reason for a miss.

    Args:
        a: Matrix [m, k], or a batch; with rows, their weights.
        b: Matrix [k, n], or a batch; with rows, a matrix [any number, n].
        out_dtype: Result dtype; by default A's, but int32 for integers and bfloat16 for fp8.
        extras: Scales, offsets, rows and addend, see
            `nvgemm_runtime.gemm.extra_operands.ExtraOperands`.
    """
    facts = facts_of(a)
    op = operation_of(a, b, extras)
    try:
        check_kinds(op, a, b)
        readings = requests(op, a, b, out_dtype, extras=extras)
    except (NoKernelError, ValueError) as error:
        return Explanation(request=None, facts=facts, match=None, reasons=(str(error),))
    request, result = find(readings, facts)
    match, reasons = (None, result.reasons) if isinstance(result, Miss) else (result, ())
    return Explanation(request=request, facts=facts, match=match, reasons=reasons)


@skip_if_loaded(Op.MM)
def mm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Multiplies two matrices with a prebuilt kernel.

    Torch does not see the call. Only the operators from `load_operators` can be traced, compiled
    into a graph, or used under ``torch.func`` transforms.

    Args:
        a: Matrix [m, k], contiguous along one dimension.
        b: Matrix [k, n], contiguous along one dimension.
        out: Output tensor [m, n], row-major; None allocates it.
        kernel: Kernel id, or the kernel that `choose` returned (fastest); None for the best-ranked
            one.

    Returns:
        ``out``. A new one has the kernel's dtype; without a kernel, A's, but int32 for integers and
        bfloat16 for fp8.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason, or none has this id.
        ValueError: If the kernel does not take these shapes, strides or devices.
        TypeError: If the kernel does not take these dtypes.
        RuntimeError: If an operand requires grad while gradients are recorded or has a forward-mode
            tangent; if torch records operations, in a dispatch mode or ``torch.jit.trace`` (not
            checked if ``out`` and a loaded kernel are given); or if the kernel's results depend on
            timing and torch uses deterministic algorithms.
    """
    return compute("mm", Op.MM, a, b, out, kernel)


@skip_if_loaded(Op.BMM)
def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Multiplies two batches of matrices with a prebuilt kernel; `mm` with a leading batch."""
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
    """Multiplies two matrices, adds to the product, and applies an activation.

    Args:
        input: Addend: one row with n elements for all rows (shape [n] or [1, n], or expanded), or a
            row-major matrix [m, n]. Has the result's dtype, or bf16 for fp8 results.
        a: Matrix [m, k], contiguous along one dimension.
        b: Matrix [k, n], contiguous along one dimension.
        out: Output tensor [m, n], row-major; None allocates it.
        kernel: Kernel id or loaded kernel; None for the best-ranked one.
        activation: Activation after adding a row: ``relu``, ``gelu_tanh`` or ``silu``.

    Returns:
        ``out``; a new one has the kernel's dtype, or A's (bfloat16 for fp8).

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
    """Works like `addmm` with a leading batch; an addend row serves all matrices."""
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
    """Multiplies two scaled fp8 or fp4 matrices.

    Args:
        a: Matrix [m, k] (fp4: [m, k / 2], two values per element), row-major.
        b: Matrix [k, n] (fp4: [k / 2, n]), column-major.
        scale_a: Scales for ``a``. Block scales: one per 32 (MX) or 16 (NVFP4) values along k,
            swizzled 32 x 4 x 4 and padded (`nvgemm_runtime.gemm.types.swizzled_elements`), in any
            contiguous shape. Row-wise: fp32 [m, 1]. Tensor-wise: fp32, one element.
        scale_b: Scales for ``b``, likewise; row-wise [1, n].
        out: Output tensor [m, n], row-major; None allocates it.
        kernel: Kernel id or loaded kernel; None for the best-ranked one.
        out_dtype: Dtype for a new result; by default the kernel's, or bfloat16.
        bias: Bias row with n elements.
        recipe: Scale recipe (a `ScaleRecipe` or its value); by default derived from scale dtypes
            and sizes, as in torch. NVFP4 with powers of two, ``e8m0_1x16``, must be named if MXFP4
            would have equally many scales.

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
    """Loads the best-ranked kernel for ``out = a @ b``: `mm` for matrices, `bmm` for batches.

    Args:
        a: Matrix [m, k], or a batch.
        b: Matrix [k, n], or a batch.
        out: Output tensor.
        extras: Scales, offsets, rows and addend, see
            `nvgemm_runtime.gemm.extra_operands.ExtraOperands`.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason.
        ValueError: If the operands cannot be multiplied.
    """
    op = operation_of(a, b, extras)
    check_kinds(op, a, b, out)
    return choose_kernel(op, a, b, out, extras)


def load_operators() -> None:
    """Registers the operators ``torch.ops.nvgemm_aot.mm``, ``bmm``, ``gated_mm`` and so on.

    They take a kernel by id, and load it from the installed bundles if needed. Unlike this
    package's functions, they can be traced and compiled.

    Raises:
        ToolchainError: If the native launcher, torch or TVM-FFI is missing or incompatible.
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
        from .compiled import note_and_preload, prepare

        note_and_preload(str(kernel_id), str(origin))
        try:
            prepare(str(kernel_id), str(origin))
        except SettingError as error:
            _log.error("%s", error)  # generated C++ raises its own error without this text
            raise


def _report_failure(kernel_id: str, kind: str, message: str) -> None:
    from .compiled import report_cpp_failure

    report_cpp_failure(str(kernel_id), str(kind), str(message))
