from __future__ import annotations

import pytest

from nvgemm_runtime.bundle.calling_convention import PLAIN, parse_calling_convention
from nvgemm_runtime.gemm.problem import Signature

PLAIN_KEY = "mm/tn/bf16xbf16/fp32/bf16"
MXFP8_KEY = "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32"
SCALED_KEY = "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias"
GROUPED_KEY = "grouped_mm/tn/bf16xbf16/fp32/bf16"


@pytest.mark.parametrize(
    ("text", "key", "has_workspace", "needs_compact"),
    [
        ("tvm_ffi:gemm(a,b,out,stream)", PLAIN_KEY, False, False),
        ("tvm_ffi:gemm(a,b,stream,scale_a,scale_b,addend,out)", SCALED_KEY, False, False),
        ("tvm_ffi:gemm(a*,b*,scale_a*,scale_b*,out*,mnkl,stream)", MXFP8_KEY, False, True),
        ("tvm_ffi:gemm(a,b,scale_a*,scale_b*,out,mnkl,stream)", MXFP8_KEY, False, True),
        ("tvm_ffi:gemm(a,b,out,offsets,workspace,stream)", GROUPED_KEY, True, False),
        ("tvm_ffi:gemm(a,b,out,clusters,stream)", PLAIN_KEY, False, False),
    ],
)
def test_reads_what_a_function_takes(
    text: str, key: str, has_workspace: bool, needs_compact: bool
) -> None:
    convention = parse_calling_convention(text)
    assert convention is not None
    assert f"tvm_ffi:{convention.name}({','.join(convention.parameters)})" == text
    assert convention.symbol == "__tvm_ffi_gemm"
    assert convention.needs_compact is needs_compact
    assert convention.misfit(Signature.parse(key), has_workspace) is None


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
    ("parameters", "key", "has_workspace", "reason"),
    [
        ("a,b,out", PLAIN_KEY, False, "stream is passed never, must be once"),
        ("a,b,b,out,stream", PLAIN_KEY, False, "b is passed 2 times, must be once"),
        ("a,b,addend,out,stream", PLAIN_KEY, False, "addend is passed once, must be"),
        ("a,b,out,stream", GROUPED_KEY, False, "offsets is passed never, must be once"),
        ("a*,b*,out*,stream", PLAIN_KEY, False, "mnkl is passed never, must be once"),
        ("a,b,out,mnkl,stream", PLAIN_KEY, False, "mnkl is passed once, must be never"),
        ("a,b,out,stream", PLAIN_KEY, True, "workspace is passed never, must be once"),
        ("a,b,out,workspace,stream", PLAIN_KEY, False, "workspace is passed once, must"),
        ("a,b,out,clusters,clusters,stream", PLAIN_KEY, False, "clusters is passed 2 times"),
    ],
)
def test_what_does_not_fit_the_kernel_is_said(
    parameters: str, key: str, has_workspace: bool, reason: str
) -> None:
    convention = parse_calling_convention(f"tvm_ffi:gemm({parameters})")
    assert convention is not None
    said = convention.misfit(Signature.parse(key), has_workspace)
    assert said is not None
    assert f"parameter {reason}" in said
    assert key in said
