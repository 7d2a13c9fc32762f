import numpy as np
import pytest

from handwritten_kernels import aligned, run
from nvgemm_aot.emulator.emulation_errors import (
    EmulationError,
    MemoryAccessError,
    UnsupportedPtxError,
)

WAIT = """
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p1, [smem], 0;
@%p1 bra DONE;
bra AGAIN;
DONE:
"""
BEGIN = """
ld.param.u64 %d1, [a0];
ld.param.u64 %d2, [a1];
mbarrier.init.shared.b64 [smem], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+256], [%d1], 256, [smem];
"""
END = """
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%d2], [smem+256], 256;"


def operands():
    source, result = aligned(64, np.float32), aligned(64, np.float32)
    source[:] = np.arange(64)
    result[:] = 20
    return {"tensors": {"a": source, "c": result}, "pointers": [source, result], "threads": 1}


@pytest.mark.parametrize("delay", [0, 5])
def test_bytes_go_to_and_come_from_shared_memory(delay):
    arguments = operands()
    run(BEGIN + WAIT + STORE + END, **arguments, delay=delay)
    assert (arguments["tensors"]["c"] == np.arange(64)).all()


@pytest.mark.parametrize(
    ("kind", "dtype", "function"),
    [
        ("add.f32", np.float32, np.add),
        ("add.noftz.f16", np.float16, np.add),
        ("max.s32", np.int32, np.maximum),
        ("xor.b64", np.uint64, np.bitwise_xor),
        ("inc.u32", np.uint32, lambda old, new: np.where(old >= new, 0, old + 1)),
    ],
)
def test_reduction_combines_with_global_memory(kind, dtype, function):
    arguments = operands()
    source, result = (each.view(dtype) for each in arguments["tensors"].values())
    source[:] = np.arange(len(source)) * 7 % 50
    result[:] = 20
    wanted = function(result, source).astype(dtype)
    store = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{kind} [%d2], [smem+256], 256;"
    run(BEGIN + WAIT + store + END, **arguments)
    assert (result == wanted).all()


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("256, [smem]", "264, [smem]", EmulationError, "multiple of 16"),
        ("[smem+256], [%d1]", "[smem+260], [%d1]", EmulationError, "multiple of 16"),
        ("[%d1], 256", "[%d1+128], 256", MemoryAccessError, "no tensor holds"),
        ("[smem+256], [%d1]", "[smem+65536], [%d1]", MemoryAccessError, "65536 bytes"),
        ("bulk_group [", "bulk_group.cp_mask [", UnsupportedPtxError, "cp_mask"),
        (", [smem];", ";", UnsupportedPtxError, "3 operands"),
    ],
)
def test_rejects(old, new, error, message):
    body = (BEGIN + WAIT + STORE + END).replace(old, new)
    with pytest.raises(error, match=message):
        run(body, **operands())


@pytest.mark.parametrize("kind", ["inc.u64", "add.s64", "add.f16", "min.noftz.u32", "and.f32"])
def test_knows_the_reductions_that_ptxas_knows(kind):
    store = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{kind} [%d2], [smem+256], 256;"
    with pytest.raises(UnsupportedPtxError, match="qualifier"):
        run(BEGIN + WAIT + store + END, **operands())


def test_shared_memory_is_reduced_by_integers_only():
    send = "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.f32"
    with pytest.raises(UnsupportedPtxError, match=r"qualifier \.f32"):
        run(f"{send} [smem+512], [smem+256], 256, [smem];")


@pytest.mark.parametrize("tensor", ["[%d1], 16", "[%d1, {0}]"])
def test_another_blocks_memory_needs_the_cluster_s_state_space(tensor):
    copy = (
        "cp.async.bulk.shared::cta.global"
        if "{" not in tensor
        else ("cp.async.bulk.tensor.1d.shared::cta.global")
    )
    body = "mov.u32 %r1, smem; mapa.shared::cluster.u32 %r2, %r1, 1; ld.param.u64 %d1, [a0];"
    body += f"{copy}.mbarrier::complete_tx::bytes [%r2+1024], {tensor}, [%r2];"
    data = aligned(64)
    with pytest.raises(MemoryAccessError, match="must be of the warp's own block"):
        run(body, tensors={"a": data}, pointers=[data], threads=1, cluster=2)
