"""Kernels for the CPU against the references: bundle, loader and launcher, with real numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from edges import edges, problem_of
from gemm_arguments import exact_arguments, random_arguments
from gemm_reference import assert_close, assert_exact, has_exact_results

import cpu_provider
import nvgemm_runtime
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import DType, Problem, Signature
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.launch.loading.loader import KernelLoader, LoadedKernel

pytestmark = pytest.mark.slow

ROWS = [
    *(one for one in cpu_provider.SIGNATURES if one.a is not DType.FP32),
    *cpu_provider.FUSED,
]


@pytest.fixture(scope="module")
def bundle(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """One kernel of each row."""
    problems = [problem_of(one, 16, 32, 64) for one in ROWS]
    built = cpu_provider.build_bundle(
        problems, tmp_path_factory.mktemp("rows"), kernel_cache, candidates=1
    )
    with Bundle(built.path) as opened:
        yield opened


@pytest.fixture(params=ROWS, ids=lambda one: one.key)
def loaded(request: pytest.FixtureRequest, bundle: Bundle) -> LoadedKernel:
    signature: Signature = request.param
    kernel = next(k for k in bundle.header.kernels if k.signature == signature)
    torch.manual_seed(0)
    return KernelLoader().load(bundle, kernel)


def small_edges(kernel: Kernel) -> list[Problem]:
    return edges(kernel.signature, 16)[:2]


def test_whole_numbers_come_out_exact(loaded: LoadedKernel) -> None:
    if not has_exact_results(loaded.kernel.signature):
        pytest.skip("an activation with rounding")
    for problem in small_edges(loaded.kernel):
        arguments = exact_arguments(problem, "cpu")
        loaded.launch(*arguments.operands(), *arguments.others)
        assert_exact(arguments.out, arguments)


def test_random_numbers_come_out_within_rounding(loaded: LoadedKernel) -> None:
    for problem in small_edges(loaded.kernel):
        arguments = random_arguments(problem, "cpu")
        loaded.launch(*arguments.operands(), *arguments.others)
        assert_close(arguments.out, arguments)


def test_operators_and_functions_give_the_same(loaded: LoadedKernel) -> None:
    kernel = loaded.kernel
    arguments = random_arguments(small_edges(kernel)[1], "cpu")
    name, tensors, named = arguments.function_call()
    out = torch.zeros_like(arguments.out)
    assert getattr(nvgemm_runtime, name)(*tensors, out=out, kernel=loaded, **named) is out
    assert_close(out, arguments)
    if not arguments.has_operator:
        return
    name, tensors, keywords = arguments.operator_call()
    operator = getattr(torch.ops.nvgemm_aot, name)
    result = operator(*tensors, kernel.id, **keywords)
    operator.out(*tensors, kernel.id, **keywords, out=arguments.out)
    assert torch.equal(result.double(), out.double())
    assert torch.equal(arguments.out.double(), out.double())


def test_the_rows_have_scales_groups_and_what_is_added() -> None:
    used = {
        role
        for one in ROWS
        for role in exact_arguments(problem_of(one, 16, 32, 64), "meta").tensors
    }
    assert used == set(Role)
