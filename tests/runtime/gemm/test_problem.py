from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES, BIAS
from nvgemm_runtime.gemm.problem import MAX_EXTENT, DType, Layout, Op, Problem, Signature
from nvgemm_runtime.gemm.types import ScaleRecipe

signatures = st.builds(
    Signature,
    op=st.sampled_from(Op),
    layout=st.sampled_from(Layout),
    a=st.sampled_from(DType),
    b=st.sampled_from(DType),
    accumulator=st.sampled_from(DType),
    out=st.sampled_from(DType),
    scales=st.none() | st.sampled_from(ScaleRecipe),
    epilogue=st.none() | st.sampled_from(ALL_EPILOGUES),
)
extents = st.integers(1, MAX_EXTENT)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    signature = draw(signatures)
    batch = draw(extents) if signature.op is Op.BMM else 1
    groups = draw(extents) if signature.op.has_groups else 1
    packed = max(signature.a.packed, signature.b.packed)
    k = draw(st.integers(1, MAX_EXTENT // packed)) * packed
    n = draw(st.integers(1, MAX_EXTENT // 2)) * 2 if signature.is_gated else draw(extents)
    return Problem(signature=signature, m=draw(extents), n=n, k=k, batch=batch, groups=groups)


@given(signatures)
def test_signature_key_parses_back(signature: Signature) -> None:
    assert Signature.parse(signature.key) == signature


@given(problems())
def test_problem_key_parses_back(problem: Problem) -> None:
    assert Problem.parse(problem.key) == problem


def test_keys_are_readable_text() -> None:
    problem = Problem.parse("bmm/nt/fp8_e4m3xfp8_e4m3/fp32/bf16/b8m16n4096k128")
    assert (problem.batch, problem.m, problem.n, problem.k) == (8, 16, 4096, 128)
    assert problem.signature.layout is Layout.NT
    assert not problem.signature.layout.a_row_major
    assert problem.signature.layout.b_row_major
    assert problem.flops == 2 * 8 * 16 * 4096 * 128


def test_keys_name_scales_epilogue_and_groups() -> None:
    scaled = Problem.parse("mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias/m16n32k64")
    assert scaled.signature.scales is ScaleRecipe.FP32_ROW
    assert scaled.signature.epilogue is BIAS
    grouped = Problem.parse("grouped_mm/tn/bf16xbf16/fp32/bf16/g8m64n32k16")
    assert (grouped.groups, grouped.batch, grouped.m) == (8, 1, 64)
    assert grouped.flops == 2 * 64 * 32 * 16  # each row meets the B of its own group alone


def test_a_gated_result_has_half_of_the_columns() -> None:
    gated = Problem.parse("mm/tn/bf16xbf16/fp32/bf16/swiglu_oai_halves/m16n64k8")
    assert gated.signature.is_gated
    assert (gated.n, gated.out_n) == (64, 32)
    assert gated.flops == 2 * 16 * 64 * 8
    plain = Problem.parse("mm/tn/bf16xbf16/fp32/bf16/bias_silu/m16n65k8")
    assert not plain.signature.is_gated
    assert plain.out_n == 65


@pytest.mark.parametrize(
    "key",
    [
        "",
        "mm",
        "mm/tn/bf16xbf16/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/bf16/m0n8k8",
        "mm/tn/bf16xbf16/fp32/bf16/m01n8k8",
        "mm/tn/bf16xbf16/fp32/bf16/m1n8k8 ",
        "mm/tn/bf16xbf16/fp32/bf16/b2m1n8k8",
        "bmm/tn/bf16xbf16/fp32/bf16/m1n8k8",
        "mm/tm/bf16xbf16/fp32/bf16/m1n8k8",
        "mm/tn/bf16/fp32/bf16/m1n8k8",
        "mm/tn/bf16xbf17/fp32/bf16/m1n8k8",
        "mm/tn/bf16xbf16/fp32/bf16/m1n8k99999999999",
        "mm/tn/bf16xbf16/fp32/bf16/g2m1n8k8",
        "bmm/tn/bf16xbf16/fp32/bf16/g2m1n8k8",
        "grouped_mm/tn/bf16xbf16/fp32/bf16/m1n8k8",
        "k_grouped_mm/nt/bf16xbf16/fp32/bf16/m8n8k8",
        "mm/tn/bf16xbf16/fp32/bf16/bias/fp32_row/m1n8k8",
        "mm/tn/bf16xbf16/fp32/bf16/bias/bias/m1n8k8",
        "mm/tn/bf16xbf16/fp32/bf16/bias_tanh/m1n8k8",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16/m1n8k33",
        "mm/tn/bf16xbf16/fp32/bf16/swiglu_halves/m1n9k8",
        "mm/tn/bf16xbf16/fp32/bf16/swiglu/m1n8k8",
    ],
)
def test_rejects_what_is_not_a_problem_key(key: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Problem.parse(key)


def test_mm_takes_no_batch() -> None:
    signature = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
    with pytest.raises(ValueError, match="got batch 2"):
        Problem(signature=signature, m=1, n=8, k=8, batch=2)


def test_problems_sort_by_size_not_by_text() -> None:
    keys = [f"mm/tn/bf16xbf16/fp32/bf16/m{m}n8k8" for m in (1, 2, 16, 128)]
    assert [p.key for p in sorted(Problem.parse(key) for key in reversed(keys))] == keys
