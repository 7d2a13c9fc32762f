"""Kernels of a provider in a package of its own (tests/provider_package), from its wheel."""

from __future__ import annotations

import pytest
import torch
from edges import problem_of
from gemm_arguments import exact_arguments
from gemm_reference import assert_exact
from installed import installed_kernels
from test_kernels import launch, windows

import nvgemm_runtime
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.launch.select import load_kernel

PROVIDER = "tiny_gemm"
SIZES = [(1, 1, 1), (3, 5, 7), (64, 64, 32), (65, 63, 33), (127, 129, 31), (1003, 257, 129)]


def own_kernels() -> list[Kernel]:
    return [kernel for _, kernel in installed_kernels() if kernel.provider == PROVIDER]


@pytest.fixture(params=own_kernels(), ids=lambda one: f"{one.operator}-{one.signature.key}")
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


@pytest.fixture(autouse=True)
def its_wheel_is_installed() -> None:
    if not own_kernels():
        pytest.skip(f"no installed kernel is of {PROVIDER}; install the wheel of tiny_gemm.yaml")


@pytest.mark.parametrize("size", SIZES)
def test_is_exact_at_any_size(kernel: Kernel, size: tuple[int, int, int]) -> None:
    assert kernel.alignment_bytes == 2
    arguments = exact_arguments(problem_of(kernel.signature, *size))
    assert_exact(launch(kernel, arguments), arguments)


def test_writes_nothing_outside_its_output(kernel: Kernel) -> None:
    for frame, place, arguments in windows(kernel):
        before = frame.clone()
        launch(kernel, arguments, frame[place].view(arguments.out.shape))
        assert_exact(frame[place].view(arguments.out.shape), arguments)
        frame[place] = before[place]
        assert torch.equal(frame.view(torch.uint8), before.view(torch.uint8))


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same matrix an element after an aligned address, with gaps between rows or columns."""
    inner = 0 if tensor.stride(0) == 1 else 1
    pitch = tensor.shape[inner] + 3
    base = torch.empty(1 + tensor.shape[1 - inner] * pitch, dtype=tensor.dtype, device="cuda")
    strides = (1, pitch) if inner == 0 else (pitch, 1)
    view = base.as_strided(tensor.shape, strides, 1)
    return view.copy_(tensor)


def test_views_at_odd_elements_are_taken(kernel: Kernel) -> None:
    arguments = exact_arguments(problem_of(kernel.signature, 33, 65, 17))
    out = shifted(arguments.out)
    load_kernel(kernel.id).launch(shifted(arguments.a), shifted(arguments.b), out)
    assert_exact(out, arguments)


def test_the_runtime_chooses_it_where_no_other_kernel_fits() -> None:
    """Strides of an odd number of elements: kernels that load by TMA need 16 bytes."""
    signatures = {kernel.signature.key for kernel in own_kernels()}
    assert "mm/tn/bf16xbf16/fp32/bf16" in signatures
    a = torch.randint(-2, 3, (33, 17), device="cuda").bfloat16()
    b = torch.randint(-2, 3, (65, 17), device="cuda").bfloat16().T
    out = torch.empty(33, 65, device="cuda", dtype=torch.bfloat16)
    chosen = nvgemm_runtime.choose(a, b, out)
    assert chosen.kernel.provider == PROVIDER
    expected = (a.float() @ b.float()).bfloat16()
    assert torch.equal(nvgemm_runtime.mm(a, b), expected)


def test_a_captured_launch_replays(kernel: Kernel) -> None:
    arguments = exact_arguments(problem_of(kernel.signature, 65, 63, 33))
    launch(kernel, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(kernel, arguments)
    arguments.out.fill_(float("nan"))
    graph.replay()
    assert_exact(arguments.out, arguments)
