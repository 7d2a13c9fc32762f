"""The native launcher, with kernels for the CPU: results, registration, processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi

import cpu_kernels
from cpu_kernels import Register, foreign, operands, signature
from forked_scripts import ForkedScripts
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.launch.loading import native

TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}


def of_layout(tensor: torch.Tensor, *, row_major: bool) -> torch.Tensor:
    return tensor if row_major else tensor.mT.contiguous().mT


@pytest.mark.parametrize("operand", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("op", [Op.MM, Op.BMM])
@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
def test_all_ways_in_compute_the_product(
    lib: native.Native, register: Register, layout: str, op: Op, operand: DType
) -> None:
    served = signature(layout, op=op, operand=operand, out=DType.FP32)
    id, handle = register(served, alignment=operand.bits // 8)
    a, b, out = operands(5, 6, 7, 3 if op is Op.BMM else None)
    a = of_layout(a.to(TORCH[operand]), row_major=served.layout.a_row_major)
    b = of_layout(b.to(TORCH[operand]), row_major=served.layout.b_row_major)
    expected = a.float() @ b.float()
    functional, out_form = getattr(torch.ops.nvgemm_aot, op.value), torch.empty_like(out)
    functional.out(a, b, id, out=out_form)
    lib.launch(handle, a, b, out)
    result = functional(a, b, id)
    assert result.is_contiguous()
    for got in (out, out_form, result):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_bf16_results_are_rounded(register: Register) -> None:
    id, _ = register(signature(operand=DType.BF16), alignment=2)
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    torch.testing.assert_close(torch.ops.nvgemm_aot.mm(a, b, id), a @ b)


def test_views_are_computed_in_place(lib: native.Native, aligned: tuple[str, int]) -> None:
    a, b, _ = operands(8, 8, 16)
    buffer = torch.full((20, 16), float("nan"))
    out = buffer[1:17:2, 4:12]
    lib.launch(aligned[1], a[:, 4:12], b[8:], out)
    torch.testing.assert_close(out, a[:, 4:12] @ b[8:])
    assert buffer.isnan().sum() == buffer.numel() - out.numel()


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (0, 0, 0), (8, 0, 0), (0, 8, 0)])
def test_empty_results_launch_nothing(
    lib: native.Native, register: Register, sizes: tuple[int, int, int]
) -> None:
    id, handle = register(behaviour=cpu_kernels.RAISES)
    a, b, out = operands(*sizes)
    lib.launch(handle, a, b, out)
    assert torch.ops.nvgemm_aot.mm(a, b, id).shape == out.shape


@pytest.mark.parametrize("batch", [None, 3])
def test_an_empty_k_gives_zeros(lib: native.Native, register: Register, batch: int | None) -> None:
    served = signature(op=Op.MM if batch is None else Op.BMM)
    id, handle = register(served, behaviour=cpu_kernels.RAISES)
    a, b, buffer = operands(8, 12, 0, batch)
    lib.launch(handle, a, b[..., :8], buffer[..., :8])
    assert (buffer[..., :8] == 0).all()
    assert buffer[..., 8:].isnan().all()
    result = getattr(torch.ops.nvgemm_aot, served.op.value)(a, b, id)
    assert result.shape == buffer.shape
    assert (result == 0).all()


def test_an_empty_batch_launches_nothing(register: Register) -> None:
    id, _ = register(signature(op=Op.BMM), behaviour=cpu_kernels.RAISES)
    a, b, out = operands(batch=0)
    assert torch.ops.nvgemm_aot.bmm(a, b, id).shape == out.shape


@pytest.mark.parametrize(
    ("shape", "strides", "canonical"),
    [
        ((1, 8), (5, 1), (8, 1)),
        ((1, 8), (0, 1), (8, 1)),
        ((1, 8), (-(2**40), 1), (8, 1)),
        ((4, 8), (12, 1), (12, 1)),
    ],
)
def test_kernels_see_canonical_strides_of_single_rows(
    lib: native.Native,
    register: Register,
    shape: tuple[int, int],
    strides: tuple[int, int],
    canonical: tuple[int, int],
) -> None:
    _, handle = register(behaviour=cpu_kernels.REPORTS_STRIDES, alignment=16)
    if strides[0] < 0:  # torch has none, so it is handed over by DLPack
        a: Any = foreign(torch.randn(8), shape, strides)
    else:
        a = torch.randn(64).as_strided(shape, strides)
    out = torch.empty(shape[0], 8)
    lib.launch(handle, a, torch.randn(8, 8), out)
    assert tuple(out.flatten()[:2].tolist()) == canonical


def test_kernels_see_canonical_strides_of_single_matrices(
    lib: native.Native, register: Register
) -> None:
    _, handle = register(signature(op=Op.BMM), cpu_kernels.REPORTS_STRIDES, 16)
    a = torch.randn(64).as_strided((1, 4, 8), (3, 8, 1))
    out = torch.empty(1, 4, 8)
    lib.launch(handle, a, torch.randn(1, 8, 8), out)
    assert out.flatten()[:3].tolist() == [8, 8, 1]


def test_a_single_column_may_have_any_stride(lib: native.Native, plain: tuple[str, int]) -> None:
    a, b = torch.randn(64).as_strided((8, 1), (2, 7)), torch.randn(1, 8)
    out = torch.empty(8, 8)
    lib.launch(plain[1], a, b, out)
    torch.testing.assert_close(out, a @ b)


def test_the_same_id_gives_the_same_handle(lib: native.Native, plain: tuple[str, int]) -> None:
    again = lib.register_kernel(
        id=plain[0], function_address=1, signature=signature(), alignment_bytes=16, target=None
    )
    assert again == plain[1] == lib.find_kernel(plain[0])
    assert lib.find_kernel("0" * 64) is None


def test_threads_register_and_find_thousands_of_kernels(lib: native.Native) -> None:
    ids = [f"made-up-{number}" for number in range(3000)]
    handles: list[list[int]] = []

    def work() -> None:
        found = []
        for id in ids:
            found.append(
                lib.register_kernel(
                    id=id,
                    function_address=1,
                    signature=signature(),
                    alignment_bytes=4,
                    target=None,
                )
            )
            assert lib.find_kernel(id) == found[-1]
        handles.append(found)

    _in_threads(work, 4)
    assert len(handles) == 4
    assert all(found == handles[0] for found in handles)
    assert len(set(handles[0])) == len(ids)


def test_first_calls_of_a_kernel_do_not_overlap(lib: native.Native, register: Register) -> None:
    _, handle = register(behaviour=cpu_kernels.RACES_ON_FIRST_CALL)
    failures = []

    def work() -> None:
        a, b, out = operands()
        try:
            lib.launch(handle, a, b, out)
            torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-5)
        except Exception as error:
            failures.append(error)

    _in_threads(work, 8)
    assert not failures


def _in_threads(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (cpu_kernels.RAISES, "kernel {id}: out of patience"),
        (cpu_kernels.RETURNS_SILENTLY, "kernel {id} failed without an error message"),
    ],
)
def test_what_a_kernel_raises_names_it(
    lib: native.Native, register: Register, behaviour: str, message: str
) -> None:
    id, handle = register(behaviour=behaviour)
    with pytest.raises(RuntimeError, match=message.format(id=id[:12])):
        lib.launch(handle, *operands())
    with pytest.raises(RuntimeError, match=message.format(id=id[:12])):
        torch.ops.nvgemm_aot.mm(*operands()[:2], id)


def test_a_forked_child_goes_on_with_kernels_of_the_cpu(
    lib: native.Native, register: Register
) -> None:
    _, handle = register()
    a, b, out = operands()
    lib.launch(handle, a, b, out)
    child = os.fork()
    if child == 0:
        out.zero_()
        lib.launch(handle, a, b, out)
        os._exit(0 if torch.allclose(out, a @ b, atol=1e-5) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture(params=[False, True], ids=["", "under one lock"])
def first_calls_of_all_kernels_share_a_lock(
    lib: native.Native, request: pytest.FixtureRequest
) -> Iterator[None]:
    lib.set_library_keeps_lock(request.param)
    yield
    lib.set_library_keeps_lock(False)


@pytest.mark.usefixtures("first_calls_of_all_kernels_share_a_lock")
def test_a_child_forked_during_a_first_call_can_make_it(
    lib: native.Native, register: Register
) -> None:
    slow = "{ struct timespec pause = {0, 300000000}; nanosleep(&pause, 0); }"
    _, handle = register(behaviour=slow)
    a, b, out = operands()
    thread = threading.Thread(target=lambda: lib.launch(handle, a, b, out))
    thread.start()
    while not _is_sleeping(thread):
        pass
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # instead of waiting for ever
        own = torch.empty_like(out)
        lib.launch(handle, a, b, own)
        os._exit(0 if torch.allclose(own, a @ b, atol=1e-5) else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


FORK = """
import os, threading, torch
from nvgemm_runtime.launch.loading import native

held, done = threading.Event(), threading.Event()

def hold():
    with native._lock:
        held.set()
        done.wait()

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    native.load()
    os._exit(7)
done.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_forked_child_loads_the_launcher_though_a_thread_of_its_parent_did(
    scripts: ForkedScripts,
) -> None:
    done = scripts.run(FORK)
    assert done.returncode == 0, done.stderr


def _is_sleeping(thread: threading.Thread) -> bool:
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize(
    ("processes", "forks"), [(1, 1), pytest.param(2, 5, marks=pytest.mark.slow)]
)
def test_the_interpreter_exits_cleanly(
    register: Register, tmp_path: Path, processes: int, forks: int
) -> None:
    script = f"""
import os, sys, torch
sys.path[:0] = {sys.path!r}
import cpu_kernels
from pathlib import Path
from nvgemm_runtime.launch.loading import native
own = Path({str(tmp_path)!r}, str(os.getpid()))
own.mkdir()
kernel = cpu_kernels.load(cpu_kernels.signature(), own)
lib = native.load()
handle = lib.register_kernel(id=kernel.id, function_address=kernel.address,
    signature=cpu_kernels.signature(), alignment_bytes=4, target=None)
lib.set_loader(lambda id: None)
for _ in range({forks}):
    if os.fork() == 0:
        a = torch.ones(4, 4)
        lib.launch(handle, a, a, torch.empty(4, 4))
        torch.ops.nvgemm_aot.mm(a, a, kernel.id)
        sys.exit(0)
    assert os.wait()[1] == 0
"""
    # Fresh interpreters and forked ones of each, which all tear everything down.
    running = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stderr=subprocess.PIPE)
        for _ in range(processes)
    ]
    for process in running:
        assert process.communicate()[1] == b""
        assert process.returncode == 0


def test_every_element_type_has_a_name_that_old_releases_of_tvm_ffi_know_too() -> None:
    """Before 0.1.15 they read DLPack's name of packed values, and not torch's."""
    names = {dtype: native._ffi_name(dtype) for dtype in DType}
    assert names.pop(DType.FP4_E2M1) == "float4_e2m1fnx2"
    assert all(name == dtype.torch_name for dtype, name in names.items())
    for dtype in DType:
        parsed = tvm_ffi.dtype(native._ffi_name(dtype))
        assert parsed.bits * parsed.lanes == getattr(torch, dtype.torch_name).itemsize * 8
