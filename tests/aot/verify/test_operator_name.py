"""What operators' names say; the names are those of cutlass-operators 0.3.0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nvgemm_aot.verify.findings import Check
from nvgemm_aot.verify.operator_name import check_operator_name
from nvgemm_runtime.bundle.format import Kernel, KernelDesign, Span
from nvgemm_runtime.gemm.problem import Signature

NAMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "epilogue": (
        "cutedsl.PersistentDenseGemmEFCOperator_sm100_tnt_ABFloat16_BBFloat16_outBFloat16"
        "_accFloat32_2cta_cluster4x1x1_tile256x64x64_tma_store",
        "mm/tn/bf16xbf16/fp32/bf16/bias_relu",
        {"tile": (256, 64, 64), "ctas_per_tile": 2, "cluster": (4, 1)},
    ),
    "row-wise scales": (
        "cutedsl.PersistentDenseGemmEFCOperator_sm100_tnt_AFloat8E5M2_BFloat8E5M2_outFloat16"
        "_accFloat32_1cta_cluster1x1x1_tile64x64x128_tma_store",
        "mm/tn/fp8_e5m2xfp8_e5m2/fp32/fp16/fp32_row",
        {"tile": (64, 64, 128)},
    ),
    "mxfp8": (
        "cutedsl.PersistentDenseBlockScaledGemmOperator_sm100_nnt_AFloat8E4M3FN_BFloat8E4M3FN"
        "_outBFloat16_SFAFloat8E8M0FNU_SFBFloat8E8M0FNU_accFloat32_scaleScaleMode.Blockwise1x32"
        "_swizzleScaleSwizzleMode.Swizzle32x4x4_2cta_cluster2x1x1_tile128x64x128_tma_store",
        "mm/nn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32",
        {"tile": (128, 64, 128), "cluster": (2, 1)},
    ),
    "nvfp4": (
        "cutedsl.PersistentDenseBlockScaledGemmOperator_sm100_tnt_AFloat4E2M1FN_BFloat4E2M1FN"
        "_outFloat32_SFAFloat8E4M3FN_SFBFloat8E4M3FN_accFloat32_scaleScaleMode.Blockwise1x16"
        "_swizzleScaleSwizzleMode.Swizzle32x4x4_2cta_cluster2x4x1_tile256x192x256_tma_store",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp32/e4m3_1x16",
        {"tile": (256, 192, 256), "ctas_per_tile": 2, "cluster": (2, 4)},
    ),
    "grouped": (
        "cutedsl.ContiguousOffset2D3DGemmDenseOperator_sm100_tnt_AFloat16_BFloat16_outFloat32"
        "_accFloat32_1cta_cluster1x4x1_tile64x128x64_tma_store",
        "grouped_mm/tn/fp16xfp16/fp32/fp32",
        {"tile": (64, 128, 64), "cluster": (1, 4)},
    ),
}
"""Operator, signature, and what of the design is not that of `kernel`."""


def kernel(name: str) -> Kernel:
    operator, signature, design = NAMES[name]
    plain = KernelDesign(
        tile=(64, 64, 64),
        ctas_per_tile=1,
        cluster=(1, 1),
        fallback_cluster=None,
        scheduler="static_persistent",
    )
    return Kernel(
        id="0" * 64,
        span=Span(offset=0, stored_bytes=1, content_bytes=1),
        signature=Signature.parse(signature),
        provider="cutlass_operators",
        operator=operator,
        design=replace(plain, **design),
        alignment_bytes=16,
        workspace_bytes=0,
        calling_convention="tvm_ffi:gemm(a,b,out,stream)",
    )


@pytest.mark.parametrize("name", NAMES)
def test_accepts_entries_that_say_what_their_operators_names_say(name: str) -> None:
    assert not list(check_operator_name(kernel(name), ()))


@pytest.mark.parametrize(
    ("name", "signature", "words"),
    [
        ("epilogue", "mm/tn/bf16xbf16/fp32/bf16", "kind epilogue, its entry says plain"),
        ("mxfp8", "mm/nn/fp8_e4m3xfp8_e4m3/fp32/bf16", "kind block-scaled, its entry says plain"),
        ("grouped", "mm/tn/fp16xfp16/fp32/fp32", "kind grouped, its entry says plain"),
        ("nvfp4", "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp32/e8m0_1x16", "scale_b Float8E4M3FN, its entry"),
        ("nvfp4", "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp32/e8m0_1x32", "scale_mode Blockwise1x16, its"),
        (
            "nvfp4",
            "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp32",
            "swizzle Swizzle32x4x4, its entry says none",
        ),
        ("mxfp8", "mm/nn/fp8_e5m2xfp8_e5m2/fp32/bf16/e8m0_1x32", "a Float8E4M3FN, its entry says"),
    ],
)
def test_finds_entries_that_names_contradict(name: str, signature: str, words: str) -> None:
    entry = replace(kernel(name), signature=Signature.parse(signature))
    gaps = list(check_operator_name(entry, ()))
    assert {gap.check for gap in gaps} == {Check.OPERATOR_NAME}
    assert any(words in gap.message for gap in gaps), gaps


@pytest.mark.parametrize(("name", "ctas"), [("mxfp8", 2), ("nvfp4", 1), ("epilogue", 1)])
def test_finds_other_number_of_thread_blocks_a_tile(name: str, ctas: int) -> None:
    """Block-scaled names always say 2; kernels with tiles of 128 rows use 1 all the same."""
    entry = kernel(name)
    (gap,) = check_operator_name(
        replace(entry, design=replace(entry.design, ctas_per_tile=ctas)), ()
    )
    assert f"states ctas_per_tile {3 - ctas}, its entry says {ctas}" in gap.message


def test_an_epilogue_is_not_in_the_name() -> None:
    entry = replace(
        kernel("epilogue"), signature=Signature.parse("mm/tn/bf16xbf16/fp32/bf16/bias_silu")
    )
    assert not list(check_operator_name(entry, ()))
