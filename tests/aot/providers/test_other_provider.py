from __future__ import annotations

import pytest

from nvgemm_aot.providers import PROVIDERS
from nvgemm_aot.providers.other_provider import other_provider
from nvgemm_runtime.gemm.problem import Signature


@pytest.mark.parametrize(
    ("key", "arch", "provider"),
    [
        ("mm/tn/bf16xbf16/fp32/bf16/bias", "sm_90a", "quack"),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor", "sm_90a", "quack"),
        ("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16", "sm_90a", None),
        ("mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16", "sm_90a", "quack"),
        ("mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_row/bias", "sm_90a", "quack"),
        ("mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16", "sm_100f", None),
        ("mm/tn/bf16xbf16/fp32/bf16/bias", "sm_100f", None),
        ("mm/tn/bf16xbf16/fp32/bf16/bias", "sm_80", None),
        ("gathered_mm/tt/fp32xbf16/fp32/bf16", "sm_100f", "gathered"),
        ("gathered_grouped_mm/tn/bf16xbf16/fp32/bf16", "sm_103a", "quack"),
        ("mm/tn/bf16xbf16/fp32/bf16/swiglu_halves", "sm_80", None),
        ("grouped_mm/tn/bf16xbf16/fp32/bf16", "sm_90a", "quack"),
        ("k_grouped_mm/nt/bf16xbf16/fp32/bf16", "sm_90a", "quack"),
        ("k_grouped_mm/nt/bf16xbf16/fp32/bf16", "sm_100f", "quack"),
        ("grouped_mm/tn/bf16xbf16/fp32/bf16", "sm_100f", None),
        ("grouped_mm/tt/bf16xbf16/fp32/bf16", "sm_100f", "quack"),
        ("grouped_mm/tn/bf16xbf16/fp32/bf16/bias", "sm_100f", "quack"),
        ("grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_halves", "sm_100f", "quack"),
    ],
)
def test_another_provider_serves_what_the_default_one_does_not(
    key: str, arch: str, provider: str | None
) -> None:
    assert other_provider(Signature.parse(key), arch) == provider
    assert provider is None or provider in PROVIDERS
