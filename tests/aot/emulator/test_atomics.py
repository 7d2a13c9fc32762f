import re

import numpy as np
import pytest

from handwritten_kernels import aligned, run
from nvgemm_aot.emulator.emulation_errors import (
    EmulationError,
    MemoryAccessError,
    UnsupportedPtxError,
)

ADDRESS = "ld.param.b64 %d1, [a0]; mov.u32 %r1, %laneid; mov.u32 %r2, smem;"


def atomic(text, data, *, out=None, **options):
    pointers = [data] if out is None else [data, out]
    tensors = {"data": data} | ({} if out is None else {"out": out})
    run(ADDRESS + text, tensors=tensors, pointers=pointers, **options)
    return data


def filled(*values, dtype=np.uint32):
    data = aligned(len(values), dtype)
    data[:] = values
    return data


@pytest.mark.parametrize(
    ("operation", "before", "after"),
    [
        ("add.u32", 5, 5 + 496),
        ("min.u32", 5, 0),
        ("max.s32", -7, 31),
        ("or.b32", 64, 64 | 31),
        ("xor.b32", 1, 1),
        ("and.b32", 31, 0),
        ("inc.u32", 0, None),
    ],
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_lanes_meet_at_one_address(operation, before, after, space):
    data = filled(before & 0xFFFF_FFFF)
    if space == "global":
        atomic(f"red.global.{operation} [%d1], %r1;", data)
    else:
        text = "ld.global.b32 %r3, [%d1]; st.shared.b32 [%r2], %r3;"
        text += f"atom.shared.{operation} %r4, [%r2], %r1; ld.shared.b32 %r3, [%r2];"
        atomic(f"{text} st.global.b32 [%d1], %r3;", data)
    if after is None:  # each lane counts to its number, then from 0: an oracle in Python
        value = before
        for limit in range(32):
            value = 0 if value >= limit else value + 1
        after = value
    assert data[0] == after


def test_sums_keep_subnormals_in_shared_memory_alone():
    for kind in ("red.global", "red"):
        data = filled(5)
        atomic(f"setp.eq.u32 %p1, %r1, 3; @%p1 {kind}.add.f32 [%d1], %r1;", data)
        assert data[0] == 0
    text = "mov.b32 %r3, 5; st.shared.b32 [%r2], %r3; setp.eq.u32 %p1, %r1, 3;"
    text += "@%p1 red.shared.add.f32 [%r2], %r1; ld.shared.b32 %r3, [%r2];"
    assert atomic(f"{text} st.global.b32 [%d1], %r3;", filled(0))[0] == 8


def test_returns_what_was_there_in_an_order_of_the_seed():
    orders = set()
    for seed in range(3):
        data, out = filled(0), aligned(32, np.uint32)
        text = "atom.global.add.u32 %r3, [%d1], 1; ld.param.b64 %d2, [a1];"
        text += "mul.wide.u32 %d3, %r1, 4; add.s64 %d2, %d2, %d3; st.global.b32 [%d2], %r3;"
        atomic(text, data, out=out, delay=3, seed=seed)
        assert sorted(out) == list(range(32))
        orders.add(tuple(out))
    assert len(orders) == 3


def test_swaps_where_the_comparison_holds():
    data = filled(7)
    out = aligned(32, np.uint32)
    text = "add.s32 %r5, %r1, 100; atom.global.cas.b32 %r3, [%d1], 7, %r5; ld.param.b64 %d2, [a1];"
    text += "mul.wide.u32 %d3, %r1, 4; add.s64 %d2, %d2, %d3; st.global.b32 [%d2], %r3;"
    atomic(text, data, out=out)
    assert data[0] == 100
    assert out.tolist() == [7, *[100] * 31]


def test_vectors_add_elementwise():
    data = filled(1, 2, 3, 4, dtype=np.float32)
    text = "mov.b32 %r3, 0f3F800000; mov.b32 %r4, 0f40000000;"
    atomic(text + "red.relaxed.gpu.global.add.v4.f32 [%d1], {%r3, %r4, %r3, %r4};", data)
    assert data.tolist() == [33, 66, 35, 68]


def test_halves_add():
    data = aligned(2, np.float16)
    data[:] = 1, 2
    atomic("mov.b32 %r3, 0x3C003C00; red.global.add.noftz.f16x2 [%d1], %r3;", data)
    assert data.tolist() == [33, 34]


def test_64_bits_add():
    data = filled(2**40, dtype=np.uint64)
    atomic("mov.b64 %d5, 0x100000000; atom.global.add.u64 %d6, [%d1], %d5;", data)
    assert data[0] == 2**40 + 32 * 2**32


def test_generic_addresses_reach_shared_memory():
    data = filled(0)
    text = "st.shared.b32 [%r2], 0; cvt.u64.u32 %d2, %r2; cvta.shared.u64 %d2, %d2;"
    text += "atom.add.u32 %r3, [%d2], 2; ld.shared.b32 %r4, [%r2]; st.global.b32 [%d1], %r4;"
    assert atomic(text, data)[0] == 64


def test_predicated_lanes_do_nothing():
    data = filled(0)
    text = "setp.lt.u32 %p1, %r1, 5; @%p1 red.global.add.u32 [%d1], 1;"
    assert atomic(text, data)[0] == 5


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("red.global.add.u32 [%d1+128], 1;", MemoryAccessError, "which no tensor holds"),
        ("red.global.add.u32 [%d1+2], 1;", MemoryAccessError, "must be a multiple of 4"),
        ("red.shared.add.u32 [%r2+65536], 1;", MemoryAccessError, "shared memory of block"),
        ("red.global.add.s64 [%d1], %d5;", UnsupportedPtxError, "qualifier .s64"),
        ("red.global.exch.b32 [%d1], 1;", UnsupportedPtxError, "qualifier .exch"),
        ("red.global.add.f16x2 [%d1], %r1;", UnsupportedPtxError, ".f16x2 without .noftz"),
        ("red.global.min.noftz.f16x2 [%d1], %r1;", UnsupportedPtxError, "without a vector"),
        ("red.shared.add.v2.f32 [%r2], {%r1, %r1};", UnsupportedPtxError, "vector .v2.f32"),
        ("atom.global.cas.b32 %r3, [%d1], 7;", UnsupportedPtxError, "a number of 3 operands"),
        ("atom.global.add.u64 %r3, [%d1], %d5;", UnsupportedPtxError, "result"),
        ("atom.shared.add.u32 %r3, [%r2], %d5;", UnsupportedPtxError, "register %d5"),
    ],
)
def test_names_what_is_wrong(text, error, named):
    with pytest.raises(error, match=re.escape(named)):
        atomic(text, filled(0))


def test_must_not_write_what_is_only_read():
    with pytest.raises(EmulationError, match="writes data, which must only be read"):
        atomic("red.global.add.u32 [%d1], 1;", filled(0), readonly=["data"])
