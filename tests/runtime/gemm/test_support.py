from __future__ import annotations

import re

import pytest

from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.support import unavailable, unsupported


@pytest.mark.parametrize(
    "key",
    [
        "mm/nt/fp16xfp16/fp32/fp8_e5m2",
        "bmm/nn/bf16xbf16/fp32/fp32/bias_silu",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp8_e4m3",
        "mm/tt/int8xint8/int32/int8",
        "mm/tn/uint8xuint8/int32/int32",
        "mm/nt/fp8_e5m2xfp8_e5m2/fp32/bf16/e8m0_1x32",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e4m3/e8m0_1x32",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp16/fp32_row/bias",
        "grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp32",
        "mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_tensor",
        "mm/tn/fp8_e4m3xfp8_e5m2/fp32/fp16/fp32_row/bias",
        "bmm/tn/fp8_e4m3xfp8_e5m2/fp32/fp8_e5m2/add",
        "grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_halves_ups",
        "grouped_mm/tt/fp16xfp16/fp32/bf16/geglu_halves_ups",
    ],
)
def test_rows_of_the_support_table(key: str) -> None:
    assert unsupported(Signature.parse(key)) is None


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("mm/tn/fp16xbf16/fp32/bf16", "A is fp16 and B is bf16, must be of one type"),
        ("mm/tn/fp8_e4m3xint8/fp32/bf16", "B is int8, must be of one type, or both of fp8"),
        ("mm/tn/bf16xfp8_e4m3/fp32/bf16", "B is fp8_e4m3, must be of one type"),
        ("mm/nt/fp8_e5m2xfp8_e4m3/fp32/bf16", "fp8 of two types has layout tn alone .here nt"),
        (
            "grouped_mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16",
            "takes A and B of one type .here fp8_e5m2",
        ),
        ("mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/e8m0_1x32", "e8m0_1x32 are for A and B of one type"),
        ("mm/tn/fp32xfp32/fp32/fp32", "fp32 is not multiplied by any operator"),
        ("mm/tn/bf16xbf16/fp32/int8", "bf16 gives no int8, but fp32, fp16, bf16"),
        ("mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16", "fp4_e2m1 needs scales .e8m0_1x32, e4m3_1x16,"),
        ("mm/tn/int8xint8/int32/int32/bias", "no operator has an epilogue for int8"),
        ("grouped_mm/nt/bf16xbf16/fp32/bf16", "has layout tn or tt alone .here nt"),
        ("k_grouped_mm/tn/bf16xbf16/fp32/bf16", "k_grouped_mm of bf16 has layout nt alone"),
        ("k_grouped_mm/nt/fp8_e4m3xfp8_e4m3/fp32/bf16", "k_grouped_mm takes no fp8_e4m3"),
        ("k_grouped_mm/nt/bf16xbf16/fp32/bf16/bias", "k_grouped_mm has no epilogue .here bias"),
        ("grouped_mm/tn/int8xint8/int32/int32", "grouped_mm takes no int8"),
        ("grouped_mm/tn/bf16xbf16/fp32/fp8_e4m3", "grouped_mm gives no fp8_e4m3"),
        (
            "grouped_mm/tn/bf16xbf16/fp32/bf16/bias_silu",
            "has the epilogues bias and add, and gated",
        ),
        ("grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/bias", "of fp8_e4m3 has no epilogue"),
        ("grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/add", "of fp8_e4m3 has no epilogue .here add"),
        ("k_grouped_mm/nt/bf16xbf16/fp32/bf16/add", "k_grouped_mm has no epilogue .here add"),
        ("grouped_mm/tn/bf16xbf16/fp32/fp32/swiglu_halves", "swiglu_halves gives no fp32"),
        ("grouped_mm/tt/bf16xbf16/fp32/bf16/swiglu_halves", "column-major alone, layout tn .here"),
        ("bmm/tn/bf16xbf16/fp32/bf16/geglu_halves", "bmm has no gated epilogue"),
        ("mm/tn/bf16xbf16/fp32/bf16/swiglu_halves_ups", "mm has no swiglu_halves_ups, grouped_mm"),
        ("grouped_mm/tn/bf16xbf16/fp32/fp32/swiglu_halves_ups", "swiglu_halves_ups gives no fp32"),
        ("grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor", "takes scales fp32_row alone"),
        ("grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32", "takes scales fp32_row alone"),
        ("grouped_mm/tn/bf16xbf16/fp32/bf16/fp32_row", "scales fp32_row are not for bf16"),
        ("grouped_mm/tn/fp8_e4m3xfp8_e5m2/fp32/bf16/fp32_row", "takes A and B of one type"),
        ("grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias", "has no epilogue .here bias"),
        ("k_grouped_mm/nt/bf16xbf16/fp32/bf16/fp32_row", "takes no scales .here fp32_row"),
        ("bmm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row", "bmm takes no scales .here fp32_row"),
        ("mm/tn/bf16xbf16/fp32/bf16/fp32_row", "scales fp32_row are not for bf16"),
        ("mm/nt/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16", "has layout tn alone"),
        ("mm/nt/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor", "has layout tn alone"),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp8_e4m3/fp32_row", "scales fp32_row give no fp8_e4m3"),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32/bias", "have no epilogue .here bias"),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/add", "the one epilogue is bias"),
    ],
)
def test_what_none_computes_has_its_reason(key: str, reason: str) -> None:
    said = unsupported(Signature.parse(key))
    assert said is not None
    assert re.search(reason, said), said


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32",
         "no kernel for sm_90a takes block scales (here e8m0_1x32)"),
        ("grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16", None),
        ("grouped_mm/tn/fp8_e5m2xfp8_e5m2/fp32/fp16/fp32_row", None),
        ("grouped_mm/tn/bf16xbf16/fp32/bf16", None),
        ("grouped_mm/tt/fp16xfp16/fp32/fp32", None),
        ("grouped_mm/tt/fp16xfp16/fp32/fp32/bias", None),
        ("grouped_mm/tt/fp16xfp16/fp32/bf16/swiglu_oai_interleaved", None),
        ("mm/nt/int8xint8/int32/int32",
         "kernels for sm_90a multiply int8 in layout tn alone (here nt)"),
        ("mm/nt/bf16xbf16/fp32/fp32", None),
        ("mm/nt/bf16xbf16/fp32/fp32/add", None),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias", None),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16", None),
    ],
)  # fmt: skip
def test_what_hopper_lacks_has_its_reason(key: str, reason: str | None) -> None:
    signature = Signature.parse(key)
    assert unsupported(signature) is None
    assert unavailable(signature, "sm_90a") == reason
    assert unavailable(signature, "sm_100f") is None


def test_fp8_of_two_types_is_for_hopper_alone() -> None:
    signature = Signature.parse("mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_tensor")
    assert unavailable(signature, "sm_90a") is None
    for arch in ("sm_100f", "sm_100a", "sm_103a"):
        assert unavailable(signature, arch) == (
            f"no kernel for {arch} multiplies fp8 of two types (here fp8_e5m2 by fp8_e4m3)"
        )
