from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvgemm_runtime.problem import MAX_EXTENT, DType, Layout, Op, Problem, Signature

signatures = st.builds(
    Signature,
    op=st.sampled_from(Op),
    layout=st.sampled_from(Layout),
    a=st.sampled_from(DType),
    b=st.sampled_from(DType),
    accumulator=st.sampled_from(DType),
    out=st.sampled_from(DType),
)
extents = st.integers(1, MAX_EXTENT)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    signature = draw(signatures)
    batch = draw(extents) if signature.op is Op.BMM else 1
    return Problem(
        signature=signature, m=draw(extents), n=draw(extents), k=draw(extents), batch=batch
    )


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
