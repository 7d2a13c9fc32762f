"""Loads, stores, exchanges among lanes and matrices, in every space and past its ends."""

from __future__ import annotations

import numpy as np
import pytest

from nvgemm_aot.emulator.emulation_errors import EmulationError, MemoryAccessError
from nvgemm_aot.emulator.machine.ordering import Ordering
from tests.support.handwritten_kernels import aligned, run
from tests.support.one_instruction import evaluate

LANES = np.arange(32, dtype=np.uint32)
BEGIN = "ld.param.u64 %d0, [a0]; ld.param.u64 %d1, [a1]; mov.u32 %r0, %tid.x; mov.b32 %r9, smem;"


def copied(body: str, count: int = 512, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Runs a body with bytes at ``%d0`` and zeros at ``%d1``; returns both."""
    source, result = aligned(count), aligned(count)
    source[:] = np.random.default_rng(0).integers(0, 256, count)
    run(
        BEGIN + body,
        tensors={"source": source, "result": result},
        pointers=[source, result],
        readonly=["source"],
        **options,  # type: ignore[arg-type]
    )
    return source, result


@pytest.mark.parametrize(
    ("kind", "vector", "registers"),
    [
        ("b8", "", "%h1"), ("b16", "", "%h1"), ("b32", "", "%r1"), ("b64", "", "%d5"),
        ("b8", "v2", "%h1, %h2"), ("b32", "v2", "%r1, %r2"), ("b32", "v4", "%r1, %r2, %r3, %r4"),
        ("b64", "v2", "%d5, %d6"), ("b16", "v4", "%h1, %h2, %h3, %h4"), ("b128", "", "%q0"),
        ("b32", "v8", "%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8"),
        ("b64", "v4", "%d5, %d6, %d7, %d8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("through", ["global", "shared", "generic", "generic shared"])
def test_copies_in_every_width(kind: str, vector: str, registers: str, through: str) -> None:
    size = int(kind[1:]) // 8 * int(vector[1:] or 1)
    access = f"{'.' + vector if vector else ''}.{kind}"
    values = f"{{{registers}}}" if vector else registers
    count = 32 * size
    space = {"global": ".global", "shared": ".shared"}.get(through, "")
    place = "%d1" if "shared" not in through else "%r9" if space else "%d4"
    body = f"mul.wide.u32 %d2, %r0, {size}; add.s64 %d0, %d0, %d2; add.s64 %d3, %d1, %d2;"
    body += f"mad.lo.u32 %r9, %r0, {size}, %r9; cvt.u64.u32 %d4, %r9; cvta.shared.u64 %d4, %d4;"
    if "shared" in through:
        body += f"ld.global.nc.L1::no_allocate.L2::128B{access} {values}, [%d0];"
        body += f"st{space}{access} [{place}], {values}; ld{space}{access} {values}, [{place}];"
        body += f"st.global{access} [%d3], {values};"
    else:
        body += f"ld{space}{access} {values}, [%d0]; st{space}{access} [%d3], {values};"
    source, result = copied(body, count)
    assert np.array_equal(source, result)


def test_loads_extend_by_sign_or_zeros() -> None:
    source, result = copied(
        "mul.wide.u32 %d2, %r0, 1; add.s64 %d0, %d0, %d2; ld.global.s8 %r1, [%d0];"
        "ld.global.u8 %r2, [%d0]; mul.wide.u32 %d2, %r0, 8; add.s64 %d1, %d1, %d2;"
        "st.global.v2.b32 [%d1], {%r1, %r2};"
    )
    pairs = result[:256].view(np.int32).reshape(32, 2)
    assert pairs[:, 0].tolist() == source[:32].view(np.int8).tolist()
    assert pairs[:, 1].tolist() == source[:32].tolist()


def test_lanes_may_access_several_tensors() -> None:
    _, result = copied(
        "and.b32 %r1, %r0, 1; setp.eq.b32 %p0, %r1, 0; selp.b64 %d5, %d0, %d1, %p0;"
        "mul.wide.u32 %d2, %r0, 4; add.s64 %d5, %d5, %d2; ld.b32 %r2, [%d5];"
        "add.s64 %d6, %d1, %d2; st.global.b32 [%d6+128], %r2;"
    )
    words = result.view(np.uint32)
    assert not words[33:64:2].any()
    assert words[32:64:2].all()


def test_the_last_lane_wins_a_place() -> None:
    _, result = copied("st.global.b32 [%d1], %r0;")
    assert result.view(np.uint32)[0] == 31


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r1, [%d0+-4];", "which no tensor holds"),
        ("ld.global.b32 %r1, [%d0+512];", "which no tensor holds"),
        ("st.global.b32 [%d1+512], %r1;", "writes 0x.* which no tensor holds"),
        ("st.global.b32 [%d0], %r1;", "writes source, which must only be read"),
        ("ld.global.b64 %d5, [%d0+4];", "must be a multiple of 8"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0+8];", "must be a multiple of 16"),
        ("ld.global.b32 %r1, [0];", "which no tensor holds"),
        ("ld.shared.b32 %r1, [%r9+-4];", "reads bytes -4 to -1 of the shared memory"),
        ("ld.shared.b8 %h1, [%r9+-1];", "reads bytes -1 to -1 of the shared memory"),
        ("ld.shared.b32 %r1, [%r9+256];", "reads bytes 256 to 259 .* has 256 bytes"),
        ("st.shared.b8 [%r9+256], %h1;", "writes bytes 256 to 256 .* has 256 bytes"),
        ("ld.shared.b64 %d5, [%r9+252];", "must be a multiple of 8"),
        ("ld.shared.v2.b64 {%d5, %d6}, [%r9+256];", "reads bytes 256 to 271"),
        ("mapa.shared::cluster.u32 %r1, %r9, 1; ld.shared::cluster.b32 %r2, [%r1];",
         "of block 1 of a cluster of 1"),
        ("mapa.shared::cluster.u32 %r1, %r9, 1; ld.shared.b32 %r2, [%r1];",
         r"is of block 1 of the cluster, must be of the warp's own block 0"),
        ("cvt.u64.u32 %d5, %r9; cvta.shared.u64 %d5, %d5; st.shared.b32 [%d5], %r1;",
         "must be of the warp's own block"),
        ("ldmatrix.sync.aligned.m8n8.x1.b16 {%r1}, [%d0];", "generic address 0x"),
        ("ld.param.b32 %r1, [a1+8];", "reads bytes 16 to 19 of the parameters"),
        ("mov.b64 %d5, a0; st.b32 [%d5], %r1;", "writes parameters"),
    ],
)  # fmt: skip
def test_accesses_outside_memory_are_errors(body: str, message: str) -> None:
    with pytest.raises(MemoryAccessError, match=message) as caught:
        copied(body, shared=256)
    assert "block (0, 0, 0) warp 0 at line" in str(caught.value)


def test_lanes_that_do_not_run_access_nothing() -> None:
    copied("setp.gt.u32 %p0, %r0, 31; @%p0 ld.global.b32 %r1, [%d0+4096];")


def test_accesses_of_shared_memory_are_told_to_the_ordering() -> None:
    seen: list[tuple[str, list[int], int]] = []

    class Recorder(Ordering):
        def read(self, warp: object, block: object, offsets: np.ndarray, size: int) -> None:
            seen.append(("read", offsets.tolist(), size))

        def write(self, warp: object, block: object, offsets: np.ndarray, size: int) -> None:
            seen.append(("write", offsets.tolist(), size))

        def fence_async(self, warp: object) -> None:
            seen.append(("fence", [], 0))

        def fence_initialised_barriers(self, warp: object) -> None:
            seen.append(("barriers", [], 0))

    copied(
        "setp.lt.u32 %p0, %r0, 2; mad.lo.u32 %r9, %r0, 8, %r9; @%p0 st.shared.b64 [%r9], %d0;"
        "@%p0 ld.shared.v2.b32 {%r1, %r2}, [%r9+16]; fence.proxy.async.shared::cta;"
        "fence.mbarrier_init.release.cluster; fence.acq_rel.cluster;",
        ordering=Recorder(),
    )
    assert seen == [
        ("write", [0, 8], 8), ("read", [16, 24], 8), ("fence", [], 0), ("barriers", [], 0),
    ]  # fmt: skip


def test_blocks_of_a_cluster_share_memory() -> None:
    out = aligned(128)
    run(
        "ld.param.u64 %d0, [a0]; mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank;"
        "mov.b32 %r9, smem; xor.b32 %r2, %r1, 1; mapa.shared::cluster.u32 %r3, %r9, %r2;"
        "mad.lo.u32 %r3, %r0, 4, %r3; mad.lo.u32 %r4, %r1, 1000, %r0;"
        "st.shared::cluster.b32 [%r3], %r4; barrier.cluster.arrive.release.aligned;"
        "barrier.cluster.wait.acquire.aligned; mad.lo.u32 %r9, %r0, 4, %r9;"
        "ld.shared.b32 %r5, [%r9]; setp.eq.b32 %p0, %r1, 0; mul.wide.u32 %d1, %r0, 4;"
        "add.s64 %d0, %d0, %d1; @%p0 st.global.b32 [%d0], %r5;",
        tensors={"out": out},
        pointers=[out],
        cluster=2,
    )
    assert out.view(np.uint32).tolist() == [1000 + lane for lane in range(32)]


def test_shared_memory_of_a_block_that_has_ended_is_gone() -> None:
    body = (
        "mov.u32 %r1, %cluster_ctarank; setp.eq.b32 %p0, %r1, 1; @%p0 ret; mov.b32 %r9, smem;"
        "mov.b32 %r2, 0; COUNT: add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 500; @%p1 bra COUNT;"
        "mapa.shared::cluster.u32 %r3, %r9, 1; st.shared::cluster.b32 [%r3], %r2;"
    )
    with pytest.raises(EmulationError, match=r"block \(1, 0, 0\), which has ended"):
        run(body, cluster=2)


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "expected"),
    [
        ("idx", 5, 31, lambda lane: 5),
        ("idx", 3, 0x181F, lambda lane: lane // 8 * 8 + 3),
        ("up", 1, 0, lambda lane: max(lane - 1, 0)),
        ("up", 4, 0x1800, lambda lane: lane - 4 if lane % 8 >= 4 else lane),
        ("down", 3, 31, lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("down", 2, 0x1C1F, lambda lane: lane + 2 if lane % 4 < 2 else lane),
        ("bfly", 16, 31, lambda lane: lane ^ 16),
        ("bfly", 1, 31, lambda lane: lane ^ 1),
    ],
)
def test_shuffles(mode: str, by: int, clamp: int, expected: object) -> None:
    text = f"shfl.sync.{mode}.b32 {{0}}, {{1}}, {by}, {clamp}, -1;"
    wanted = [expected(lane) for lane in range(32)]  # type: ignore[operator]
    assert evaluate(text, np.uint32, LANES).tolist() == wanted
    by_lane = np.full(32, by, np.uint32)
    text = f"shfl.sync.{mode}.b32 {{0}}, {{1}}, {{2}}, {clamp}, -1;"
    assert evaluate(text, np.uint32, LANES, by_lane).tolist() == wanted


def test_shuffles_from_lanes_that_are_elsewhere_give_no_value() -> None:
    _, result = copied(
        "setp.lt.u32 %p1, %r0, 16; mov.b32 %r1, 7; @!%p1 bra JOIN;"
        "shfl.sync.down.b32 %r1, %r0, 8, 31, 0xFFFF; JOIN: mul.wide.u32 %d2, %r0, 4;"
        "add.s64 %d1, %d1, %d2; st.global.b32 [%d1], %r1;"
    )
    found = result.view(np.uint32)[:32].tolist()
    assert found == [*range(8, 16), *[0x7FC00000] * 8, *[7] * 16]


def test_shuffles_say_which_lanes_are_in_range() -> None:
    text = "{{ .reg .b32 t; shfl.sync.up.b32 t|{0}, {1}, 3, 0, -1; }}"
    assert evaluate(text, bool, LANES).tolist() == [lane >= 3 for lane in range(32)]


def test_votes_matches_and_elections() -> None:
    odd = LANES & 1 == 1
    assert set(evaluate("vote.sync.ballot.b32 {0}, {1}, -1;", np.uint32, odd)) == {0xAAAAAAAA}
    assert not evaluate("vote.sync.all.pred {0}, {1}, -1;", bool, odd).any()
    assert evaluate("vote.sync.any.pred {0}, {1}, -1;", bool, odd).all()
    assert evaluate("vote.sync.uni.pred {0}, {1}, -1;", bool, odd & False).all()
    found = evaluate("match.any.sync.b32 {0}, {1}, -1;", np.uint32, LANES // 16)
    assert found.tolist() == [0xFFFF] * 16 + [0xFFFF0000] * 16
    text = "match.all.sync.b32 {0}, {1}, -1;"
    assert set(evaluate(text, np.uint32, LANES // 16)) == {0}
    assert set(evaluate(text, np.uint32, LANES // 32)) == {0xFFFFFFFF}
    text = "{{ .reg .b32 t; elect.sync t|{0}, -1; }}"
    assert evaluate(text, bool).tolist() == [True] + [False] * 31


def test_reductions() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, 32, np.uint32)
    signed = values.view(np.int32)
    cases = {
        "add.u32": int(values.sum(dtype=np.uint32)),
        "min.u32": int(values.min()),
        "max.s32": int(signed.max()) & 0xFFFFFFFF,
        "min.s32": int(signed.min()) & 0xFFFFFFFF,
        "and.b32": int(np.bitwise_and.reduce(values)),
        "or.b32": int(np.bitwise_or.reduce(values)),
        "xor.b32": int(np.bitwise_xor.reduce(values)),
    }
    for name, wanted in cases.items():
        assert set(evaluate(f"redux.sync.{name} {{0}}, {{1}}, -1;", np.uint32, values)) == {wanted}
    floats = np.linspace(-4, 3, 32).astype(np.float32)
    floats[7] = np.nan
    found = evaluate("redux.sync.max.abs.f32 {0}, {1}, -1;", np.uint32, floats.view(np.uint32))
    assert set(found.view(np.float32)) == {4.0}
    found = evaluate("redux.sync.min.NaN.f32 {0}, {1}, -1;", np.uint32, floats.view(np.uint32))
    assert set(found.tolist()) == {0x7FFFFFFF}


def matrices(body: str) -> np.ndarray:
    """Runs a body on 1 KiB of shared memory that holds random bytes; returns what it becomes."""
    source, result = copied(
        "mul.wide.u32 %d2, %r0, 16; add.s64 %d0, %d0, %d2; add.s64 %d1, %d1, %d2;"
        "mad.lo.u32 %r8, %r0, 16, %r9; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0];"
        "st.shared.v4.b32 [%r8], {%r1, %r2, %r3, %r4}; bar.sync 0;"
        + body
        + "bar.sync 0; ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r8];"
        "st.global.v4.b32 [%d1], {%r1, %r2, %r3, %r4};"
    )
    return np.stack([source, result])


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_load_as_fragments(trans: str) -> None:
    source, result = matrices(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r11, %r12, %r13, %r14}}, [%r8];"
        "bar.sync 0; st.shared.v4.b32 [%r8], {%r11, %r12, %r13, %r14};"
    )
    tiles = source.view(np.uint16).reshape(4, 8, 8)
    found = result.view(np.uint16).reshape(32, 4, 2)
    for lane in range(32):
        for tile in range(4):
            for half in range(2):
                row, column = lane // 4, 2 * (lane % 4) + half
                if trans:
                    row, column = column, row
                assert found[lane, tile, half] == tiles[tile, row, column]


@pytest.mark.parametrize("place", [".shared.b16", ".shared::cta.b16", ".b16"])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_are_stored_as_they_were_loaded(trans: str, place: str) -> None:
    where = "%d7" if place == ".b16" else "%r8"
    source, result = matrices(
        "cvt.u64.u32 %d7, %r8; cvta.shared.u64 %d7, %d7;"
        f"ldmatrix.sync.aligned.m8n8.x4{trans}{place} {{%r11, %r12, %r13, %r14}}, [{where}];"
        "bar.sync 0; mov.b32 %r20, 0; st.shared.v4.b32 [%r8], {%r20, %r20, %r20, %r20};"
        f"bar.sync 0; stmatrix.sync.aligned.m8n8.x4{trans}{place} [{where}], "
        "{%r11, %r12, %r13, %r14};"
    )
    assert np.array_equal(source, result)


def test_matrices_of_bytes_are_transposed() -> None:
    source, result = matrices(
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r11, %r12}, [%r8]; bar.sync 0;"
        "st.shared.v2.b32 [%r8], {%r11, %r12};"
    )
    tile = source[:256].reshape(16, 16)
    found = result.reshape(32, 16)[:, :8]
    for lane in range(32):
        for byte in range(8):
            row = lane // 4 + 8 * (byte // 4)
            assert found[lane, byte] == tile[4 * (lane % 4) + byte % 4, row]


def test_unbulky_copies_fill_with_zeros() -> None:
    source, result = copied(
        "mad.lo.u32 %r8, %r0, 16, %r9; mul.wide.u32 %d2, %r0, 16; add.s64 %d0, %d0, %d2;"
        "add.s64 %d1, %d1, %d2; mov.b32 %r1, -1;"
        "st.shared.v4.b32 [%r8], {%r1, %r1, %r1, %r1}; and.b32 %r2, %r0, 15;"
        "cp.async.ca.shared.global.L2::128B [%r8], [%d0], 16, %r2; cp.async.commit_group;"
        "cp.async.wait_group 0; ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r8];"
        "st.global.v4.b32 [%d1], {%r1, %r2, %r3, %r4};"
    )
    wanted = source.reshape(32, 16).copy()
    for lane in range(32):
        wanted[lane, lane & 15 :] = 0
    assert np.array_equal(result.reshape(32, 16), wanted)


COPY = (
    "mul.wide.u32 %d2, %r0, 4; add.s64 %d0, %d0, %d2; add.s64 %d1, %d1, %d2;"
    "mad.lo.u32 %r8, %r0, 4, %r9; cp.async.ca.shared.global [%r8], [%d0], 4;{}"
    "ld.shared.b32 %r1, [%r8]; st.global.b32 [%d1], %r1;"
)


@pytest.mark.parametrize(
    ("waits", "enough"),
    [
        ("", False),
        ("cp.async.commit_group;", False),
        ("cp.async.wait_group 0;", False),
        ("cp.async.commit_group; cp.async.wait_group 1;", False),
        ("cp.async.commit_group; cp.async.wait_group 0;", True),
        ("cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;", True),
        ("cp.async.wait_all;", True),
    ],
)
def test_unbulky_copies_must_be_waited_for(waits: str, enough: bool) -> None:
    source, result = copied(COPY.format(waits), delay=50)
    assert np.array_equal(result[:128], source[:128] if enough else np.full(128, 0xFF))


def test_unbulky_copies_come_before_their_arrival_at_a_barrier() -> None:
    barrier = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r9+128], 32; bar.sync 0;"
    wait = (
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r9+128];"
        "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r9+128], 0; @!%p2 bra AGAIN;"
    )
    source, result = copied(barrier + COPY.format(wait), delay=20)
    assert np.array_equal(result[:128], source[:128])


def test_member_masks_must_name_the_lanes_that_are_there() -> None:
    with pytest.raises(EmulationError, match="does not name them"):
        evaluate("shfl.sync.idx.b32 {0}, {1}, 0, 31, 1;", np.uint32, LANES)


def test_vectors_pack_and_unpack() -> None:
    high = LANES + 100
    pair = evaluate("mov.b64 {0}, {{{1}, {2}}};", np.uint64, LANES, high)
    assert pair.tolist() == [low | (top << 32) for low, top in zip(LANES.tolist(), high.tolist())]
    assert evaluate("mov.b64 {{_, {0}}}, {1};", np.uint32, pair).tolist() == high.tolist()
    halves = np.arange(32, dtype=np.uint16)
    packed = evaluate("mov.b64 {0}, {{{1}, {1}, {2}, {1}}};", np.uint64, halves, halves + 7)
    assert packed.view(np.uint16).reshape(32, 4).tolist() == [[n, n, n + 7, n] for n in range(32)]
    text = "{{ .reg .b8 a, b, c, d; mov.b32 {{a, b, c, d}}, {1}; mov.b32 {0}, {{d, c, b, a}}; }}"
    found = evaluate(text, np.uint32, LANES * 0x01030507)
    assert found.tolist() == [n.byteswap() for n in LANES * 0x01030507]
    text = "{{ .reg .b128 q; mov.b128 q, {{{1}, {2}}}; .reg .b64 t; mov.b128 {{t, {0}}}, q; }}"
    assert evaluate(text, np.uint64, pair, pair + 5).tolist() == (pair + 5).tolist()


def test_lanes_that_do_not_run_keep_wide_registers() -> None:
    text = (
        "{{ .reg .b128 q; .reg .pred p; .reg .b64 t; mov.b128 q, {{{1}, {2}}};"
        "setp.gt.u64 p, {1}, 9; @p mov.b128 q, {{{2}, {1}}}; mov.b128 {{{0}, t}}, q; }}"
    )
    low, high = LANES.astype(np.uint64), LANES.astype(np.uint64) + np.uint64(50)
    assert evaluate(text, np.uint64, low, high).tolist() == [*range(10), *range(60, 82)]
