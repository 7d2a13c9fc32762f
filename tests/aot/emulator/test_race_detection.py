"""Findings of the race detector, each with a twin that is right."""

import numpy as np
import pytest

from handwritten_kernels import aligned, module, run, tensor_map
from nvgemm_aot.emulator.machine.ordering import Ordering
from nvgemm_aot.emulator.mutants.fence_uses import FenceUses, Redundancy

WHO = """
mov.u32 %r1, %tid.x;
setp.eq.u32 %p1, %r1, 0;
shr.u32 %r2, %r1, 5;
setp.eq.u32 %p2, %r2, 0;
mov.u32 %r3, smem;
"""


def wait(label, barrier):
    return f"""
{label}:
mbarrier.try_wait.parity.shared.b64 %p3, [smem+{barrier}], 0;
@%p3 bra {label}_DONE;
bra {label};
{label}_DONE:
"""


def findings(body, threads=64, **options):
    return run(WHO + body, threads=threads, **options).findings


def test_warps_need_a_barrier_between_a_write_and_a_read():
    body = """
@%p2 st.shared.b32 [smem+64], %r1;
{}
@!%p2 ld.shared.b32 %r4, [smem+64];
"""
    assert findings(body.format("bar.sync 0;")) == []
    (found,) = findings(body.format(""))
    assert found.startswith(
        "block (0, 0, 0) warp 1 at line 22 (ld.shared.b32 %r4, [smem+64]): reads shared memory of "
        "block (0, 0, 0) that block (0, 0, 0) warp 0 at line 20 (st.shared.b32 [smem+64], %r1) "
        "writes, not ordered behind it"
    )
    assert found.endswith("missing: a barrier between the two warps")


@pytest.mark.parametrize("second", ["st.shared.b32 [smem], %r1;", "st.shared.b32 [smem+4], %r1;"])
def test_two_writers_need_a_barrier_if_they_write_one_place(second):
    found = findings(f"@%p2 st.shared.b32 [smem], %r1;\n@!%p2 {second}")
    assert len(found) == (second == "st.shared.b32 [smem], %r1;")


def test_two_warps_may_write_the_halves_of_a_word():
    body = """
mov.b16 %h1, 1;
@%p2 st.shared.b16 [smem], %h1;
@!%p2 st.shared.b16 [smem+2], %h1;
"""
    assert findings(body) == []
    assert len(findings(body.replace("[smem+2]", "[smem]"))) == 1


def test_a_read_needs_a_barrier_before_the_place_is_overwritten():
    body = """
@%p2 st.shared.b32 [smem], %r1;
bar.sync 0;
@!%p2 ld.shared.b32 %r4, [smem];
{}
@%p2 st.shared.b32 [smem], %r1;
"""
    assert findings(body.format("bar.sync 0;")) == []
    (found,) = findings(body.format(""), delay=2, seed=1)
    assert "overwrites shared memory" in found or "reads shared memory" in found


def test_arrivals_and_waits_order_like_barriers():
    body = f"""
@%p1 mbarrier.init.shared.b64 [smem], 32;
bar.sync 0;
@!%p2 bra READ;
st.shared.b32 [smem+64], %r1;
mbarrier.arrive.{{}}.cta.shared.b64 _, [smem];
ret;
READ:
{wait("L", 0)}
ld.shared.b32 %r4, [smem+64];
"""
    assert findings(body.format("release")) == []
    assert len(findings(body.format("relaxed"))) == 1
    fenced = body.replace("mbarrier.arrive", "fence.acq_rel.cta;\nmbarrier.arrive")
    assert findings(fenced.format("relaxed")) == []


def test_atomic_operations_of_two_warps_are_no_race():
    body = """
@%p1 st.shared.b32 [smem], %r1;
bar.sync 0;
atom.shared.add.u32 %r4, [smem], 1;
{}
@!%p2 ld.shared.b32 %r5, [smem];
"""
    assert findings(body.format("bar.sync 0;")) == []
    assert len(findings(body.format(""))) == 1


def test_reports_what_nobody_has_written():
    (found,) = findings("ld.shared.b32 %r4, [smem+64];", threads=32)
    assert found.endswith("reads shared memory of block (0, 0, 0) that nobody has written")


def test_barriers_of_another_block_must_be_visible():
    body = """
@%p1 mbarrier.init.shared.b64 [smem], 2;
{}
barrier.cluster.arrive.relaxed;
barrier.cluster.wait;
mov.u32 %r5, 0;
mapa.shared::cluster.u32 %r6, %r3, %r5;
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
barrier.cluster.arrive;
barrier.cluster.wait;
"""
    right = body.format("fence.mbarrier_init.release.cluster;")
    assert findings(right, threads=32, cluster=2) == []
    found = findings(body.format(""), threads=32, cluster=2)
    assert len(found) == 1
    assert "missing: fence.mbarrier_init and a barrier behind it" in found[0]


SMALL = 1 << 4 | 1 << 7 | 1 << 10 | (16 >> 3) << 17 | (128 >> 4) << 24
"""Instruction descriptor: bf16 times bf16 to fp32, 128 x 16."""

PIPELINE = f"""
@!%p1 bra READY;
mbarrier.init.shared.b64 [smem], 1;
mbarrier.init.shared.b64 [smem+8], 1;
fence.mbarrier_init.release.cluster;
READY:
@!%p2 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+16], 32;
ALLOCATED:
shl.b32 %r5, %r1, 5;
add.u32 %r5, %r5, %r3;
mov.b32 %r6, 0;
st.shared.v4.b32 [%r5+1024], {{%r6, %r6, %r6, %r6}};
st.shared.v4.b32 [%r5+1040], {{%r6, %r6, %r6, %r6}};
fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %r7, [smem+16];
@!%p1 bra ISSUED;
ld.param.u64 %d1, [a0];
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+8192], [%d1], 512, [smem];
{wait("LOADED", 0)}
mov.u32 %r8, smem;
shr.u32 %r9, %r8, 4;
cvt.u64.u32 %d2, %r9;
or.b64 %d2, %d2, {1 << 46 | (256 >> 4) << 32 | (128 >> 4) << 16};
add.u64 %d3, %d2, {8192 >> 4};
add.u64 %d2, %d2, {1024 >> 4};
mov.b32 %r10, {SMALL};
setp.ne.b32 %p4, %r10, %r10;
tcgen05.mma.cta_group::1.kind::f16 [%r7], %d2, %d3, %r10, %p4;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+8];
ISSUED:
{wait("MULTIPLIED", 8)}
shl.b32 %r11, %r2, 21;
add.u32 %r11, %r11, %r7;
tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r20, %r21, %r22, %r23}}, [%r11];
tcgen05.wait::ld.sync.aligned;
shl.b32 %r12, %r1, 4;
add.u32 %r12, %r12, %r3;
st.shared.v4.b32 [%r12+16384], {{%r20, %r21, %r22, %r23}};
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra STORED;
ld.param.u64 %d4, [a1];
cp.async.bulk.global.shared::cta.bulk_group [%d4], [smem+16384], 2048;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
STORED:
bar.sync 0;
st.shared.v4.b32 [%r12+16384], {{%r6, %r6, %r6, %r6}};
@!%p2 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32;
FREED:
"""
"""Loads, multiplies, and stores the result, with every fence and wait that this takes."""


def pipeline(body, ordering=None):
    source, result = aligned(256, np.uint16), aligned(512, np.uint32)
    result[:] = 7
    execution = run(
        WHO + body,
        tensors={"a": source, "c": result},
        pointers=[source, result],
        threads=128,
        ordering=ordering,
    )
    return execution.findings, result


def test_a_pipeline_with_all_its_fences_is_right():
    found, result = pipeline(PIPELINE)
    assert found == []
    assert (result == 0).all()


def lines(*names):
    """Returns the places of lines that begin with a name."""
    return [place for place, line in enumerate(PIPELINE.splitlines()) if line.startswith(names)]


SYNCHRONISATION = lines("fence.proxy", "bar.sync", "cp.async.bulk.wait")


@pytest.mark.parametrize("place", SYNCHRONISATION)
def test_every_fence_of_the_pipeline_is_needed(place):
    body = PIPELINE.splitlines()
    body[place] = ""
    found, _ = pipeline("\n".join(body))
    assert found


def test_a_fence_is_redundant_if_another_orders_the_same():
    """The proxy fence behind it makes the initialised barriers visible, too."""
    (place,) = lines("fence.mbarrier_init")
    body = PIPELINE.splitlines()
    body[place] = ""
    assert pipeline("\n".join(body))[0] == []
    uses = FenceUses()
    pipeline(PIPELINE, uses)
    assert uses.redundancy(8) is Redundancy.ORDERED_BY_OTHERS


@pytest.mark.parametrize("label", ["LOADED", "MULTIPLIED"])
def test_waits_of_the_pipeline_are_needed(label):
    barrier = 0 if label == "LOADED" else 8
    found, _ = pipeline(PIPELINE.replace(wait(label, barrier), ""))
    assert any(
        ("a wait for the copy's memory barrier" if barrier == 0 else "tcgen05.commit") in each
        for each in found
    )


def test_reports_a_block_that_ends_before_its_store_has_read():
    body = PIPELINE.replace("cp.async.bulk.wait_group.read 0;", "")
    body = body.replace("st.shared.v4.b32 [%r12+16384], {%r6, %r6, %r6, %r6};", "")
    (found,) = pipeline(body)[0]
    assert "may use shared memory after block (0, 0, 0) warp 0 has ended" in found


def test_every_lane_waits_for_a_store_that_it_shares():
    result = aligned(128, np.uint32)
    body = """
shl.b32 %r5, %r1, 4;
add.u32 %r5, %r5, %r3;
st.shared.v4.b32 [%r5+1024], {{%r1, %r1, %r1, %r1}};
fence.proxy.async.shared::cta;
bar.sync 0;
mov.u32 %r6, 0;
cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [m0, {{%r6}}], [smem+1024];
cp.async.bulk.commit_group;
{}
bar.sync 0;
st.shared.v4.b32 [%r5+1024], {{%r6, %r6, %r6, %r6}};
"""
    options = {
        "threads": 32,
        "tensors": {"c": result},
        "maps": [tensor_map(result, "u32", (128,), (128,))],
    }
    wait_group = "cp.async.bulk.wait_group.read 0;"
    assert findings(body.format(wait_group), **options) == []
    in_turns = f"@%p1 {wait_group}\n@!%p1 {wait_group}"
    assert findings(body.format(in_turns), **options) == []
    for waits in ("", f"@%p1 {wait_group}", f"@!%p1 {wait_group}"):
        overwritten, ended = findings(body.format(waits), **options)
        assert overwritten.endswith("missing: cp.async.bulk.wait_group.read")
        assert "may use shared memory after block (0, 0, 0) warp 0 has ended" in ended


def test_copies_of_threads_are_fenced_behind_the_wait_for_them():
    """`cp.async` writes through the generic proxy, unlike `cp.async.bulk`."""
    body = """
ld.param.u64 %d1, [a0];
shl.b32 %r5, %r1, 4;
add.u32 %r5, %r5, %r3;
cp.async.cg.shared.global [%r5+1024], [%d1], 16;
cp.async.wait_all;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra STORED;
ld.param.u64 %d4, [a1];
cp.async.bulk.global.shared::cta.bulk_group [%d4], [smem+1024], 2048;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
STORED:
"""
    assert pipeline(body)[0] == []
    found = pipeline(body.replace("fence.proxy.async.shared::cta;", ""))[0]
    assert found[0].endswith(
        "writes through the generic proxy; missing: fence.proxy.async behind the wait for that copy"
    )


def test_stores_to_tensor_memory_must_be_waited_for():
    body = """
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32;
ld.shared.b32 %r4, [smem];
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r1};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4];
tcgen05.wait::ld.sync.aligned;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;
"""
    assert findings(body, threads=32) == []
    found = findings(body.replace("tcgen05.wait::st.sync.aligned;", ""), threads=32)
    assert "missing: tcgen05.wait::st" in found[0]
    (found,) = findings(
        body.replace("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r1};", ""), threads=32
    )
    assert found.endswith("reads tensor memory of block (0, 0, 0) that nobody has written")


def test_loads_of_tensor_memory_must_be_waited_for_before_others_overwrite():
    body = """
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32;
ld.shared.b32 %r4, [smem];
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r1};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4];
tcgen05.wait::ld.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4];
tcgen05.wait::ld.sync.aligned; // last
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;
"""
    assert findings(body, threads=32) == []
    (found,) = findings(body.replace("tcgen05.wait::ld.sync.aligned; //", "//"), threads=32)
    assert found.endswith("missing: tcgen05.wait::ld")
    # PTX that never waits leaves that to ptxas.
    assert findings(body.replace("tcgen05.wait::ld.sync.aligned;", ""), threads=32) == []


def test_findings_of_a_kind_are_few_and_can_be_left_out():
    reads = "\n".join(f"ld.shared.b32 %r4, [smem+{64 * place}];" for place in range(10))
    assert len(findings(reads, threads=32)) == 3
    assert findings(reads, threads=32, ordering=Ordering()) == []
    assert "smem" in module(reads)
