"""Public functions for grouped, gated and gathered products.

A gate combines column pairs. All functions round once, as in `api`, and go through `compute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..gemm.epilogues import ALL_EPILOGUES, Addend, Epilogue, GateForm
from ..gemm.extra_operands import ExtraOperands
from ..gemm.problem import Op
from .compute import compute
from .loading.loader import LoadedKernel
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
    """Multiplies A's rows, group by group, with one B matrix per group.

    A bias row per group, or a matrix, may be added. A gated epilogue may combine column pairs, see
    `gated_mm`. Training uses further forms:

    - ``…_kept`` stores the product in front of the gated values.
    - ``…_gradient`` multiplies to get the gradient for the gated values, and returns the gradients
      for gates and ups.
    - ``…_gradient_sums`` also returns, per row, the sum over gated values times their gradients.
      That is the routing weight's gradient (if the down projection has no bias).
    - ``…_ups`` serves separate gate and up weights: it multiplies with the up weight, reads the
      gates, and stores the ups in front of the gated values.

    Group ends are on the device, so a call cannot check them: ends that descend or exceed the last
    row make a kernel access memory outside its tensors. NVGEMM_AOT_DEBUG=1 copies and checks them,
    which synchronizes with the device.

    Args:
        a: Matrix [m, k], row-major, with all groups' rows, one group after the other.
        b: Matrices [groups, k, n], each contiguous along one dimension: k if a gated epilogue has
            columns in halves.
        offsets: Group ends along m, ascending: int32 [groups]. Rows past the last end are not
            computed; the result is undefined there.
        out: Output tensor, row-major: [m, n]; with a gate [m, n / 2]; with a kept product [m, n + n
            / 2]; with a gradient or ups [m, 2 n]. None allocates it.
        kernel: Kernel id or loaded kernel; None for the best-ranked one.
        out_dtype: Dtype for a new result; by default the kernel's, or A's (bfloat16 for fp8).
        epilogue: Gated epilogue (an `Epilogue` or its value, such as ``swiglu_halves``); None for
            no gate, or for the named kernel's.
        bias: Bias [groups, n], contiguous along n, in the result's dtype (bfloat16 for fp8).
            ``swiglu_oai`` requires it; other gated epilogues refuse it.
        product: For a gradient, the kept product [m, 2 n], row-major, in the result's dtype; gates
            and ups in the epilogue's order.
        gates: For ups, the gate product [m, n], row-major, in the result's dtype.
        addend: Matrix to add [m, n], row-major, in the result's dtype; not with a bias or a gate.
            May be ``out`` itself, but must not overlap it otherwise.
        sums: For a gradient with sums, the destination for their parts, fp32 [m, ceil(n / 64)],
            contiguous. A kernel writes one part per tile and the others become 0; ``sums.sum(1)``
            is the result, 0 in rows past the last end.

    Returns:
        ``out``.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`. ValueError also
            if n is odd with a gate, if the epilogue has no gate, and, under NVGEMM_AOT_DEBUG=1, if
            offsets descend or exceed the last row.
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
    """Multiplies selected rows of A, group by group: each expert's tokens.

    Equals ``grouped_mm(a[rows], b, offsets, ...)`` without a copy of the rows. Group ends work as
    there. For a row outside ``a``, kernels from builtin providers read another row: nothing outside
    ``a`` is read, and that result row is undefined. NVGEMM_AOT_DEBUG=1 copies and checks rows and
    ends, which synchronizes with the device.

    Args:
        a: Matrix [any number of tokens, k], row-major, bf16 or fp16.
        b: Matrices [groups, k, n], each contiguous along one dimension: k if a gated epilogue has
            columns in halves.
        offsets: Group ends along m, ascending: int32 [groups]. Rows past the last end are not
            computed; the result is undefined there.
        rows: Row in ``a`` for each result row: int32 [m], contiguous.
        out: Output tensor, row-major: [m, n]; with a gate [m, n / 2]; with a kept product [m, n + n
            / 2]; with ups [m, 2 n]. None allocates it.
        kernel: Kernel id or loaded kernel; None for the best-ranked one.
        out_dtype: Dtype for a new result; by default the kernel's, or A's.
        epilogue: Gated epilogue except gradients (an `Epilogue` or its value, such as
            ``swiglu_halves_kept``); None for no gate, or for the named kernel's.
        bias: Bias [groups, n], contiguous along n, in the result's dtype. ``swiglu_oai`` requires
            it; other gated epilogues refuse it.
        gates: For ups, the gate product [m, n], row-major, in the result's dtype.

    Returns:
        ``out``; zeros if ``a`` has no rows.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `grouped_mm`. ValueError also if
            ``rows`` does not have shape [m], and, under NVGEMM_AOT_DEBUG=1, if a row is negative or
            not below the number of tokens.
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
    added: Mapping[str, torch.Tensor | None],
) -> torch.Tensor:
    """Computes grouped rows; ``added`` has the operands to add or read, by name."""
    where = op.value
    gated, kernel = _gated_epilogue(where, epilogue, kernel)
    if gated is not None and gated.gate is None:
        raise ValueError(
            f"{where}: epilogue is {gated.name}, must be gated or None; a bias or a matrix "
            "needs no epilogue"
        )
    if added["bias"] is not None and added["addend"] is not None:
        raise ValueError(
            f"{where}: bias and addend are both given, at most one is allowed; add the other "
            "with torch"
        )
    names: dict[Addend | None, str] = {Addend.PRODUCT: "product", Addend.GATES: "gates"}
    adds_matrix = gated is None and added["addend"] is not None
    expected = names.get(
        None if gated is None else gated.addend, "addend" if adds_matrix else "bias"
    )
    for name, owner in (
        ("bias", "epilogues other than gradients and ups"), ("product", "gradients"),
        ("gates", "ups"), ("addend", "products without a gate"),
    ):  # fmt: skip
        if added[name] is not None and name != expected:
            raise ValueError(
                f"{where}: {name} is given with epilogue {None if gated is None else gated.name}, "
                f"but is only for {owner}"
            )
    extras = extras._replace(addend=added[expected], adds_matrix=adds_matrix, gated=gated)
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
    """Multiplies an fp8 matrix's rows, group by group, and scales rows and columns.

    ``out[i, j] = scale_a[i] * scale_b[g, j] * (a @ b[g])[i, j]`` for row i in group g, computed in
    fp32 and rounded once. ``torch._scaled_grouped_mm`` computes the same into bfloat16.

    Args:
        a: Matrix [m, k], row-major, with all groups' rows, one group after the other.
        b: Matrices [groups, k, n], each contiguous along k.
        scale_a: Row scales, fp32 [m], contiguous.
        scale_b: Column scales, fp32 [groups, n], contiguous.
        offsets: Group ends along m, as in `grouped_mm`.
        out: Output tensor [m, n], row-major; None allocates it.
        kernel: Kernel id or loaded kernel; None for the best-ranked one.
        out_dtype: Dtype for a new result; by default the kernel's, or bfloat16.

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
    """Multiplies two matrices group by group along k: the experts' weight gradients.

    ``out[g] = a[:, begin:end] @ b[begin:end, :]``; a group begins at the previous group's end. An
    empty group gives zeros. ``torch._grouped_mm`` computes the same for two matrices.

    Group ends are on the device, so a call cannot check them: if they descend or exceed k, the
    result is undefined. NVGEMM_AOT_DEBUG=1 copies and checks them, which synchronizes with the
    device.

    Args:
        a: Matrix [m, k], column-major; in a training step, the transposed gradient for a product's
            rows.
        b: Matrix [k, n], row-major.
        offsets: Group ends along k, ascending: int32 [groups]. Terms past the last end are not
            added.
        out: Output tensor [groups, m, n], row-major; None allocates it.
        kernel: Kernel id or loaded kernel; None for the best-ranked one.
        out_dtype: Dtype for a new result; by default the kernel's, or A's.

    Returns:
        ``out``.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`. ValueError also,
            under NVGEMM_AOT_DEBUG=1, if offsets descend or exceed k.
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
    """Adds selected rows with weights: the sum over a token's expert results.

    ``out[i] = sum over j of a[i, j] * b[rows[i, j]]``, in fp32, in order of j, rounded once. A row
    outside ``b``, such as -1, adds nothing, whatever its weight.

    Args:
        a: Weights, fp32 [m, k], row-major.
        b: Matrix [any number, n], bf16 or fp16, row-major.
        rows: Row in ``b`` for each weight: int32 [m, k], contiguous.
        out: Output tensor [m, n], row-major, in B's dtype; None allocates it.
        kernel: Kernel id or loaded kernel; None for the best-ranked one.

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
    """Multiplies two matrices and combines column pairs, for a gated MLP.

    For a column pair (gate, up), ``swiglu`` computes ``silu(gate) * up``, and ``geglu`` computes
    ``gelu(gate) * up`` with the tanh form. ``swiglu_oai`` adds the bias, clamps gates to at most 7
    and ups to -7..7, and computes ``gate * sigmoid(1.702 * gate) * (up + 1)``. The epilogue's
    suffix is its column order: ``_halves`` has all gates before all ups, like a weight [gate; up];
    ``_interleaved`` has each gate before its up.

    Args:
        a: Matrix [m, k], contiguous along one dimension.
        b: Matrix [k, n] with both weights, n even, contiguous along one dimension: k if columns are
            in halves.
        out: Output tensor [m, n / 2], row-major; None allocates it.
        kernel: Kernel id or loaded kernel; None for the best-ranked one with this epilogue.
        epilogue: Gated epilogue (an `Epilogue` or its value, such as ``swiglu_halves``). Optional
            if ``kernel`` names one that has it.
        bias: Bias row with n elements, in B's column order and the result's dtype. ``swiglu_oai``
            requires it; others refuse it.

    Returns:
        ``out``; a new one has the kernel's dtype, or A's.

    Raises:
        NoKernelError, ValueError, TypeError, RuntimeError: As `nvgemm_runtime.mm`. ValueError also
            if n is odd, or the epilogue has no gate.
    """
    where = "gated_mm"
    gated, kernel = _gated_epilogue(where, epilogue, kernel)
    if gated is None and isinstance(kernel, LoadedKernel):
        raise ValueError(
            f"{where}: kernel {kernel.kernel.id[:12]} computes {kernel.kernel.signature.key}"
        )
    if gated is None or gated.form is not GateForm.JOINED:
        allowed = ", ".join(
            member.name for member in ALL_EPILOGUES if member.form is GateForm.JOINED
        )
        requested = "None" if gated is None else gated.name
        raise ValueError(f"{where}: epilogue is {requested}, must be one of {allowed}")
    return compute(where, Op.MM, a, b, out, kernel, ExtraOperands(addend=bias, gated=gated))


def _gated_epilogue(
    where: str, epilogue: Epilogue | str | None, kernel: str | LoadedKernel | None
) -> tuple[Epilogue | None, str | LoadedKernel | None]:
    """Returns the requested gated epilogue, else the named kernel's; and that kernel."""
    requested = _epilogue_of(where, epilogue)
    if requested is not None or not isinstance(kernel, (str, LoadedKernel)):
        return requested, kernel
    loaded = load_kernel(kernel) if isinstance(kernel, str) else kernel
    signature = loaded.kernel.signature
    return (signature.epilogue if signature.is_gated else None), loaded


def _epilogue_of(where: str, epilogue: Epilogue | str | None) -> Epilogue | None:
    """Returns an epilogue that a caller may give by name."""
    try:
        return None if epilogue is None else Epilogue.parse(epilogue)
    except ValueError:
        known = ", ".join(member.name for member in ALL_EPILOGUES)
        message = f"{where}: no such Epilogue: {epilogue!r} (known: {known})"
        raise ValueError(message) from None
