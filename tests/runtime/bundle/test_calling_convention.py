from __future__ import annotations

import pytest

from nvgemm_runtime.bundle.calling_convention import PLAIN, parse_calling_convention
from nvgemm_runtime.gemm.problem import Signature

PLAIN_KEY = "mm/tn/bf16xbf16/fp32/bf16"
MXFP8_KEY = "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32"
SCALED_KEY = "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias"
GROUPED_KEY = "grouped_mm/tn/bf16xbf16/fp32/bf16"


@pytest.mark.parametrize(
    ("text", "key", "workspace_bytes", "needs_compact"),
    [
        ("tvm_ffi:gemm(a,b,out,stream)", PLAIN_KEY, 0, False),
        ("tvm_ffi:gemm(a,b,stream,scale_a,scale_b,addend,out)", SCALED_KEY, 0, False),
        ("tvm_ffi:gemm(a*,b*,scale_a*,scale_b*,out*,mnkl,stream)", MXFP8_KEY, 0, True),
        ("tvm_ffi:gemm(a,b,scale_a*,scale_b*,out,mnkl,stream)", MXFP8_KEY, 0, True),
        ("tvm_ffi:gemm(a,b,out,offsets,workspace,stream)", GROUPED_KEY, 64, False),
    ],
)
def test_reads_what_a_function_takes(
    text: str, key: str, workspace_bytes: int, needs_compact: bool
) -> None:
    convention = parse_calling_convention(text)
    assert convention is not None
    assert f"tvm_ffi:{convention.name}({','.join(convention.parameters)})" == text
    assert convention.symbol == "__tvm_ffi_gemm"
    assert convention.needs_compact is needs_compact
    assert convention.misfit(Signature.parse(key), workspace_bytes) is None


def test_the_plain_one_has_its_name() -> None:
    assert parse_calling_convention("tvm_ffi:gemm(a,b,out,stream)") == PLAIN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "c:gemm(a)",
        "tvm_ffi:gemm",
        "tvm_ffi:gemm()",
        "tvm_ffi:gemm(a,,b)",
        "tvm_ffi:gemm(a,b,c)",
        "tvm_ffi:gemm(a,b,out,stream*)",
        "tvm_ffi:gemm(a**,b,out,stream)",
        "tvm_ffi:gemm(A,b,out,stream)",
        "tvm_ffi:1gemm(a,b,out,stream)",
        "tvm_ffi:gemm(a, b, out, stream)",
        "tvm_ffi:gemm(a,b,out,stream) ",
    ],
)  # fmt: skip
def test_what_it_does_not_know_is_none(text: str) -> None:
    assert parse_calling_convention(text) is None


@pytest.mark.parametrize(
    ("text", "key", "workspace_bytes", "reason"),
    [
        ("tvm_ffi:gemm(a,b,out)", PLAIN_KEY, 0, "stream is passed never, must be once"),
        ("tvm_ffi:gemm(a,b,b,out,stream)", PLAIN_KEY, 0, "b is passed 2 times, must be once"),
        ("tvm_ffi:gemm(a,b,addend,out,stream)", PLAIN_KEY, 0, "addend is passed once, must be"),
        ("tvm_ffi:gemm(a,b,out,stream)", GROUPED_KEY, 0, "offsets is passed never, must be once"),
        ("tvm_ffi:gemm(a*,b*,out*,stream)", PLAIN_KEY, 0, "mnkl is passed never, must be once"),
        ("tvm_ffi:gemm(a,b,out,mnkl,stream)", PLAIN_KEY, 0, "mnkl is passed once, must be never"),
        ("tvm_ffi:gemm(a,b,out,stream)", PLAIN_KEY, 8, "workspace is passed never, must be once"),
        ("tvm_ffi:gemm(a,b,out,workspace,stream)", PLAIN_KEY, 0, "workspace is passed once, must"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_kernel_is_said(
    text: str, key: str, workspace_bytes: int, reason: str
) -> None:
    convention = parse_calling_convention(text)
    assert convention is not None
    said = convention.misfit(Signature.parse(key), workspace_bytes)
    assert said is not None
    assert f"parameter {reason}" in said
    assert key in said
