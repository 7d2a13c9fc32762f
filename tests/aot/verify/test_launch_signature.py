"""What launchers say of their parameters; the texts are those of real kernels (cutlass-dsl 4.8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvgemm_aot.verify.findings import Check, Finding
from nvgemm_aot.verify.host.launch_signature import LauncherText, check_interface
from nvgemm_runtime.bundle.format import Kernel, KernelDesign, Span
from nvgemm_runtime.gemm.problem import Signature

FP32_ROW = "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row"
PLAIN = "tvm_ffi:gemm(a,b,out,stream)"
GROUPED = "tvm_ffi:gemm(a,b,out,offsets,stream)"
BLOCK_SCALED = "tvm_ffi:gemm(a*,b*,scale_a*,scale_b*,out*,mnkl,stream)"
BIAS = "tvm_ffi:gemm(a,b,stream,addend,out)"
SCALED_BIAS = "tvm_ffi:gemm(a,b,stream,scale_a,scale_b,addend,out)"

POINTERS = (
    "a_ptr: DataPointer, b_ptr: DataPointer, sfa_ptr: DataPointer, sfb_ptr: DataPointer, "
    "c_ptr: DataPointer, problem_mnkl: Tuple[int32, int32, int32, int32], stream: Stream"
)
BIAS_TEXT = (
    "a: Tensor([n0, n1], bfloat16), b: Tensor([n2, n3], bfloat16), stream: Stream, "
    "_vararg_5: Tensor([n4], bfloat16), _vararg_6: Tensor([n5, n6], bfloat16)"
)
GROUPED_TEXT = (
    "a: Tensor([n0, n1], float8_e4m3fn), b: Tensor([n2, n3, n4], float8_e4m3fn), "
    "c: Tensor([n5, n6], bfloat16), offset_mapping: Tensor([n7], int32), stream: Stream"
)

SEEN = {
    "transposed": (
        "mm/tn/bf16xbf16/fp32/bf16",
        PLAIN,
        "a_api: Tensor([n0, n1], bfloat16), b_api: Tensor([n2, n3], bfloat16), "
        "c_api: Tensor([n4, n5], bfloat16), stream: Stream",
        {16},
    ),
    "bmm": (
        "bmm/nn/bf16xbf16/fp32/fp16",
        PLAIN,
        "a: Tensor([n0, n1, n2], bfloat16), b: Tensor([n3, n4, n5], bfloat16), "
        "c: Tensor([n6, n7, n8], float16), stream: Stream",
        {16},
    ),
    "bias": ("mm/tn/bf16xbf16/fp32/bf16/bias", BIAS, BIAS_TEXT, {16}),
    "bias of a batch": (
        "bmm/nt/bf16xbf16/fp32/bf16/bias_silu",
        BIAS,
        "a: Tensor([n0, n1, n2], bfloat16), b: Tensor([n3, n4, n5], bfloat16), stream: Stream, "
        "_vararg_5: Tensor([n6], bfloat16), _vararg_6: Tensor([n7, n8, n9], bfloat16)",
        {16},
    ),
    "add": (
        "mm/tn/bf16xbf16/fp32/bf16/add",
        BIAS,
        BIAS_TEXT.replace("[n4]", "[n4, n7]"),
        {16},
    ),
    "row-wise scales and bias": (
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp16/fp32_row/bias",
        SCALED_BIAS,
        "a: Tensor([n0, n1], float8_e4m3fn), b: Tensor([n2, n3], float8_e4m3fn), stream: Stream, "
        "_vararg_5: Tensor([n4, n5], float32), _vararg_6: Tensor([n6, n7], float32), "
        "_vararg_7: Tensor([n8], float16), _vararg_8: Tensor([n9, n10], float16)",
        {4, 16},
    ),
    "tensor-wise scales": (
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor",
        "tvm_ffi:gemm(a,b,stream,scale_a,scale_b,out)",
        "a: Tensor([n0, n1], float8_e4m3fn), b: Tensor([n2, n3], float8_e4m3fn), stream: Stream, "
        "_vararg_5: Tensor([1], float32), _vararg_6: Tensor([1], float32), "
        "_vararg_7: Tensor([n4, n5], bfloat16)",
        {4, 16},
    ),
    "row-wise scales and bias, by name": (
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp16/fp32_row/bias",
        "tvm_ffi:gemm(a,b,scale_a,scale_b,addend,out,stream)",
        "a: Tensor([n0, n1], float8_e4m3fn), b: Tensor([n1, n2], float8_e4m3fn), "
        "scale_a: Tensor([n0, n3], float32), scale_b: Tensor([n4, n2], float32), "
        "addend: Tensor([n2], float16), out: Tensor([n0, n2], float16), stream: Stream",
        {4, 16},
    ),
    "grouped": ("grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16", GROUPED, GROUPED_TEXT, {4, 16}),
    "mxfp8": ("mm/nt/fp8_e4m3xfp8_e4m3/fp32/fp32/e8m0_1x32", BLOCK_SCALED, POINTERS, set()),
    "nvfp4": ("mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16", BLOCK_SCALED, POINTERS, set()),
}


def kernel(signature: str, convention: str) -> Kernel:
    return Kernel(
        id="0" * 64,
        span=Span(offset=0, stored_bytes=1, content_bytes=1),
        signature=Signature.parse(signature),
        provider="test",
        operator="operator",
        design=KernelDesign(
            tile=(128, 128, 64),
            ctas_per_tile=1,
            cluster=(1, 1),
            fallback_cluster=None,
            scheduler="clc",
        ),
        alignment_bytes=16,
        workspace_bytes=0,
        calling_convention=convention,
    )


def findings_of(entry: Kernel, operands: str, alignment_bytes: set[int]) -> list[Finding]:
    text = LauncherText(operands=operands, alignment_bytes=frozenset(alignment_bytes))
    return list(check_interface(entry, text))


@pytest.mark.parametrize("name", SEEN)
def test_accepts_what_real_launchers_say(name: str) -> None:
    signature, convention, operands, alignment_bytes = SEEN[name]
    assert not findings_of(kernel(signature, convention), operands, alignment_bytes)


@pytest.mark.parametrize("name", SEEN)
def test_no_parameter_can_be_left_out_doubled_or_moved(name: str) -> None:
    signature, convention, operands, alignment_bytes = SEEN[name]
    parts = operands.replace("], ", "];").replace("), ", ");").replace("r, ", "r;").split(";")
    parts = [part for part in parts if part]
    for index in range(len(parts)):
        rest = parts[:index] + parts[index + 1 :]
        for other in (rest, [*parts, parts[index]], [*rest, parts[index]]):
            if ", ".join(other) == operands:
                continue
            findings = findings_of(kernel(signature, convention), ", ".join(other), alignment_bytes)
            assert [finding.check for finding in findings] == [Check.OPERANDS], other


@pytest.mark.parametrize(
    ("name", "signature", "message"),
    [
        ("bias", "mm/tn/bf16xbf16/fp32/bf16/add", "addend of rank 2, bfloat16"),
        ("add", "mm/tn/bf16xbf16/fp32/bf16/bias", "addend of rank 1, bfloat16"),
        ("bias", "mm/tn/bf16xbf16/fp32/fp16/bias", "addend of rank 1, float16"),
        ("bias of a batch", "mm/nt/bf16xbf16/fp32/bf16/bias_silu", "a of rank 2, bfloat16"),
        (
            "row-wise scales and bias",
            "mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp16/fp32_tensor/bias",
            "scale_a of rank 1, float32",
        ),
        ("tensor-wise scales", FP32_ROW, "scale_a of rank 2, float32"),
        ("grouped", "grouped_mm/tn/fp8_e5m2xfp8_e5m2/fp32/bf16", "b of rank 3, float8_e5m2"),
    ],
)
def test_finds_other_operands(name: str, signature: str, message: str) -> None:
    _, convention, operands, alignment_bytes = SEEN[name]
    (finding,) = findings_of(kernel(signature, convention), operands, alignment_bytes)
    assert finding.check is Check.OPERANDS
    assert message in finding.message
    assert f"its signature is {signature}" in finding.message


@pytest.mark.parametrize(
    ("name", "signature", "message"),
    [
        ("bias", "mm/tn/bf16xbf16/fp32/bf16", "addend is passed once, must be never"),
        ("bmm", "grouped_mm/nn/bf16xbf16/fp32/fp16", "offsets is passed never, must be once"),
    ],
)
def test_finds_convention_that_does_not_fit_its_signature(
    name: str, signature: str, message: str
) -> None:
    _, convention, operands, alignment_bytes = SEEN[name]
    (finding,) = findings_of(kernel(signature, convention), operands, alignment_bytes)
    assert finding.check is Check.CALLING_CONVENTION
    assert message in finding.message


@pytest.mark.parametrize(
    ("name", "alignment_bytes", "message"),
    [
        ("bias", {4, 16}, "aligned to 4, 16 bytes, its entry says 16"),
        ("grouped", {16}, "aligned to 16 bytes, its entry says 16, and other tensors to 4"),
        ("grouped", {4, 32}, "aligned to 4, 32 bytes, its entry says 16, and other tensors to 4"),
        ("mxfp8", {16}, "aligned to 16 bytes, it takes pointers, which show none"),
        ("bmm", set(), "aligned to no number of bytes, its entry says 16"),
    ],
)
def test_finds_other_alignment(name: str, alignment_bytes: set[int], message: str) -> None:
    signature, convention, operands, _ = SEEN[name]
    (finding,) = findings_of(kernel(signature, convention), operands, alignment_bytes)
    assert finding.check is Check.ALIGNMENT
    assert message in finding.message


def test_knows_kernels_with_a_workspace() -> None:
    signature, _, operands, _ = SEEN["transposed"]
    entry = replace(
        kernel(signature, "tvm_ffi:gemm(a,b,out,workspace,stream)"), workspace_bytes=4096
    )
    taking = operands.replace(", stream", ", workspace: Tensor([n6], uint8), stream")
    assert not findings_of(entry, taking, {16})
    assert [finding.check for finding in findings_of(entry, operands, {16})] == [Check.OPERANDS]
    (finding,) = findings_of(replace(entry, workspace_bytes=0), taking, {16})
    assert finding.check is Check.WORKSPACE
    assert "0 bytes of workspace, must be more than 0" in finding.message


def test_pointers_that_no_launcher_was_seen_to_take_match_nothing() -> None:
    entry = kernel("mm/tn/bf16xbf16/fp32/bf16/bias", "tvm_ffi:gemm(a*,b*,addend*,out*,mnkl,stream)")
    operands = POINTERS.replace("sfa_ptr: DataPointer, sfb_ptr", "addend_ptr")
    assert [finding.check for finding in findings_of(entry, operands, set())] == [Check.OPERANDS]
