"""Divergence, waiting and errors of warps, by handwritten PTX."""

from __future__ import annotations

import re

import numpy as np
import pytest

from nvgemm_aot.emulator.emulation_errors import DeadlockError, EmulationError
from nvgemm_aot.emulator.machine.global_memory import GlobalMemory, Region
from nvgemm_aot.emulator.machine.launch import Launch, Schedule
from nvgemm_aot.emulator.machine.scheduler import Execution
from nvgemm_aot.emulator.ptx.parser import parse
from nvgemm_aot.emulator.run import execute
from tests.support.handwritten_kernels import aligned, module, run

STORE = """
    mad.wide.u32 %d1, %r63, 4, %d0;
    st.global.b32 [%d1], %r62;
"""
BEGIN = """
    ld.param.u64 %d0, [a0];
    mov.u32 %r60, %ctaid.x; mov.u32 %r61, %ntid.x; mov.u32 %r63, %tid.x;
    mad.lo.u32 %r63, %r60, %r61, %r63;
    mov.u32 %r0, %tid.x;
    mov.b32 %r62, 0;
"""


def lanes(body: str, threads: int = 32, **options: int) -> list[int]:
    """Runs a body on one block; returns ``%r62`` of each thread, whose number is ``%r0``."""
    out = aligned(threads, np.uint32)
    run(BEGIN + body + STORE, tensors={"out": out}, pointers=[out], threads=threads, **options)
    return out.tolist()


def test_lanes_take_both_sides_of_a_branch_and_come_together() -> None:
    found = lanes("""
        and.b32 %r1, %r0, 1; setp.eq.b32 %p0, %r1, 0;
        @%p0 bra EVEN;
        mov.b32 %r62, 1; bra JOIN;
        EVEN: mov.b32 %r62, 2;
        JOIN: vote.sync.ballot.b32 %r2, %p0, -1; add.u32 %r62, %r62, %r2;
    """)
    assert found == [0x55555555 + 2, 0x55555555 + 1] * 16


def test_nested_branches() -> None:
    found = lanes("""
        setp.lt.u32 %p0, %r0, 16; setp.lt.u32 %p1, %r0, 8; setp.lt.u32 %p2, %r0, 24;
        @%p0 bra LOW;
        @%p2 bra THIRD;
        mov.b32 %r62, 4; bra JOIN;
        THIRD: mov.b32 %r62, 3; bra JOIN;
        LOW: @!%p1 bra SECOND;
        mov.b32 %r62, 1; bra INNER;
        SECOND: mov.b32 %r62, 2;
        INNER: add.u32 %r62, %r62, 10;
        JOIN: activemask.b32 %r5; setp.ne.b32 %p5, %r5, -1; @%p5 mov.b32 %r62, 99;
    """)
    assert found == [11] * 8 + [12] * 8 + [3] * 8 + [4] * 8


def test_lanes_leave_a_loop_one_by_one() -> None:
    found = lanes("""
        mov.b32 %r1, 0;
        LOOP: add.u32 %r62, %r62, %r1; add.u32 %r1, %r1, 1;
        setp.le.u32 %p0, %r1, %r0; @%p0 bra LOOP;
        activemask.b32 %r2; setp.ne.b32 %p1, %r2, -1; @%p1 mov.b32 %r62, 999;
    """)
    assert found == [lane * (lane + 1) // 2 for lane in range(32)]


def test_lanes_break_out_of_nested_loops() -> None:
    found = lanes("""
        mov.b32 %r1, 0;
        OUTER: mov.b32 %r2, 0;
        INNER: add.u32 %r62, %r62, 1;
        setp.ge.u32 %p0, %r62, %r0; @%p0 bra OUT;
        add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 3; @%p1 bra INNER;
        add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 4; @%p2 bra OUTER;
        OUT: activemask.b32 %r3; setp.ne.b32 %p3, %r3, -1; @%p3 mov.b32 %r62, 999;
    """)
    assert found == [min(max(lane, 1), 12) for lane in range(32)]


def test_lanes_that_exit_are_not_waited_for() -> None:
    found = lanes("""
        setp.lt.u32 %p0, %r0, 8; @%p0 exit;
        setp.lt.u32 %p1, %r0, 16; @%p1 bra SIDE;
        mov.b32 %r62, 7; bra JOIN;
        SIDE: setp.lt.u32 %p2, %r0, 12; @%p2 ret; mov.b32 %r62, 5;
        JOIN: bar.sync 0; activemask.b32 %r1; popc.b32 %r1, %r1; mad.lo.u32 %r62, %r1, 100, %r62;
    """)
    assert found == [0] * 12 + [2005] * 4 + [2007] * 16


def test_a_loop_around_a_barrier() -> None:
    found = lanes(
        """
        mov.b32 %r10, smem; mov.b32 %r1, 0; st.shared.b32 [%r10], %r1; bar.sync 0;
        LOOP: setp.ne.b32 %p0, %r0, 0;
        @!%p0 ld.shared.b32 %r3, [%r10]; @!%p0 add.u32 %r3, %r3, 5;
        @!%p0 st.shared.b32 [%r10], %r3;
        bar.sync 0; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 3; @%p1 bra LOOP;
        ld.shared.b32 %r62, [%r10];
    """,
        threads=96,
    )
    assert found == [15] * 96


def test_lanes_of_one_warp_may_wait_for_each_other() -> None:
    found = lanes("""
        mov.b32 %r10, smem; mov.b32 %r11, 1;
        setp.eq.b32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [%r10], %r11;
        bar.warp.sync -1;
        setp.lt.u32 %p1, %r0, 16; @%p1 bra WAIT;
        setp.ne.b32 %p3, %r0, 20; @%p3 bra JOIN;
        mbarrier.arrive.shared.b64 %d5, [%r10]; bra JOIN;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0; @!%p2 bra WAIT;
        mov.b32 %r62, 1;
        JOIN: add.u32 %r62, %r62, 1;
    """)
    assert found == [2] * 16 + [1] * 16


def test_a_partial_warp_has_no_other_lanes() -> None:
    found = lanes("activemask.b32 %r62; bar.sync 0;", threads=40)
    assert found == [0xFFFFFFFF] * 32 + [0xFF] * 8


def test_predicated_instructions_change_their_lanes_only() -> None:
    found = lanes("""
        setp.ge.u32 %p0, %r0, 30; mov.b32 %r1, 7;
        @%p0 mov.b32 %r62, %r1; @!%p0 add.u32 %r62, %r0, 100;
        setp.lt.u32 %p1, %r0, 2; @%p1 bra SKIP; bra JOIN;
        SKIP: @!%p0 mov.b32 %r62, 1; @%p0 mov.b32 %r62, 2;
        JOIN:
    """)
    assert found == [1, 1, *(lane + 100 for lane in range(2, 30)), 7, 7]


@pytest.mark.parametrize(
    ("body", "threads", "message"),
    [
        ("setp.lt.u32 %p0, %r0, 8; @%p0 bra S; bra J; S: bar.sync 0; J:", 32, "without lanes 8"),
        ("setp.lt.u32 %p0, %r0, 4; @%p0 shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;", 32,
         "names lanes 4, 5"),
        ("vote.sync.any.pred %p1, %p0, 15;", 32, "does not name them"),
        ("bar.sync 16;", 32, "barrier 16 must be in 0..15"),
        ("bar.sync 1, 33;", 32, "expects 33 threads"),
        ("bar.sync %r0;", 32, "unequal operands"),
        ("trap;", 32, "runs trap"),
    ],
)  # fmt: skip
def test_errors_name_block_warp_and_line(body: str, threads: int, message: str) -> None:
    with pytest.raises(EmulationError, match=message) as caught:
        lanes(body, threads)
    assert re.match(r"block \(0, 0, 0\) warp 0 at line \d+ \(", str(caught.value))


def test_deadlock_says_what_each_warp_waits_for() -> None:
    with pytest.raises(DeadlockError) as caught:
        lanes("setp.lt.u32 %p0, %r0, 32; @%p0 bra JOIN; bar.sync 3, 96; JOIN:", threads=64)
    message = str(caught.value)
    assert "block (0, 0, 0) warp 1 waits for barrier 3 of 96 threads at line" in message
    assert "bar.sync 3, 96" in message
    assert "warp 0" not in message


def test_deadlock_of_a_cluster_barrier() -> None:
    with pytest.raises(DeadlockError, match=r"waits for barrier\.cluster"):
        run(
            "mov.u32 %r0, %cluster_ctarank; setp.eq.b32 %p0, %r0, 0;"
            "barrier.cluster.arrive; barrier.cluster.wait;"
            "@%p0 barrier.cluster.arrive; @%p0 barrier.cluster.wait; bar.sync 1, 64;",
            cluster=2,
        )


LATE = "mov.b32 %r1, 0; COUNT: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 500; @%p2 bra COUNT;"


@pytest.mark.parametrize("late", ["", LATE])
def test_barriers_do_not_wait_for_warps_that_have_ended(late: str) -> None:
    others = f"setp.lt.u32 %p0, %r0, 32; @%p0 bra GO; {late} ret; GO: bar.sync 0; mov.b32 %r62, 1;"
    assert lanes(others, threads=96) == [1] * 32 + [0] * 64
    cluster = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    clustered = "mov.u32 %r63, %tid.x;" + others.replace("bar.sync 0;", cluster)
    assert lanes(clustered, threads=64, cluster=2) == [1] * 32 + [0] * 32


def test_arriving_twice_at_a_cluster_barrier_is_an_error() -> None:
    with pytest.raises(EmulationError, match=r"arrives at the cluster's barrier again"):
        run("barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;", cluster=2)


def launched(body: str, schedule: Schedule, blocks: int = 1, threads: int = 32) -> Execution:
    out = aligned(blocks * threads, np.uint32)
    program = parse(module(BEGIN + body + STORE, ".param .u64 a0"))
    region = Region(address=out.ctypes.data, data=out.view(np.uint8), name="out")
    return execute(
        program,
        Launch(
            grid=(blocks, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=1024,
            parameters=out.ctypes.data.to_bytes(8, "little"),
        ),
        GlobalMemory([region]),
        schedule,
    )


def test_an_endless_loop_ends_by_the_limit_with_its_place() -> None:
    body = "LOOP: add.u32 %r1, %r1, 1; st.shared.b32 [smem], %r1; bra LOOP;"
    with pytest.raises(DeadlockError, match=r"not ended after \d+ .* at most 5000; .*line 1\d"):
        launched(body, Schedule(limit=5000))


def test_waiting_for_global_memory_that_nobody_writes_is_a_deadlock() -> None:
    body = "LOOP: ld.acquire.gpu.global.b32 %r1, [%d0]; setp.eq.b32 %p0, %r1, 0; @%p0 bra LOOP;"
    with pytest.raises(DeadlockError, match=r"no warp can go on: .*line \d+"):
        launched(body, Schedule(quantum=3))


@pytest.mark.parametrize("end", ["", "trap;"])
def test_lanes_come_together_in_front_of_a_loop_without_end(end: str) -> None:
    body = """
        setp.lt.u32 %p0, %r0, 8; @%p0 bra JOIN; mov.b32 %r62, 1;
    JOIN: elect.sync %r1|%p1, -1; @!%p1 bra TOGETHER; mov.b32 %r62, 2;
    TOGETHER: bar.warp.sync -1;
    LOOP: ld.acquire.gpu.global.b32 %r1, [%d0]; bra LOOP;
    """
    with pytest.raises(DeadlockError, match=r"no warp can go on: .*ld\.acquire"):
        launched(body + end, Schedule(quantum=3))


def test_a_loop_without_end_may_be_one_warp_s() -> None:
    body = """
        setp.lt.u32 %p0, %r0, 32; @%p0 bra END;
    LOOP: elect.sync %r1|%p1, -1; @!%p1 bra TOGETHER; mov.b32 %r62, 2;
    TOGETHER: bar.warp.sync -1; bra LOOP;
    END:
    """
    with pytest.raises(DeadlockError, match=r"no warp can go on: .*warp 1"):
        lanes(body, threads=64)


def test_a_long_computation_is_no_deadlock_for_those_who_wait() -> None:
    # Warp 0 computes for thousands of rounds while warp 1 waits at a barrier.
    body = """
        setp.ge.u32 %p0, %r0, 32; @%p0 bra WAIT;
        mov.b32 %r1, 0;
        LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 3000; @%p1 bra LOOP;
        WAIT: bar.sync 0;
    """
    assert launched(body, Schedule(quantum=3), threads=64).warp_instructions > 9000


def test_blocks_may_wait_for_others_through_global_memory() -> None:
    body = """
        setp.eq.b32 %p0, %r60, 1; @%p0 bra WRITE;
        LOOP: ld.acquire.gpu.global.b32 %r1, [%d0+128]; setp.ne.b32 %p1, %r1, 5; @%p1 bra LOOP;
        bra JOIN;
        WRITE: mov.b32 %r2, 5; st.release.gpu.global.b32 [%d0+128], %r2; mov.b32 %r62, 5;
        JOIN:
    """
    assert launched(body, Schedule(resident=2), blocks=2).warp_instructions > 0


def test_schedules_can_be_replayed() -> None:
    body = "bar.sync 0; mov.b32 %r62, %r0;"
    runs = [launched(body, Schedule(seed=3, delay=4), 4, 96).counts for _ in range(2)]
    assert runs[0] == runs[1]


def test_execution_reports_what_ran() -> None:
    execution = launched(
        "setp.eq.b32 %p0, %r0, 99; @%p0 bra NEVER; bra JOIN; NEVER: mov.b32 %r62, 9; JOIN:",
        Schedule(),
        threads=64,
    )
    assert [each.text for each in execution.never_ran()] == ["mov.b32 %r62, 9"]
    count = len(execution.counts)
    assert execution.covered == (count - 1) / count
    assert execution.warp_instructions == 2 * (count - 1)
    (line,) = {each.line for each in execution.program.instructions if each.opcode == "setp"}
    # Four of its five instructions ran, in two warps.
    assert execution.ran()[line] == 2 * 3


def test_the_block_must_have_the_threads_that_the_kernel_requires() -> None:
    text = module("").replace("kernel()\n", "kernel()\n.reqntid 64, 1, 1\n")
    with pytest.raises(EmulationError, match="must have"):
        execute(parse(text), Launch(grid=(1, 1, 1), block=(32, 1, 1)), GlobalMemory([]))
