"""Streams, graphs, threads, devices and processes around a launch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from edges import problem_of
from gemm_arguments import Arguments, exact_arguments, poisoned
from gemm_reference import assert_exact
from installed import installed_kernels

from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import extra_roles
from nvgemm_runtime.launch.api import choose, explain, load_kernel, mm

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def kernel() -> Kernel:
    """Some mm kernel for a Linear in a 16-bit float."""
    for _, kernel in installed_kernels():
        signature = kernel.signature
        sixteen_bits = signature.a.bits == 16 and signature.out is signature.a
        plain = signature.op is Op.MM and not extra_roles(signature)
        if plain and signature.layout.value == "tn" and sixteen_bits:
            return kernel
    pytest.fail("no installed kernel for mm/tn")


def exact(kernel: Kernel, m: int, n: int, k: int, device: str = "cuda") -> Arguments:
    return exact_arguments(problem_of(kernel.signature, m, n, k), device)


def test_runs_on_the_current_stream(kernel: Kernel) -> None:
    a, b, out = exact(kernel, 1024, 1024, 1024).operands()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        a.zero_()  # seen only by what runs behind it on this stream
        mm(a, b, out, kernel=kernel.id)
    stream.synchronize()
    assert not out.any()


def test_two_streams_do_not_wait_for_each_other(kernel: Kernel) -> None:
    arguments = exact(kernel, 256, 256, 256)
    a, b, out = arguments.operands()
    mm(a, b, out, kernel=kernel.id)
    torch.cuda.synchronize()
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
        blocked = torch.cuda.Event()
        blocked.record()
    result = poisoned(tuple(out.shape), kernel.signature.out)
    free.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(free):
        mm(a, b, result, kernel=kernel.id)
    free.synchronize()
    assert not blocked.query(), "the other stream is still busy"
    assert_exact(result, arguments)
    busy.synchronize()


def test_cuda_graphs_capture_and_replay(kernel: Kernel) -> None:
    arguments = exact(kernel, 512, 512, 512)
    a, b, out = arguments.operands()
    mm(a, b, out, kernel=kernel.id)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mm(a, b, out, kernel=kernel.id)
        second = torch.ops.nvgemm_aot.mm(a, b, kernel.id)
    for _ in range(3):
        a.copy_(torch.rand_like(a) < 0.2)  # few enough for every sum to be exact
        out.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_exact(out, arguments)
        assert_exact(second, arguments)


RACE = """
import sys, threading
import torch
from nvgemm_runtime.launch.api import mm
kernel, devices = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
work = []
for number in range(16):
    device = f"cuda:{number % devices}"
    a = (torch.rand(256, 256, device=device) < 0.2).to(getattr(torch, sys.argv[3]))
    b = (torch.rand(256, 256, device=device) < 0.2).to(getattr(torch, sys.argv[3])).T
    work.append((a, b, torch.full((256, 256), float("nan"), dtype=a.dtype, device=device)))
for device in range(devices):
    torch.cuda.synchronize(device)
barrier = threading.Barrier(16)
failures = []
def run(a, b, out):
    barrier.wait()
    try:
        for _ in range(20):
            mm(a, b, out, kernel=kernel)
    except Exception as error:
        failures.append(error)
threads = [threading.Thread(target=run, args=item) for item in work]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
for a, b, out in work:
    torch.cuda.synchronize(out.device)
    assert torch.equal(out.double(), a.double() @ b.double())
assert torch.cuda.current_device() == 0
print("right")
"""


def torch_name(kernel: Kernel) -> str:
    return str(torch_dtype(kernel.signature.a)).removeprefix("torch.")


def race(kernel: Kernel, devices: int) -> None:
    for _ in range(3):
        result = subprocess.run(
            [sys.executable, "-c", RACE, kernel.id, str(devices), torch_name(kernel)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.stdout.strip() == "right", result.stderr


def test_threads_race_on_the_first_use(kernel: Kernel) -> None:
    race(kernel, devices=1)


@two_gpus
def test_threads_race_on_the_first_use_of_two_gpus(kernel: Kernel) -> None:
    race(kernel, devices=2)


@two_gpus
def test_launches_on_two_gpus_interleave_and_restore_the_device(kernel: Kernel) -> None:
    pairs = [exact(kernel, 128, 256, 64, device=f"cuda:{i}") for i in (0, 1)]
    for _ in range(10):
        for current in (0, 1):
            torch.cuda.set_device(current)
            for arguments in pairs:
                arguments.out.fill_(float("nan"))
                mm(*arguments.operands(), kernel=kernel.id)
                assert torch.cuda.current_device() == current
    torch.cuda.set_device(0)
    for arguments in pairs:
        torch.cuda.synchronize(arguments.out.device)
        assert_exact(arguments.out, arguments)


@two_gpus
def test_operands_on_two_gpus_are_refused(kernel: Kernel) -> None:
    a, b, out = exact(kernel, 128, 256, 64).operands()
    with pytest.raises(ValueError, match="cuda"):
        mm(a, b.to("cuda:1"), out, kernel=kernel.id)


def test_refuses_what_a_kernel_cannot_take(kernel: Kernel) -> None:
    arguments = exact(kernel, 64, 64, 64)
    a, b, out = arguments.operands()
    other = torch.float16 if a.dtype == torch.bfloat16 else torch.bfloat16
    flat = torch.empty(64 * 64 + 8, dtype=a.dtype, device="cuda")
    cases = {
        "dtype": (a.to(other), b, out),
        "rank": (a[0], b, out),
        "shape": (a[:, :32], b, out),
        "cpu": (a.cpu(), b.cpu(), out.cpu()),
        "cpu operand": (a, b.cpu(), out),
        "unaligned": (flat[1 : 64 * 64 + 1].view(64, 64), b, out),
        "column-major out": (a, b, out.T),
        "overlap": (a, b, a),
    }
    for name, (x, y, z) in cases.items():
        with pytest.raises((ValueError, TypeError), match=r"."):
            mm(x, y, z, kernel=kernel.id)
        assert torch.cuda.synchronize() is None, name
    with pytest.raises(RuntimeError, match="requires grad"):
        mm(a.detach().requires_grad_(), b, out, kernel=kernel.id)
    mm(a, b, out, kernel=kernel.id)
    assert_exact(out, arguments)


def test_unknown_kernel_is_refused() -> None:
    a = torch.ones(64, 64, device="cuda")
    with pytest.raises(NoKernelError, match="no installed bundle holds kernel"):
        mm(a, a, kernel="0" * 64)


def test_chooses_and_explains(kernel: Kernel) -> None:
    arguments = exact(kernel, 333, 4096, 4096)
    a, b, out = arguments.operands()
    explanation = explain(a, b)
    assert explanation.match is not None
    assert choose(a, b, out).kernel.id == explanation.match.kernels[0].kernel.id
    mm(a, b, out)
    assert_exact(out, arguments)
    missed = explain(a.double(), b.double())
    assert missed.match is None
    assert missed.reasons


def test_a_forked_child_is_refused_and_its_parent_goes_on(kernel: Kernel) -> None:
    script = (
        "import os, sys, torch\n"
        "from nvgemm_runtime.launch.api import mm\n"
        "a = torch.ones(64, 64, dtype=getattr(torch, sys.argv[2]), device='cuda')\n"
        "out = torch.empty_like(a)\n"
        "mm(a, a.T, out, kernel=sys.argv[1]); torch.cuda.synchronize()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: mm(a, a.T, out, kernel=sys.argv[1])\n"
        "    except Exception as error: os._exit(7 if 'fork' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "mm(a, a.T, out, kernel=sys.argv[1]); print(float(out[0, 0]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, kernel.id, torch_name(kernel)],
        capture_output=True, text=True, timeout=120, env=dict(os.environ),
    )  # fmt: skip
    assert result.stdout.split() == ["7", "64.0"], result.stderr


def test_loading_is_once_for_all_threads(kernel: Kernel) -> None:
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(load_kernel(kernel.id))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(loaded) for loaded in found}) == 1
