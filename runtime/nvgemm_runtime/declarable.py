"""Which GEMMs a manifest can declare and `build` can serve; for any other, why not, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import NoKernelError
from .operands import requests
from .problem import DType, Op, Problem
from .support import unsupported

if TYPE_CHECKING:
    from .inductor.operand import Operand

ALIGNMENT_BYTES = 16
"""What every kernel of the builder's providers demands of pointers, contiguous extents and strides.

Seen with cutlass.operators 0.3.0 for mm and bmm of fp16 and bf16, in all layouts, into fp32, fp16
and bf16, on sm_90a, sm_100f and sm_103a.
"""

_BIAS = "no bundled kernel adds a bias"
_SCALES = "no bundled kernel takes scales"
_GROUPS = "no bundled kernel is grouped"
_TWO_PRODUCTS = "no bundled kernel adds two products"

UNSERVED = {
    "addmm": _BIAS,
    "bias_addmm": _BIAS,
    "_addmm_activation": _BIAS,
    "baddbmm": _BIAS,
    "addbmm": "no bundled kernel sums over a batch",
    "_int_mm": "no bundled kernel is offered for _int_mm",
    "_scaled_mm": _SCALES,
    "_scaled_mm_v2": _SCALES,
    "_grouped_mm": _GROUPS,
    "_scaled_grouped_mm": _GROUPS,
    "_scaled_grouped_mm_v2": _GROUPS,
    "mm_plus_mm": _TWO_PRODUCTS,
    "_mm_plus_mm": _TWO_PRODUCTS,
}
"""By name of an ATen operator, or of Inductor's choice for it: why a GEMM is not served."""


def declarable(op: str, a: Operand, b: Operand, out: Operand) -> Problem | str:
    """The problem by which a manifest declares a GEMM, or why none can.

    Args:
        op: ATen's name of the operator that multiplies, such as ``mm`` or ``addmm``.
        a: Operand of shape [m, k], with a leading batch for ``bmm``.
        b: Operand of shape [k, n], likewise.
        out: Result of shape [m, n], likewise.

    Returns:
        The problem; otherwise one line: operator, types, sizes and the reason.
    """
    if op in UNSERVED:
        return f"{in_words(op, a, b, out)}: {UNSERVED[op]}"
    try:
        request = requests(Op(op), a, b, out=out)[0]  # the best aligned way to read it
    except (NoKernelError, ValueError) as error:
        return f"{in_words(op, a, b, out)}: {error}"
    signature = request.problem.signature
    reason = unsupported(signature)
    if reason is not None:
        pass
    elif request.alignment_bytes < ALIGNMENT_BYTES:
        reason = (
            f"rows or columns are aligned to {request.alignment_bytes} bytes, kernels need "
            f"{ALIGNMENT_BYTES} (layout {signature.layout.value})"
        )
    else:
        return request.problem
    return f"{in_words(op, a, b, out)}: {reason}"


def in_words(op: str, a: Operand, b: Operand, out: Operand) -> str:
    """A GEMM in words, e.g. ``addmm of bf16[16, 64] and bf16[64, 32] into bf16[16, 32]``."""
    return f"{op} of {_word(a)} and {_word(b)} into {_word(out)}"


_IN_WORDS = re.compile(r"\w+ of \w+\[([0-9, ]+)\] and \w+\[([0-9, ]+)\] into \w+\[[0-9, ]+\]")


def sizes_in_words(words: str) -> tuple[int, int, int, int] | None:
    """m, n, k and batch of a GEMM that `in_words` describes; None where that is not to be read."""
    match = _IN_WORDS.fullmatch(words)
    if match is None:
        return None
    a, b = ([int(extent) for extent in shape.split(", ")] for shape in match.groups())
    if not (2 <= len(a) <= 3 and 2 <= len(b) <= 3 and all(a + b)):
        return None
    return a[-2], b[-1], a[-1], a[0] if len(a) == 3 else 1


def _word(operand: Operand) -> str:
    dtype = str(operand.dtype).removeprefix("torch.")
    return f"{_SHORT_NAMES.get(dtype, dtype)}{_extents(operand.shape)}"


def _extents(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


_SHORT_NAMES = {dtype.torch_name: dtype.value for dtype in DType}
