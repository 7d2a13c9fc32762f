"""The public functions: what bundles there are, which kernel serves a GEMM and why, running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import native
from .errors import NoKernelError
from .facts import DeviceFacts, device_facts
from .installation import INSTALLATION, FoundBundle
from .library import LIBRARY, LoadedKernel
from .match import Match, Miss
from .operands import Request, request, torch_dtype
from .problem import Op

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
    """Every bundle that is installed or named in NVGEMM_AOT_BUNDLES, usable or not."""
    return INSTALLATION.bundles()


def explain(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> Explanation:
    """Say which kernels serve ``a @ b``, or every reason why none does.

    Args:
        a: Matrix [m, k], or a batch of them.
        b: Matrix [k, n], or a batch of them.
        out_dtype: Type of the result; by default as ``a``.
    """
    facts = _facts(a)
    op = Op.MM if a.dim() == 2 else Op.BMM
    try:
        asked = request(op, a, b, out_dtype)
    except NoKernelError as error:
        return Explanation(request=None, facts=facts, match=None, reasons=(str(error),))
    index, _ = INSTALLATION.index(facts)
    found = index.match(asked.problem, asked.alignment_bytes)
    if isinstance(found, Miss):
        return Explanation(request=asked, facts=facts, match=None, reasons=found.reasons)
    return Explanation(request=asked, facts=facts, match=found, reasons=())


def mm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Multiply two matrices with a prebuilt kernel.

    Args:
        a: Matrix of shape [m, k], contiguous along one dimension.
        b: Matrix of shape [k, n], likewise.
        out: Where the result goes, [m, n] row-major; made if None.
        kernel: The kernel: its id, or what `choose` gave (the quickest way); the best-ranked if
            None.

    Returns:
        ``out``.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why.
        ValueError: If the operands are not what the kernel takes.
        RuntimeError: If an operand requires grad while gradients are recorded.
    """
    return _run(Op.MM, a, b, out, kernel)


def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    kernel: str | LoadedKernel | None = None,
) -> torch.Tensor:
    """Multiply two batches of matrices with a prebuilt kernel; as `mm` with a leading batch."""
    return _run(Op.BMM, a, b, out, kernel)


def choose(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> LoadedKernel:
    """Load the best-ranked kernel for ``out = a @ b``.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why.
    """
    op = Op.MM if a.dim() == 2 else Op.BMM
    asked = request(op, a, b, out=out)
    index, opened = INSTALLATION.index(_facts(a))
    found = index.match(asked.problem, asked.alignment_bytes)
    if isinstance(found, Miss):
        raise NoKernelError(
            f"no kernel for {asked.problem.key}:\n" + "\n".join(f"  {r}" for r in found.reasons),
            found.reasons,
        )
    best = found.kernels[0]
    return LIBRARY.load(opened[best.bundle], best.kernel)


def load_kernel(kernel_id: str) -> LoadedKernel:
    """Load a kernel by its id, from whichever bundle holds it.

    Raises:
        NoKernelError: If no bundle holds it.
    """
    loaded = LIBRARY.get(kernel_id)
    if loaded is not None:
        return loaded
    place = INSTALLATION.kernels().get(kernel_id)
    if place is None:
        raise NoKernelError(
            f"no installed bundle holds kernel {kernel_id}; install the kernel wheel it came from"
        )
    return LIBRARY.load(*place)


def _run(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    kernel: str | LoadedKernel | None,
) -> torch.Tensor:
    if isinstance(kernel, str):
        kernel = load_kernel(kernel)
    if out is None:
        out = _empty_out(op, a, b, kernel)
    if kernel is None:
        if out.numel() == 0 or a.numel() == 0:
            return out.zero_()  # as ATen: a sum of nothing is zero
        kernel = choose(a, b, out)
    _require_plain(a, b, out)
    native.load().launch(kernel.handle, a, b, out)
    return out


def _require_plain(*operands: torch.Tensor) -> None:
    """Refuse what the launcher cannot see and would get wrong."""
    for operand in operands:
        if operand.requires_grad and _grad_enabled():
            raise RuntimeError(
                "kernels have no derivative, and an operand requires grad; call under "
                "torch.no_grad() or detach it"
            )
        if operand.is_neg():
            raise ValueError("an operand is a lazily negated view; call .resolve_neg() on it")


def _grad_enabled() -> bool:
    import torch

    return bool(torch.is_grad_enabled())


def _empty_out(
    op: Op, a: torch.Tensor, b: torch.Tensor, kernel: LoadedKernel | None
) -> torch.Tensor:
    """A result of the kernel's type, or of ``a``'s where the kernel is yet to be found."""
    dtype = a.dtype if kernel is None else torch_dtype(kernel.kernel.signature.out)
    shape = (a.shape[0], b.shape[1]) if op is Op.MM else (*a.shape[:2], b.shape[2])
    return a.new_empty(shape, dtype=dtype)


def _facts(tensor: torch.Tensor) -> DeviceFacts:
    return device_facts(tensor.device.type, tensor.device.index or 0)
