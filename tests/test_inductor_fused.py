"""Sums with an activation: a kernel for both where that is faster, and nothing else touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch.nn import functional

import cpu_kernels
import cpu_provider
import recording_kernels
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.cache import Cache
from nvgemm_aot.pipeline import BuiltBundle
from nvgemm_runtime.epilogue import Epilogue
from nvgemm_runtime.problem import DType

Tensor = torch.Tensor

M, N, K = 16, 32, 64
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def build(
    provider: recording_kernels.Recording | None, cache: Cache, directory: Path
) -> BuiltBundle:
    served = [
        cpu_kernels.signature("tn", operand=operand, epilogue=epilogue)
        for operand in (DType.BF16, DType.FP16)
        for epilogue in (Epilogue.BIAS_RELU, Epilogue.BIAS_GELU_TANH, Epilogue.BIAS_SILU)
    ]
    problems = [cpu_provider.problem_of(one, (M, N, K)) for one in served]
    return recording_kernels.build_recording(problems, directory, cache, provider)


@pytest.fixture(scope="module")
def fused(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Recording kernels with each activation."""
    return build(None, kernel_cache, tmp_path_factory.mktemp("fused"))


@pytest.fixture(scope="module")
def sleeping(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Kernels with each activation that take 100 ms."""
    return build(
        recording_kernels.Sleeping(), kernel_cache, tmp_path_factory.mktemp("sleeping-fused")
    )


@pytest.fixture
def session(inductor: InductorSession, fused: BuiltBundle) -> InductorSession:
    inductor.use(fused.path)
    inductor.slow_down_aten()
    return inductor


@pytest.fixture
def events(inductor: InductorSession, tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    path = tmp_path / "events"
    inductor.monkeypatch.setenv("NVGEMM_AOT_EXPLAIN", str(path))
    return lambda: list(map(json.loads, path.open())) if path.exists() else []


def layer(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    return torch.nn.Linear(K, N, dtype=dtype).requires_grad_(False)


def once_rounded(linear: torch.nn.Linear, x: Tensor, activation: str) -> Tensor:
    assert linear.bias is not None
    product = x.float() @ linear.weight.float().t() + linear.bias.float()
    return ACTIVATIONS[activation](product).to(x.dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("lead", [(M,), (2, M // 2)], ids=["matrix", "batch"])
def test_a_fused_kernel_that_is_faster_computes(
    session: InductorSession,
    fused: BuiltBundle,
    events: Callable[[], list[dict[str, Any]]],
    activation: str,
    lead: tuple[int, ...],
) -> None:
    linear, function = layer(), ACTIVATIONS[activation]
    x = torch.randn(*lead, K, dtype=torch.bfloat16)
    compiled = session.compile(lambda x: function(linear(x)), x)
    torch.testing.assert_close(compiled.result, once_rounded(linear, x, activation))
    assert len(compiled.launched) == 1
    code = compiled.code[-1]  # before it, what it competes with was compiled
    key = f"mm/tn/bf16xbf16/fp32/bf16/bias_{activation}"
    (kernel,) = [one for one in fused.header.kernels if one.signature.key == key]
    name = f"nvgemm_addmm_{activation}_{kernel.id[:12]}"
    assert name in code
    assert "extern_kernels" not in code.partition("def call")[2]
    met, timed, used = events()
    assert met["gemm"] == used["gemm"] == f"{key}/m16n32k64"
    assert (met["basis"], used["name"]) == ("declared", name)
    assert len(timed["times_ms"]) == 2


@pytest.mark.parametrize(
    "expression",
    [
        lambda a, b, c: functional.relu(a @ b.t() + c),
        lambda a, b, c: functional.relu(c + a @ b.t()),
        lambda a, b, c: functional.relu(a.view(2, M // 2, K) @ b.t() + c),
    ],
    ids=["product and bias", "bias and product", "three dimensions"],
)
def test_a_product_and_a_sum(session: InductorSession, expression: Callable[..., Tensor]) -> None:
    a, b, c = (torch.randn(shape).half() for shape in ((M, K), (N, K), (N,)))
    compiled = session.compile(expression, a, b, c)
    torch.testing.assert_close(
        compiled.result.float(), expression(a.float(), b.float(), c.float()), rtol=2**-9, atol=1e-3
    )
    assert len(compiled.launched) == 1


def test_a_fused_kernel_that_is_slower_leaves_the_graph_as_it_was(
    inductor: InductorSession, sleeping: BuiltBundle
) -> None:
    linear = layer()
    x = torch.randn(M, K, dtype=torch.bfloat16)
    inductor.use()
    without = inductor.compile(lambda x: functional.silu(linear(x)), x)
    torch._dynamo.reset()
    inductor.use(sleeping.path)
    compiled = inductor.compile(lambda x: functional.silu(linear(x)), x)
    assert torch.equal(compiled.result, without.result)
    assert compiled.launched == ()
    assert calls(compiled.code[-1]) == calls(without.code[-1])
    assert "nvgemm_aot_gemm" not in compiled.code[-1]


def calls(code: str) -> list[str]:
    """What a generated module runs: ATen's calls, and those of loops, which are named by graphs."""
    body = code.partition("def call(")[2].partition("runner =")[0]
    lines = [line.strip() for line in body.splitlines()]
    return ["loop" if "cpp_fused" in line else line for line in lines if "(" in line]


def test_the_sum_without_its_activation_may_win(
    inductor: InductorSession,
    sleeping: BuiltBundle,
    kernel_cache: Cache,
    tmp_path: Path,
) -> None:
    """The unfused best is found as always: here a bundled kernel that adds the bias."""
    served = cpu_kernels.signature("tn", operand=DType.BF16, epilogue=Epilogue.BIAS)
    plain = recording_kernels.build_recording(
        [cpu_provider.problem_of(served, (M, N, K))], tmp_path / "plain", kernel_cache
    )
    inductor.use(sleeping.path, plain.path)
    inductor.slow_down_aten()
    linear = layer()
    x = torch.randn(M, K, dtype=torch.bfloat16)
    compiled = inductor.compile(lambda x: functional.relu(linear(x)), x)
    torch.testing.assert_close(compiled.result, once_rounded(linear, x, "relu"))
    assert len(compiled.launched) == 1
    assert f"nvgemm_addmm_{plain.header.kernels[0].id[:12]}(" in compiled.code[-1]


def scaled(linear: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.relu(torch.addmm(linear.bias, x, linear.weight.t(), beta=2))


def again(linear: torch.nn.Linear) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        total = linear(x)
        return total, functional.relu(total)

    return function


LEFT_ALONE: dict[str, Callable[[torch.nn.Linear], Callable[[Tensor], Any]]] = {
    "the sum is used again": again,
    "exact gelu": lambda linear: lambda x: functional.gelu(linear(x)),
    "a scaled sum": scaled,
    "a matrix is added": lambda linear: lambda x: functional.relu(x[:, :N] + x @ linear.weight.t()),
    "no bias": lambda linear: lambda x: functional.relu(x @ linear.weight.t()),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_graphs_are_left_alone(session: InductorSession, name: str) -> None:
    function = LEFT_ALONE[name](layer())
    x = torch.randn(M, K, dtype=torch.bfloat16)
    compiled = session.compile(function, x)
    torch.testing.assert_close(compiled.result, function(x), rtol=2**-7, atol=1e-2)
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]


@pytest.mark.parametrize(
    "settings",
    [{"max_autotune_gemm": False}, {"emulate_precision_casts": True}, {"deterministic": True}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_leave_graphs_alone(
    session: InductorSession,
    events: Callable[[], list[dict[str, Any]]],
    settings: dict[str, bool],
) -> None:
    linear = layer()
    x = torch.randn(M, K, dtype=torch.bfloat16)
    with config.patch(settings):
        compiled = session.compile(lambda x: functional.silu(linear(x)), x)
    assert compiled.launched == ()
    assert not [event for event in events() if "silu" in event["gemm"]]


def test_a_change_of_m_compiles_nothing(session: InductorSession) -> None:
    linear = layer()
    x = torch.randn(M, K, dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = session.compile(lambda x: functional.relu(linear(x)), x, dynamic=None)
    launches = 1 if RELEASE >= (2, 13) else 0  # earlier ones are left alone
    for m in (16, 33, 7):
        x = torch.randn(m, K, dtype=torch.bfloat16)
        torch.testing.assert_close(
            compiled.function(x), once_rounded(linear, x, "relu"), rtol=2**-7, atol=1e-2
        )
        assert len(session.launched(compiled.function, x)) == launches


def test_operands_that_the_kernel_cannot_take_go_to_aten(session: InductorSession) -> None:
    linear = layer()
    flat = torch.randn(M * K + 1, dtype=torch.bfloat16)
    compiled = session.compile(lambda x: functional.silu(linear(x)), flat[:-1].view(M, K))
    assert len(compiled.launched) == 1
    unaligned = flat[1:].view(M, K)
    torch.testing.assert_close(compiled.function(unaligned), functional.silu(linear(unaligned)))
    assert session.launched(compiled.function, unaligned) == ()


def test_required_is_met_by_a_fused_kernel(
    session: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    linear = layer()
    x = torch.randn(M, K, dtype=torch.bfloat16)
    compiled = session.compile(
        lambda x: functional.relu(linear(x)), x,
        options={"max_autotune_gemm": True, "nvgemm_aot_mode": "required"},
    )  # fmt: skip
    assert len(compiled.launched) == 1
    assert warnings_of(caplog) == []


def test_training_is_right(session: InductorSession) -> None:
    linear = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    x = torch.randn(M, K, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: functional.relu(linear(x)), dynamic=False)
    compiled(x).sum().backward()
    assert linear.weight.grad is not None
    gradient = linear.weight.grad.clone()
    linear.weight.grad = None
    functional.relu(linear(x)).sum().backward()
    torch.testing.assert_close(gradient, linear.weight.grad)
