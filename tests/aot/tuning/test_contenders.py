"""Random operands, and torch's own operators for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvgemm_aot.tuning.contenders import aten_run, triton_run
from nvgemm_aot.tuning.correctness.judgement import agrees_roughly, expect, reference
from nvgemm_aot.tuning.correctness.random_operands import MOST_SETS, Operands, make_sets
from nvgemm_runtime.gemm.aten import named_arguments, read_call
from nvgemm_runtime.gemm.operands import requests
from nvgemm_runtime.gemm.problem import Layout, Op, Problem, Signature


def problem(key: str, k: int = 4096) -> Problem:
    signature = Signature.parse(key)
    batch = 2 if signature.op is Op.BMM else 1
    groups = 3 if signature.op.has_groups else 1
    return Problem(signature=signature, m=48, n=64, k=k, batch=batch, groups=groups)


def operands(given: Problem) -> Operands:
    return make_sets(given, "cpu", seed=1, total_bytes=1)[0]


@pytest.mark.parametrize("layout", [layout.value for layout in Layout])
def test_operands_have_the_problems_layout(layout: str) -> None:
    given = problem(f"mm/{layout}/bf16xbf16/fp32/bf16")
    a, b, out = operands(given)
    assert a.shape == (48, 4096)
    assert b.shape == (4096, 64)
    assert out.shape == (48, 64)
    assert (a.stride()[1] == 1) == given.signature.layout.a_row_major
    assert (b.stride()[1] == 1) == given.signature.layout.b_row_major


def test_sets_fill_the_space_that_a_cache_needs_and_differ() -> None:
    given = problem("mm/tn/bf16xbf16/fp32/bf16", 64)
    one = 2 * (48 * 64 + 64 * 64 + 48 * 64)
    sets = make_sets(given, "cpu", seed=1, total_bytes=5 * one)
    assert len(sets) == 5
    assert len({tensor.data_ptr() for each in sets for tensor in each}) == 15
    assert not torch.equal(sets[0][0], sets[1][0])
    assert len(make_sets(given, "cpu", seed=1, total_bytes=1)) == 2
    assert len(make_sets(given, "cpu", seed=1, total_bytes=10**9)) == MOST_SETS


@pytest.mark.parametrize(
    ("key", "shared"), [("grouped_mm/tn", "m48n64"), ("k_grouped_mm/nt", "m64n48")]
)
def test_sets_of_groups_have_both_routings_as_often(key: str, shared: str) -> None:
    k = 4096 if key.startswith("k_") else 64
    given = Problem.parse(f"{key}/bf16xbf16/fp32/bf16/g4{shared}k{k}")
    rows = k if key.startswith("k_") else 48
    ends = [
        each[3].tolist()
        for each in make_sets(given, "cpu", seed=1, total_bytes=5 * 2 * (64 * k + 48 * k))
    ]
    assert len(ends) % 2 == 0
    even = [rows // 4 * group for group in range(1, 5)]
    assert ends[::2] == [even] * (len(ends) // 2)
    assert all(one == ends[1] != even and one[-1] == rows for one in ends[1::2])


def test_atens_operator_computes_the_same() -> None:
    for key in (
        "mm/nt/fp32xfp32/fp32/fp32",
        "bmm/tn/bf16xbf16/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/bf16/bias",
        "mm/tn/bf16xbf16/fp32/bf16/add",
        "bmm/tn/bf16xbf16/fp32/bf16/bias",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor/bias",
        "mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16/fp32_tensor",
        "grouped_mm/tn/bf16xbf16/fp32/bf16",
        "k_grouped_mm/nt/bf16xbf16/fp32/bf16",
    ):
        given = problem(key, 64)
        tensors = operands(given)
        run = aten_run(given.signature)
        assert run is not None
        found = run(*tensors)
        expected = expect(tensors, given.signature, terms=given.k)
        assert agrees_roughly(found, expected), key
        assert not agrees_roughly(found * 1.2, expected)


def test_aten_has_nothing_for_what_it_cannot_compute() -> None:
    for key in (
        "bmm/tn/int8xint8/int32/int32",
        "mm/tn/int8xint8/int32/int8",
        "bmm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/fp16",
        "mm/tn/bf16xbf16/fp32/bf16/bias_relu",
        "mm/tn/bf16xbf16/fp32/fp32/bias",
        "grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16",
        "grouped_mm/tn/bf16xbf16/fp32/bf16/bias",
        "grouped_mm/tt/bf16xbf16/fp32/bf16/add",
        "gathered_grouped_mm/tn/bf16xbf16/fp32/bf16",
        "gathered_mm/tt/fp32xbf16/fp32/bf16",
        "grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_halves",
        "mm/nt/fp8_e5m2xfp8_e5m2/fp32/bf16/e8m0_1x32",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e8m0_1x16",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp32/e8m0_1x32",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e4m3/e8m0_1x32",
    ):
        assert aten_run(Signature.parse(key)) is None
    for key in ("mm/tn/int8xint8/int32/int32", "mm/tn/bf16xbf16/fp32/bf16/bias", *BLOCKS):
        assert triton_run(Signature.parse(key)) is None


MXFP8 = "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32"
MXFP4 = "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e8m0_1x32"
NVFP4 = "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16"
BLOCKS = [MXFP8, MXFP8.replace("/tn/", "/nn/"), MXFP4, NVFP4]


@pytest.mark.parametrize("key", BLOCKS)
def test_aten_is_asked_for_the_same_blocks(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """As the plug-in of torch.compile reads such a call."""
    posed = problem(key, 416)
    tensors = operands(posed)
    run = aten_run(posed.signature)
    assert run is not None
    with pytest.raises((ValueError, RuntimeError), match=r"swizzle|CPU"):
        run(*tensors)  # the schema is met: it is this device that it does not compute on
    overload, calls = torch.ops.aten._scaled_mm_v2.out, []

    def noted(*args: Any, out: Any, **kwargs: Any) -> Any:
        calls.append(named_arguments(overload, args, kwargs, lambda value: value))
        return out

    monkeypatch.setattr(torch.ops.aten._scaled_mm_v2, "out", noted)
    run = aten_run(posed.signature)
    assert run is not None
    assert run(*tensors) is tensors[2]
    gemm = read_call("_scaled_mm_v2", calls[0], tensors[2])
    assert gemm.obstacle is None
    assert calls[0]["out_dtype"] is tensors[2].dtype
    (asked, *_) = requests(Op.MM, gemm.a, gemm.b, out=tensors[2], extras=gemm.extras)
    assert asked.problem == posed


CURVES = {
    "bias_relu": torch.nn.functional.relu,
    "bias_gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "bias_silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("epilogue", CURVES)
def test_activations_are_torchs(epilogue: str) -> None:
    given = problem(f"mm/tn/fp16xfp16/fp32/fp16/{epilogue}", 16)
    a, b, _, addend = operands(given)
    wanted = CURVES[epilogue](torch.addmm(addend.double(), a.double(), b.double()))
    torch.testing.assert_close(reference(operands(given), given.signature), wanted)


def test_groups_share_the_rows_evenly() -> None:
    given = problem("grouped_mm/tn/bf16xbf16/fp32/bf16", 64)
    a, b, out, offsets = operands(given)
    assert offsets.tolist() == [16, 32, 48]
    assert b.shape == (3, 64, 64)
    wanted = torch.cat([a[16 * g : 16 * g + 16].double() @ b[g].double() for g in range(3)])
    assert torch.equal(reference([a, b, out, offsets], given.signature), wanted)
