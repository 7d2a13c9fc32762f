"""One real kernel of each row of the support table: what it must be, and lies about it.

`data/rows.json` says for each kernel how it is called and what its code must show, and is compared
with what `verify` reads. Nothing rewrites it: whoever changes it claims that a kernel is right in
another way than before. Bytes are not held, for they change with every patch of the toolchain.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvgemm_aot.bundle.content import BuiltKernel
from nvgemm_aot.pipeline.compiler import compile_all
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.verify.bundle import EPILOGUES, GROUPS, POINTERS, UNPROVED, Report, verify_bundle
from nvgemm_aot.verify.device.disassembler import require_disassembler
from nvgemm_aot.verify.findings import Check
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.gemm.problem import Signature
from row_kernels import ROWS, TARGETS, compile_rows, make_task, write_kernels

pytestmark = pytest.mark.slow  # compiles a kernel of every row; a few others are verified always


@pytest.fixture(scope="module")
def kernels(kernel_cache: Cache) -> dict[str, BuiltKernel]:
    """The kernel of each row."""
    return compile_rows(ROWS, kernel_cache)


def verify(folder: Path, arch: str, *kernels: BuiltKernel) -> Report:
    return verify_bundle(write_kernels(folder, arch, kernels), disassemble=True, jobs=2)


@pytest.fixture(scope="module")
def reports(
    kernels: dict[str, BuiltKernel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Report]:
    """What `verify` says of each target's kernels."""
    require_disassembler()
    folder = tmp_path_factory.mktemp("rows")
    return {
        arch: verify(
            folder, arch, *(kernels[name] for name, row in ROWS.items() if row["target"] == arch)
        )
        for arch in TARGETS
    }


@pytest.mark.parametrize("name", ROWS)
def test_kernel_is_what_the_table_says(
    name: str, kernels: dict[str, BuiltKernel], reports: dict[str, Report]
) -> None:
    kernel, row = kernels[name], ROWS[name]
    evidence = next(
        item for item in reports[row["target"]].kernels if item.id == sha256_hex(kernel.payload)
    )
    observed = {
        "target": evidence.compiled_for,
        "signature": evidence.signature,
        "operator": evidence.operator,
        "calling_convention": kernel.calling_convention,
        "workspace_bytes": kernel.workspace_bytes,
        "operands": evidence.operands,
        "alignment_bytes": list(evidence.alignment_bytes),
        "instructions": list(evidence.instructions),
        "multiplies": list(evidence.multiplies),
        "clusters": [list(cluster) for cluster in evidence.clusters],
        "scheduler": kernel.design.scheduler,
        "ctas_per_tile": kernel.design.ctas_per_tile,
    }
    assert observed == row


@pytest.mark.parametrize("arch", TARGETS)
def test_nothing_is_wrong_with_any(arch: str, reports: dict[str, Report]) -> None:
    assert not reports[arch].findings
    assert (
        reports[arch].notes
        == {
            "sm_100f": (UNPROVED, POINTERS, EPILOGUES, GROUPS),
            "sm_103a": (UNPROVED, POINTERS),
            "sm_100a": (UNPROVED,),
            "sm_90a": (UNPROVED, EPILOGUES),
        }[arch]
    )


FP4 = "mm/tn/fp4_e2m1xfp4_e2m1/fp32/"
LIES: list[tuple[str, dict[str, Any], set[Check], str]] = [
    (
        "bias-silu",
        {"signature": "mm/tt/fp8_e4m3xfp8_e4m3/fp32/bf16/bias_gelu_tanh"},
        {Check.EPILOGUE},
        "computes silu, its",
    ),
    (
        "bias-fp8",
        {"signature": "mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp8_e5m2/bias"},
        {Check.OPERANDS, Check.RESULT_TYPE},
        "converts sums to fp8_e4m3",
    ),
    (
        "scales-row-wise-bias",
        {"calling_convention": "tvm_ffi:gemm(a,b,stream,addend,scale_a,scale_b,out)"},
        {Check.OPERANDS},
        "addend of rank 1, float16, scale_a of rank 2, float32",
    ),
    (
        "mxfp8",
        {"signature": "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32"},
        {Check.OPERAND_LAYOUT},
        "multiplies m256n128 nn fp8_e4m3xfp8_e4m3/fp32/e8m0_1x32",
    ),
    (
        "mxfp8",
        {"signature": "mm/nn/fp8_e4m3xfp8_e4m3/fp32/bf16"},
        {Check.CALLING_CONVENTION, Check.BLOCK_SCALES},
        "parameter scale_a is passed once, must be never",
    ),
    *(
        (row, {"signature": f"{FP4}{other}"}, {Check.BLOCK_SCALES}, f"/{scales}, its signature")
        for row, scales, other in (
            ("mxfp4", "e8m0_1x32", "bf16/e4m3_1x16"),
            ("sm_103a-nvfp4", "e4m3_1x16", "fp16/e8m0_1x16"),
            ("sm_103a-nvfp4-e8m0", "e8m0_1x16", "fp8_e4m3/e8m0_1x32"),
            ("sm_103a-mxfp4", "e8m0_1x32", "bf16/e8m0_1x16"),
        )
    ),
    (
        "nvfp4",
        {"calling_convention": "tvm_ffi:gemm(a*,b*,scale_b*,scale_a*,out*,mnkl,stream)"},
        {Check.OPERANDS},
        "pointer scale_b, pointer scale_a",
    ),
    ("nvfp4-e8m0", {"ctas_per_tile": 2}, {Check.CTAS_PER_TILE}, "UTCOMMA.4X; its entry says 2"),
    ("mxfp4", {"tile": (256, 128, 256)}, {Check.INSTRUCTION_TILE}, "its entry says tile 256x128"),
    ("grouped", {"alignment_bytes": 4}, {Check.ALIGNMENT}, "to 4, 16 bytes, its entry says 4"),
    (
        "hopper-bias-relu-fp8",
        {"signature": "mm/nn/bf16xbf16/fp32/fp8_e4m3/bias"},
        {Check.EPILOGUE},
        "computes relu, its",
    ),
    (
        "hopper-bias-silu",
        {"signature": "mm/nt/bf16xbf16/fp32/fp16/bias_gelu_tanh"},
        {Check.OPERANDS, Check.EPILOGUE, Check.RESULT_TYPE},
        "computes silu, its",
    ),
    (
        "hopper-scales-row-wise-bias",
        {"calling_convention": "tvm_ffi:gemm(a,b,scale_b,scale_a,addend,out,clusters,stream)"},
        {Check.OPERANDS},
        "scale_b of rank 2, float32, scale_a of rank 2",
    ),
    (
        "hopper-scales-tensor-wise",
        {"signature": "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row"},
        {Check.OPERANDS},
        "scale_a of rank 2, float32",
    ),
    ("hopper-add", {"tile": (192, 64, 64)}, {Check.INSTRUCTION_TILE}, "its entry says tile 192x64"),
    (
        "uint8",
        {"signature": "mm/nn/int8xint8/int32/int32"},
        {Check.OPERANDS, Check.OPERAND_TYPES},
        "multiplies m128n128 nn uint8xuint8/int32",
    ),
]
"""Row, what its entry says falsely, what finds it, and in which words."""


@pytest.mark.parametrize(("name", "change", "checks", "words"), LIES)
def test_finds_lies(
    name: str,
    change: dict[str, Any],
    checks: set[Check],
    words: str,
    kernels: dict[str, BuiltKernel],
    tmp_path: Path,
) -> None:
    """Of a provider whose names are not read: what the code shows must be enough."""
    kernel = _changed(replace(kernels[name], provider="test"), change)
    report = verify(tmp_path, ROWS[name]["target"], kernel)
    assert {finding.check for finding in report.findings} == checks, report.findings
    assert any(words in finding.message for finding in report.findings), report.findings


def _changed(kernel: BuiltKernel, change: dict[str, Any]) -> BuiltKernel:
    fields = dict(change)
    if "signature" in fields:
        fields["signature"] = Signature.parse(fields["signature"])
    of_design = {name: fields.pop(name) for name in ("ctas_per_tile", "tile") if name in fields}
    return replace(kernel, design=replace(kernel.design, **of_design), **fields)


def test_kernels_that_spill_are_not_kept(kernel_cache: Cache) -> None:
    """Seen of this tile: `verify` would refuse it, so no bundle may get it."""
    operator = (
        "cutedsl.PersistentDenseGemmEFCOperator_sm100_tnt_AFloat8E5M2_BFloat8E5M2_outFloat16"
        "_accFloat32_1cta_cluster8x2x1_tile128x128x128_tma_store"
    )
    signature = "mm/tn/fp8_e5m2xfp8_e5m2/fp32/fp16/fp32_row"
    row = {"target": "sm_100f", "signature": signature, "operator": operator}
    task = make_task(row)
    (failure,) = compile_all([task], kernel_cache, jobs=1).failures
    assert "registers spill, 16 bytes a thread" in failure.reason
    assert kernel_cache.get(task.key) is None
