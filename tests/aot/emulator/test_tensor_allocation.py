import pytest

from handwritten_kernels import run
from nvgemm_aot.emulator.emulation_errors import DeadlockError, EmulationError, UnsupportedPtxError

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{}], {};\n"
FREE = "ld.shared.u32 %r1, [smem+{}];\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, {};\n"
GIVE_UP = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"


def test_columns_are_allocated_where_there_is_room():
    body = ALLOC.format(0, 256) + ALLOC.format(4, 128) + FREE.format(0, 256)
    body += ALLOC.format(8, 128) + GIVE_UP + FREE.format(4, 128) + FREE.format(8, 128)
    run(body)


def test_a_warp_waits_for_room_until_another_frees_it():
    body = """
mov.u32 %r2, %tid.x;
setp.lt.u32 %p1, %r2, 32;
@!%p1 bra OTHER;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 512;
bar.sync 0;
ld.shared.u32 %r1, [smem];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;
ret;
OTHER:
bar.sync 0;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+4], 32;
ld.shared.u32 %r1, [smem+4];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;
"""
    run(body, threads=64)


PAIR = (
    "mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p1, %r9, 0; selp.b32 %r8, 64, {}, %p1;"
    + "{} "
    + ALLOC.format(0, "%r8").replace("::1", "::2")
    + "{} "
    + FREE.format(0, "%r8").replace("::1", "::2").replace("\n", "\n{} ", 1)
)


def test_blocks_of_a_pair_allocate_together():
    run(PAIR.format(64, "", "", ""), cluster=2, delay=4)
    with pytest.raises(EmulationError, match=r"of its pair allocates (32|64)"):
        run(PAIR.format(32, "", "", ""), cluster=2)
    with pytest.raises(EmulationError, match=r"block \(1, 0, 0\), which has ended"):
        run(PAIR.format(64, "@%p1", "@%p1", "@%p1"), cluster=2)
    waits = "@!%p1 bar.sync 1, 64;\n" + PAIR.format(64, "@%p1", "@%p1", "@%p1")
    with pytest.raises(DeadlockError, match=r"waits for block \(1, 0, 0\) to allocate"):
        run("mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p1, %r9, 0;" + waits, cluster=2)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (ALLOC.format(0, 32) + ALLOC.format(4, 64), EmulationError, "64 columns .* after 32"),
        (ALLOC.format(0, 64), EmulationError, "ends without freeing its tensor memory"),
        (ALLOC.format(0, 64) + FREE.format(0, 64) * 2, EmulationError, "allocated are none"),
        (ALLOC.format(0, 64) + FREE.format(0, 32), EmulationError, "frees 32 columns"),
        (ALLOC.format(0, 48), EmulationError, "is 48, must be a power of 2 from 32 to 512"),
        (ALLOC.format(0, 16), EmulationError, "is 16, must be"),
        (ALLOC.format(0, 512) + ALLOC.format(4, 32), DeadlockError, "32 columns of tensor memory"),
        (GIVE_UP + ALLOC.format(0, 32), EmulationError, "giving up the right"),
        (
            ALLOC.format(0, 32) + GIVE_UP.replace("::1", "::2"),
            UnsupportedPtxError,
            "group other than .cta_group::1",
        ),
        (ALLOC.format(0, 32).replace(".b32", ".b64"), UnsupportedPtxError, "b64"),
    ],
)
def test_rejects(body, error, message):
    with pytest.raises(error, match=message):
        run(body)
