"""Work that two blocks of a cluster share: multiplications, multicast copies, remote arrivals."""

import numpy as np
import pytest

from handwritten_kernels import aligned, run, tensor_map
from nvgemm_aot.emulator.emulation_errors import DeadlockError, EmulationError
from tensor_kernels import run_with_tensor_memory, wait

COMMIT = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
LOAD = (
    "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster"
)
CLUSTER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


def half(rows, seed):
    """Integers as (2 * rows, 16), and their bytes, of which each block loads half."""
    numbers = np.random.default_rng(seed).integers(-4, 5, (2 * rows, 16))
    data = aligned(numbers.size, np.uint16)
    data[:] = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(-1)
    return numbers, data


def descriptor(place):
    return (1024 + place) >> 4 | 256 >> 4 << 32 | 1 << 46 | 6 << 61


@pytest.mark.parametrize("delay", [0, 5])
@pytest.mark.parametrize("m", [128, 256])
def test_two_blocks_multiply_together(m, delay):
    n = 64
    a, a_data = half(m // 2, 1)
    b, b_data = half(n // 2, 2)
    maps = [
        tensor_map(data, "bf16", (16, rows), (16, rows // 2), swizzle=32)
        for data, rows in ((a_data, m), (b_data, n))
    ]
    size = (m // 2 + n // 2) * 32
    word = 1 << 4 | 1 << 7 | 1 << 10 | n >> 3 << 17 | m >> 4 << 24
    load = (
        "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".cta_group::2 [smem+{}], [{}, {{0, %r41}}], [%r42];\n"
    )
    # Both blocks' copies arrive at the even block's barrier, which expects the bytes of both.
    body = f"""
mov.u32 %r40, %cluster_ctarank;
setp.eq.u32 %p5, %r40, 0;
and.pred %p6, %p1, %p5;
@%p6 mbarrier.arrive.expect_tx.shared.b64 _, [smem+16], {2 * size};
{CLUSTER}
mov.u32 %r43, smem;
add.u32 %r43, %r43, 16;
and.b32 %r42, %r43, {0xFEFFFFFF};
mul.lo.u32 %r41, %r40, {m // 2};
{load.format(1024, "m0")}
mul.lo.u32 %r41, %r40, {n // 2};
{load.format(17408, "m1")}
@!%p6 bra ISSUED;
{wait("smem+16", "LOADS")}
mov.b64 %d10, {descriptor(1024)};
mov.b64 %d11, {descriptor(17408)};
mov.b32 %r9, {word};
mov.pred %p3, 0;
tcgen05.mma.cta_group::2.kind::f16 [%r3], %d10, %d11, %r9, %p3;
mov.b16 %h1, 3;
{COMMIT} [smem+24], %h1;
ISSUED:
{wait("smem+24", "MULTIPLIED")}
tcgen05.fence::after_thread_sync;
"""
    cells = run_with_tensor_memory(
        body, tensors={"a": a_data, "b": b_data}, maps=maps, group=2, delay=delay
    )
    found = cells.view(np.float32)
    wanted = a @ b.T
    if m == 256:
        assert (found.reshape(256, 64) == wanted).all()
    else:
        assert (found[:, :64, :32].reshape(128, 32) == wanted[:, :32]).all()
        assert (found[:, 64:, :32].reshape(128, 32) == wanted[:, 32:]).all()


MULTICAST = f"""
mov.u32 %r1, %tid.x;
mov.u32 %r2, %cluster_ctarank;
setp.eq.u32 %p1, %r1, 0;
setp.eq.u32 %p2, %r2, 0;
and.pred %p3, %p1, %p2;
@%p1 mbarrier.init.shared.b64 [smem], 1;
@%p1 fence.mbarrier_init.release.cluster;
{CLUSTER}
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;
mov.b16 %h1, 3;
@%p3 {LOAD} [smem+1024], [m0, {{0}}], [smem], %h1;
{wait("smem", "LOADS")}
mul.lo.u32 %r3, %r2, 32;
@%p1 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [m1, {{%r3}}], [smem+1024];
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group.read 0;
{CLUSTER}
"""


def multicast(body=MULTICAST, **options):
    source, result = aligned(32, np.float32), aligned(64, np.float32)
    source[:] = np.arange(32)
    maps = [tensor_map(source, "f32", (32,), (32,)), tensor_map(result, "f32", (64,), (32,))]
    run(body, tensors={"a": source, "c": result}, maps=maps, cluster=2, **options)
    return result


@pytest.mark.parametrize("delay", [0, 5])
def test_multicast_copies_reach_all_chosen_blocks(delay):
    assert (multicast(delay=delay).reshape(2, 32) == np.arange(32)).all()


def test_a_block_that_is_not_chosen_waits_for_ever():
    with pytest.raises(DeadlockError, match=r"block \(1, 0, 0\)"):
        multicast(MULTICAST.replace("mov.b16 %h1, 3;", "mov.b16 %h1, 1;"))


def test_rejects_blocks_that_the_cluster_lacks():
    with pytest.raises(EmulationError, match="multicasts to blocks 0b111 of a cluster of 2"):
        multicast(MULTICAST.replace("mov.b16 %h1, 3;", "mov.b16 %h1, 7;"))


def test_reports_an_arrival_at_a_block_that_has_ended():
    body = """
mov.u32 %r2, %cluster_ctarank;
mbarrier.init.shared.b64 [smem], 1;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
setp.eq.u32 %p1, %r2, 1;
@%p1 bra END;
mov.u32 %r3, 0;
LOOP:
add.u32 %r3, %r3, 1;
setp.lt.u32 %p2, %r3, 2000;
@%p2 bra LOOP;
mov.u32 %r4, 1;
mapa.shared::cluster.u32 %r5, smem, %r4;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
END:
"""
    with pytest.raises(EmulationError, match=r"block \(1, 0, 0\), which has ended"):
        run(body, threads=1, cluster=2)
