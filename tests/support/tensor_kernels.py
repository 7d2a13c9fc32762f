"""Handwritten kernels that use tensor memory: what goes around their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from handwritten_kernels import aligned, run

COLUMNS = 64
"""Columns of tensor memory that `run_with_tensor_memory` returns."""

BARRIERS = """
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 5;
setp.eq.u32 %p0, %r2, 0;
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared.b64 [smem+16], 1;
@%p1 mbarrier.init.shared.b64 [smem+24], 1;
@%p1 fence.mbarrier_init.release.cluster;
@%p0 tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [smem], 128;
tcgen05.fence::before_thread_sync;
SYNC
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r3, [smem];
shl.b32 %r4, %r2, 21;
add.u32 %r5, %r3, %r4;
"""

DUMP = """
tcgen05.ld.sync.aligned.32x32b.x64.b32 {REGISTERS}, [%r5];
tcgen05.wait::ld.sync.aligned;
ld.param.u64 %d1, [a0];
mov.u32 %r6, %ctaid.x;
shl.b32 %r6, %r6, 7;
add.u32 %r6, %r6, %r1;
mul.wide.u32 %d2, %r6, 256;
add.u64 %d1, %d1, %d2;
STORES
tcgen05.fence::before_thread_sync;
SYNC
tcgen05.fence::after_thread_sync;
@%p0 tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;
@%p0 tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %r3, 128;
"""


def wait(place: str, name: str) -> str:
    """Returns a loop that waits for the first phase of a barrier."""
    return f"""
AGAIN{name}:
mbarrier.try_wait.parity.shared.b64 %p2, [{place}], 0;
@%p2 bra DONE{name};
bra AGAIN{name};
DONE{name}:
"""


def registers(count: int, first: int = 100) -> str:
    """Returns registers in braces."""
    return "{" + ", ".join(f"%r{first + number}" for number in range(count)) + "}"


def whole(body: str, group: int = 1) -> str:
    """Returns a kernel that allocates, runs a body, and stores columns of tensor memory."""
    cluster = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    stores = "\n".join(
        f"st.global.v4.b32 [%d1+{16 * number}], {registers(4, 100 + 4 * number)};"
        for number in range(COLUMNS // 4)
    )
    text = BARRIERS + body + DUMP
    text = text.replace("{REGISTERS}", registers(COLUMNS)).replace("STORES", stores)
    return text.replace("GROUP", str(group)).replace(
        "SYNC", cluster if group == 2 else "bar.sync 0;"
    )


def run_with_tensor_memory(
    body: str,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    maps: Sequence[bytes] = (),
    group: int = 1,
    delay: int = 0,
    seed: int = 0,
    shared: int = 131072,
) -> np.ndarray:
    """Runs a body in 128 threads; returns ``(blocks, 128, 64)`` cells of tensor memory."""
    cells = aligned(group * 128 * COLUMNS, np.uint32)
    run(
        whole(body, group),
        tensors={**(tensors or {}), "cells": cells},
        maps=maps,
        pointers=[cells],
        threads=128,
        cluster=group,
        delay=delay,
        seed=seed,
        shared=shared,
    )
    return cells.reshape(group, 128, COLUMNS)
