"""Decides which GEMMs a manifest can declare and `build` can serve."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import NoKernelError
from ..gemm.aten import UNSERVED, AtenGemm, operation_of, product_of_sum
from ..gemm.operands import Request, requests
from ..gemm.problem import DType, Problem
from ..gemm.support import unavailable, unsupported

if TYPE_CHECKING:
    from ..gemm.operands import Operand

ALIGNMENT_BYTES = 16
"""Alignment that all the builder's providers require for pointers, contiguous extents and strides.

Observed with cutlass.operators 0.3.0 for mm and bmm in fp16 and bf16, all layouts, into fp32, fp16
and bf16, on sm_90a, sm_100f and sm_103a.
"""


def read_requests(gemm: AtenGemm) -> tuple[Request, ...] | str:
    """Returns a GEMM's requests, best aligned first, or the reason why no kernel can compute it."""
    unserved = UNSERVED.get(gemm.op)
    reason = gemm.obstacle if unserved is None else unserved.reason
    if reason is not None:
        return reason
    try:
        op = operation_of(gemm)
        return requests(op, gemm.a, gemm.b, out=gemm.out, extras=gemm.extras)
    except (NoKernelError, ValueError) as error:
        return str(error)


def declarable(gemm: AtenGemm, readings: tuple[Request, ...] | str | None = None) -> Problem | str:
    """Returns the problem by which a manifest declares a GEMM, or the reason why it cannot.

    Returns:
        The problem, or one line with operator, dtypes, sizes and the reason.
    """
    if readings is None:
        readings = read_requests(gemm)
    reason = readings if isinstance(readings, str) else _why_undeclarable(readings[0])
    if isinstance(readings, str) or reason is not None:
        return f"{describe_gemm(gemm)}: {reason}"
    return readings[0].problem


def declarable_for(gemm: AtenGemm, arch: str) -> Problem | str:
    """Returns the problem that serves a GEMM in a manifest for one architecture, or a reason.

    If no kernel computes a sum because of its addend, the product alone is declared, into fp32.
    torch.compile then uses its kernel and makes torch add.
    """
    declaration = declarable(gemm)
    product = product_of_sum(gemm) if isinstance(declaration, str) else None
    if product is not None and isinstance(product_problem := declarable(product), Problem):
        declaration = product_problem
    if isinstance(declaration, str):
        return declaration
    reason = unavailable(declaration.signature, arch)
    return declaration if reason is None else f"{describe_gemm(gemm)}: {reason}"


def _why_undeclarable(request: Request) -> str | None:
    signature = request.problem.signature
    reason = unsupported(signature)
    if reason is not None:
        return reason
    if request.alignment_bytes < ALIGNMENT_BYTES:
        return (
            f"rows or columns are aligned to {request.alignment_bytes} bytes, kernels need "
            f"{ALIGNMENT_BYTES} (layout {signature.layout.value})"
        )
    if signature.scales is not None and signature.scales.is_swizzled and not request.is_compact:
        return "operands have gaps between rows, which block-scaled kernels do not support"
    return None


def describe_gemm(gemm: AtenGemm) -> str:
    """Describes a GEMM, e.g. ``addmm of bf16[16, 64] and bf16[64, 32] into bf16[16, 32]``."""
    return f"{gemm.op} of {_text(gemm.a)} and {_text(gemm.b)} into {_text(gemm.out)}"


_IN_WORDS = re.compile(r"\w+ of \w+\[([0-9, ]+)\] and \w+\[([0-9, ]+)\] into \w+\[[0-9, ]+\]")


def parse_description(words: str) -> tuple[int, int, int, int] | None:
    """Reads m, n, k and batch from a description by `describe_gemm`, or returns None."""
    match = _IN_WORDS.fullmatch(words)
    if match is None:
        return None
    a, b = ([int(extent) for extent in shape.split(", ")] for shape in match.groups())
    if not (2 <= len(a) <= 3 and 2 <= len(b) <= 3 and all(a + b)):
        return None
    return a[-2], b[-1], a[-1], a[0] if len(a) == 3 else 1


def _text(operand: Operand) -> str:
    dtype = str(operand.dtype).removeprefix("torch.")
    return f"{_SHORT_NAMES.get(dtype, dtype)}[{', '.join(map(str, operand.shape))}]"


_SHORT_NAMES = {dtype.torch_name: dtype.value for dtype in DType}
