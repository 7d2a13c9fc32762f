import pytest

from handwritten_kernels import run
from nvgemm_aot.emulator.emulation_errors import (
    DeadlockError,
    EmulationError,
    MemoryAccessError,
    UnsupportedPtxError,
)

INIT = "mbarrier.init.shared.b64 [smem], 1;\n"
WAIT = """
AGAIN{n}:
mbarrier.try_wait.parity.shared.b64 %p1, [smem], {parity};
@%p1 bra DONE{n};
bra AGAIN{n};
DONE{n}:
"""


def wait(parity, n=0):
    return WAIT.format(parity=parity, n=n)


def test_phase_ends_with_the_last_arrival():
    body = "mbarrier.init.shared.b64 [smem], 3;\n" + "mbarrier.arrive.shared.b64 %d1, [smem];\n" * 2
    run(body + "mbarrier.arrive.shared.b64 %d1, [smem];\n" + wait(0), threads=1)
    with pytest.raises(DeadlockError, match="1 of 3 arrivals and 0 bytes are missing"):
        run(body + wait(0), threads=1)


def test_previous_phase_is_over_at_the_start():
    run("mbarrier.init.shared.b64 [smem], 1;" + wait(1), threads=1)


def test_phase_waits_for_the_bytes_it_expects():
    body = (
        "mbarrier.init.shared.b64 [smem], 1;\nmbarrier.arrive.expect_tx.shared.b64 _, [smem], 32;\n"
    )
    done = "mbarrier.complete_tx.shared::cta.b64 [smem], 16;\n"
    run(body + done * 2 + wait(0), threads=1)
    with pytest.raises(DeadlockError, match=r"offset 0 of block .*parity 0.* 16 bytes are missing"):
        run(body + done + wait(0), threads=1)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("mbarrier.init.shared.b64 [smem], 3;\n", None),
        ("mbarrier.init.shared.b64 [smem], 1;\nmbarrier.arrive.shared.b64 _, [smem];\n", None),
        (
            "mbarrier.init.shared.b64 [smem], 3;\n" + "mbarrier.arrive.shared.b64 _, [smem];\n" * 4,
            "ends within phase 1 of the memory barrier at offset 0: 1 of 3 arrivals have come, 0",
        ),
        (
            INIT + "mbarrier.arrive.expect_tx.shared.b64 _, [smem], 16;\n",
            "ends within phase 0 of the memory barrier at offset 0: 1 of 1 arrivals have come, 16",
        ),
    ],
)
def test_a_block_ends_between_a_barrier_s_phases(body, left):
    found = run(body, threads=1).findings
    assert len(found) == (left is not None)
    assert left is None or left in found[0]


@pytest.mark.parametrize("parity", [0, 2, 0xFFFF_FFFE])
def test_a_parity_is_its_lowest_bit(parity):
    begin = """
mbarrier.init.shared.b64 [smem], 32;
mbarrier.arrive.shared.b64 _, [smem];
"""
    wait = "mbarrier.try_wait.parity.shared.b64 %p1, [smem], {};\n@%p1 bra END;\ntrap;\nEND:\n"
    begin = f"mov.u32 %r1, %tid.x;\nsetp.eq.u32 %p2, %r1, 0;\n@%p2 {begin.strip()}"
    run(f"{begin}\n{wait.format(parity)}")
    with pytest.raises(EmulationError, match="runs trap"):
        run(f"{begin}\n{wait.format(parity + 1)}")


TWO_WARPS = """
mov.u32 %r1, %tid.x;
setp.eq.u32 %p2, %r1, 0;
setp.eq.u32 %p3, %r1, 32;
@%p2 mbarrier.init.shared.b64 [smem], 1;
mov.u32 %r2, 0;
st.shared.b32 [smem+8], %r2;
bar.sync 0;
setp.ge.u32 %p4, %r1, 32;
@%p4 bra SECOND;
"""


def waits_of(execution):
    """Returns how often a kernel's only wait was executed."""
    for instruction, count in zip(execution.program.instructions, execution.counts):
        if "try_wait" in instruction.qualifiers:
            return count
    raise AssertionError("no wait")


def test_a_loop_that_waits_does_not_run_while_another_warp_computes():
    execution = run(
        TWO_WARPS
        + wait(0)
        + """
ret;
SECOND:
add.u32 %r2, %r2, 1;
setp.lt.u32 %p5, %r2, 2000;
@%p5 bra SECOND;
@%p3 mbarrier.arrive.shared.b64 _, [smem];
""",
        threads=64,
    )
    assert waits_of(execution) == 3  # it fails, is suspended, and succeeds


def test_a_suspended_loop_goes_on_where_others_need_it():
    """The second warp does not arrive before the first one has asked four times."""
    execution = run(
        TWO_WARPS
        + """
FIRST:
mbarrier.try_wait.parity.shared.b64 %p1, [smem], 0;
@%p1 bra DONE;
add.u32 %r2, %r2, 1;
st.shared.b32 [smem+8], %r2;
bra FIRST;
DONE:
ret;
SECOND:
ld.shared.b32 %r3, [smem+8];
setp.lt.u32 %p5, %r3, 4;
@%p5 bra SECOND;
@%p3 mbarrier.arrive.shared.b64 _, [smem];
""",
        threads=64,
    )
    assert waits_of(execution) >= 5


def test_separate_expect_tx_and_early_bytes_count():
    run(
        INIT
        + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [smem], 16;\n"
        + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], 16;\n"
        + "mbarrier.arrive.shared.b64 _, [smem];"
        + wait(0),
        threads=1,
    )


def test_dropped_arrivals_are_not_expected_again():
    run(
        "mbarrier.init.shared.b64 [smem], 2;\nmbarrier.arrive_drop.shared.b64 %d1, [smem];\n"
        + "mbarrier.arrive.shared.b64 %d1, [smem];\n" * 2
        + wait(1),
        threads=1,
    )


def test_states_name_their_phase():
    body = (
        INIT + "mbarrier.arrive.shared.b64 %d1, [smem];\n"
        "mbarrier.test_wait.shared.b64 %p1, [smem], %d1;\n"
        "@!%p1 mbarrier.inval.shared.b64 [smem+8];\n"
    )
    run(body, threads=1)


def test_remote_arrivals_reach_the_other_block():
    body = "mbarrier.init.shared.b64 [smem], 2;\n"
    run(
        body + "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [smem], 2;" + wait(0),
        threads=1,
    )


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r3], 1;",
        "mbarrier.test_wait.parity.shared.b64 %p1, [%r3], 1;",
        "mbarrier.arrive.shared::cta.b64 _, [%r3];",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r3], 16;",
        "mbarrier.init.shared.b64 [%r3+8], 1;",
        "mbarrier.inval.shared.b64 [%r3];",
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r3];",
    ],
)
def test_another_blocks_barrier_needs_the_cluster_s_state_space(text):
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    peer = "mov.u32 %r1, %cluster_ctarank; xor.b32 %r1, %r1, 1; mov.u32 %r2, smem;"
    peer += "mapa.shared::cluster.u32 %r3, %r2, %r1;"
    with pytest.raises(MemoryAccessError, match="must be of the warp's own block"):
        run(INIT + meet + peer + text + meet, threads=1, cluster=2)


def test_invalidated_barriers_free_their_bytes():
    run(
        INIT + "mbarrier.inval.shared.b64 [smem];\nst.shared.b64 [smem], 7;\n"
        "fence.proxy.async.shared::cta;\n"
        + INIT
        + "mbarrier.arrive.shared.b64 _, [smem];"
        + wait(0),
        threads=1,
    )


def test_reports_a_barrier_that_a_store_overwrites():
    with pytest.raises(EmulationError, match="ordinary data has overwritten"):
        run(INIT + "st.shared.b32 [smem+4], 7;\nmbarrier.arrive.shared.b64 _, [smem];", threads=1)


def test_arrivals_behind_copies_count_unless_they_were_not_expected():
    arrive = "cp.async.mbarrier.arrive{}.shared.b64 [smem];\n"
    run(INIT + arrive.format(".noinc") + wait(0), threads=1)
    with pytest.raises(DeadlockError, match="1 of 1 arrivals"):
        run(INIT + arrive.format("") + wait(0), threads=1)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("mbarrier.arrive.shared.b64 %d1, [smem];", EmulationError, "none was initialised"),
        ("mbarrier.init.shared.b64 [smem], 0;", EmulationError, "count is 0, must be 1"),
        ("mbarrier.init.shared.b64 [smem+4], 1;", EmulationError, "multiple of 8"),
        ("mbarrier.init.shared.b64 [smem+70000], 1;", MemoryAccessError, "offsets 70000"),
        ("mbarrier.init.shared.b64 [smem], 1;" * 2, EmulationError, "again"),
        (
            "mbarrier.init.shared.b64 [smem], 1;\nmbarrier.arrive.shared.b64 _, [smem], 2;",
            EmulationError,
            "expects 1 more",
        ),
        (
            "mbarrier.init.shared.b64 [smem], 1;\n"
            "mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %d1, [smem], 1;",
            EmulationError,
            "noComplete",
        ),
        (
            "mbarrier.init.shared.b64 [smem], 1;\nmbarrier.inval.shared.b64 [smem];\n"
            "mbarrier.arrive.shared.b64 _, [smem];",
            EmulationError,
            "none was initialised",
        ),
        ("mbarrier.arrive.acquire.cta.shared.b64 _, [smem];", UnsupportedPtxError, "acquire"),
        ("mbarrier.arrive.shared::cluster.b64 %d1, [smem];", UnsupportedPtxError, "state"),
        ("mbarrier.try_wait.parity.shared.b64 %p1, [smem];", UnsupportedPtxError, "2 operands"),
        ("mbarrier.begin.shared.b64 [smem];", UnsupportedPtxError, "begin"),
    ],
)
def test_rejects(body, error, message):
    with pytest.raises(error, match=message):
        run(body, threads=1)
