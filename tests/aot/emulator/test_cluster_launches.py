import numpy as np
import pytest

from handwritten_kernels import aligned, run
from nvgemm_aot.emulator.emulation_errors import EmulationError, UnsupportedPtxError
from tensor_kernels import wait

ASK = (
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
    "[smem+16], [smem];"
)
# Each block adds 1 to its own place, and to the places of the blocks that it takes over.
BODY = f"""
ld.param.u64 %d1, [a0];
mov.u32 %r1, %ctaid.x;
mbarrier.init.shared.b64 [smem], 1;
mov.u32 %r3, 0;
NEXT:
mul.wide.u32 %d2, %r1, 4;
add.u64 %d2, %d1, %d2;
ld.global.u32 %r4, [%d2];
add.u32 %r4, %r4, 1;
st.global.u32 [%d2], %r4;
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 16;
{ASK}
{wait("smem", "ANSWER").replace(", 0;", ", %r3;")}
ld.shared.b128 %q1, [smem+16];
fence.proxy.async.shared::cta;
xor.b32 %r3, %r3, 1;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %q1;
@%p1 bra NEXT;
"""


@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_block_runs_once_whoever_takes_it_over(delay, seed):
    counts = aligned(9, np.uint32)
    run(
        BODY,
        tensors={"c": counts},
        pointers=[counts],
        threads=1,
        clusters=9,
        delay=delay,
        seed=seed,
    )
    assert (counts == 1).all()


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("[smem+16], [smem]", "[smem+24], [smem]", EmulationError, "multiple of 16"),
        ("[smem+16], [smem]", "[smem+16], [smem+8]", EmulationError, "none was initialised"),
        ("::bytes.b128", "::bytes.b64", UnsupportedPtxError, "b64"),
        ("::x.b32", "::w.b32", UnsupportedPtxError, "get_first_ctaid::w"),
    ],
)
def test_rejects(old, new, error, message):
    counts = aligned(9, np.uint32)
    assert old in BODY
    with pytest.raises(error, match=message):
        run(
            BODY.replace(old, new),
            tensors={"c": counts},
            pointers=[counts],
            threads=1,
            clusters=9,
        )


def test_nobody_asks_again_after_reading_that_no_cluster_is_left():
    counts = aligned(1, np.uint32)
    again = BODY.replace("@%p1 bra NEXT;", "mov.u32 %r1, 0; bra NEXT;")
    with pytest.raises(EmulationError, match="there was none to cancel"):
        run(again, tensors={"c": counts}, pointers=[counts], threads=1)
