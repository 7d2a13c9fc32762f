"""Sums with an activation: a kernel for both where that is faster, and nothing else touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch.nn import functional

import cpu_kernels
import cpu_provider
import nvgemm_runtime
import recording_kernels
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.workload.decisions import collect
from nvgemm_runtime.gemm.epilogues import BIAS, Epilogue
from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.recording.recorder import Recorder

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
        for epilogue in (
            Epilogue.parse("bias_relu"),
            Epilogue.parse("bias_gelu_tanh"),
            Epilogue.parse("bias_silu"),
        )
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


@pytest.fixture(autouse=True)
def triton(inductor: InductorSession) -> Iterator[None]:
    """Triton's choices may round once, so that kernels may; on the CPU there are none of them."""
    with config.patch(max_autotune_gemm_backends="ATEN,TRITON"):
        yield


@pytest.fixture
def session(inductor: InductorSession, fused: BuiltBundle) -> InductorSession:
    inductor.use(fused.path)
    inductor.slow_down_aten()
    return inductor


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(K, N, dtype=torch.bfloat16).requires_grad_(False)


def rows(count: int = M) -> Tensor:
    return torch.randn(count, K, dtype=torch.bfloat16)


def once_rounded(linear: torch.nn.Linear, x: Tensor, activation: str) -> Tensor:
    assert linear.bias is not None
    product = x.float() @ linear.weight.float().t() + linear.bias.float()
    return ACTIVATIONS[activation](product).to(x.dtype)


@pytest.mark.parametrize(
    ("activation", "lead"),
    [
        *((activation, (M,)) for activation in ACTIVATIONS),
        pytest.param("silu", (2, M // 2), id="batch", marks=pytest.mark.slow),
    ],
)
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
    timed, met, used = events()
    assert met["gemm"] == used["gemm"] == f"{key}/m16n32k64"
    assert (met["basis"], used["name"]) == ("declared", name)
    assert len(timed["times_ms"]) == 2


@pytest.mark.parametrize(
    "expression",
    [
        pytest.param(lambda a, b, c: functional.relu(a @ b.t() + c), marks=pytest.mark.slow),
        pytest.param(lambda a, b, c: functional.relu(c + a @ b.t()), marks=pytest.mark.slow),
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
    linear, x = layer(), rows()
    inductor.use()
    without = inductor.compile(lambda x: functional.silu(linear(x)), x)
    torch._dynamo.reset()
    inductor.use(sleeping.path)
    compiled = inductor.compile(lambda x: functional.silu(linear(x)), x)
    assert torch.equal(compiled.result, without.result)
    assert compiled.launched == ()
    assert calls(compiled.code[-1]) == calls(without.code[-1])
    assert "nvgemm_aot_gemm" not in compiled.code[-1]


@pytest.mark.slow
def test_a_fused_kernel_that_is_slower_leaves_one_gemm_counted(
    inductor: InductorSession, sleeping: BuiltBundle, events: Callable[[], list[dict[str, Any]]]
) -> None:
    linear, x = layer(), rows()
    inductor.use(sleeping.path)
    nvgemm_runtime.reset_stats()
    inductor.compile(lambda x: functional.silu(linear(x)), x)
    stats = nvgemm_runtime.stats()
    assert (stats.met, stats.missed) == (1, 1), "the sum, for which no kernel is bundled"
    met = collect(events())
    assert sum(gemm.graphs for gemm in met) == 1
    [tried] = [gemm for gemm in met if not gemm.graphs]
    assert tried.gemm == "mm/tn/bf16xbf16/fp32/bf16/bias_silu/m16n32k64"
    assert (tried.basis, len(tried.offered), tried.fastest in tried.offered) == (
        "declared", 1, False,
    )  # fmt: skip


def calls(code: str) -> list[str]:
    """What a generated module runs: ATen's calls, and those of loops, which are named by graphs."""
    body = code.partition("def call(")[2].partition("runner =")[0]
    lines = [line.strip() for line in body.splitlines()]
    return ["loop" if "cpp_fused" in line else line for line in lines if "(" in line]


@pytest.mark.slow
def test_the_sum_without_its_activation_may_win(
    inductor: InductorSession,
    sleeping: BuiltBundle,
    kernel_cache: Cache,
    tmp_path: Path,
) -> None:
    """The unfused best is found as always: here a bundled kernel that adds the bias."""
    served = cpu_kernels.signature("tn", operand=DType.BF16, epilogue=BIAS)
    plain = recording_kernels.build_recording(
        [cpu_provider.problem_of(served, (M, N, K))], tmp_path / "plain", kernel_cache
    )
    inductor.use(sleeping.path, plain.path)
    inductor.slow_down_aten()
    linear, x = layer(), rows()
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


def of_product(
    expression: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[torch.nn.Linear], Callable[[Tensor], Any]]:
    """An expression of a product without its bias, and of the bias."""
    return lambda linear: lambda x: expression(x @ linear.weight.t(), linear.bias)


LEFT_ALONE: dict[str, Callable[[torch.nn.Linear], Callable[[Tensor], Any]]] = {
    "the sum is used again": again,
    "its result is used by a sum": lambda linear: lambda x: functional.silu(linear(x)) + x[:, :N],
    "exact gelu": lambda linear: lambda x: functional.gelu(linear(x)),
    "a scaled sum": scaled,
    "a matrix is added": lambda linear: lambda x: functional.relu(x[:, :N] + x @ linear.weight.t()),
    "no bias": lambda linear: lambda x: functional.relu(x @ linear.weight.t()),
    "a number is added": of_product(lambda y, c: functional.relu(y + 1.0)),
    "a row along another dimension": of_product(
        lambda y, c: functional.relu(y.reshape(M, N, 1) + c)
    ),
    "a row for each value": of_product(lambda y, c: functional.relu(y.reshape(M * N, 1) + c)),
    "a broadcast product": of_product(
        lambda y, c: functional.relu(y.reshape(M, 1, N) + c.expand(M, N))
    ),
    "another row length": of_product(
        lambda y, c: functional.relu(y.reshape(M * 2, N // 2) + c[: N // 2])
    ),
    "a column": of_product(lambda y, c: functional.relu(y + c[:M, None])),
    "one row and a matrix": lambda linear: (
        lambda x: functional.relu(x[:1] @ linear.weight.t() + x[:, :N])
    ),
}


@pytest.mark.slow
def test_other_graphs_are_left_alone(
    session: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    """All in one compilation, with operands of its own for each, so that none meets another."""
    functions = [make(layer()) for make in LEFT_ALONE.values()]

    def results(*given: Tensor) -> Any:
        return [function(x) for function, x in zip(functions, given)]

    given = [rows() for _ in functions]
    compiled = session.compile(results, *given, fullgraph=True)
    torch.testing.assert_close(compiled.result, results(*given), rtol=2**-6, atol=2e-2)
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]
    assert warnings_of(caplog) == []


@pytest.mark.slow
def test_broadcast_products_of_dynamic_size_are_left_alone(session: InductorSession) -> None:
    functions = [
        of_product(expression)(layer())
        for expression in (
            lambda y, c: functional.relu(y.reshape(-1, 1) + c),
            lambda y, c: functional.silu(y.reshape(-1, N, 1) + c),
            lambda y, c: functional.relu(y.reshape(-1, 1, N) + c.expand(y.shape[0], N)),
        )
    ]

    def results(*given: Tensor) -> Any:
        return [function(x) for function, x in zip(functions, given)]

    given = [rows() for _ in functions]
    for x in given:
        torch._dynamo.mark_dynamic(x, 0)
    compiled = session.compile(results, *given, dynamic=None)
    assert compiled.launched == ()
    for count in (M, 5):
        given = [rows(count) for _ in functions]
        found = compiled.function(*given)
        torch.testing.assert_close(found, results(*given), rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize(
    "expression",
    [
        lambda y, c: functional.relu(y.reshape(M, 1, N) + c),
        pytest.param(lambda y, c: functional.relu(y + c[None]), marks=pytest.mark.slow),
        pytest.param(
            lambda y, c: functional.silu(y.reshape(2, M // 2, N) + c), marks=pytest.mark.slow
        ),
    ],
)
def test_a_row_for_each_of_a_reshaped_product(
    session: InductorSession, expression: Callable[[Tensor, Tensor], Tensor]
) -> None:
    function = of_product(expression)(layer())
    x = rows()
    compiled = session.compile(function, x)
    torch.testing.assert_close(compiled.result, function(x), rtol=2**-6, atol=2e-2)
    assert len(compiled.launched) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backends", "fused_ones"),
    [
        ("ATEN", {"relu"}),
        ("triton, aten", set(ACTIVATIONS)),
    ],
)
def test_nothing_rounds_otherwise_than_it_might_without_us(
    session: InductorSession,
    events: Callable[[], list[dict[str, Any]]],
    backends: str,
    fused_ones: set[str],
) -> None:
    linear, x = layer(), rows()
    with config.patch(max_autotune_gemm_backends=backends):
        for function in ACTIVATIONS.values():
            torch._dynamo.reset()
            torch.compile(lambda x, function=function: function(linear(x)), dynamic=False)(x)
    keys = [event["gemm"] for event in events() if event["event"] == "used"]
    assert {key.split("/")[5].removeprefix("bias_") for key in keys} == fused_ones


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_autotune_gemm": False},
        pytest.param({"emulate_precision_casts": True}, marks=pytest.mark.slow),
        pytest.param({"deterministic": True}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_leave_graphs_alone(
    session: InductorSession,
    events: Callable[[], list[dict[str, Any]]],
    settings: dict[str, bool],
) -> None:
    linear, x = layer(), rows()
    with config.patch(settings):
        compiled = session.compile(lambda x: functional.silu(linear(x)), x)
    assert compiled.launched == ()
    assert not [event for event in events() if "silu" in event["gemm"]]


def test_nothing_is_fused_where_aten_may_not_compute(session: InductorSession) -> None:
    """Inductor has no choice for the CPU then, and neither has it with bundles."""
    linear, x = layer(), rows()
    with (
        config.patch(max_autotune_gemm_backends="TRITON"),
        pytest.raises(Exception, match="No choices"),
    ):
        session.compile(lambda x: functional.relu(linear(x)), x)


@pytest.mark.slow
def test_a_change_of_m_compiles_nothing(session: InductorSession) -> None:
    linear, x = layer(), rows()
    torch._dynamo.mark_dynamic(x, 0)
    compiled = session.compile(lambda x: functional.relu(linear(x)), x, dynamic=None)
    launches = 1 if RELEASE >= (2, 13) else 0  # earlier ones are left alone
    for m in (16, 33, 7):
        x = rows(m)
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


@pytest.mark.parametrize(
    "bundle",
    [
        pytest.param(None, marks=pytest.mark.slow),
        "fused",
        pytest.param("sleeping", marks=pytest.mark.slow),
    ],
)
def test_a_recording_has_the_sum_once_whatever_wins(
    inductor: InductorSession, request: pytest.FixtureRequest, tmp_path: Path, bundle: str | None
) -> None:
    inductor.use(*([] if bundle is None else [request.getfixturevalue(bundle).path]))
    if bundle == "fused":
        inductor.slow_down_aten()
    path = tmp_path / "out.yaml"
    inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD", str(path))
    inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD_TARGET", "sm_100f")
    linear, x = layer(), rows()
    compiled = inductor.compile(lambda x: functional.relu(linear(x)), x)
    assert len(compiled.launched) == (bundle == "fused")
    recorded = Recorder(path).read().problems
    assert {problem.key: count for problem, count in recorded.items()} == {
        f"mm/tn/bf16xbf16/fp32/bf16/bias/m{M}n{N}k{K}": 1
    }


def test_required_is_met_by_a_fused_kernel(
    session: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    linear, x = layer(), rows()
    compiled = session.compile(
        lambda x: functional.relu(linear(x)), x,
        options={"max_autotune_gemm": True, "nvgemm_aot_mode": "required"},
    )  # fmt: skip
    assert len(compiled.launched) == 1
    assert warnings_of(caplog) == []


@pytest.mark.slow
def test_training_is_right(session: InductorSession) -> None:
    linear = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    x = rows()
    compiled = torch.compile(lambda x: functional.relu(linear(x)), dynamic=False)
    compiled(x).sum().backward()
    assert linear.weight.grad is not None
    gradient = linear.weight.grad.clone()
    linear.weight.grad = None
    functional.relu(linear(x)).sum().backward()
    torch.testing.assert_close(gradient, linear.weight.grad)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_rows_that_are_counted_when_the_graph_runs_cannot_be_timed_and_stay_as_they_are(
    session: InductorSession, caplog: pytest.LogCaptureFixture, activation: str
) -> None:
    linear, function = layer(), ACTIVATIONS[activation]

    def chosen(x: Tensor, mask: Tensor) -> Tensor:
        return function(linear(x[mask]))

    x = rows()
    mask = torch.arange(M) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = session.compile(chosen, x, mask, fullgraph=True)
    torch.testing.assert_close(compiled.result, once_rounded(linear, x[mask], activation))
    assert warnings_of(caplog) == []
    assert compiled.launched == ()
