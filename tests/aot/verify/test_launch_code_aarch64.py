"""Arm host code, in instructions that LLVM 22 writes for the lines beside them."""

from __future__ import annotations

import struct

import pytest

from nvgemm_aot.verify.host.launch_code import launch_clusters, launch_shared_bytes
from nvgemm_aot.verify.host.launch_code_aarch64 import extension, stored_constants

ARM = "linux_aarch64"

MOV_X8_0X8400 = 0xD2908008  # mov x8, #0x8400
MOVK_X8_3 = 0xF2A00068  # movk x8, #3, lsl #16
MOVN_X8 = 0x92800008  # mov x8, #-1
MOV_X9_PAIR = 0xB20003E9  # mov x9, #0x100000001
MOV_X9_2 = 0xD2800049  # mov x9, #2
MOVK_X9_HIGH_1 = 0xF2C00029  # movk x9, #1, lsl #32
MOVI_V2_1 = 0x0F000422  # movi v2.2s, #1
MOVI_V2_2 = 0x0F000442  # movi v2.2s, #2
STR_X8 = 0xF9000008  # str x8, [x0]
STUR_X8 = 0xF81F8008  # stur x8, [x0, #-8]
STR_W8 = 0xB9000008  # str w8, [x0]
STP_X8_X9 = 0xA9002408  # stp x8, x9, [x0]
STR_D2 = 0xFD000002  # str d2, [x0]
STR_Q2 = 0x3D800002  # str q2, [x0]
ADD_X8 = 0x91000508  # add x8, x8, #1
LDR_X8 = 0xF9400008  # ldr x8, [x0]
LDR_D2 = 0xFD400002  # ldr d2, [x0]
LDP_X10_X9 = 0xA940240A  # ldp x10, x9, [x0]
LDP_X8_X11 = 0xA9402C08  # ldp x8, x11, [x0]
LDPSW_X10_X8 = 0x6940200A  # ldpsw x10, x8, [x0]
LDXP_X10_X8 = 0xC87F200A  # ldxp x10, x8, [x0]
LDP_D3_D2 = 0x6D400803  # ldp d3, d2, [x0]
LDP_Q3_Q2 = 0xAD400803  # ldp q3, q2, [x0]
FMOV_X8_D0 = 0x9E660008  # fmov x8, d0
FMOV_X9_D0 = 0x9E660009  # fmov x9, d0
FMOV_D2_X0 = 0x9E670002  # fmov d2, x0
UMOV_X8_D0 = 0x4E083C08  # mov x8, v0.d[0]
SMOV_X8_S0 = 0x4E042C08  # smov x8, v0.s[0]
FCVTZU_X8_D0 = 0x9E790008  # fcvtzu x8, d0
B_NE = 0x54000041  # b.ne
BL = 0x94000000  # bl
RET = 0xD65F03C0

SHARED = 0x38400


def code(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


@pytest.mark.parametrize(
    ("words", "stored"),
    [
        ((MOV_X8_0X8400, MOVK_X8_3, STR_X8), {SHARED}),
        ((MOV_X8_0X8400, MOVK_X8_3, STUR_X8), {SHARED}),
        ((MOV_X8_0X8400, MOVK_X8_3, B_NE, STR_X8), {SHARED}),
        ((MOVN_X8, STR_X8), {2**64 - 1}),
        ((MOV_X8_0X8400, STR_W8), set()),
        ((MOV_X8_0X8400, ADD_X8, STR_X8), set()),
        ((MOV_X8_0X8400, LDR_X8, STR_X8), set()),
        ((MOV_X8_0X8400, BL, STR_X8), set()),
        ((MOVK_X8_3, STR_X8), set()),
        ((MOV_X9_PAIR, MOV_X8_0X8400, STP_X8_X9), {0x8400, 0x100000001}),
        ((MOVI_V2_1, STR_D2), {0x100000001}),
        ((MOVI_V2_2, STR_Q2), {0x200000002}),
        ((MOVI_V2_1, LDR_D2, STR_D2), set()),
        ((MOV_X9_PAIR, LDP_X10_X9, STP_X8_X9), set()),
        ((MOV_X8_0X8400, LDP_X8_X11, STR_X8), set()),
        ((MOV_X8_0X8400, LDPSW_X10_X8, STR_X8), set()),
        ((MOV_X8_0X8400, LDXP_X10_X8, STR_X8), set()),
        ((MOVI_V2_1, LDP_D3_D2, STR_D2), set()),
        ((MOVI_V2_1, LDP_Q3_Q2, STR_D2), set()),
        ((MOV_X8_0X8400, FMOV_X8_D0, STR_X8), set()),
        ((MOVI_V2_1, FMOV_D2_X0, STR_D2), set()),
        ((MOV_X8_0X8400, UMOV_X8_D0, STR_X8), set()),
        ((MOV_X8_0X8400, SMOV_X8_S0, STR_X8), set()),
        ((MOV_X8_0X8400, FCVTZU_X8_D0, STR_X8), set()),
        ((MOV_X8_0X8400, FMOV_X9_D0, STR_X8), {0x8400}),
        ((MOVI_V2_1, BL, STR_D2), set()),
    ],
)
def test_follows_constants_to_where_they_are_stored(
    words: tuple[int, ...], stored: set[int]
) -> None:
    assert stored_constants(code(*words, RET)) == stored


def test_reads_the_launch_off_the_code() -> None:
    launch = (MOV_X8_0X8400, MOVK_X8_3, MOV_X9_2, MOVK_X9_HIGH_1, STP_X8_X9, RET)
    assert launch_shared_bytes(code(*launch), ARM) == SHARED
    assert launch_clusters(code(*launch), ARM) == {(2, 1)}
    assert launch_clusters(code(MOVI_V2_1, STR_D2), ARM) == {(1, 1)}


def test_two_plausible_sizes_of_shared_memory_are_none() -> None:
    launch = (MOV_X8_0X8400, STR_X8, MOVK_X8_3, STR_X8)
    assert launch_shared_bytes(code(*launch), ARM) is None


@pytest.mark.parametrize(
    ("word", "found"),
    [
        (0xF8200041, "LSE atomics"),  # ldadd x0, x1, [x2]
        (0xC8A07C41, "LSE atomics"),  # cas x0, x1, [x2]
        (0x48207C82, "LSE atomics"),  # casp x0, x1, x2, x3, [x4]
        (0x04A00000, "SVE"),  # add z0.s, z0.s, z0.s
        (0x80800000, "SME"),  # fmopa za0.s, ...
        (0xC85F7C41, None),  # ldxr x1, [x2]
        (0x9B017C00, None),  # mul x0, x0, x1
        (0xD503233F, None),  # paciasp, which older processors skip
    ],
)
def test_names_what_not_every_processor_has(word: int, found: str | None) -> None:
    assert extension(code(MOV_X9_2, word, RET)) == found
