import re

import numpy as np
import pytest

from benchmarks.emulation.hopper.instruction_runs import emulate
from benchmarks.emulation.hopper.wgmma_cases import IMAGE_BYTES, Matrix, wgmma
from handwritten_kernels import aligned, run
from nvgemm_aot.emulator.emulation_errors import DeadlockError, EmulationError, UnsupportedPtxError

SUMS = "{%r10, %r11, %r12, %r13}"
"""Accumulators of m64n8k16."""

BEGIN = """
mov.b64 %d2, 0x4000004000010040;
mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0; mov.b32 %r20, 0;
setp.eq.s32 %p1, %r10, 0;
"""
FENCE = "wgmma.fence.sync.aligned;"
MULTIPLY = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {SUMS}, %d2, %d2, %p1, 1, 1, 0, 0;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
FROM_REGISTERS = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    f"{SUMS}, {{%r20, %r21, %r22, %r23}}, %d2, %p1, 1, 1, 0;"
)


def start(*parts, target="sm_90a", threads=128, **options):
    return run("\n".join((BEGIN, *parts)), threads=threads, target=target, **options)


def bf16(data):
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rows_of(image, begin, rows, columns):
    """Elements of 128-byte rows in which chunks of 16 bytes are exchanged by the row's number."""
    return np.array(
        [
            [
                bf16(image[begin + 128 * r + 16 * ((k // 8) ^ (r % 8)) + 2 * (k % 8) :][:2])[0]
                for k in range(columns)
            ]
            for r in range(rows)
        ]
    )


def sums_of(words, n):
    """Matrix of 64 rows from threads' registers (PTX ISA, figure "WGMMA .m64nNk16 D fragment")."""
    matrix = np.empty((64, n), words.dtype)
    for thread, values in enumerate(words.reshape(128, n // 2)):
        row = 16 * (thread // 32) + thread % 32 // 4
        for place, value in enumerate(values):
            matrix[row + 8 * (place // 2 % 2), place // 4 * 8 + thread % 4 * 2 + place % 2] = value
    return matrix


@pytest.mark.parametrize("scales", [(1, 1), (-1, 1)])
@pytest.mark.parametrize("accumulates", [True, False])
def test_sums_are_numpys(scales, accumulates):
    case = wgmma("of a test", n=24, scales=scales, accumulates=accumulates)
    given = case.input()
    a, b = rows_of(given, 0, 64, 16), rows_of(given, 16384, 24, 16)
    before = sums_of(given[IMAGE_BYTES + 2048 :].view(np.float32), 24)
    expected = scales[0] * a @ b.T + (before if accumulates else 0)
    assert (sums_of(emulate(case, []).view(np.float32), 24) == expected).all()


@pytest.mark.parametrize("seed", range(3))
def test_late_multiplications_of_a_chain_add_up(seed):
    matrices = {"a": (Matrix(), Matrix(begin=32)), "b": (Matrix(begin=16384), Matrix(begin=16416))}
    case = wgmma("a chain", n=16, **matrices)
    assert (emulate(case, [], seed=seed, delay=5) == emulate(case, [])).all()


def test_runs_without_a_fault():
    start(FENCE, MULTIPLY, COMMIT, WAIT, "add.f32 %r14, %r10, %r11;")


@pytest.mark.parametrize(
    ("use", "named"),
    [
        ("add.f32 %r14, %r11, %r0;", "%r11, an accumulator"),
        ("mov.b32 %r10, 0;", "%r10, an accumulator"),
        ("setp.lt.s32 %p2, %r20, 0; @%p2 mov.b32 %r12, 0;", "%r12, an accumulator"),
        ("st.shared.b32 [smem], %r13;", "%r13, an accumulator"),
        ("setp.eq.b32 %p2, %r10, %r11;", "%r10, an accumulator"),
        ("sub.u32 %r14, %r10, %r11;", "%r10, an accumulator"),
        ("setp.lt.s32 %p2, %r20, 0; selp.b32 %r14, %r10, %r20, %p2;", "%r10, an accumulator"),
        ("setp.lt.s32 %p2, %r20, 0; selp.b32 %r14, %r20, %r10, %p2;", "%r10, an accumulator"),
    ],
)
def test_an_accumulator_in_flight_must_not_be_used(use, named):
    with pytest.raises(EmulationError, match=re.escape(named)):
        start(FENCE, MULTIPLY, COMMIT, use, WAIT)


def test_a_register_of_a_in_flight_must_not_be_used():
    with pytest.raises(EmulationError, match="%r21, part of A of the wgmma at line"):
        start(FENCE, FROM_REGISTERS, COMMIT, "mov.b32 %r21, 1;", WAIT)
    with pytest.raises(EmulationError, match="%r20, part of A of the wgmma at line"):
        start(FENCE, FROM_REGISTERS, COMMIT, "add.s32 %r30, %r20, 1;", WAIT)
    start(FENCE, FROM_REGISTERS, COMMIT, WAIT, "mov.b32 %r20, 1;")


def test_registers_must_be_fenced():
    with pytest.raises(EmulationError, match=r"wgmma\.fence must come first"):
        start(MULTIPLY, COMMIT, WAIT)
    with pytest.raises(EmulationError, match=r"%r10 was not fenced"):
        start(FENCE, MULTIPLY, COMMIT, WAIT, MULTIPLY, COMMIT, WAIT)


def test_only_groups_that_are_waited_for_give_registers_back():
    other = MULTIPLY.replace(SUMS, "{%r30, %r31, %r32, %r33}")
    two = (FENCE, MULTIPLY, COMMIT, other, COMMIT, WAIT.replace("0;", "1;"))
    start(*two, "add.f32 %r14, %r10, %r11;", WAIT)
    with pytest.raises(EmulationError, match="%r30"):
        start(*two, "add.f32 %r14, %r30, %r11;", WAIT)


def test_a_warp_that_does_not_come_is_named():
    skip = "mov.u32 %r0, %tid.x; setp.ge.u32 %p5, %r0, 96; @%p5 bra END;"
    with pytest.raises(DeadlockError, match=r"the wgmma at line \d+, which warps 3 have not"):
        start(skip, FENCE, MULTIPLY, COMMIT, WAIT, "END:")


def test_warps_must_agree():
    differ = (
        "mov.u32 %r0, %tid.x; shr.u32 %r0, %r0, 5; cvt.u64.u32 %d3, %r0; add.s64 %d2, %d2, %d3;"
    )
    with pytest.raises(EmulationError, match="the same wgmma with the same descriptors"):
        start(differ, FENCE, MULTIPLY, COMMIT, WAIT)


def test_lanes_must_agree():
    differ = "mov.u32 %r0, %laneid; cvt.u64.u32 %d3, %r0; add.s64 %d2, %d2, %d3;"
    with pytest.raises(EmulationError, match="other operands than lane 0"):
        start(differ, FENCE, MULTIPLY, COMMIT, WAIT)
    half = "mov.u32 %r0, %laneid; setp.lt.u32 %p5, %r0, 16;"
    with pytest.raises(EmulationError, match="runs in 16 lanes of a warp, must run in all 32"):
        start(half, FENCE, "@%p5 " + MULTIPLY, COMMIT, WAIT)


def test_a_group_needs_four_warps():
    with pytest.raises(EmulationError, match="a warp group has 4 warps; the block has only 2"):
        start(FENCE, threads=64)


def test_a_matrix_must_lie_in_shared_memory():
    with pytest.raises(EmulationError, match="reads a matrix at"):
        start(FENCE, MULTIPLY, COMMIT, WAIT, shared=512)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("mma_async", "mma_async.sp", "sparse matrix"),
        ("f32.bf16.bf16", "s32.b1.b1", "qualifier .b1"),
        ("f32.bf16.bf16", "f32.bf16.f16", "qualifier .f16"),
        ("f32.bf16.bf16", "f16.bf16.bf16", "D of .f16 for A of .bf16"),
        ("m64n8k16", "m64n12k16", "shape .m64n12k16"),
        ("m64n8k16", "m64n8k32", "shape .m64n8k32"),
        ("m64n8k16", "m64n16k16", "must have 8 registers"),
        ("1, 1, 0, 0;", "1, 2, 0, 0;", "a constant in"),
        ("1, 1, 0, 0;", "1, 1;", "a number of"),
        (".aligned", "", "qualifier .m64n8k16"),
    ],
)
def test_names_what_it_does_not_know(old, new, named):
    with pytest.raises(UnsupportedPtxError, match=re.escape(named)):
        start(FENCE, MULTIPLY.replace(old, new), COMMIT, WAIT)


def test_blackwell_has_no_warp_groups():
    with pytest.raises(UnsupportedPtxError, match="wgmma on sm_100a, which only sm_90a has"):
        start(FENCE, target="sm_100a")


def test_ends_with_results_in_memory():
    out = aligned(128, np.float32)
    store = (
        "ld.param.b64 %d4, [a0]; mov.u32 %r0, %tid.x; mul.wide.u32 %d5, %r0, 4;"
        "add.s64 %d4, %d4, %d5; st.global.b32 [%d4], %r10;"
    )
    start(FENCE, MULTIPLY, COMMIT, WAIT, store, tensors={"out": out}, pointers=[out])
    assert np.isnan(out).all()  # as operands that nobody has written are
