"""The public functions: what bundles there are, which kernel serves a GEMM and why, running it.

Each GEMM function computes ``round(f(scale_a * scale_b * (A @ B) + addend))``: everything in the
accumulator's type, and one rounding at the end. With a gated epilogue, f joins columns in pairs.
All go through `compute`; `mm` and `bmm` skip it where they are given an ``out`` and a loaded kernel
(`fast_path`).
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..errors import NoKernelError
from ..gemm.epilogues import Activation, Addend, Epilogue, GateForm
from ..gemm.extra_operands import NO_EXTRAS, ExtraOperands
from ..gemm.operands import Request, check_kinds, requests
from ..gemm.problem import Op
from ..gemm.types import ScaleRecipe
from ..installed.registry import INSTALLATION, FoundBundle
from ..matching.device import DeviceFacts
from ..matching.index import Match, Miss
from . import native
from .compute import compute
from .fast_path import skip_if_loaded
from .loader import LoadedKernel
from .select import choose_kernel, facts_of, find, load_kernel

if TYPE_CHECKING:
    import torch

_Named = TypeVar("_Named", bound=enum.Enum)


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
        a: Matrix [m, k], or a batch of them.
        b: Matrix [k, n], or a batch of them.
        out_dtype: Type of the result; by default as ``a``, but int32 for integers and bfloat16 for
            fp8.
        extras: Scales, offsets and addend, see `nvgemm_runtime.gemm.extra_operands.ExtraOperands`.
    """
    facts = facts_of(a)
    op = _op(a, b, extras)
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
    extras = ExtraOperands(addend=input, activation=_enum_of("addmm", Activation, activation))
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
    extras = ExtraOperands(addend=input, activation=_enum_of("baddbmm", Activation, activation))
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
        recipe=_enum_of("scaled_mm", ScaleRecipe, recipe),
        addend=bias,
    )
    return compute("scaled_mm", Op.MM, a, b, out, kernel, extras, out_dtype)


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
) -> torch.Tensor:
    """Multiply the rows of one matrix, group by group, with a matrix for each group.

    A bias may be added, a row for each group, and a gated epilogue may join the columns of the
    product in pairs, as `gated_mm` says. For training, one whose name ends with ``_kept`` stores
    the product in front of that, and one that ends with ``_gradient`` takes the gradient of what
    the gate gave, by multiplying, to those of gates and ups. Of two weights, one that ends with
    ``_ups`` multiplies with that of ups, reads gates, and stores ups in front of what the gate
    gives.

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

    Returns:
        ``out``.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`; ValueError also
            under NVGEMM_AOT_DEBUG=1, if offsets fall or pass the last row, and if n is odd with a
            gated epilogue, or the epilogue has no gate.
    """
    where = "grouped_mm"
    gated, kernel = _gated_epilogue(where, epilogue, kernel)
    if gated is not None and gated.gate is None:
        raise ValueError(
            f"{where}: epilogue is {gated.value}, must be a gated one or None; a bias alone needs "
            "no epilogue"
        )
    names: dict[Addend | None, str] = {Addend.PRODUCT: "product", Addend.GATES: "gates"}
    wanted = names.get(None if gated is None else gated.addend, "bias")
    given = {"bias": bias, "product": product, "gates": gates}
    for name, owner in (
        ("bias", "neither gradients nor ups"), ("product", "gradients"), ("gates", "ups"),
    ):  # fmt: skip
        if given[name] is not None and name != wanted:
            raise ValueError(
                f"{where}: {name} is given with epilogue {None if gated is None else gated.value}; "
                f"it is for {owner}"
            )
    extras = ExtraOperands(offsets=offsets, addend=given[wanted], gated=gated)
    return compute(where, Op.GROUPED_MM, a, b, out, kernel, extras, out_dtype)


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
    asked = _enum_of(where, Epilogue, epilogue)
    if asked is not None or not isinstance(kernel, (str, LoadedKernel)):
        return asked, kernel
    loaded = load_kernel(kernel) if isinstance(kernel, str) else kernel
    signature = loaded.kernel.signature
    return (signature.epilogue if signature.is_gated else None), loaded


def choose(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands = NO_EXTRAS
) -> LoadedKernel:
    """Load the best-ranked kernel for ``out = a @ b``: `mm` of matrices, `bmm` of batches.

    Args:
        a: Matrix [m, k], or a batch of them.
        b: Matrix [k, n], or a batch of them.
        out: The tensor that the result would be written to.
        extras: Scales, offsets and addend, see `nvgemm_runtime.gemm.extra_operands.ExtraOperands`.

    Raises:
        NoKernelError: If no bundled kernel serves this, with every reason why.
        ValueError: If the operands cannot be multiplied.
    """
    op = _op(a, b, extras)
    check_kinds(op, a, b, out)
    return choose_kernel(op, a, b, out, extras)


def _op(a: torch.Tensor, b: torch.Tensor, extras: ExtraOperands) -> Op:
    if extras.offsets is not None:
        return Op.GROUPED_MM if b.dim() == 3 else Op.K_GROUPED_MM
    return Op.BMM if a.dim() == 3 else Op.MM


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
        prepare(str(kernel_id), str(origin))


def _report_failure(kernel_id: str, kind: str, message: str) -> None:
    from .compiled import report_failure

    report_failure(str(kernel_id), str(kind), str(message))


def _enum_of(where: str, kind: type[_Named], value: _Named | str | None) -> _Named | None:
    """A member that a caller may give by its value."""
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(one.value) for one in kind)
        raise ValueError(f"{where}: no such {kind.__name__}: {value!r} (known: {known})") from None
