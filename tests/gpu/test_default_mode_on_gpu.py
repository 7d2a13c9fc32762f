"""Plain torch.compile with measured kernels: one graph, the kernel of each size, CUDA graphs.

The kernels and the GPU are real; the times are made up, so that every declared m up to `LAST` is
won by a kernel. Needs kernels for bf16 mm in the layout tn at several m of one n and k:
manifests/llama-3.1-8b.yaml, built for the GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from made_up_times import default_mode, measured_index, runs_aten
from torch._inductor import config
from user_program import relative_error

import nvgemm_runtime
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.launch import linear
from nvgemm_runtime.matching.index import Index

SIGNATURE = "mm/tn/bf16xbf16/fp32/bf16"
LAST = 2048
"""At larger m, ATen is said to be faster."""

ERROR_FACTOR = 1.5


@pytest.fixture(scope="module")
def index() -> Index:
    """The installed bundles, as if two GPUs of this product had measured them."""
    return measured_index(lambda problem: problem.m <= LAST)


@pytest.fixture
def declared(index: Index, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The problems of one n and k with the most m; graphs are compiled without max-autotune."""
    rows: dict[tuple[int, int], list[Problem]] = {}
    for view in index.bundles:
        for ranking in view.header.rankings:
            problem = ranking.problem
            # torch.compile makes no size dynamic that is 0 or 1: such calls are compiled anew.
            if problem.signature.key == SIGNATURE and problem.m > 1:
                rows.setdefault((problem.n, problem.k), []).append(problem)
    row = sorted(max(rows.values(), key=len, default=[]))
    if len(row) < 3:
        pytest.skip(f"no n and k has three m of {SIGNATURE}; install the llama-3.1-8b wheel")
    with default_mode(index, monkeypatch):
        yield row


def operands(problem: Problem, m: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(m or problem.m, problem.k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(problem.n, problem.k, device="cuda", dtype=torch.bfloat16).t()
    return a, b


def compile_dynamic(problem: Problem) -> Callable[..., torch.Tensor]:
    a, b = operands(problem, 48)
    torch._dynamo.mark_dynamic(a, 0)
    compiled = torch.compile(torch.mm)
    compiled(a, b)
    return compiled


def weight_of(problem: Problem) -> torch.Tensor:
    return torch.randn(problem.n, problem.k, device="cuda", dtype=torch.bfloat16)


def runs_cublas(function: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> bool:
    """Whether the GPU runs a kernel of cuBLAS; generated C++ calls ATen without an event of it."""
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profile:
        function(*arguments)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert names, "the profiler sees no kernels"
    return any(part in name for name in names for part in ("nvjet", "xmma", "cublas"))


def assert_right(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    exact = a.float() @ b.float()
    least = relative_error(torch.mm(a, b), exact)
    assert relative_error(result, exact) <= ERROR_FACTOR * least + 1e-6


def test_one_graph_runs_the_kernel_of_each_size(declared: list[Problem]) -> None:
    compiled = compile_dynamic(declared[0])
    largest = max(one.m for one in declared)
    for problem in declared:
        a, b = operands(problem)
        assert_right(compiled(a, b), a, b)
        assert runs_aten("mm", compiled, a, b) == (problem.m > LAST), problem.key
    a, b = operands(declared[0], largest + 8)
    assert_right(compiled(a, b), a, b)
    assert runs_aten("mm", compiled, a, b), "beyond what was measured"


def test_generated_cpp_runs_the_kernel_of_each_size(declared: list[Problem]) -> None:
    with config.patch(cpp_wrapper=True):
        compiled = compile_dynamic(declared[0])
        for problem in declared:
            a, b = operands(problem)
            assert_right(compiled(a, b), a, b)
            assert runs_cublas(compiled, a, b) == (problem.m > LAST), problem.key


def test_a_package_runs_the_kernel_of_each_size(declared: list[Problem], tmp_path: Path) -> None:
    class Product(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

    largest = max(one.m for one in declared)
    m = torch.export.Dim("m", min=2, max=2 * largest)
    example = operands(declared[0], 48)
    program = torch.export.export(Product(), example, dynamic_shapes={"a": {0: m}, "b": None})
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "product.pt2")
    )
    importlib.import_module("tvm_ffi")  # see package_program.run
    loaded = torch._inductor.aoti_load_package(path)
    for problem in declared:
        a, b = operands(problem)
        assert_right(loaded(a, b), a, b)
        assert runs_cublas(loaded, a, b) == (problem.m > LAST), problem.key
    a, b = operands(declared[0], largest + 8)
    assert_right(loaded(a, b), a, b)
    assert runs_cublas(loaded, a, b), "beyond what was measured"


def test_generated_cpp_is_captured_at_sizes_at_which_it_was_never_called(
    declared: list[Problem],
) -> None:
    """The first call, whatever its size, has loaded the kernels of all."""
    with config.patch(cpp_wrapper=True):
        compiled = compile_dynamic(declared[0])
        beyond, b = operands(declared[0], max(one.m for one in declared) + 8)
        compiled(beyond, b)  # cuBLAS makes its handle
        captured = []
        for problem in declared:
            a, _ = operands(problem)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = compiled(a, b)
            captured.append((graph, a, out))
        for graph, a, out in captured:
            a.copy_(torch.randn_like(a))
            graph.replay()
            torch.cuda.synchronize()
            assert_right(out, a, b)


def test_unaligned_operands_at_one_call_and_aligned_at_the_next(declared: list[Problem]) -> None:
    """Inductor copies an operand that is not aligned as the one was for which it compiled."""
    problem = declared[0]
    compiled = compile_dynamic(problem)
    a, b = operands(problem)
    unaligned = torch.empty(a.numel() + 1, device="cuda", dtype=a.dtype)[1:].view_as(a).copy_(a)
    for one in (unaligned, a, unaligned, a):
        assert_right(compiled(one, b), a, b)
        assert not runs_aten("mm", compiled, one, b)


def test_cuda_graphs_of_sixteen_sizes_from_one_graph(declared: list[Problem]) -> None:
    problem = declared[0]
    compiled = compile_dynamic(problem)
    sizes = [one.m for one in declared if one.m <= LAST][:8]
    sizes += [m for m in (3, 5, 24, 40, 72, 136, 264, 520, 1032, 1544, 24, 80) if m not in sizes]
    sizes = sizes[:16]
    _, b = operands(problem)
    captured = []
    for m in sizes:
        a, _ = operands(problem, m)
        compiled(a, b)  # loads the kernel, which must not happen while capturing
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(a, b)
        captured.append((graph, a, out))
    for graph, a, out in captured:
        a.copy_(torch.randn_like(a))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(out, a, b)


def test_memory_does_not_grow_once_all_kernels_have_run(declared: list[Problem]) -> None:
    compiled = compile_dynamic(declared[0])
    inputs = [operands(problem) for problem in declared if problem.m <= LAST]

    def call_all() -> int:
        for a, b in inputs:
            compiled(a, b)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = call_all()
    for _ in range(20):
        after = call_all()
    assert after == before


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight was looked up before."""
    monkeypatch.setattr(linear, "_plans", {})


@pytest.mark.usefixtures("unplanned")
def test_linear_runs_the_kernel_of_each_size(declared: list[Problem]) -> None:
    weight = weight_of(declared[0])
    for problem in declared:
        a, _ = operands(problem)
        assert_right(nvgemm_runtime.linear(a, weight), a, weight.t())
        assert runs_aten("mm", nvgemm_runtime.linear, a, weight) == (problem.m > LAST), problem.key
        rows = nvgemm_runtime.linear(a.view(1, problem.m, problem.k), weight)
        assert rows.shape == (1, problem.m, problem.n)
        assert_right(rows[0], a, weight.t())
    with torch.cuda.stream(torch.cuda.Stream()):
        a, _ = operands(declared[0])
        result = nvgemm_runtime.linear(a, weight)
        torch.cuda.current_stream().synchronize()
    assert_right(result, a, weight.t())


@pytest.mark.usefixtures("unplanned")
def test_linear_is_captured_at_sizes_at_which_it_was_never_called(declared: list[Problem]) -> None:
    """The first call, whatever its size, has loaded the kernels of all."""
    weight = weight_of(declared[0])
    beyond, _ = operands(declared[0], max(one.m for one in declared) + 8)
    nvgemm_runtime.linear(beyond, weight)  # cuBLAS makes its handle
    captured = []
    for problem in declared:
        a, _ = operands(problem)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = nvgemm_runtime.linear(a, weight)
        captured.append((problem, graph, a, out))
    for problem, graph, a, out in captured:
        a.copy_(torch.randn_like(a))
        assert runs_cublas(graph.replay) == (problem.m > LAST), problem.key
        assert_right(out, a, weight.t())


@pytest.mark.usefixtures("unplanned")
def test_linear_loads_nothing_while_a_graph_is_captured(declared: list[Problem]) -> None:
    """Torch computes the first call of a weight then, and kernels later ones."""
    problem = declared[0]
    weight = weight_of(problem)
    a, _ = operands(problem)
    torch.mm(a, weight.t())  # cuBLAS makes its handle
    for is_first in (True, False):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = nvgemm_runtime.linear(a, weight)
        assert runs_cublas(graph.replay) == is_first
        assert_right(out, a, weight.t())
        nvgemm_runtime.linear(a, weight)
