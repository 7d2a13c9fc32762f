"""Every row of the support table, as a signature."""

from __future__ import annotations

import itertools

from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Signature
from nvgemm_runtime.gemm.support import GATHERED, OUTS, multiply_together, unsupported
from nvgemm_runtime.gemm.types import ScaleRecipe

EVERY_SIGNATURE = [
    signature
    for op, layout, dtype, scales, epilogue in itertools.product(
        Op, Layout, OUTS, (None, *ScaleRecipe), (None, *ALL_EPILOGUES)
    )
    for b in OUTS
    if multiply_together(dtype, b)
    for out in OUTS[dtype]
    if unsupported(
        signature := Signature(
            op=op,
            layout=layout,
            a=dtype,
            b=b,
            accumulator=DType.INT32 if dtype.is_integer else DType.FP32,
            out=out,
            scales=scales,
            epilogue=epilogue,
        )
    )
    is None
]
EVERY_SIGNATURE += [
    Signature(
        op=Op.GATHERED_MM,
        layout=Layout.TT,
        a=DType.FP32,
        b=dtype,
        accumulator=DType.FP32,
        out=dtype,
    )
    for dtype in GATHERED
]
