"""Reading disassembled code; the files in data/ are lines that nvdisasm 13.5 printed."""

from __future__ import annotations

import re

import pytest

from nvgemm_aot.verify.device.kernel_design import computes_transposed
from nvgemm_aot.verify.device.sass import check_disassembly, read_disassembly
from nvgemm_aot.verify.device.stored_values import read_epilogue_code
from nvgemm_aot.verify.device.tensor_core import warp_types
from nvgemm_aot.verify.findings import Check, Finding
from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.gemm.epilogues import Activation
from nvgemm_runtime.gemm.problem import DType, Signature
from nvgemm_runtime.gemm.target import Target
from repository import TESTS

DATA = TESTS / "data"
GATHERED = "gathered_mm/tt/fp32xbf16/fp32/bf16"
BF16 = "mm/tn/bf16xbf16/fp32/bf16"
MXFP8 = "mm/nn/fp8_e5m2xfp8_e5m2/fp32/fp16/e8m0_1x32"
FP4 = "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/"
NVFP4_E8M0 = "mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e4m3/e8m0_1x16"
HOPPER_192 = "HGMMA.64x192x16.F32.BF16"
BIAS_RELU = "mm/nn/bf16xbf16/fp32/bf16/bias_relu"
BIAS_GELU = "mm/tn/fp16xfp16/fp32/fp16/bias_gelu_tanh"


def sass(name: str) -> str:
    return (DATA / f"{name}.sass").read_text(encoding="utf-8")


def findings_of(
    text: str,
    arch: str,
    signature: str,
    tile: tuple[int, int],
    *,
    ctas: int | None = None,
    scheduler: str = "static_persistent",
    swapped: bool = False,
) -> list[Finding]:
    design = KernelDesign(
        tile=(*tile, 64),
        ctas_per_tile=ctas or (2 if "2CTA" in text else 1),
        cluster=(1, 1),
        fallback_cluster=None,
        scheduler=scheduler,
        swapped=swapped,
    )
    return list(
        check_disassembly(
            read_disassembly(text),
            target=Target(arch=arch),
            signature=Signature.parse(signature),
            design=design,
        )
    )


def with_descriptor_bits(text: str, bits: int) -> str:
    """The same code with other majors of A (bit 0) and B (bit 1) in its descriptors."""
    assert "0x8082490" in text
    return re.sub(
        r"0x808(?=[02]490\b)(.)490",
        lambda found: hex(int(found[0], 16) | bits << 15),
        text,
    )


GOOD = [
    ("sm_100f_bf16_2cta", "sm_100f", BF16, (128, 32), "UTCHMMA.2CTA"),
    ("sm_100f_fp8_e5m2", "sm_100f", "mm/nn/fp8_e5m2xfp8_e5m2/fp32/bf16", (64, 128), "UTCQMMA"),
    ("sm_100a_int8", "sm_100a", "mm/tn/int8xint8/int32/int32", (128, 64), "UTCIMMA"),
    ("sm_90a_bf16", "sm_90a", BF16, (128, 256), "HGMMA.64x256x16.F32.BF16"),
    ("sm_90a_fp16", "sm_90a", "mm/tn/fp16xfp16/fp32/fp16", (64, 64), "HGMMA.64x64x16.F32"),
    (
        "sm_90a_fp8_e4m3",
        "sm_90a",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16",
        (64, 128),
        "QGMMA.64x128x32.F32.E4M3.E4M3",
    ),
    (
        "sm_90a_int8",
        "sm_90a",
        "mm/tn/int8xint8/int32/int32",
        (128, 128),
        "IGMMA.64x128x32.S8.S8.SAT",
    ),
    ("sm_100f_mxfp8", "sm_100f", MXFP8, (128, 128), "UTCQMMA"),
    ("sm_100f_mxfp4", "sm_100f", FP4 + "e8m0_1x32", (256, 192), "UTCOMMA.2CTA"),
    ("sm_100f_nvfp4", "sm_100f", FP4 + "e4m3_1x16", (256, 192), "UTCOMMA.2CTA.4X"),
    ("sm_100f_nvfp4_e8m0", "sm_100f", NVFP4_E8M0, (256, 128), "UTCOMMA.2CTA.4X"),
    ("sm_100f_bias_relu", "sm_100f", BIAS_RELU, (128, 128), "UTCHMMA"),
    ("sm_100f_bias_gelu_tanh", "sm_100f", BIAS_GELU, (128, 32), "UTCHMMA"),
    ("sm_100f_bias_silu", "sm_100f", f"{BF16}/bias_silu", (128, 64), "UTCHMMA.2CTA"),
    ("sm_90a_swiglu", "sm_90a", f"{BF16}/swiglu_halves", (128, 192), HOPPER_192),
    ("sm_90a_swiglu_oai", "sm_90a", f"{BF16}/swiglu_oai_interleaved", (128, 192), HOPPER_192),
    ("sm_100f_geglu", "sm_100f", f"{BF16}/geglu_halves", (256, 192), "UTCHMMA.2CTA"),
]


def test_hopper_names_the_types_of_a_and_b_in_this_order() -> None:
    """As code that quack's kernels of two types have; swapped, an instruction's A is B."""
    text = sass("sm_90a_fp8_e4m3").replace(".E4M3.E4M3", ".E5M2.E4M3")
    one, other = "mm/tn/fp8_e5m2xfp8_e4m3/fp32/bf16", "mm/tn/fp8_e4m3xfp8_e5m2/fp32/bf16"
    tiles = {False: (64, 128), True: (128, 64)}
    for key, swapped in ((one, False), (other, True)):
        assert not findings_of(text, "sm_90a", key, tiles[swapped], swapped=swapped)
        (finding,) = findings_of(text, "sm_90a", key, tiles[not swapped], swapped=not swapped)
        assert finding.check is Check.OPERAND_TYPES
        assert f"its signature is {key}" in finding.message
    for key in (one.replace("e5m2", "e4m3"), other.replace("e4m3", "e5m2")):
        (finding,) = findings_of(text, "sm_90a", key, tiles[False])
        assert finding.check is Check.OPERAND_TYPES


@pytest.mark.parametrize(("name", "arch", "signature", "tile", "opcode"), GOOD)
def test_accepts_the_instruction_that_dtype_and_architecture_call_for(
    name: str, arch: str, signature: str, tile: tuple[int, int], opcode: str
) -> None:
    code = read_disassembly(sass(name))
    assert list(code.tensor_core) == [opcode]
    assert not code.local_memory
    assert len(code.multiplies) == 1
    assert not findings_of(sass(name), arch, signature, tile)


def test_accepts_transposed_tile_of_the_transposed_problem_alone() -> None:
    text = sass("sm_100f_bf16_2cta")
    assert not findings_of(text, "sm_100f", BF16, (32, 128), scheduler="one_tile")
    for tile, scheduler in (((32, 128), "static_persistent"), ((128, 32), "one_tile")):
        (finding,) = findings_of(text, "sm_100f", BF16, tile, scheduler=scheduler)
        assert finding.check is Check.INSTRUCTION_TILE


@pytest.mark.parametrize(("asks", "scheduler"), [(True, "static_persistent"), (False, "clc")])
def test_what_asks_for_work_is_what_its_entry_says(asks: bool, scheduler: str) -> None:
    text = sass("sm_100f_bf16_2cta")
    if asks:
        text += "        /*7000*/                   UGETNEXTWORKID.BROADCAST [UR4], [UR5] ;\n"
    assert not findings_of(
        text, "sm_100f", BF16, (128, 32), scheduler="clc" if asks else "static_persistent"
    )
    [finding] = findings_of(text, "sm_100f", BF16, (128, 32), scheduler=scheduler)
    assert finding.check is Check.SCHEDULER
    assert f"entry says scheduler {scheduler}" in finding.message


def test_a_swapped_tile_of_hopper_has_the_whole_n_of_the_instruction_along_m() -> None:
    text, signature = sass("sm_90a_fp8_e4m3"), "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16"
    assert "QGMMA.64x128x32" in text
    for tile in ((128, 64), (128, 192)):
        assert not findings_of(text, "sm_90a", signature, tile, swapped=True)
    (finding,) = findings_of(text, "sm_90a", signature, (64, 128), swapped=True)
    assert finding.check is Check.INSTRUCTION_TILE


@pytest.mark.parametrize(("bits", "layout"), [(0, "tn"), (1, "nn"), (2, "tt"), (3, "nt")])
def test_reads_layout_from_the_instruction_descriptor(bits: int, layout: str) -> None:
    text = with_descriptor_bits(sass("sm_100f_bf16_2cta"), bits)
    assert {multiply.layout.value for multiply in read_disassembly(text).multiplies} == {layout}
    assert not findings_of(text, "sm_100f", BF16.replace("tn", layout), (128, 32))
    for other in {"tn", "nn", "tt", "nt"} - {layout}:
        (finding,) = findings_of(text, "sm_100f", BF16.replace("tn", other), (128, 32))
        assert finding.check is Check.OPERAND_LAYOUT
        assert f" {layout} " in finding.message


@pytest.mark.parametrize(("bits", "layout"), [(0, "tn"), (1, "tt"), (2, "nn"), (3, "nt")])
def test_swaps_operands_of_the_transposed_problem(bits: int, layout: str) -> None:
    text = with_descriptor_bits(sass("sm_100f_bf16_2cta"), bits)
    signature = BF16.replace("tn", layout)
    assert not findings_of(text, "sm_100f", signature, (32, 128), scheduler="one_tile")


@pytest.mark.parametrize(
    ("suffix", "layout"),
    [("", "tn"), (".tnspA", "nn"), (".tnspB", "tt"), (".tnspA.tnspB", "nt")],
)
def test_reads_layout_from_the_suffixes_of_warp_group_instructions(
    suffix: str, layout: str
) -> None:
    text = sass("sm_90a_bf16").replace("gdesc[UR12]", f"gdesc[UR12]{suffix}")
    assert not findings_of(text, "sm_90a", BF16.replace("tn", layout), (128, 256))
    for other in {"tn", "nn", "tt", "nt"} - {layout}:
        (finding,) = findings_of(text, "sm_90a", BF16.replace("tn", other), (128, 256))
        assert finding.check is Check.OPERAND_LAYOUT


def test_finds_one_instruction_with_another_layout() -> None:
    text = sass("sm_90a_bf16").replace("gdesc[UR12]", "gdesc[UR12].tnspB", 1)
    (finding,) = findings_of(text, "sm_90a", BF16, (128, 256))
    assert finding.check is Check.OPERAND_LAYOUT


@pytest.mark.parametrize(
    ("name", "arch", "tile", "ctas"),
    [("sm_100f_bf16_2cta", "sm_100f", (128, 32), 1), ("sm_90a_bf16", "sm_90a", (128, 256), 2)],
)
def test_finds_other_number_of_thread_blocks_a_tile(
    name: str, arch: str, tile: tuple[int, int], ctas: int
) -> None:
    (finding,) = findings_of(sass(name), arch, BF16, tile, ctas=ctas)
    assert finding.check is Check.CTAS_PER_TILE
    assert f"its entry says {ctas} thread blocks a tile" in finding.message


@pytest.mark.parametrize(
    ("name", "arch", "signature", "tile"),
    [
        ("sm_100f_bf16_2cta", "sm_100f", "mm/tn/fp16xfp16/fp32/bf16", (128, 32)),
        ("sm_100f_bf16_2cta", "sm_100f", "mm/tn/bf16xbf16/fp16/bf16", (128, 32)),
        ("sm_100f_fp8_e5m2", "sm_100f", "mm/nn/fp8_e4m3xfp8_e5m2/fp32/bf16", (64, 128)),
        # What cutlass-operators 0.3.0 compiles for uint8 multiplies signed numbers.
        ("sm_100a_int8", "sm_100a", "mm/tn/uint8xuint8/int32/int32", (128, 64)),
        ("sm_90a_int8", "sm_90a", "mm/tn/uint8xuint8/int32/int32", (128, 128)),
        ("sm_90a_bf16", "sm_90a", "mm/tn/bf16xbf16/fp16/bf16", (128, 256)),
        ("sm_100f_mxfp8", "sm_100f", MXFP8.replace("e5m2", "e4m3"), (128, 128)),
    ],
)
def test_finds_other_operand_types(
    name: str, arch: str, signature: str, tile: tuple[int, int]
) -> None:
    (finding,) = findings_of(sass(name), arch, signature, tile)
    assert finding.check is Check.OPERAND_TYPES
    assert f"its signature is {signature}" in finding.message


@pytest.mark.parametrize(
    ("name", "arch", "signature", "message"),
    [
        ("sm_100f_mxfp8", "sm_100f", f"{FP4}e8m0_1x32", "fp4_e2m1 on sm_100f calls for UTCOMMA"),
        ("sm_100f_mxfp4", "sm_90a", f"{FP4}e8m0_1x32", "no rule for fp4_e2m1 on sm_90a"),
        ("sm_100f_sm80_code", "sm_100f", BF16, "multiplies with HMMA; bf16 on sm_100f calls for"),
        ("sm_90a_bf16", "sm_90a", "mm/tn/int8xint8/int32/int32", "int8 on sm_90a calls for IGMMA"),
        ("sm_100_local_memory", "sm_100f", BF16, "multiplies with no tensor-core instruction"),
        ("sm_90a_bf16", "sm_80", BF16, "no rule for bf16 on sm_80"),
        ("sm_90a_bf16", "sm_90a", GATHERED, "no tensor core multiplies fp32"),
    ],
)
def test_finds_other_tensor_core_instruction(
    name: str, arch: str, signature: str, message: str
) -> None:
    findings = findings_of(sass(name), arch, signature, (128, 256))
    assert [
        message in finding.message for finding in findings if finding.check is Check.TENSOR_CORE
    ] == [True]


@pytest.mark.parametrize(
    ("name", "arch", "tile"),
    [
        ("sm_100f_bf16_2cta", "sm_100f", (256, 32)),
        ("sm_100f_bf16_2cta", "sm_100f", (128, 64)),
        ("sm_90a_bf16", "sm_90a", (128, 128)),
        ("sm_90a_bf16", "sm_90a", (96, 256)),
    ],
)
def test_finds_tile_of_another_kernel(name: str, arch: str, tile: tuple[int, int]) -> None:
    (finding,) = findings_of(sass(name), arch, BF16, tile)
    assert finding.check is Check.INSTRUCTION_TILE
    assert f"its entry says tile {tile[0]}x{tile[1]}" in finding.message


def test_finds_code_that_does_not_show_its_types() -> None:
    text = "\n".join(
        line for line in sass("sm_100f_bf16_2cta").splitlines() if re.search("MMA|F2FP", line)
    )
    (finding,) = findings_of(text, "sm_100f", BF16, (128, 32))
    assert finding.check is Check.OPERAND_TYPES
    assert "show no operand types" in finding.message


@pytest.mark.parametrize(
    ("name", "signature", "tile", "message"),
    [
        ("sm_100f_mxfp4", f"{FP4}e8m0_1x16", (256, 192), "fp4_e2m1xfp4_e2m1/fp32/e8m0_1x32, its"),
        ("sm_100f_nvfp4", f"{FP4}e8m0_1x16", (256, 192), "fp4_e2m1xfp4_e2m1/fp32/e4m3_1x16, its"),
        ("sm_100f_mxfp8", MXFP8.rpartition("/")[0], (128, 128), "all of UTCQMMA take block scales"),
    ],
)
def test_finds_other_block_scales(
    name: str, signature: str, tile: tuple[int, int], message: str
) -> None:
    (finding,) = findings_of(sass(name), "sm_100f", signature, tile)
    assert finding.check is Check.BLOCK_SCALES
    assert message in finding.message
    assert f"its signature is {signature}" in finding.message


def test_finds_instructions_without_the_block_scales_of_the_others() -> None:
    text = sass("sm_100f_mxfp8").replace("tmem[UR16]", "UR16", 1)
    (finding,) = findings_of(text, "sm_100f", MXFP8, (128, 128))
    assert finding.check is Check.BLOCK_SCALES
    assert "some of UTCQMMA take block scales" in finding.message


@pytest.mark.parametrize(
    ("name", "signature", "tile", "observed"),
    [
        ("sm_100f_bias_relu", BIAS_RELU.replace("bias_relu", "bias"), (128, 128), "relu"),
        ("sm_100f_bias_gelu_tanh", BIAS_GELU.replace("gelu_tanh", "silu"), (128, 32), "gelu_tanh"),
        ("sm_100f_bias_silu", f"{BF16}/bias_gelu_tanh", (128, 64), "silu"),
        ("sm_100f_bf16_2cta", f"{BF16}/bias_relu", (128, 32), "no activation"),
    ],
)
def test_finds_other_activation(
    name: str, signature: str, tile: tuple[int, int], observed: str
) -> None:
    (finding,) = findings_of(sass(name), "sm_100f", signature, tile)
    assert finding.check is Check.EPILOGUE
    assert f"computes {observed}, its signature is {signature}" in finding.message


@pytest.mark.parametrize(
    ("name", "epilogue", "message"),
    [
        ("sm_90a_swiglu", "geglu_halves", "computes silu, its"),
        ("sm_90a_swiglu", "swiglu_oai_halves", "has the constant of no gate"),
        ("sm_90a_swiglu_oai", "swiglu_interleaved", "has the constant of swiglu_oai"),
        ("sm_90a_bf16", "swiglu_halves", "computes no activation, its"),
    ],
)
def test_finds_other_gate(name: str, epilogue: str, message: str) -> None:
    tile = (128, 256) if name == "sm_90a_bf16" else (128, 192)
    (finding,) = findings_of(sass(name), "sm_90a", f"{BF16}/{epilogue}", tile)
    assert finding.check is Check.EPILOGUE
    assert message in finding.message


@pytest.mark.parametrize(
    ("epilogue", "message"),
    [
        ("swiglu_halves_kept", "rounds 2 values for 2 gates"),
        ("swiglu_interleaved_gradient", "must round 2 for each"),
        ("swiglu_halves_ups", "must round 2 for each"),
    ],
)
def test_finds_other_form_of_a_gate(epilogue: str, message: str) -> None:
    """One stores what a gate gives, another the product or ups as well, or a pair's gradients."""
    signature = f"grouped_mm/tn/bf16xbf16/fp32/bf16/{epilogue}"
    (finding,) = findings_of(sass("sm_90a_swiglu"), "sm_90a", signature, (128, 192))
    assert finding.check is Check.EPILOGUE
    assert message in finding.message


@pytest.mark.parametrize(
    ("epilogue", "rounded"),
    [("swiglu_halves_kept", 6), ("swiglu_halves_gradient", 4), ("swiglu_halves_ups", 4)],
)
def test_accepts_as_many_values_as_a_form_has_for_each_gate(epilogue: str, rounded: int) -> None:
    line = "        /*2f90*/                   F2FP.BF16.F32.PACK_AB R220, R10, R9 ;\n"
    text = sass("sm_90a_swiglu").replace(line, line * (rounded // 2))
    signature = f"grouped_mm/tn/bf16xbf16/fp32/bf16/{epilogue}"
    assert not findings_of(text, "sm_90a", signature, (128, 192))


def test_finds_limits_that_drop_nan() -> None:
    text = sass("sm_90a_swiglu_oai").replace("FMNMX.NAN", "FMNMX")
    (finding,) = findings_of(text, "sm_90a", f"{BF16}/swiglu_oai_interleaved", (128, 192))
    assert "drops NaN" in finding.message


def test_finds_relu_that_drops_nan() -> None:
    text = sass("sm_100f_bias_relu").replace("FSETP.GEU.AND P3, PT, R3.reuse, RZ, PT", "NOP")
    text = text.replace("FSEL R3, R3, RZ, P3", "FMNMX R3, RZ, R3, !PT")
    (finding,) = findings_of(text, "sm_100f", BIAS_RELU, (128, 128))
    assert finding.check is Check.EPILOGUE
    assert finding.message == "takes maxima by FMNMX, which drops NaN: relu of NaN must be NaN"


@pytest.mark.parametrize(
    ("opcode", "out"),
    [
        ("F2FP.RELU.BF16.F32.PACK_AB", DType.BF16),
        ("F2FP.SATFINITE.RELU.E4M3.F32.PACK_AB_MERGE_C", DType.FP8_E4M3),
    ],
)
def test_a_conversion_may_be_a_relu_that_keeps_nan(opcode: str, out: DType) -> None:
    """As in kernels for sm_90a; without the modifier, the same conversion is none."""
    code = read_epilogue_code([(opcode, " R4, R5, R4")])
    assert (code.activation, code.results) == (Activation.RELU, {out})
    assert not code.drops_nan
    plain = read_epilogue_code([(opcode.replace(".RELU", ""), " R4, R5, R4")])
    assert (plain.activation, plain.results) == (None, {out})


def test_a_maximum_may_keep_nan_by_its_modifier() -> None:
    code = read_epilogue_code([("FMNMX.NAN", " R4, RZ, R4, !PT")])
    assert (code.activation, code.drops_nan) == (Activation.RELU, False)


def test_finds_epilogue_that_computes_in_16_bits() -> None:
    text = sass("sm_100f_bias_in_16_bits")
    findings = findings_of(text, "sm_100f", f"{BF16}/bias_relu", (64, 64))
    assert {finding.check for finding in findings} == {Check.EPILOGUE}
    assert (
        "computes with HADD2.BF16_V2, HFMA2.BF16_V2, HMNMX2.BF16_V2: an epilogue must compute in "
        "fp32 and round once" in findings[0].message
    )


@pytest.mark.parametrize(
    ("name", "arch", "signature", "tile", "observed"),
    [
        ("sm_100f_bf16_2cta", "sm_100f", "mm/tn/bf16xbf16/fp32/fp32", (128, 32), "bf16"),
        ("sm_90a_fp16", "sm_90a", "mm/tn/fp16xfp16/fp32/bf16", (64, 64), "fp16"),
        ("sm_100f_nvfp4_e8m0", "sm_100f", f"{FP4}e8m0_1x16", (256, 128), "fp8_e4m3"),
        ("sm_100a_int8", "sm_100a", "mm/tn/int8xint8/int32/fp32", (128, 64), "nothing else"),
    ],
)
def test_finds_other_result_type(
    name: str, arch: str, signature: str, tile: tuple[int, int], observed: str
) -> None:
    (finding,) = findings_of(sass(name), arch, signature, tile)
    assert finding.check is Check.RESULT_TYPE
    assert f"converts sums to {observed}, its signature is {signature}: " in finding.message


@pytest.mark.parametrize("line", ["@!P0 LDL.LU.64 R2, [R1+0x8] ;", "STL.128 [R1], R4 ;"])
def test_finds_spills(line: str) -> None:
    text = sass("sm_90a_bf16") + f"        /*7f00*/                   {line}\n"
    (finding,) = findings_of(text, "sm_90a", BF16, (128, 256))
    assert finding.check is Check.LOCAL_MEMORY
    assert "registers spill" in finding.message


def test_finds_local_memory_in_real_code() -> None:
    assert read_disassembly(sass("sm_100_local_memory")).local_memory == {"STL": 1}


@pytest.mark.parametrize("opcode", ["LDLCK", "STLX", "LDS", "STG.E", "UTCBAR", "LDTM.x16"])
def test_takes_no_other_instruction_for_a_spill_or_a_multiplication(opcode: str) -> None:
    code = read_disassembly(f"        /*0000*/                   {opcode} R0, [R1] ;\n")
    assert not code.local_memory
    assert not code.tensor_core


def test_reads_nothing_from_other_text() -> None:
    code = read_disassembly("nvdisasm fatal   : UTCHMMA 0x8082490 STL\n")
    assert not code.tensor_core
    assert not code.local_memory
    assert not code.multiplies


def test_the_instruction_of_a_warp_shows_types() -> None:
    """Right ones leave the other checks open; wrong ones are a contradiction, whoever's kernel."""
    text = sass("sm_100f_sm80_code")
    for signature, wrong in ((BF16, False), ("mm/tn/fp16xfp16/fp32/fp16", True)):
        found = findings_of(text, "sm_100f", signature, (128, 256))
        assert [one.is_unseen for one in found if one.check is Check.TENSOR_CORE] == [True]
        assert any(one.check is Check.OPERAND_TYPES for one in found) is wrong
        assert not any(one.is_unseen for one in found if one.check is Check.OPERAND_TYPES)


def test_types_of_warp_instructions() -> None:
    assert warp_types("HMMA.16816.F32.BF16") == (DType.BF16, DType.BF16, DType.FP32)
    assert warp_types("HMMA.16816.F32") == (DType.FP16, DType.FP16, DType.FP32)
    assert warp_types("HMMA.16816.F16") == (DType.FP16, DType.FP16, DType.FP16)
    assert warp_types("HMMA.1688.F32.TF32") is None
    assert warp_types("HGMMA.64x64x16.F32.BF16") is None


def test_an_instruction_that_is_a_part_of_the_tile_leaves_it_open() -> None:
    """Known kernels have one along n; others may have several, but none that does not fit."""
    text = sass("sm_90a_bf16")
    (known,) = read_disassembly(text).multiplies
    for tile_n, unseen in ((2 * known.n, True), (known.n + 8, False)):
        found = findings_of(text, "sm_90a", BF16, (64, tile_n), scheduler="static_persistent")
        tiles = [one.is_unseen for one in found if one.check is Check.INSTRUCTION_TILE]
        assert tiles == [unseen]


@pytest.mark.parametrize(
    ("provider", "scheduler", "swapped", "transposed"),
    [
        ("cutlass_operators", "one_tile", False, True),
        ("cutlass_operators", "clc", False, False),
        ("quack", "static_persistent", True, True),
        ("somebody", "one_tile", False, False),
        ("somebody", "one_tile", True, True),
    ],
)
def test_only_known_providers_say_by_their_scheduler_that_they_transpose(
    provider: str, scheduler: str, swapped: bool, transposed: bool
) -> None:
    design = KernelDesign(
        tile=(64, 64, 64),
        ctas_per_tile=1,
        cluster=(1, 1),
        fallback_cluster=None,
        scheduler=scheduler,
        swapped=swapped,
    )
    assert computes_transposed(design, provider) is transposed
