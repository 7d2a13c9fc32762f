"""Products with block scales without max-autotune, by both of torch's operators for them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from microscaling import dequantise, quantise, swizzle

import cpu_kernels
import cpu_provider
import nvgemm_runtime
import tuning_bench
from inductor_session import InductorSession
from measured_bundles import ATEN, write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.errors import RequiredError
from nvgemm_runtime.gemm.problem import DType, Signature
from nvgemm_runtime.gemm.types import ScaleRecipe
from nvgemm_runtime.recording.recorder import Recorder

Tensor = torch.Tensor

N, K = 32, 128
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

pytestmark = pytest.mark.usefixtures("counted_anew", "default_mode")

KINDS: dict[str, tuple[torch.dtype, torch.dtype, int, Signature, int]] = {
    "mxfp8": (
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        32,
        cpu_kernels.signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.E8M0_1X32),
        3,
    ),
    "nvfp4": (
        torch.float4_e2m1fn_x2,
        torch.float8_e4m3fn,
        16,
        cpu_kernels.signature("tn", operand=DType.FP4_E2M1, scales=ScaleRecipe.E4M3_1X16),
        2,
    ),
}
"""By name: types of values and scales, values a scale, a signature, and ``ScalingType``'s value."""

WITHOUT_E8M0 = RELEASE < (2, 13)
"""Torch 2.11 and 2.12 keep the later operator with scales of that type from every lowering."""

SQUARE, WIDE, ONE = "Cpu_16x16", "Cpu_8x32", "Cpu_1x1"

TIMES = {
    16: {SQUARE: 300, WIDE: 500, ONE: 600, ATEN: 1000},
    32: {SQUARE: 500, WIDE: 300, ONE: 600, ATEN: 1000},
    64: {SQUARE: 500, WIDE: 500, ONE: 600, ATEN: 200},
}


Measured = Callable[[Signature], Path]


@pytest.fixture(scope="module")
def measured(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Makes a bundle of one signature's kernels, measured as `TIMES` says."""

    @functools.cache
    def make(signature: Signature) -> Path:
        directory = tmp_path_factory.mktemp("scaled")
        directory.chmod(0o755)
        problems = [cpu_provider.problem_of(signature, (m, N, K)) for m in TIMES]
        built = tuning_bench.build(problems, directory / "built", kernel_cache)
        return write_measured(built, directory / "measured" / "scaled.nvgemm", TIMES)

    return make


@pytest.fixture
def default_mode(inductor: InductorSession) -> Iterator[None]:
    inductor.monkeypatch.delenv("NVGEMM_AOT_DEFAULT_MODE", raising=False)
    with torch._inductor.config.patch(max_autotune=False, max_autotune_gemm=False):
        yield


def blocks(name: str, m: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Operands with their scales, and what comes of them."""
    dtype, scale, block, _, _ = KINDS[name]
    a, scale_a = quantise(torch.randn(m, K), dtype, scale, block)
    b, scale_b = quantise(torch.randn(N, K), dtype, scale, block)
    wanted = dequantise(a, scale_a, block) @ dequantise(b, scale_b, block).t()
    return (a, b.t(), swizzle(scale_a), swizzle(scale_b)), wanted.bfloat16()


def first(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)


def second(name: str) -> Callable[..., Tensor]:
    """What ``torch.nn.functional.scaled_mm`` calls."""
    kind = KINDS[name][4]

    def call(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        given = [scale_a], [kind], [1], [scale_b], [kind], [1]
        result: Tensor = torch.ops.aten._scaled_mm_v2(a, b, *given, None, torch.bfloat16)
        return result

    return call


CALLS = [
    pytest.param(
        name,
        operator,
        id=f"{name} {operator}",
        marks=[pytest.mark.slow] if name == "mxfp8" else [],  # more kernels to compile
    )
    for name in KINDS
    for operator in ("_scaled_mm", "_scaled_mm_v2")
    if not (WITHOUT_E8M0 and (name, operator) == ("mxfp8", "_scaled_mm_v2"))
]


def call_of(name: str, operator: str) -> Callable[..., Tensor]:
    return first if operator == "_scaled_mm" else second(name)


@pytest.mark.parametrize(("name", "operator"), CALLS)
def test_both_operators_get_the_kernel_that_was_measured_to_be_the_fastest(
    inductor: InductorSession, measured: Measured, timed: list[str], name: str, operator: str
) -> None:
    inductor.use(measured(KINDS[name][3]))
    arguments, wanted = blocks(name, 32)
    compiled = inductor.compile(call_of(name, operator), *arguments)
    torch.testing.assert_close(compiled.result, wanted, rtol=2**-7, atol=1e-3)
    assert compiled.launched == (WIDE,)
    assert timed == []
    counted = nvgemm_runtime.stats()
    assert (counted.met, counted.declared, dict(counted.misses)) == (1, 1, {})


@pytest.mark.parametrize(("name", "operator"), CALLS)
def test_both_operators_get_the_kernel_of_each_size(
    inductor: InductorSession,
    measured: Measured,
    timed: list[str],
    tmp_path: Path,
    name: str,
    operator: str,
) -> None:
    inductor.use(measured(KINDS[name][3]))
    record = tmp_path / "recorded.yaml"
    inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD", str(record))
    arguments, wanted = blocks(name, 32)
    torch._dynamo.mark_dynamic(arguments[0], 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = inductor.compile(call_of(name, operator), *arguments, dynamic=None)
        torch.testing.assert_close(compiled.result, wanted, rtol=2**-7, atol=1e-3)
        for m, used in {16: SQUARE, 32: WIDE}.items():
            arguments, wanted = blocks(name, m)
            result = compiled.function(*arguments)
            torch.testing.assert_close(result, wanted, rtol=2**-7, atol=1e-3)
            assert inductor.launched(compiled.function, *arguments) == (used,)
    assert timed == []
    counted = nvgemm_runtime.stats()
    assert (counted.met, counted.declared, dict(counted.misses)) == (1, 1, {})
    assert list(Recorder(record).read().problems.values()) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [ScaleRecipe.FP32_TENSOR, ScaleRecipe.FP32_ROW])
def test_the_later_operator_with_scales_that_inductor_knows(
    inductor: InductorSession, measured: Measured, timed: list[str], recipe: ScaleRecipe
) -> None:
    served = cpu_kernels.signature("tn", operand=DType.FP8_E4M3, scales=recipe)
    inductor.use(measured(served))
    is_row = recipe is ScaleRecipe.FP32_ROW

    def call(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        given = [scale_a], [int(is_row)], [0], [scale_b], [int(is_row)], [0]
        result: Tensor = torch.ops.aten._scaled_mm_v2(
            a, b, *given, None, torch.bfloat16, use_fast_accum=True
        )
        return result

    a, b = (torch.randn(extent, K).to(torch.float8_e4m3fn) for extent in (32, N))
    scales = (torch.rand(32, 1), torch.rand(1, N)) if is_row else (torch.rand(()), torch.rand(()))
    compiled = inductor.compile(call, a, b.t(), *scales)
    wanted = (a.float() @ b.t().float() * scales[0] * scales[1]).bfloat16()
    torch.testing.assert_close(compiled.result, wanted, rtol=2**-7, atol=1e-3)
    assert compiled.launched == (WIDE,)
    assert timed == []


def test_where_aten_won_the_call_is_left_to_inductor(
    inductor: InductorSession, measured: Measured
) -> None:
    inductor.use(measured(KINDS["nvfp4"][3]))
    with contextlib.suppress(Exception):  # ATen has it on GPUs alone, and torch 2.13 nowhere
        inductor.compile(second("nvfp4"), *blocks("nvfp4", 64)[0])
    counted = nvgemm_runtime.stats()
    assert (counted.met, counted.declared, sum(counted.won.values())) == (1, 1, 0)


def miss(inductor: InductorSession, call: Callable[..., Any], *arguments: Tensor) -> str:
    with contextlib.suppress(Exception):  # as above
        inductor.compile(call, *arguments)
    (reason,) = nvgemm_runtime.stats().misses
    return reason


def test_a_second_level_of_scales_is_a_miss(inductor: InductorSession, measured: Measured) -> None:
    def two_levels(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, one: Tensor) -> Tensor:
        given = [scale_a, one], [2, 0], [1, 0], [scale_b, one], [2, 0], [1, 0]
        result: Tensor = torch.ops.aten._scaled_mm_v2(a, b, *given, None, torch.bfloat16)
        return result

    inductor.use(measured(KINDS["nvfp4"][3]))
    arguments, _ = blocks("nvfp4", 32)
    assert miss(inductor, two_levels, *arguments, torch.ones(())) == (
        "scales have 2 levels, kernels take 1"
    )


def test_generated_cpp_is_a_miss_and_an_error_where_kernels_are_required(
    inductor: InductorSession, measured: Measured
) -> None:
    inductor.use(measured(KINDS["nvfp4"][3]))
    arguments, _ = blocks("nvfp4", 32)
    with torch._inductor.config.patch(cpp_wrapper=True):
        assert miss(inductor, second("nvfp4"), *arguments) == (
            "generated C++ cannot call ATen's _scaled_mm_v2 with an existing tensor as its result"
        )
        torch._dynamo.reset()
        with pytest.raises(
            Exception, match="forbids compiling this declared problem without its kernel"
        ) as caught:
            inductor.compile(second("nvfp4"), *arguments, options={"nvgemm_aot_mode": "required"})
    assert isinstance(caught.value, RequiredError) or "RequiredError" in str(caught.value)
