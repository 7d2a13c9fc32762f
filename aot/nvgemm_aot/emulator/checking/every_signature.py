"""Every signature that some provider may compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES, Epilogue
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Signature
from nvgemm_runtime.gemm.support import GATHERED, OUTS, multiply_together, unsupported
from nvgemm_runtime.gemm.types import ScaleRecipe


def _every_signature() -> Iterator[Signature]:
    for op, scales, epilogue in itertools.product(Op, (None, *ScaleRecipe), (None, *ALL_EPILOGUES)):
        yield from _signatures(op, scales, epilogue)


def _signatures(
    op: Op, scales: ScaleRecipe | None, epilogue: Epilogue | None
) -> Iterator[Signature]:
    if op is Op.GATHERED_MM:
        if scales is None and epilogue is None:
            yield from (_gathered(dtype) for dtype in GATHERED)
        return
    for layout, a, b in itertools.product(Layout, OUTS, OUTS):
        if not multiply_together(a, b):
            continue
        for out in OUTS[a]:
            signature = Signature(
                op=op,
                layout=layout,
                a=a,
                b=b,
                out=out,
                scales=scales,
                epilogue=epilogue,
                accumulator=DType.INT32 if a.is_integer else DType.FP32,
            )
            if unsupported(signature) is None:
                yield signature


def _gathered(dtype: DType) -> Signature:
    return Signature(
        op=Op.GATHERED_MM,
        layout=Layout.TT,
        a=DType.FP32,
        b=dtype,
        accumulator=DType.FP32,
        out=dtype,
    )


EVERY_SIGNATURE = tuple(_every_signature())
"""All signatures, row by row of the support matrix."""
