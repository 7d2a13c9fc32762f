"""Kernels whose code is on the GPU before anything calls them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from installed import installed_kernels

import nvgemm_runtime
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import extra_roles
from nvgemm_runtime.launch import compiled
from nvgemm_runtime.launch.loading import upload
from nvgemm_runtime.launch.loading.loader import LOADER


@pytest.fixture
def plain_kernels() -> list[Kernel]:
    """Kernels for mm of A and B alone."""
    found = [kernel for _, kernel in installed_kernels()]
    return [one for one in found if one.signature.op is Op.MM and not extra_roles(one.signature)]


def test_every_installed_kernel_can_be_uploaded() -> None:
    """Through operands of the smallest sizes, which every kernel must take."""
    for bundle, kernel in installed_kernels():
        assert upload.upload(LOADER.load(bundle, kernel), torch.device("cuda", 0)), kernel.operator
    torch.cuda.synchronize()


def test_a_preloaded_wheel_takes_no_device_memory_afterwards() -> None:
    done = nvgemm_runtime.preload("quickstart")
    assert done.kernels > 0
    assert dict(done.failures) == {}
    assert done.code_bytes > 0
    assert done.seconds > 0
    again = nvgemm_runtime.preload("quickstart")
    assert (again.kernels, again.device_bytes) == (done.kernels, 0)


FIRST_USE = """
import logging, sys
import torch
from nvgemm_runtime.launch.compiled import gemm
logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
torch.manual_seed(0)
a, b = ((torch.rand(256, 256, device="cuda") < 0.2).to(getattr(torch, sys.argv[2])) for _ in "ab")
b, wanted = b.T, a.float() @ b.T.float()
out = torch.full((256, 256), float("nan"), dtype=a.dtype, device="cuda")
def not_computed(*_, **__): raise SystemExit("ATen was called")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    gemm(not_computed, sys.argv[1], "a wheel")(a, b, out=out)
for _ in range(2):
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out.float(), wanted)
"""


def test_the_first_use_of_a_kernel_may_be_captured(plain_kernels: list[Kernel]) -> None:
    """A module that is loaded under capture launches nothing of its own into the graph."""
    kernel = next(
        one
        for one in plain_kernels
        if one.signature.layout.value == "tn"
        and one.signature.out is one.signature.a
        and one.signature.a.bits == 16  # a result in 8 bits would round the sums
    )
    dtype = str(torch_dtype(kernel.signature.a)).removeprefix("torch.")
    command = [sys.executable, "-c", FIRST_USE, kernel.id, dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_generated_code_loads_its_kernels_before_it_is_called(plain_kernels: list[Kernel]) -> None:
    uploaded: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compiled,
            "upload",
            lambda kernel, device: uploaded.append(f"{kernel.kernel.id} {device}"),
        )
        compiled.gemm(torch.mm, plain_kernels[0].id, "a wheel")
    assert uploaded == [f"{plain_kernels[0].id} cuda:{torch.cuda.current_device()}"]
