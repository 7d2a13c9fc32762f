"""The public functions: what bundles there are, which kernel serves a GEMM and why, running it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import NoKernelError
from ..gemm.extra_operands import NO_EXTRAS, ExtraOperands
from ..gemm.operands import Request, check_kinds, requests
from ..gemm.problem import Op
from ..installed.registry import INSTALLATION, FoundBundle
from ..matching.device import DeviceFacts
from ..matching.index import Match, Miss
from . import native
from .calls import prepare_call, unseen_by_dynamo
from .fast_path import quick_with_kernel
from .library import LoadedKernel
from .select import choose_kernel, facts_of, find, load_kernel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What would happen to one GEMM.

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
        a: Matrix [m, k], or a batch of them.
        b: Matrix [k, n], or a batch of them.
        out_dtype: Type of the result; by default as ``a``, but int32 for integers and bfloat16 for
            fp8.
        extras: What else is there, as `nvgemm_runtime.gemm.extra_operands.ExtraOperands` names it.
    """
    facts = facts_of(a)
    op = _op(a, extras)
    try:
        check_kinds(op, a, b)
        asked = requests(op, a, b, out_dtype, extras=extras)
    except (NoKernelError, ValueError) as error:
        return Explanation(request=None, facts=facts, match=None, reasons=(str(error),))
    request, found = find(asked, facts)
    if isinstance(found, Miss):
        return Explanation(request=request, facts=facts, match=None, reasons=found.reasons)
    return Explanation(request=request, facts=facts, match=found, reasons=())


@quick_with_kernel(Op.MM)
def mm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Multiply two matrices with a prebuilt kernel.

    Torch does not see the call. Only the operators that `load_operators` gives may be traced,
    compiled into a graph, or used under the transforms of ``torch.func``.

    Args:
        a: Matrix of shape [m, k], contiguous along one dimension.
        b: Matrix of shape [k, n], likewise.
        out: Where the result goes, [m, n] row-major; made if None.
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
            ``torch.jit.trace`` (not looked for where ``out`` and a loaded kernel are given).
    """
    return unseen_by_dynamo(_run)(Op.MM, a, b, out, kernel)


@quick_with_kernel(Op.BMM)
def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Multiply two batches of matrices with a prebuilt kernel; as `mm` with a leading batch."""
    return unseen_by_dynamo(_run)(Op.BMM, a, b, out, kernel)


def choose(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands = NO_EXTRAS
) -> LoadedKernel:
    """Load the best-ranked kernel for ``out = a @ b``: `mm` of matrices, `bmm` of batches.

    Args:
        a: Matrix [m, k], or a batch of them.
        b: Matrix [k, n], or a batch of them.
        out: Where the result is to go.
        extras: What else is there, as `nvgemm_runtime.gemm.extra_operands.ExtraOperands` names it.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why.
        ValueError: If the operands cannot be multiplied.
    """
    op = _op(a, extras)
    check_kinds(op, a, b, out)
    return choose_kernel(op, a, b, out, extras)


def _op(a: torch.Tensor, extras: ExtraOperands) -> Op:
    if extras.offsets is not None:
        return Op.GROUPED_MM
    return Op.BMM if a.dim() == 3 else Op.MM


def load_operators() -> None:
    """Give torch the operators ``torch.ops.nvgemm_aot.mm``, ``bmm``, ``addmm`` and so on.

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
    return launcher


def _load_for_operator(kernel_id: str, origin: str | None = None) -> None:
    if origin is None:
        load_kernel(str(kernel_id))
    else:
        from .compiled import prepare

        prepare(str(kernel_id), str(origin))


def _run(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    kernel: str | LoadedKernel | None,
) -> torch.Tensor:
    out, loaded = prepare_call(op, a, b, out, kernel)
    return out if loaded is None else (mm if op is Op.MM else bmm)(a, b, out, loaded)
