import numpy as np
import pytest

from handwritten_kernels import aligned, run
from nvgemm_aot.emulator.emulation_errors import (
    EmulationError,
    MemoryAccessError,
    UnsupportedPtxError,
)
from tensor_kernels import registers, run_with_tensor_memory, whole

LAYOUTS = {
    # Threads and bits of a row-major (lane, bit) space, as CuTe's copy traits have them.
    "32x32b": (1, lambda thread, number: (thread, number)),
    "16x64b": (1, lambda t, r: (t % 2 * 8 + t // 4, t // 2 % 2 + 2 * r)),
    "16x128b": (2, lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2))),
    "16x256b": (4, lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4))),
}
VALUES = "".join(f"mad.lo.u32 %r{20 + n}, %r1, 64, {n};\n" for n in range(64))
CLEAR = (
    "".join(f"mov.b32 %r{200 + n}, 7;\n" for n in range(64))
    + f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r5], {registers(64, 200)};\n"
    + "tcgen05.wait::st.sync.aligned;\n"
)


def stored(shape, count, packing="", split="", lane=0):
    per = LAYOUTS[shape][0] if shape in LAYOUTS else 1
    return (
        CLEAR
        + VALUES
        + f"add.u32 %r7, %r5, {lane << 16};\n"
        + f"tcgen05.st.sync.aligned.{shape}.x{count}{packing}.b32 [%r7]{split}, "
        + registers(per * count, 20)
        + ";\ntcgen05.wait::st.sync.aligned;\n"
    )


@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize(
    ("shape", "count"),
    [("32x32b", 1), ("32x32b", 16), ("16x64b", 1), ("16x64b", 8), ("16x128b", 4), ("16x256b", 2)],
)
def test_store_puts_each_register_where_its_shape_says(shape, count, delay):
    per, layout = LAYOUTS[shape]
    lane = 0 if shape == "32x32b" else 16
    (cells,) = run_with_tensor_memory(stored(shape, count, lane=lane), delay=delay)
    wanted = np.full((128, 64), 7)
    for warp in range(4):
        for thread in range(32):
            for number in range(per * count):
                row, column = layout(thread, number)
                wanted[32 * warp + lane + row, column] = 64 * (32 * warp + thread) + number
    assert (cells == wanted).all()


def test_split_shape_has_two_halves_of_columns():
    (cells,) = run_with_tensor_memory(stored("16x32bx2", 2, split=", 8"))
    assert cells[3, :10].tolist() == [192, 193, 7, 7, 7, 7, 7, 7, 64 * 19, 64 * 19 + 1]
    assert (cells[16:32] == 7).all()


def test_unpacked_halves_go_to_neighbouring_columns_and_come_back():
    body = VALUES.replace(", 64, ", ", 65537, ") + (
        f"tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r5], {registers(2, 20)};\n"
        "tcgen05.wait::st.sync.aligned;\n"
        f"tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {registers(2, 200)}, [%r5];\n"
        "tcgen05.wait::ld.sync.aligned;\n"
        f"tcgen05.st.sync.aligned.32x32b.x2.b32 [%r5+4], {registers(2, 200)};\n"
        "tcgen05.wait::st.sync.aligned;\n"
    )
    (cells,) = run_with_tensor_memory(CLEAR + body)
    assert cells[5, :6].tolist() == [5, 5, 6, 5, 5 * 65537, 5 * 65537 + 1]


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("[%r7]", "[%r3]", EmulationError, r"accesses lanes of tensor memory from 0, warp [1-3]"),
        ("[%r7]", "[%r7+120]", MemoryAccessError, "columns 120 to 135 of tensor memory"),
        ("[%r7]", "[%r1]", EmulationError, "different addresses"),
        (".x16.b32 [%r7]", ".x256.b32 [%r7]", UnsupportedPtxError, "x256"),
        (".x16.b32 [%r7]", ".x8.b32 [%r7]", UnsupportedPtxError, "16 registers, not 8"),
        (".x16.b32 [%r7]", ".x16.red.b32 [%r7]", UnsupportedPtxError, "red"),
        (
            "tcgen05.st.sync.aligned.32x32b.x16",
            "@%p1 tcgen05.st.sync.aligned.32x32b.x16",
            EmulationError,
            "1 lanes run",
        ),
        (
            "tcgen05.ld.sync.aligned.32x32b.x64.b32",
            "tcgen05.ld.red.sync.aligned.32x32b.x64.b32",
            UnsupportedPtxError,
            "red",
        ),
    ],
)
def test_rejects(old, new, error, message):
    cells = aligned(128 * 64, np.uint32)
    body = whole(stored("32x32b", 16))
    assert old in body
    with pytest.raises(error, match=message):
        run(body.replace(old, new), tensors={"c": cells}, pointers=[cells], threads=128)


def test_cells_that_nobody_wrote_hold_nan():
    (cells,) = run_with_tensor_memory("")
    assert np.isnan(cells.view(np.float32)).all()
