"""The signatures that an entry of a manifest stands for: the product of its lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from nvgemm_runtime.gemm.problem import DType, Layout, Op, Signature
from nvgemm_runtime.gemm.types import Epilogue, ScaleRecipe

from .schema import NONE


def expand_signatures(
    *,
    op: str,
    layouts: Iterable[str],
    dtypes: Iterable[str],
    outs: Iterable[str] | None,
    scales: Iterable[str],
    epilogues: Iterable[str],
) -> Iterator[Signature]:
    """Make the signatures of an entry, from values that exist, spelt as manifests spell them.

    Args:
        op: The operation.
        layouts: Majors of A and B.
        dtypes: Types of A and B.
        outs: Types of the result; None for what is usual for each of ``dtypes``.
        scales: Scale recipes, or ``none``.
        epilogues: Epilogues, or ``none``.
    """
    named = None if outs is None else [DType(out) for out in outs]
    for layout, dtype in itertools.product(layouts, map(DType, dtypes)):
        for out, recipe, epilogue in itertools.product(
            [dtype.usual_out] if named is None else named, scales, epilogues
        ):
            yield Signature(
                op=Op(op),
                layout=Layout(layout),
                a=dtype,
                b=dtype,
                accumulator=dtype.accumulator,
                out=out,
                scales=None if recipe == NONE else ScaleRecipe(recipe),
                epilogue=None if epilogue == NONE else Epilogue(epilogue),
            )
