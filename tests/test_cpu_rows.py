"""Kernels for the CPU against the references: bundle, loader and launcher, with real numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from edges import edges, problem_of
from gemm_arguments import exact_arguments, random_arguments
from gemm_reference import assert_close, assert_exact, has_exact_results

import cpu_provider
from nvgemm_aot.cache import Cache
from nvgemm_aot.pipeline import BuiltBundle
from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.format import Kernel
from nvgemm_runtime.library import Library, LoadedKernel
from nvgemm_runtime.problem import DType, Signature
from nvgemm_runtime.roles import Role

ROWS = [
    *(one for one in cpu_provider.SIGNATURES if one.a is not DType.FP32),
    *cpu_provider.FUSED,
]


@pytest.fixture(scope="module")
def bundle(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuiltBundle]:
    """One kernel of each row, which demands 16 bytes as those for GPUs do."""
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
    return Library().load(bundle, kernel)


def small_edges(kernel: Kernel) -> list:
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


def test_the_rows_have_scales_groups_and_what_is_added() -> None:
    used = {
        role
        for one in ROWS
        for role in exact_arguments(problem_of(one, 16, 32, 64), "meta").tensors
    }
    assert used == set(Role)
