"""Supported combinations of operand dtypes, result dtypes, scales and epilogues.

Each row here matches one in docs/reference/support.md, and holds for at least one target. The
builder finds out which operators a target has for it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from .epilogues import ADD, BIAS, GateForm, WeightOrder
from .problem import Layout, Op, Signature
from .target import ARCHITECTURES
from .types import DType, ScaleRecipe

_WIDE = tuple(d for d in DType if not d.is_integer and d.bits >= 16)
_FP8 = tuple(d for d in DType if d.is_fp8)

OUTS = {
    dtype: (DType.INT32, DType.FP32, dtype) if dtype.is_integer else (*_WIDE, *_FP8)
    for dtype in DType
    if dtype.is_operand
}
"""Result dtypes by dtype of A and B, before any further restriction."""

GROUPED = tuple(dtype for dtype in DType if dtype.row.in_groups)
"""Dtypes for A and B in grouped products; the result is fp32, fp16 or bf16."""

GATED = tuple(dtype for dtype in DType if dtype in _WIDE and dtype.bits == 16)
"""Dtypes for A, B and the result with a gated epilogue."""

K_GROUPED = GATED
"""Dtypes for A and B in products grouped along k; the result is fp32, fp16 or bf16."""

GATHERED = GATED
"""Dtypes for B and the result in gathered sums; A is fp32."""

GATHERED_GROUPED = GATED
"""Dtypes for A and B in grouped products with gathered rows; the result is fp32, fp16 or bf16."""

GROUPED_LAYOUTS = (Layout.TN, Layout.TT)
"""Layouts for grouped products; fp8 has only the first."""

K_GROUPED_LAYOUTS = (Layout.NT,)
"""Layouts for products grouped along k. A group may begin at any k; if k were contiguous in A or B,
TMA could load only groups that begin at a multiple of 16 bytes."""


def multiply_together(a: DType, b: DType, op: Op = Op.MM) -> bool:
    """Returns True if A and B dtypes can be multiplied: equal ones, or two fp8 dtypes.

    For ``gathered_mm``, A holds fp32 weights.
    """
    if op is Op.GATHERED_MM:
        return a is DType.FP32 and b in GATHERED
    return a is b or (a.is_fp8 and b.is_fp8)


def unsupported(signature: Signature) -> str | None:
    """Returns why no target has kernels for a signature; None if one may.

    If several reasons apply, returns the one that comes first in the signature's text.
    """
    a, b, out, scales = signature.a, signature.b, signature.out, signature.scales
    if signature.op is Op.GATHERED_MM:
        return _unsupported_gather(signature)
    if not multiply_together(a, b):
        return f"A is {a.value} and B is {b.value}, must be of one type, or both of fp8"
    if a not in OUTS:
        return f"{a.value} is not multiplied by any operator ({_listed(OUTS)} are)"
    if out not in OUTS[a]:
        return f"{a.value} gives no {out.value}, but {_listed(OUTS[a])}"
    if scales is None and a.row.needs_scales:
        return f"{a.value} needs scales ({_listed(r for r in ScaleRecipe if a in r.row.operands)})"
    if a is not b and signature.layout is not Layout.TN:
        return f"fp8 of two types has layout tn alone (here {signature.layout.value})"
    if signature.op.has_groups:
        return _unsupported_in_groups(signature)
    if scales is not None:
        return _unsupported_with_scales(signature, scales)
    if signature.epilogue is not None and a.is_integer:
        return f"no operator has an epilogue for {a.value}"
    return _unsupported_gate(signature) if signature.is_gated else None


def unavailable(signature: Signature, arch: str) -> str | None:
    """Returns why one architecture has no kernel for a supported signature, or None."""
    row = ARCHITECTURES.get(arch)
    if row is None:
        return None
    if signature.scales is not None and signature.scales.is_swizzled and not row.has_block_scales:
        return f"no kernel for {arch} takes block scales (here {signature.scales.value})"
    if signature.a is not signature.b and not row.has_mixed_fp8:
        return f"no kernel for {arch} multiplies fp8 of two types{_both_dtypes(signature)}"
    layouts = row.narrow_layouts if signature.a.bits <= 8 else ()
    if layouts and signature.layout.value not in layouts:
        return (
            f"kernels for {arch} multiply {signature.a.value} in layout {', '.join(layouts)} alone "
            f"(here {signature.layout.value})"
        )
    return None


def _unsupported_gather(signature: Signature) -> str | None:
    name, b = signature.op.value, signature.b
    if not multiply_together(signature.a, b, signature.op):
        operands = f"A of {DType.FP32.value} and B of {_listed(GATHERED)}"
        return f"{name} takes {operands}{_both_dtypes(signature)}"
    if signature.out is not b:
        return f"{name} gives B's type, {b.value} (here {signature.out.value})"
    scales, epilogue = signature.scales, signature.epilogue
    if scales is not None or epilogue is not None:
        observed = scales.value if scales is not None else epilogue and epilogue.name
        return f"{name} takes no scales and has no epilogue (here {observed})"
    if signature.layout is not Layout.TT:
        return f"{name} has layout {Layout.TT.value} alone (here {signature.layout.value})"
    return None


def _unsupported_in_groups(signature: Signature) -> str | None:
    name, is_along_k = signature.op.value, signature.op is Op.K_GROUPED_MM
    is_gathered = signature.op is Op.GATHERED_GROUPED_MM
    operands = K_GROUPED if is_along_k else GATHERED_GROUPED if is_gathered else GROUPED
    scales = signature.scales
    is_unscaled = is_along_k or is_gathered
    if scales is not None and (is_unscaled or scales is not ScaleRecipe.FP32_ROW):
        allowed = "no scales" if is_unscaled else f"scales {ScaleRecipe.FP32_ROW.value} alone"
        return f"{name} takes {allowed} (here {scales.value})"
    if scales is not None and signature.a not in scales.row.operands:
        return _wrong_operand(scales, signature.a)
    if signature.a is not signature.b:
        return f"{name} takes A and B of one type{_both_dtypes(signature)}"
    epilogue = signature.epilogue
    if epilogue is not None and is_along_k:
        return f"{name} has no epilogue (here {epilogue.name})"
    if is_gathered and (epilogue is ADD or signature.is_gradient):
        assert epilogue is not None
        return (
            f"{name} has the epilogue bias, and gated ones other than gradients (here "
            f"{epilogue.name})"
        )
    if epilogue not in (None, BIAS, ADD) and not signature.is_gated:
        assert epilogue is not None
        return f"{name} has the epilogues bias and add, and gated ones (here {epilogue.name})"
    if signature.a not in operands:
        return f"{name} takes no {signature.a.value}, but {_listed(operands)}"
    if signature.out not in _WIDE:
        return f"{name} gives no {signature.out.value}, but {_listed(_WIDE)}"
    layouts = GROUPED_LAYOUTS[:1] if signature.a.is_fp8 else GROUPED_LAYOUTS
    if is_along_k:
        layouts = K_GROUPED_LAYOUTS
    if signature.layout not in layouts:
        return (
            f"{name} of {signature.a.value} has layout {' or '.join(x.value for x in layouts)} "
            f"alone (here {signature.layout.value})"
        )
    if epilogue is not None and signature.a.is_fp8:
        return f"grouped_mm of {signature.a.value} has no epilogue (here {epilogue.name})"
    return _unsupported_gate(signature) if signature.is_gated else None


def _unsupported_gate(signature: Signature) -> str | None:
    assert signature.epilogue is not None
    name = signature.epilogue.name
    if signature.op is Op.BMM:
        return f"bmm has no gated epilogue (here {name}), mm and grouped_mm do"
    if not signature.op.groups_rows and signature.form is not GateForm.JOINED:
        return f"{signature.op.value} has no {name}, grouped_mm has"
    for verb, dtype in (("takes", signature.a), ("gives", signature.out)):
        if dtype not in GATED:
            return f"{name} {verb} no {dtype.value}, but {_listed(GATED)}"
    assert signature.form is not None
    in_halves = signature.epilogue.order is WeightOrder.HALVES
    if signature.form.has_pairs and in_halves and signature.layout.b_row_major:
        # A gate and its up would be n / 2 elements apart within contiguous rows, and TMA cannot
        # load such pairs into neighbouring tile columns.
        layouts = "tn or nn" if signature.op is Op.MM else "tn"
        return (
            f"{name} has B column-major alone, layout {layouts} (here {signature.layout.value}): "
            "interleave the columns, or lay B out along k"
        )
    return None


def _unsupported_with_scales(signature: Signature, scales: ScaleRecipe) -> str | None:
    a = signature.a
    if signature.op is not Op.MM:
        return f"{signature.op.value} takes no scales (here {scales.value}), mm does"
    if a not in scales.row.operands:
        return _wrong_operand(scales, a)
    if scales.is_swizzled and a is not signature.b:
        return f"scales {scales.value} are for A and B of one type{_both_dtypes(signature)}"
    if signature.layout is not Layout.TN and (a.packed > 1 or not scales.is_swizzled):
        return f"{a.value} with scales {scales.value} has layout tn alone"
    if not scales.is_swizzled and signature.out not in _WIDE:
        return f"scales {scales.value} give no {signature.out.value}, but {_listed(_WIDE)}"
    if signature.epilogue is None:
        return None
    if scales.is_swizzled:
        return f"block-scaled operators have no epilogue (here {signature.epilogue.name})"
    if signature.epilogue is not BIAS:
        return f"with scales {scales.value} the one epilogue is bias"
    return None


def _wrong_operand(scales: ScaleRecipe, dtype: DType) -> str:
    return f"scales {scales.value} are not for {dtype.value}, but {_listed(scales.row.operands)}"


def _both_dtypes(signature: Signature) -> str:
    return f" (here {signature.a.value} by {signature.b.value})"


def _listed(values: Iterable[enum.Enum]) -> str:
    return ", ".join(str(value.value) for value in values)
