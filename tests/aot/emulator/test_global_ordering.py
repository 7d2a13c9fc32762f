"""Findings about global memory: the workspace, and launches that depend on earlier ones."""

from __future__ import annotations

import numpy as np
import pytest

from handwritten_kernels import aligned, run, tensor_map

HANDOVER = """
ld.param.u64 %d1, [a0];
mov.u32 %r1, %ctaid.x;
setp.ne.u32 %p1, %r1, 0;
mov.b32 %r2, 7;
@%p1 bra READ;
{write}
ret;
READ:
{wait}
ld.global.b32 %r4, [%d1+128];
"""
"""Block 0 writes 4 bytes, which block 1 reads. A flag lies at the workspace's begin."""

RELEASE = "st.global.b32 [%d1+128], %r2;\nst.release.gpu.global.b32 [%d1], %r2;"
FENCE = "st.global.b32 [%d1+128], %r2;\n{}st.relaxed.gpu.global.b32 [%d1], %r2;"
ADD = "st.global.b32 [%d1+128], %r2;\nred.{}.gpu.global.max.u32 [%d1], %r2;"
POLL = """
AGAIN:
ld.{}.gpu.global.b32 %r3, [%d1];
setp.ne.b32 %p2, %r3, 7;
@%p2 bra AGAIN;
"""
ACQUIRE, RELAXED = POLL.format("acquire"), POLL.format("relaxed")


def handed_over(write: str, wait: str) -> list[str]:
    workspace = aligned(64, np.uint32)
    return run(
        HANDOVER.format(write=write, wait=wait),
        tensors={"workspace": workspace},
        pointers=[workspace],
        workspaces=["workspace"],
        clusters=2,
    ).findings


@pytest.mark.parametrize(
    ("write", "wait"),
    [
        (RELEASE, ACQUIRE),
        (RELEASE, f"{RELAXED}fence.acq_rel.gpu;"),
        (FENCE.format("membar.gl;\n"), ACQUIRE),
        (FENCE.format("fence.acq_rel.gpu;\n"), f"{RELAXED}membar.gl;"),
        (ADD.format("release"), ACQUIRE),
    ],
)
def test_a_flag_hands_the_workspace_over(write: str, wait: str) -> None:
    assert handed_over(write, wait) == []


@pytest.mark.parametrize(
    ("write", "wait"),
    [
        (RELEASE, RELAXED),
        (FENCE.format(""), ACQUIRE),
        (ADD.format("relaxed"), ACQUIRE),
        ("st.global.b32 [%d1+128], %r2;", ""),
    ],
)
def test_a_flag_without_order_does_not(write: str, wait: str) -> None:
    (found,) = handed_over(write, wait)
    assert (
        "(ld.global.b32 %r4, [%d1+128]): reads the workspace that block (0, 0, 0) warp 0" in found
    )
    assert found.endswith(
        "not ordered behind it; missing: a flag that is released behind that and acquired before "
        "this, or a barrier"
    )


def test_blocks_may_add_to_one_place() -> None:
    add = "red.relaxed.gpu.global.add.u32 [%d1+128], %r2;"
    assert handed_over(f"{add}\n{RELEASE}", f"{add}\n{ACQUIRE}") != []  # the store races with it
    assert handed_over(f"{add}\nst.release.gpu.global.b32 [%d1], %r2;", ACQUIRE) == []


ACCESSES = {
    "load": "ld.global.b32 %r1, [%d1];",
    "store": "st.global.b32 [%d1], %r1;",
    "atomic": "red.global.add.u32 [%d1], %r1;",
    "tensor store": "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%d2, {%r1}], "
    "[smem];\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;",
    "bulk store": "cp.async.bulk.global.shared::cta.bulk_group [%d1], [smem], 16;\n"
    "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;",
}


def dependent(body: str, *, threads: int = 32, **options: object) -> list[str]:
    data = aligned(64, np.uint32)
    begin = """
ld.param.u64 %d1, [a0];
mov.u64 %d2, m0;
cvta.param.u64 %d2, %d2;
mov.u32 %r9, %tid.x;
st.shared.b32 [smem], %r9;
fence.proxy.async;
"""
    found = run(
        begin + body,
        tensors={"data": data},
        pointers=[data],
        maps=[tensor_map(data, "u32", [64], [4])],
        **{"is_dependent": True, **options},  # type: ignore[arg-type]
        threads=threads,
    ).findings
    return [each for each in found if "depends have ended" in each]


@pytest.mark.parametrize("name", ACCESSES)
def test_a_dependent_launch_waits_before_it_accesses_memory(name: str) -> None:
    elected = f"setp.eq.u32 %p1, %r9, 0;\n@!%p1 bra END;\n{ACCESSES[name]}\nEND:\n"
    (found,) = dependent(elected)
    assert found.endswith(
        "missing: griddepcontrol.wait, in this warp or before a barrier that it passes"
    )
    assert dependent(f"griddepcontrol.wait;\n{elected}") == []
    assert dependent(elected, is_dependent=False) == []


def test_a_warp_may_wait_for_another() -> None:
    body = """
setp.lt.u32 %p1, %r9, 32;
@!%p1 bra TOGETHER;
griddepcontrol.wait;
TOGETHER:
{}
@!%p1 ld.global.b32 %r1, [%d1];
"""
    assert dependent(body.format("bar.sync 0;"), threads=64) == []
    assert len(dependent(body.format(""), threads=64)) == 1


def test_offsets_of_groups_may_be_read_before() -> None:
    assert dependent(ACCESSES["load"], early=["data"]) == []
