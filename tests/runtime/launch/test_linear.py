"""`nvgemm_runtime.linear`: kernels where measured faster, and torch's function elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch.fx.experimental.proxy_tensor import make_fx

import cpu_kernels
import cpu_provider
import nvgemm_runtime
import recording_kernels
import tuning_bench
from inductor_session import InductorSession
from kernels_by_m import COMPUTED_BY, SQUARE, TIMES, WIDE
from measured_bundles import write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import BIAS
from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.launch import linear as module

N, K = 32, 64
Tensor = torch.Tensor


@pytest.fixture(scope="module")
def measured(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with kernels by m for products with weights, in fp32 and, with a bias, in bf16."""
    signatures = (
        cpu_kernels.signature("tn"),
        cpu_kernels.signature("tn", operand=DType.BF16, epilogue=BIAS),
    )
    problems = [cpu_provider.problem_of(served, (m, N, K)) for served in signatures for m in TIMES]
    directory = tmp_path_factory.mktemp("linear")
    directory.chmod(0o755)
    built = tuning_bench.build(
        problems, directory / "built", kernel_cache, recording_kernels.Recording()
    )
    return write_measured(built, directory / "m" / "measured.nvgemm", TIMES)


@pytest.fixture
def forgotten() -> Iterator[None]:
    module._plans.clear()
    yield
    module._plans.clear()


@pytest.fixture
def session(
    inductor: InductorSession, measured: Path, forgotten: None
) -> Iterator[InductorSession]:
    inductor.use(measured)
    with torch.no_grad():
        yield inductor


Launched = Callable[..., list[str]]


@pytest.fixture
def launched(session: InductorSession) -> Launched:
    """Calls the function, compares the result with torch's, and returns the kernels launched."""

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[str]:
        session.record.forget()
        result = nvgemm_runtime.linear(x, weight, bias)
        lines: list[str] = session.record.lines()
        expected = F.linear(x, weight, bias)
        torch.testing.assert_close(result, expected)
        assert (result.shape, result.dtype, result.device, result.stride()) == (
            expected.shape, expected.dtype, expected.device, expected.stride(),
        )  # fmt: skip
        assert result.is_inference() == expected.is_inference()
        return lines

    return call


WEIGHT = torch.randn(N, K)


def test_kernels_compute_the_m_at_which_they_were_measured_faster(launched: Launched) -> None:
    for m, operator in COMPUTED_BY.items():
        assert launched(torch.randn(m, K), WEIGHT) == ([operator] if operator else []), m


def test_leading_dimensions_count_as_rows(launched: Launched) -> None:
    assert launched(torch.randn(2, 4, K), WEIGHT) == [WIDE]
    assert launched(torch.randn(2, 2, 4, K), WEIGHT) == [SQUARE]
    assert launched(torch.randn(2, 1, K), WEIGHT) == []
    assert launched(torch.randn(K), WEIGHT) == []
    assert launched(torch.randn(2, 4, 2 * K)[..., :K], WEIGHT) == []
    assert launched(torch.randn(4, 2, K).transpose(0, 1), WEIGHT) == []


def test_rows_may_have_gaps(launched: Launched) -> None:
    assert launched(torch.randn(8, 2 * K)[:, :K], WEIGHT) == [WIDE]
    assert launched(torch.randn(K, 8).t(), WEIGHT) == []
    assert launched(torch.randn(16, K)[::2], WEIGHT) == [WIDE]


def test_a_bias_is_added_by_kernels_that_were_measured_with_it(launched: Launched) -> None:
    x, weight = torch.randn(8, K, dtype=torch.bfloat16), WEIGHT.bfloat16()
    assert launched(x, weight, torch.randn(N, dtype=torch.bfloat16)) == [WIDE]
    assert launched(x, weight) == [], "not measured without a bias"
    assert launched(torch.randn(8, K), WEIGHT, torch.randn(N)) == []


def test_nothing_is_computed_for_no_rows(launched: Launched) -> None:
    for shape in ((0, K), (2, 0, K), (0, 2, K)):
        assert launched(torch.randn(*shape), WEIGHT) == []
    assert launched(torch.randn(8, 0), torch.randn(N, 0)) == []


def test_parameters_are_weights_too(launched: Launched) -> None:
    assert launched(torch.randn(8, K), torch.nn.Parameter(WEIGHT)) == [WIDE]
    with torch.inference_mode():
        assert launched(torch.randn(8, K), torch.nn.Parameter(WEIGHT)) == [WIDE]
    with torch.enable_grad():
        assert launched(torch.randn(8, K), torch.nn.Parameter(WEIGHT, requires_grad=False)) == [
            WIDE
        ]


def test_a_weight_may_change_between_calls(launched: Launched) -> None:
    weight, x = torch.nn.Parameter(WEIGHT.clone()), torch.randn(8, K)
    assert launched(x, weight) == [WIDE]
    weight.data = torch.randn(N, K)
    assert launched(x, weight) == [WIDE]
    weight.data = torch.randn(K, N).t()
    assert launched(x, weight) == []
    weight.data = torch.randn(N + 1, K)
    assert launched(x, weight) == []
    weight.data = torch.randn(N, K, dtype=torch.float64)
    assert launched(x.double(), weight) == []
    weight.data = WEIGHT.clone()
    assert launched(x, weight) == [WIDE]


def test_gradients_are_torchs(session: InductorSession) -> None:
    session.record.forget()
    with torch.enable_grad():
        for x, weight in (
            (torch.randn(8, K, requires_grad=True), WEIGHT),
            (torch.randn(8, K), torch.nn.Parameter(WEIGHT)),
        ):
            assert nvgemm_runtime.linear(x, weight).requires_grad
    assert session.record.lines() == []


def test_autocast_is_torchs(session: InductorSession) -> None:
    session.record.forget()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nvgemm_runtime.linear(torch.randn(8, K), WEIGHT).dtype is torch.bfloat16
    assert session.record.lines() == []


def test_compiled_code_traces_torchs_function(session: InductorSession) -> None:
    def function(x: Tensor) -> Tensor:
        return nvgemm_runtime.linear(x, WEIGHT) + 1

    x = torch.randn(8, K)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), F.linear(x, WEIGHT) + 1)
    assert F.linear in graphs[0] or torch._C._nn.linear in graphs[0]
    session.record.forget()
    traced = make_fx(function)(x)
    assert any("aten" in str(node.target) for node in traced.graph.nodes)
    scripted = torch.jit.trace(function, x, check_trace=False)
    assert "linear" in str(scripted.graph)
    assert session.record.lines() == []

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    for strict in (False, True):
        exported = torch.export.export(Model(), (x,), strict=strict)
        assert "aten.linear.default" in exported.graph_module.code


def test_the_signature_is_torchs_own() -> None:
    parameters = inspect.signature(nvgemm_runtime.linear).parameters
    assert list(parameters)[1:] == ["weight", "bias"]
    assert parameters["bias"].default is None
