"""The public functions: what bundles there are, which kernel serves a GEMM and why, running it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import native
from .autograd_refusal import refuse_lost_derivative
from .eager import quick_with_kernel, refuse_negation, refuse_tracing
from .errors import NoKernelError
from .facts import DeviceFacts, device_facts, host_platform, torch_cuda
from .installation import INSTALLATION, FoundBundle
from .jit_cache import mark_used
from .library import LIBRARY, LoadedKernel
from .match import Match, Miss, first_served
from .operands import (
    MAX_ALIGNMENT_BYTES,
    Request,
    check_empty,
    check_kinds,
    check_shapes,
    requests,
    torch_dtype,
    usual_out_dtype,
)
from .problem import Op
from .refusals import process_refusal

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


def explain(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> Explanation:
    """Say which kernels serve ``a @ b``, or every reason why none does.

    Args:
        a: Matrix [m, k], or a batch of them.
        b: Matrix [k, n], or a batch of them.
        out_dtype: Type of the result; by default as ``a``, but int32 for integers and bfloat16 for
            fp8.
    """
    facts = _facts(a)
    op = Op.BMM if a.dim() == 3 else Op.MM
    try:
        check_kinds(op, a, b)
        asked = requests(op, a, b, out_dtype)
    except (NoKernelError, ValueError) as error:
        return Explanation(request=None, facts=facts, match=None, reasons=(str(error),))
    request, found = _find(asked, facts)
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
    return _unseen_by_dynamo()(Op.MM, a, b, out, kernel)


@quick_with_kernel(Op.BMM)
def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Multiply two batches of matrices with a prebuilt kernel; as `mm` with a leading batch."""
    return _unseen_by_dynamo()(Op.BMM, a, b, out, kernel)


def choose(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> LoadedKernel:
    """Load the best-ranked kernel for ``out = a @ b``: `mm` of matrices, `bmm` of batches.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why.
        ValueError: If the operands cannot be multiplied.
    """
    op = Op.BMM if a.dim() == 3 else Op.MM
    check_kinds(op, a, b, out)
    return _choose(op, a, b, out)


def load_kernel(kernel_id: str) -> LoadedKernel:
    """Load a kernel by its id, from whichever bundle holds it.

    Raises:
        NoKernelError: If no bundle holds it, or only one for another platform or CUDA version.
        NvgemmError: If it cannot be loaded; see `Library.load`.
    """
    loaded = LIBRARY.get(kernel_id)
    if loaded is not None:
        return loaded
    place = INSTALLATION.kernels().get(kernel_id)
    if place is None:
        raise NoKernelError(
            f"no installed bundle holds kernel {kernel_id[:12]}; install the kernel wheel it came "
            "from"
        )
    bundle, kernel = place
    reason = process_refusal(bundle.header.target, host_platform(), torch_cuda())
    if reason is not None:
        raise NoKernelError(f"kernel {kernel_id[:12]} of {bundle.path}: {reason}", (reason,))
    return LIBRARY.load(bundle, kernel)


def load_operators() -> None:
    """Give torch the operators ``torch.ops.nvgemm_aot.mm`` and ``bmm``.

    They take a kernel by its id, and load it from the installed bundles where it is not yet loaded.
    Other than `mm` and `bmm` they may be traced and compiled.

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
        from .inductor.compiled import prepare

        prepare(str(kernel_id), str(origin))


def _unseen_by_dynamo() -> Callable[..., torch.Tensor]:
    """`_run`, into which ``torch.compile`` must not look: Dynamo fails on parts of the search."""
    dynamo = sys.modules.get("torch._dynamo")  # not loaded for its own sake: that takes seconds
    if dynamo is None:
        return _run
    if not _disabled:
        _disabled.append(dynamo.disable(_run))
    return _disabled[0]


_disabled: list[Callable[..., torch.Tensor]] = []


def _run(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    kernel: str | LoadedKernel | None,
) -> torch.Tensor:
    refuse_tracing(op)
    if isinstance(kernel, str):
        kernel = load_kernel(kernel)
    elif kernel is not None and not isinstance(kernel, LoadedKernel):
        raise TypeError(
            f"{op.value}: kernel must be an id, what choose() gave, or None (got "
            f"{type(kernel).__name__})"
        )
    if kernel is not None and kernel.op is not op:
        raise ValueError(
            f"{op.value}: kernel {kernel.kernel.id[:12]} computes {kernel.kernel.signature.key}"
        )
    if out is None or kernel is None:
        refuse_lost_derivative(op.value, a=a, b=b, **({} if out is None else {"out": out}))
        check_kinds(op, a, b, out)
        shape = check_shapes(op, a, b, out)
        if out is None:
            # Of the kernel's type, or of the usual one where the kernel is yet to be found.
            signature = None if kernel is None else kernel.kernel.signature
            dtype = usual_out_dtype(a.dtype) if signature is None else torch_dtype(signature.out)
            out = a.new_empty(shape, dtype=dtype)
    refuse_negation(op, a, b, out)
    if kernel is None:
        if out.numel() == 0 or a.numel() == 0:
            check_empty(op, a, b, out)
            return out.zero_()  # as ATen: a sum of nothing is zero
        kernel = _choose(op, a, b, out)
    return (mm if op is Op.MM else bmm)(a, b, out, kernel)


_chosen: dict[tuple[object, ...], LoadedKernel] = {}
"""The kernel that was chosen for operands like these: what is installed stays as it was found."""

_MAX_CHOSEN = 4096


def _choose(op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> LoadedKernel:
    key = (op, *_all_that_counts(a), *_all_that_counts(b), *_all_that_counts(out))
    kernel = _chosen.get(key)
    if kernel is None:
        kernel = _match_and_load(op, a, b, out)
        if len(_chosen) >= _MAX_CHOSEN:
            _chosen.clear()
        _chosen[key] = kernel
    return kernel


def _all_that_counts(tensor: torch.Tensor) -> tuple[object, ...]:
    """What of a tensor can decide which kernel serves it."""
    place = tensor.data_ptr() % MAX_ALIGNMENT_BYTES
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), place


def _match_and_load(op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> LoadedKernel:
    facts = _facts(a)
    request, found = _find(requests(op, a, b, out=out), facts)
    if isinstance(found, Miss):
        raise NoKernelError(
            f"no kernel for {request.problem.key}:\n" + "\n".join(f"  {r}" for r in found.reasons),
            found.reasons,
        )
    best = found.kernels[0]
    _, opened = INSTALLATION.index(facts)
    return LIBRARY.load(opened[best.bundle], best.kernel)


def _find(asked: tuple[Request, ...], facts: DeviceFacts) -> tuple[Request, Match | Miss]:
    """The first reading of the operands that a kernel serves, or why none serves any."""
    index, _ = INSTALLATION.index(facts)
    request, found = first_served(index.match, asked)
    if isinstance(found, Match) and found.from_jit:
        mark_used(found.ranked_as)
    return request, found


def _facts(tensor: torch.Tensor) -> DeviceFacts:
    return device_facts(tensor.device.type, tensor.device.index or 0)
