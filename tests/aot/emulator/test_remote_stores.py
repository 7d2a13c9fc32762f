import re

import numpy as np
import pytest

from handwritten_kernels import aligned, run
from nvgemm_aot.emulator.emulation_errors import (
    DeadlockError,
    EmulationError,
    MemoryAccessError,
    UnsupportedPtxError,
)

BEGIN = """
ld.param.b64 %d1, [a0]; mov.u32 %r0, %tid.x; mov.u32 %r2, smem; add.s32 %r3, %r2, 1024;
mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1;
mapa.shared::cluster.u32 %r6, %r2, %r5; mapa.shared::cluster.u32 %r7, %r3, %r5;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r3], 1;
@%p1 fence.mbarrier_init.release.cluster;
"""
FENCE = "@%p1 fence.mbarrier_init.release.cluster;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {};"
MEET_RELAXED = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"
WAIT = """
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @%p2 bra ARRIVED; bra.uni WAIT; ARRIVED:
"""
OUT = """
mul.wide.u32 %d2, %r0, 4; add.s64 %d1, %d1, %d2; mul.wide.u32 %d3, %r4, 128; add.s64 %d1, %d1, %d3;
mad.lo.s32 %r8, %r0, 4, %r2; ld.shared.b32 %r9, [%r8]; st.global.b32 [%d1], %r9;
"""
FOUR = "mad.lo.s32 %r10, %r0, 4, %r6; mad.lo.s32 %r11, %r4, 1000, %r0;"
STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r10], %r11, [%r7];"


def exchange(*parts, begin=BEGIN, findings=False, **options):
    """Runs two blocks; returns 32 words of the result for each, or findings."""
    out = aligned(64, np.uint32)
    text = "\n".join((begin, *parts))
    execution = run(text, tensors={"out": out}, pointers=[out], cluster=2, **options)
    return execution.findings if findings else out.reshape(2, 32)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_store_in_each_other(seed):
    out = exchange(EXPECT.format(128), MEET, FOUR, STORE, WAIT, OUT, MEET, seed=seed, delay=4)
    assert (out[0] == 1000 + np.arange(32)).all()
    assert (out[1] == np.arange(32)).all()


def test_blocks_reduce_in_each_other():
    first = "mad.lo.s32 %r8, %r0, 4, %r2; st.shared.b32 [%r8], %r0;"
    reduce = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
    text = (first, EXPECT.format(128), MEET, f"{reduce} [%r6], 2, [%r7];", WAIT, OUT, MEET)
    out = exchange(*text, delay=3)
    assert out[:, 0].tolist() == [64, 64]
    assert (out[:, 1:] == np.arange(1, 32)).all()


@pytest.mark.parametrize(
    "send",
    [STORE, STORE.replace("st.async", "red.async.relaxed.cluster").replace("b32", "add.u32")],
)
def test_the_other_blocks_barrier_must_be_visible(send):
    text = (EXPECT.format(128), MEET_RELAXED, FOUR, send, WAIT, MEET)
    assert exchange(*text, findings=True) == []
    found = exchange(*text, findings=True, begin=BEGIN.replace(FENCE, ""))
    assert found
    assert all("missing: fence.mbarrier_init and a barrier behind it" in each for each in found)


def test_bytes_that_nobody_sends_are_waited_for():
    with pytest.raises(DeadlockError, match="0 of 1 arrivals and 4 bytes are missing"):
        exchange(EXPECT.format(132), MEET, FOUR, STORE, WAIT, OUT, MEET)


def test_the_barrier_must_be_where_the_data_goes():
    with pytest.raises(EmulationError, match="signals a barrier in another"):
        exchange(EXPECT.format(128), MEET, FOUR, STORE.replace("[%r7]", "[%r3]"), WAIT, MEET)


def test_a_barrier_must_be_there():
    with pytest.raises(EmulationError, match="where none was initialised"):
        exchange(MEET, FOUR, STORE.replace("[%r7]", "[%r7+8]"), MEET)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (".b32", ".f16", "qualifier .f16"),
        (".b32", ".v4.b64", "vector .v4.b64"),
        (".mbarrier::complete_tx::bytes", "", "qualifier .b32"),
        ("%r11,", "%d1,", "register %d1"),
        (".b32", ".v2.b32", "a vector of 1"),
    ],
)
def test_names_what_it_does_not_know(old, new, named):
    with pytest.raises(UnsupportedPtxError, match=re.escape(named)):
        exchange(MEET, FOUR, STORE.replace(old, new))


def test_a_reduction_of_another_type_is_not_known():
    reduce = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.min.u64"
    with pytest.raises(UnsupportedPtxError, match=re.escape("qualifier .u64")):
        exchange(f"{reduce} [%r6], %d1, [%r7];")


def test_addresses_without_a_state_space_are_generic():
    generic = "".join(
        f"cvt.u64.u32 %d{to}, %r{of}; cvta.shared.u64 %d{to}, %d{to};"
        for to, of in ((10, 10), (7, 7))
    )
    store = STORE.replace(".shared::cluster", "").replace("[%r", "[%d")
    out = exchange(EXPECT.format(128), MEET, FOUR, generic, store, WAIT, OUT, MEET, delay=4)
    assert (out[0] == 1000 + np.arange(32)).all()
    for wrong in (store.replace("[%d10]", "[%d1]"), STORE.replace("[%r10]", "[%d10]")):
        with pytest.raises(MemoryAccessError, match="is not of shared memory"):
            exchange(EXPECT.format(128), MEET, FOUR, generic, wrong, WAIT, OUT, MEET)
