import numpy as np
import pytest

from handwritten_kernels import aligned, run, tensor_map
from nvgemm_aot.emulator.emulation_errors import (
    DeadlockError,
    EmulationError,
    MemoryAccessError,
    UnsupportedPtxError,
)
from nvgemm_aot.emulator.machine.ordering import Ordering

WAIT = """
AGAIN:
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [smem], 0;
@%p1 bra DONE;
bra AGAIN;
DONE:
"""
LOAD = (
    "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[smem+1024], [m0, {at}], [smem];\n"
)
STORE = """
cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [m1, {at}], [smem+1024];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
"""


def through(size, load, store):
    return (
        "mbarrier.init.shared.b64 [smem], 1;\n"
        f"mbarrier.arrive.expect_tx.shared.b64 _, [smem], {size};\n" + load + WAIT + store
    )


def braces(numbers):
    return "{" + ", ".join(map(str, numbers)) + "}"


@pytest.mark.parametrize("delay", [0, 5])
@pytest.mark.parametrize(
    ("swizzle", "inner"), [(0, 48), (32, 8), (64, 16), (128, 32), ("atoms", 32), (128, 16)]
)
def test_box_goes_to_and_comes_from_shared_memory(swizzle, inner, delay):
    source, result = aligned(100 * 60, np.float32), aligned(100 * 60, np.float32)
    source[:] = np.arange(6000)
    sizes, box, at = (60, 100), (inner, 24), (20, 85)
    body = through(
        inner * 24 * 4, LOAD.format(rank=2, at=braces(at)), STORE.format(rank=2, at=braces(at))
    )
    maps = [tensor_map(each, "f32", sizes, box, swizzle=swizzle) for each in (source, result)]
    run(body, tensors={"a": source, "c": result}, maps=maps, threads=1, delay=delay)
    wanted = np.zeros((100, 60), np.float32)
    wanted[85:, 20 : 20 + inner] = source.reshape(100, 60)[85:, 20 : 20 + inner]
    assert (result.reshape(100, 60) == wanted).all()


class _CountedReads(Ordering):
    count = 0

    def operation_read(self, operation, block, offsets, size):
        self.count += 1


@pytest.mark.parametrize(("row", "reads"), [("%r2", 1), ("%r1", 32)])
def test_lanes_that_store_equal_boxes_do_so_at_once(row, reads):
    result, ordering = aligned(32 * 4, np.uint32), _CountedReads()
    body = """
mov.u32 %r1, %tid.x;
mov.u32 %r2, 3;
mov.u32 %r3, 5;
shl.b32 %r4, %r1, 2;
mov.u32 %r5, smem;
add.u32 %r4, %r4, %r5;
st.shared.b32 [%r4+1024], %r3;
""" + STORE.format(rank=2, at=f"{{0, {row}}}").replace("m1", "m0")
    maps = [tensor_map(result, "u32", (4, 32), (4, 1))]
    run(body, tensors={"c": result}, maps=maps, ordering=ordering)
    wanted = np.zeros((32, 4), np.uint32)
    wanted[3 if reads == 1 else slice(None)] = 5
    assert (result.reshape(32, 4) == wanted).all()
    assert ordering.count == reads


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_box_outside_is_filled_in_every_rank(rank):
    sizes = (16, 3, 4, 2, 3)[:rank]
    box = (16, 2, 2, 1, 2)[:rank]
    at = (-4, 2, -1, 1, 2)[:rank]
    source = aligned(int(np.prod(sizes)), np.float32)
    source[:] = np.arange(1, len(source) + 1)
    result = aligned(int(np.prod(box)), np.float32)
    result[:] = -1
    body = through(
        result.nbytes,
        LOAD.format(rank=rank, at=braces(at)),
        STORE.format(rank=rank, at=braces([0] * rank)),
    )
    maps = [tensor_map(source, "f32", sizes, box), tensor_map(result, "f32", box, box)]
    run(body, tensors={"a": source, "c": result}, maps=maps, threads=1)
    padded = np.pad(source.reshape(sizes[::-1]), 8)
    window = tuple(slice(8 + a, 8 + a + b) for a, b in zip(at[::-1], box[::-1]))
    assert (result.reshape(box[::-1]) == padded[window]).all()


def test_map_of_a_ragged_tensor_may_begin_below_address_0():
    far, stride = 1 << 30, 1 << 18  # 2**48 bytes before the tensor, more than any of its addresses
    source, result = aligned(4 * stride // 4, np.float32), aligned(4 * 8, np.float32)
    source.reshape(4, -1)[:, :8] = np.arange(32).reshape(4, 8)
    body = through(
        result.nbytes,
        LOAD.format(rank=2, at=braces((0, far))),
        STORE.format(rank=2, at=braces((0, 0))),
    )
    below = source.ctypes.data - far * stride
    assert below < 0
    maps = [
        tensor_map(source, "f32", (8, 1 << 31), (8, 4), strides=(stride,), address=below),
        tensor_map(result, "f32", (8, 4), (8, 4)),
    ]
    run(body, tensors={"a": source, "c": result}, maps=maps, threads=1)
    assert (result == np.arange(32)).all()


def test_swizzle_exchanges_chunks_by_the_address():
    source, result = aligned(8 * 128), aligned(8 * 128)
    source[:] = np.repeat(np.arange(64), 16)
    load = LOAD.format(rank=2, at="{0, 0}")
    maps = [
        tensor_map(source, "u8", (128, 8), (128, 8), swizzle=128),
        tensor_map(result, "u8", (128, 8), (128, 8)),
    ]
    body = through(1024, load, STORE.format(rank=2, at="{0, 0}"))
    run(body, tensors={"a": source, "c": result}, maps=maps, threads=1)
    chunks = result.reshape(8, 8, 16)[:, :, 0]
    row, chunk = np.indices((8, 8))
    assert (chunks == 8 * row + (chunk ^ row)).all()


def test_fill_is_nan_if_the_map_says_so():
    source, result = aligned(64, np.float32), aligned(64, np.float32)
    maps = [
        tensor_map(source, "f32", (64,), (64,), nan=True),
        tensor_map(result, "f32", (64,), (64,)),
    ]
    body = through(256, LOAD.format(rank=1, at="{32}"), STORE.format(rank=1, at="{0}"))
    run(body, tensors={"a": source, "c": result}, maps=maps, threads=1)
    assert np.isnan(result[32:]).all()
    assert (result[:32] == 0).all()


@pytest.mark.parametrize(
    ("operation", "kind", "dtype"),
    [("add", "f32", np.float32), ("max", "f16", np.float16), ("min", "s32", np.int32)],
)
def test_reduction_combines_with_the_tensor(operation, kind, dtype):
    source, result = aligned(64, dtype), aligned(64, dtype)
    source[:] = np.arange(64)
    result[:] = 20
    function = {"add": np.add, "max": np.maximum, "min": np.minimum}[operation]
    wanted = function(source, result)
    store = STORE.format(rank=1, at="{0}").replace(
        "cp.async.bulk.tensor.1d.global.shared::cta.tile",
        f"cp.reduce.async.bulk.tensor.1d.global.shared::cta.{operation}.tile",
    )
    maps = [tensor_map(each, kind, (64,), (64,)) for each in (source, result)]
    body = through(source.nbytes, LOAD.format(rank=1, at="{0}"), store)
    run(body, tensors={"a": source, "c": result}, maps=maps, threads=1)
    assert (result == wanted).all()


def test_pairs_of_four_bits_move_as_bytes():
    source, result = aligned(64 * 4), aligned(64 * 4)
    source[:] = np.arange(256)
    maps = [tensor_map(each, "b4x16", (128, 4), (64, 2)) for each in (source, result)]
    body = through(64, LOAD.format(rank=2, at="{64, 1}"), STORE.format(rank=2, at="{64, 1}"))
    run(body, tensors={"a": source, "c": result}, maps=maps, threads=1)
    wanted = np.zeros((4, 64), np.uint8)
    wanted[1:3, 32:] = source.reshape(4, 64)[1:3, 32:]
    assert (result.reshape(4, 64) == wanted).all()


def test_padded_elements_of_four_bits_take_twice_their_space():
    source, result = aligned(64 * 2), aligned(256)
    source[:] = np.arange(128)
    moves = "".join(
        f"ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [smem+{1024 + place}];\n"
        f"st.global.v4.b32 [%d1+{place}], {{%r1, %r2, %r3, %r4}};\n"
        for place in range(0, 256, 16)
    )
    # The barrier counts bytes of global memory.
    body = through(128, LOAD.format(rank=2, at="{0, 0}"), "ld.param.u64 %d1, [a0];\n" + moves)
    maps = [tensor_map(source, "b4x16_p64", (128, 2), (128, 2))]
    run(body, tensors={"a": source, "c": result}, maps=maps, pointers=[result], threads=1)
    groups = result.reshape(16, 16)
    assert (groups[:, :8] == source.reshape(16, 8)).all()
    assert (groups[:, 8:] == 0).all()


def test_gathered_rows_have_their_own_coordinates():
    source, result = aligned(10 * 32), aligned(4 * 32)
    source[:] = np.repeat(np.arange(10), 32)
    maps = [
        tensor_map(source, "u8", (32, 10), (32, 1)),
        tensor_map(result, "u8", (32, 4), (32, 4)),
    ]
    load = LOAD.format(rank=2, at="{0, 7, 2, 9, 2}").replace(".tile.", ".tile::gather4.")
    body = through(128, load, STORE.format(rank=2, at="{0, 0}"))
    run(body, tensors={"a": source, "c": result}, maps=maps, threads=1)
    assert result.reshape(4, 32)[:, 0].tolist() == [7, 2, 9, 2]


def test_gathering_rows_needs_two_dimensions():
    load = LOAD.format(rank=3, at="{0, 0, 0}").replace(".tile.", ".tile::gather4.")
    with pytest.raises(UnsupportedPtxError, match="tile::gather4"):
        run(load, maps=[bytes(128)])


def plain(**changes):
    """Returns the arguments of a copy that works, with some changed."""
    source, result = aligned(64, np.float32), aligned(64, np.float32)
    chosen = {"sizes": (64,), "box": (64,), "size": 256, "at": "{0}", "kind": "f32", **changes}
    rank = len(chosen["sizes"])
    options = {
        name: chosen[name] for name in ("strides", "swizzle", "nan", "interleave") if name in chosen
    }
    maps = [
        tensor_map(source, chosen["kind"], chosen["sizes"], chosen["box"], **options),
        tensor_map(result, "f32", (64,), (64,)),
    ]
    load = LOAD.format(rank=chosen.get("rank", rank), at=chosen["at"])
    body = through(chosen["size"], load, STORE.format(rank=1, at="{0}"))
    for old, new in chosen.get("replace", {}).items():
        body = body.replace(old, new)
    return body, {"tensors": {"a": source, "c": result}, "maps": maps, "threads": 1}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"size": 272}, DeadlockError, "16 bytes are missing"),
        ({"size": 240}, DeadlockError, "copies brought 16 bytes too many"),
        ({"sizes": (80,), "box": (80,), "size": 320}, MemoryAccessError, "no tensor holds"),
        ({"sizes": (32, 4), "box": (32, 4), "at": "{0, 0}"}, MemoryAccessError, "no tensor holds"),
        ({"box": (2,)}, EmulationError, "multiple of 16 bytes"),
        ({"box": (64,), "swizzle": 128}, EmulationError, "at most 128"),
        ({"interleave": 1}, EmulationError, "interleave"),
        ({"nan": True, "kind": "s32"}, EmulationError, "fill mode"),
        ({"rank": 2, "at": "{0, 0}"}, EmulationError, "1 dimensions, must have 2"),
        ({"replace": {"[smem+1024], [m0": "[smem+1040], [m0"}}, EmulationError, "multiple of 128"),
        ({"replace": {"[m0": "[m0+8"}}, EmulationError, "multiple of 64"),
        ({"replace": {"[smem+1024], [m0": "[smem+65536], [m0"}}, MemoryAccessError, "65536 bytes"),
        ({"replace": {".tile.mb": ".im2col.mb"}}, EmulationError, "im2col"),
        ({"replace": {"bytes [": "bytes.L3 ["}}, EmulationError, "L3"),
        (
            {"replace": {", [smem];\n\nAGAIN": ", [smem], %h1;\nAGAIN"}},
            EmulationError,
            "4 operands",
        ),
    ],
)
def test_rejects(changes, error, message):
    body, arguments = plain(**changes)
    with pytest.raises(error, match=message):
        run(body, **arguments)


def test_rejects_a_store_to_a_tensor_that_is_only_read():
    body, arguments = plain()
    with pytest.raises(MemoryAccessError, match="writes c, which must only be read"):
        run(body, **arguments, readonly=["c"])


def test_reports_a_block_that_ends_before_its_store_has_read():
    body, arguments = plain()
    body = body.replace("cp.async.bulk.wait_group.read 0;", "")
    with pytest.raises(EmulationError, match="after the block has ended"):
        run(body, **arguments, delay=99)


def test_reports_a_barrier_that_a_copy_overwrites():
    body, arguments = plain()
    body = body.replace("[smem];", "[smem+1088];").replace("[smem], ", "[smem+1088], ")
    with pytest.raises(EmulationError, match=r"offset 1088 .* ordinary data has overwritten"):
        run(body, **arguments)
