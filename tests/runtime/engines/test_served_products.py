"""The share of a model's products that kernels serve."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo

from fake_engines import FakeEngine
from inductor_session import InductorSession
from nvgemm_runtime import preload
from nvgemm_runtime.engines.served_products import measure_coverage

N, K = 32, 64


def test_counts_what_compiled_code_of_this_process_calls(
    session: InductorSession, vllm: Callable[..., FakeEngine]
) -> None:
    linears = vllm()("model_executor.layers.linear")
    model = torch.nn.Sequential(linears.Linear(N, K), linears.Linear(K, N), linears.Linear(N, K))
    before = measure_coverage(model, [8, 16])
    assert (before.layers, before.shapes, before.served_layers, before.share) == (3, 2, 0, 0)
    with torch._inductor.config.patch(max_autotune=False, max_autotune_gemm=False):
        torch.compile(model, dynamic=True)(torch.randn(8, K))
    # The graph names both kernels, and each of the two layers runs one of them at each size.
    preload()
    after = measure_coverage(model, [16, 8, 8])
    assert (after.served_layers, after.served_shapes, after.sizes) == (2, 1, (8, 16))
    assert after.share == 4 / 6


def test_counts_no_other_parameters(session: InductorSession) -> None:
    model = torch.nn.Module()
    model.norm = torch.nn.LayerNorm(K)
    model.embedding = torch.nn.Embedding(N, K)
    model.linear = torch.nn.Linear(K, N)
    model.lm_head = torch.nn.Identity()  # as on ranks that have no head
    coverage = measure_coverage(model, [])
    assert (coverage.layers, coverage.share, coverage.sizes) == (0, 0.0, ())
    assert str(coverage).startswith("bundled kernels serve 0 of 0 unquantised Linears")
