import pytest

from handwritten_kernels import run
from nvgemm_aot.emulator.emulation_errors import DeadlockError, EmulationError, UnsupportedPtxError

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{}], {};\n"
FREE = "ld.shared.u32 %r1, [smem+{}];\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, {};\n"
GIVE_UP = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"


def test_columns_are_allocated_where_there_is_room():
    body = ALLOC.format(0, 256) + ALLOC.format(4, 128) + FREE.format(0, 256)
    body += ALLOC.format(8, 256) + GIVE_UP + FREE.format(4, 128) + FREE.format(8, 256)
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


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
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
