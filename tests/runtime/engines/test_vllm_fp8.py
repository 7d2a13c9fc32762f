"""The class that the plug-in adds to vLLM's fp8 Linears."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cpu_kernels
import cpu_provider
import tuning_bench
from fake_engines import FakeEngine
from inductor_session import InductorSession
from kernels_by_m import COMPUTED_BY, TIMES
from measured_bundles import write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.engines import vllm_plugin
from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.gemm.types import ScaleRecipe

N, K = 32, 64
FP8 = torch.float8_e4m3fn
Tensor = torch.Tensor
MakeVllm = Callable[..., FakeEngine]
RECIPES = {"tensor": ScaleRecipe.FP32_TENSOR, "row": ScaleRecipe.FP32_ROW}


@dataclass(frozen=True)
class GroupShape:
    """As vLLM's."""

    row: int
    col: int

    def is_per_tensor(self) -> bool:
        return (self.row, self.col) == (-1, -1)

    def is_per_token(self) -> bool:
        return (self.row, self.col) == (1, -1)

    def is_per_channel(self) -> bool:
        return (self.row, self.col) == (-1, 1)


TENSOR, TOKEN, CHANNEL = GroupShape(-1, -1), GroupShape(1, -1), GroupShape(-1, 1)
SHAPES = {"tensor": (TENSOR, TENSOR), "row": (TOKEN, CHANNEL)}


def config(a: GroupShape, b: GroupShape, n: int = N, k: int = K) -> SimpleNamespace:
    """VLLM's description of a Linear."""
    a_key, b_key = (
        SimpleNamespace(dtype=FP8, scale=SimpleNamespace(group_shape=s)) for s in (a, b)
    )
    return SimpleNamespace(
        activation_quant_key=a_key,
        weight_quant_key=b_key,
        weight_shape=(n, k),
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
    )


@pytest.fixture(scope="module")
def measured(
    kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    @functools.cache
    def make(recipe: str) -> Path:
        directory = tmp_path_factory.mktemp(recipe)
        served = cpu_kernels.signature("tn", operand=DType.FP8_E4M3, scales=RECIPES[recipe])
        problems = [cpu_provider.problem_of(served, (m, N, K)) for m in TIMES]
        built = tuning_bench.build(problems, directory / "built", kernel_cache)
        return write_measured(built, directory / "measured" / "fp8.nvgemm", TIMES)

    return make


@pytest.fixture
def linears(
    session: InductorSession, vllm: MakeVllm, measured: Callable[[str], Path]
) -> Callable[[str], tuple[FakeEngine, Any]]:
    """Finds the kernels for a recipe; returns vLLM and its module with the list."""
    from nvgemm_runtime.engines import vllm_fp8

    def use(recipe: str) -> tuple[FakeEngine, Any]:
        session.use(measured(recipe))
        session.monkeypatch.setattr(vllm_fp8, "_calls", {})
        engine = vllm()
        vllm_plugin.activate()
        return engine, engine("model_executor.kernels.linear")

    return use


def operands(recipe: str, m: int) -> dict[str, Any]:
    a, weight = torch.randn(m, K).to(FP8), torch.randn(N, K).to(FP8)
    if recipe == "tensor":
        scales = torch.tensor([0.5]), torch.tensor([2.0])
    else:
        scales = torch.rand(m, 1) + 0.5, torch.rand(N, 1) + 0.5
    names = {"A": a, "B": weight.t(), "As": scales[0], "Bs": scales[1], "bias": None}
    return {**names, "out_dtype": torch.bfloat16, "output_shape": [m, N]}


def expected(one: dict[str, Any]) -> torch.Tensor:
    scaled = (one["A"].float() * one["As"]) @ (one["B"].float() * one["Bs"].reshape(1, -1))
    return scaled.bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
def test_dispatches_by_m_and_leaves_the_rest_to_vllm(
    session: InductorSession, linears: Callable[[str], tuple[FakeEngine, Any]], recipe: str
) -> None:
    engine, kernels = linears(recipe)
    linear = kernels.choose(config(*SHAPES[recipe]))
    assert isinstance(linear, kernels.CutlassFP8ScaledMMLinearKernel)
    for m, operator in {0: None, 1: None, **COMPUTED_BY}.items():
        session.record.forget()
        engine("_custom_ops").calls.clear()
        one = operands(recipe, m)
        torch.testing.assert_close(
            linear.apply_scaled_mm(**one), expected(one), rtol=1e-2, atol=1e-2
        )
        assert session.record.lines() == ([] if operator is None else [operator]), m
        assert engine("_custom_ops").calls == ([m] if operator is None else [])


@pytest.mark.parametrize("recipe", RECIPES)
def test_is_an_operator_in_compiled_graphs(
    session: InductorSession, linears: Callable[[str], tuple[FakeEngine, Any]], recipe: str
) -> None:
    _, kernels = linears(recipe)
    linear = kernels.choose(config(*SHAPES[recipe]))

    @torch.compile(fullgraph=True, dynamic=True)
    def compute(
        a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
    ) -> Any:
        shape = [a.shape[0], N]
        options = {"out_dtype": torch.bfloat16, "bias": None, "output_shape": shape}
        return linear.apply_scaled_mm(A=a, B=b, As=a_scale, Bs=b_scale, **options) * 2

    for m in (8, 20, 100):
        session.record.forget()
        one = operands(recipe, m)
        result = compute(one["A"], one["B"], one["As"], one["Bs"])
        torch.testing.assert_close(result, 2 * expected(one), rtol=1e-2, atol=1e-2)
        operator = {8: COMPUTED_BY[8], 20: COMPUTED_BY[20], 100: None}[m]
        assert session.record.lines() == ([] if operator is None else [operator])


def test_a_bias_without_a_measured_kernel_is_left_to_vllm(
    session: InductorSession, linears: Callable[[str], tuple[FakeEngine, Any]]
) -> None:
    engine, kernels = linears("tensor")
    linear = kernels.choose(config(*SHAPES["tensor"]))
    one = operands("tensor", 8) | {"bias": torch.randn(N, dtype=torch.bfloat16)}
    session.record.forget()
    result = linear.apply_scaled_mm(**one)
    torch.testing.assert_close(result, expected(one) + one["bias"], rtol=2e-2, atol=5e-2)
    assert session.record.lines() == []
    assert engine("_custom_ops").calls == [8]


@pytest.mark.parametrize(
    ("a", "b", "n", "k", "reason"),
    [
        (TENSOR, CHANNEL, N, K, "takes scales per tensor, or per token and channel"),
        (TENSOR, TENSOR, 48, K, "has no measured kernel for n 48, k 64"),
        (TENSOR, TENSOR, N, 72, "takes n and k that are multiples of 16, not 32 and 72"),
        (TOKEN, CHANNEL, N, K, "has no measured kernel for n 32, k 64"),
    ],
)
def test_leaves_other_linears_to_vllms_class(
    linears: Callable[[str], tuple[FakeEngine, Any]],
    a: GroupShape,
    b: GroupShape,
    n: int,
    k: int,
    reason: str,
) -> None:
    _, kernels = linears("tensor")
    described = config(a, b, n, k)
    assert type(kernels.choose(described)) is kernels.CutlassFP8ScaledMMLinearKernel
    own = kernels._POSSIBLE_FP8_KERNELS[kernels.PlatformEnum.CUDA][1]
    is_served, why = own.can_implement(described)
    assert not is_served
    assert why.startswith(reason)


@pytest.mark.parametrize("variable", ["NVGEMM_AOT_DEFAULT_MODE", "NVGEMM_AOT_MAX_CHOICES"])
def test_settings_leave_every_linear_to_vllms_class(
    session: InductorSession, linears: Callable[[str], tuple[FakeEngine, Any]], variable: str
) -> None:
    _, kernels = linears("tensor")
    served = kernels.choose(config(TENSOR, TENSOR))
    assert type(served) is not kernels.CutlassFP8ScaledMMLinearKernel
    session.monkeypatch.setenv(variable, "0")
    assert type(kernels.choose(config(TENSOR, TENSOR))) is kernels.CutlassFP8ScaledMMLinearKernel


@pytest.mark.parametrize(
    "why", ["disabled", "batch invariance", "communication", "preferred", "an internal error"]
)
def test_stays_out(
    linears: Callable[[str], tuple[FakeEngine, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    engine, kernels = linears("tensor")
    chosen = kernels.CutlassFP8ScaledMMLinearKernel
    if why == "disabled":
        monkeypatch.setattr(engine("envs"), "VLLM_DISABLED_KERNELS", [chosen.__name__])
        chosen = type(None)
    elif why == "batch invariance":
        monkeypatch.setattr(engine("envs"), "VLLM_BATCH_INVARIANT", True)
    elif why == "communication":
        passes = SimpleNamespace(pass_config=SimpleNamespace(fuse_gemm_comms=True))
        current = SimpleNamespace(compilation_config=passes)
        monkeypatch.setattr(engine("config"), "current", current)
    elif why == "preferred":
        first = chosen = kernels.FlashInferFP8ScaledMMLinearKernel
        monkeypatch.setattr(first, "can_implement", classmethod(lambda *_: (True, None)))
        monkeypatch.setattr(first, "__init__", lambda *_: None)
    else:
        monkeypatch.delattr(engine("envs"), "VLLM_BATCH_INVARIANT")
    assert type(kernels.choose(config(TENSOR, TENSOR))) is chosen
    if why == "an internal error":
        assert "an fp8 Linear stays with vLLM: AttributeError" in caplog.messages[0]
    assert bool(caplog.messages) == (why == "an internal error")
