"""Copies of scales to tensor memory, and multiplications by them."""

import numpy as np
import pytest

from handwritten_kernels import aligned, tensor_map
from nvgemm_aot.emulator.emulation_errors import EmulationError
from tensor_kernels import run_with_tensor_memory, wait

A_PLACE, B_PLACE, SCALES = 1024, 17 * 1024, 33 * 1024
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LINES = 64
"""Rows of 16 bytes that hold scales: A's 32, then B's 32."""


def load(place, name):
    return (
        "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        f"[smem+{place}], [{name}, {{0, 0}}], [smem+16];\n"
    )


def descriptor(place, swizzle=0, leading=0, stride=128):
    word = (1024 + place) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46
    return word | {0: 0, 32: 6}[swizzle] << 61


def staged(sizes, body):
    """Loads tensors m0, m1, ... to their places, and lets one thread run a body behind that."""
    text = f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem+16], {sum(sizes.values())};\n"
    for number, place in enumerate(sizes):
        text += load(place, f"m{number}")
    text += "@!%p1 bra ISSUED;\n" + wait("smem+16", "LOADS") + body
    text += "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+24];\n"
    return text + "ISSUED:\n" + wait("smem+24", "WORK") + "tcgen05.fence::after_thread_sync;\n"


@pytest.mark.parametrize("delay", [0, 5])
@pytest.mark.parametrize(
    ("shape", "rows", "width", "place_of"),
    [
        ("128x256b", 128, 2, lambda lane: lane),
        ("128x128b", 128, 1, lambda lane: lane),
        ("64x128b.warpx2::02_13", 64, 1, lambda lane: lane % 64),
        ("64x128b.warpx2::01_23", 64, 1, lambda lane: lane // 64 * 32 + lane % 32),
        ("32x128b.warpx4", 32, 1, lambda lane: lane % 32),
    ],
)
def test_rows_go_to_the_lanes_of_their_shape(shape, rows, width, place_of, delay):
    data = aligned(rows * width * 16)
    data[:] = np.arange(len(data)) % 251
    # Chunk after chunk, each with all rows, as matrices without swizzling lie.
    lines = tensor_map(data, "u8", (16, rows * width), (16, rows * width))
    word = descriptor(A_PLACE, leading=rows * 16)
    body = f"mov.b64 %d10, {word};\ntcgen05.cp.cta_group::1.{shape} [%r3], %d10;\n"
    (cells,) = run_with_tensor_memory(
        staged({A_PLACE: len(data)}, body), tensors={"a": data}, maps=[lines], delay=delay
    )
    wanted = data.view(np.uint32).reshape(width, rows, 4)
    for lane in range(128):
        found = cells[lane, : 4 * width].reshape(width, 4)
        assert (found == wanted[:, place_of(lane)]).all(), lane


def encode_e2m1(codes):
    """Packs pairs of codes, the first one in the low half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def scaled(kind, qualifiers, codes, scales, word):
    """Multiplies 128 x 64 by 64 x 32 packed elements, with scales as (rows, 4) bytes."""
    tensors, maps = {}, []
    for name, matrix in zip("ab", codes):
        tensors[name] = aligned(len(matrix) * 32)
        tensors[name][:] = encode_e2m1(matrix).reshape(-1)
        maps.append(
            tensor_map(tensors[name], "u8", (32, len(matrix)), (32, len(matrix)), swizzle=32)
        )
    lines = np.zeros((LINES, 16), np.uint8)
    for number, each in enumerate(scales):
        for row in range(len(each)):
            lines[32 * number + row % 32, 4 * (row // 32) : 4 * (row // 32) + 4] = each[row]
    tensors["scales"] = aligned(lines.size)
    tensors["scales"][:] = lines.reshape(-1)
    maps.append(tensor_map(tensors["scales"], "u8", (16, LINES), (16, LINES)))
    operands = "%d12, %d13, %r9, [%r7], [%r8]"
    body = f"""
mov.b64 %d10, {descriptor(SCALES)};
mov.b64 %d11, {descriptor(SCALES + 512)};
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r3+64], %d10;
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r3+68], %d11;
add.u32 %r7, %r3, 64;
add.u32 %r8, %r3, 68;
mov.b32 %r9, {word};
mov.b64 %d12, {descriptor(A_PLACE, 32, stride=256)};
mov.b64 %d13, {descriptor(B_PLACE, 32, stride=256)};
mov.pred %p3, 0;
tcgen05.mma.cta_group::1.kind::{kind}.block_scale{qualifiers} [%r3], {operands}, %p3;
"""
    sizes = {A_PLACE: 128 * 32, B_PLACE: 32 * 32, SCALES: LINES * 16}
    (cells,) = run_with_tensor_memory(staged(sizes, body), tensors=tensors, maps=maps)
    return cells[:, :32].view(np.float32)


def ue4m3(codes):
    return np.where(
        codes >> 3 == 0, codes % 8 / 512, (1 + codes % 8 / 8) * 2.0 ** ((codes >> 3) - 7)
    )


@pytest.mark.parametrize(
    ("kind", "qualifiers", "block", "powers", "first"),
    [
        ("mxf4", ".block32", 32, 1, 2),
        ("mxf4", "", 32, 1, 0),
        ("mxf4nvf4", ".scale_vec::4X", 16, 0, 0),
        ("mxf4nvf4", ".block16", 16, 1, 0),
        ("mxf4nvf4", ".scale_vec::2X", 32, 1, 2),
    ],
)
def test_scales_multiply_their_blocks(kind, qualifiers, block, powers, first):
    random = np.random.default_rng(3)
    codes = [random.integers(0, 16, (rows, 64)) for rows in (128, 32)]
    low, high = (124, 131) if powers else (0x28, 0x48)
    scales = [random.integers(low, high, (rows, 4)) for rows in (128, 32)]
    word = 1 << 7 | 1 << 10 | 32 >> 3 << 17 | powers << 23 | 1 << 27 | first << 29 | first << 4
    found = scaled(kind, qualifiers, codes, scales, word)
    values = []
    for code, scale in zip(codes, scales):
        numbers = np.where(code & 8, -E2M1[code & 7], E2M1[code & 7])
        chosen = scale[:, first : first + 64 // block]
        factors = 2.0 ** (chosen - 127) if powers else ue4m3(chosen)
        values.append(numbers * np.repeat(factors, block, 1))
    assert (found == (values[0] @ values[1].T).astype(np.float32)).all()


@pytest.mark.parametrize(
    ("kind", "qualifiers", "change", "message"),
    [
        ("mxf4", ".block32", 1 << 23, "type of scales"),
        ("mxf4nvf4", ".block16", 1 << 15, "transposition"),
        ("mxf4nvf4", ".scale_vec::4X", 1 << 29, "4 scales from byte 1"),
        ("mxf4nvf4", ".scale_vec::2X", 1 << 29, "2 scales from byte 1"),
        ("mxf4nvf4", ".block32", 1 << 23, "ue4m3, must be ue8m0"),
        ("mxf4nvf4", ".block16", 3 << 27, "M is 256"),
        (
            "mxf4nvf4",
            ".block32",
            1 << 31,
            "K is 96, must be 64; the longer K that only sm_103a has",
        ),
        ("mxf4nvf4", "", 0, "scale_vec"),
        ("mxf4", ".block16", 0, "block16"),
    ],
)
def test_rejects(kind, qualifiers, change, message):
    codes = [np.zeros((rows, 64), int) for rows in (128, 32)]
    scales = [np.full((rows, 4), 127) for rows in (128, 32)]
    word = (1 << 7 | 1 << 10 | 32 >> 3 << 17 | 1 << 23 | 1 << 27) ^ change
    with pytest.raises(EmulationError, match=message):
        scaled(kind, qualifiers, codes, scales, word)
