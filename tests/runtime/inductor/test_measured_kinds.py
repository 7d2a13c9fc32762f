"""Measured rankings of sums, scales and groups, under torch.compile.

The numbers are put into bundles by hand, with those of ATen where it computes nothing on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from microscaling import dequantise, quantise, swizzle
from torch.nn import functional

import cpu_kernels
import cpu_provider
import nvgemm_runtime
import recording_kernels
from inductor_session import InductorSession
from nvgemm_aot.bundle.content import read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.epilogues import BIAS, Epilogue
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.gemm.types import ScaleRecipe
from tuning_bench import bench

Tensor = torch.Tensor

M, N, K = 128, 32, 64
BUNDLED_NS, APART_NS = 200, 10

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def measured(path: Path, output: Path, *, aten_ns: int, spread_ns: int = 1) -> None:
    """A bundle whose kernels take 200 ns here, the second 210 ns and so on."""
    here = bench()
    conditions = Conditions(
        driver="580.95.05",
        torch=here.versions.torch,
        cuda=here.versions.cuda,
        date="2026-11-21",
    )
    source = RankingSource(
        kind="measurement", by="a test", gpu=here.facts.name, conditions=conditions
    )
    with Bundle(path) as bundle:
        content = read_content(bundle)
    rankings = tuple(
        replace(
            ranking,
            source=source,
            kernels=tuple(
                (id_, BUNDLED_NS + rank * APART_NS) for rank, (id_, _) in enumerate(ranking.kernels)
            ),
            measured=Measured(
                spreads_ns=(spread_ns,) * len(ranking.kernels),
                aten=Timing(time_ns=aten_ns, spread_ns=1),
                triton=None,
                doubts=(),
            ),
        )
        for ranking in content.rankings
    )
    write_bundle(output, replace(content, rankings=rankings))


@dataclass(frozen=True, kw_only=True)
class Rankings:
    """Bundles in which its kernels were measured to be faster, and in which ATen was.

    Attributes:
        close: ATen was, and bundled kernels were not told apart.
    """

    bundled: Path
    aten: Path
    close: Path


@pytest.fixture(scope="module")
def rankings(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Rankings:
    served = [
        cpu_kernels.signature("tn", operand=DType.FP16, epilogue=BIAS),
        cpu_kernels.signature("tn", operand=DType.BF16, epilogue=Epilogue.parse("bias_relu")),
        cpu_kernels.signature("tn", operand=DType.BF16, out=DType.FP32),
        cpu_kernels.signature("tn", operand=DType.FP16, out=DType.FP32),
        cpu_kernels.signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_TENSOR),
        cpu_kernels.signature("tn", operand=DType.FP4_E2M1, scales=ScaleRecipe.E4M3_1X16),
        cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16),
    ]
    directory = tmp_path_factory.mktemp("kinds")
    directory.chmod(0o755)
    built = recording_kernels.build_recording(
        [cpu_provider.problem_of(one, (M, N, K)) for one in served],
        directory / "built",
        kernel_cache,
        candidates=len(cpu_provider.TILES),
    )
    made = Rankings(**{name: directory / f"{name}.nvgemm" for name in ("bundled", "aten", "close")})
    measured(built.path, made.bundled, aten_ns=2 * BUNDLED_NS)
    measured(built.path, made.aten, aten_ns=BUNDLED_NS // 2)
    measured(built.path, made.close, aten_ns=BUNDLED_NS // 2, spread_ns=APART_NS)
    return made


@pytest.fixture(autouse=True)
def trusted(inductor: InductorSession, counted_anew: None) -> None:
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")


def addmm() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    a, b = torch.randn(M, K).half(), torch.randn(N, K).half().t()
    return torch.addmm, (torch.randn(N).half(), a, b)


def tensor_wise(*, is_fast: bool = True) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=BF16, use_fast_accum=is_fast)

    a, b = torch.randn(M, K).to(FP8), torch.randn(N, K).to(FP8).t()
    return scaled, (a, b, torch.tensor(0.5), torch.tensor(3.0))


def grouped() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    ends = torch.tensor([8, 40, 40, M], dtype=torch.int32)
    a, b = torch.randn(M, K, dtype=BF16), torch.randn(4, N, K, dtype=BF16).mT
    return lambda a, b, ends: functional.grouped_mm(a, b, offs=ends), (a, b, ends)


KINDS = {"addmm": addmm, "scaled": tensor_wise, "grouped": grouped}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trusted_winner_is_taken_without_timing_anything(
    inductor: InductorSession, rankings: Rankings, timed: list[str], kind: str
) -> None:
    inductor.use(rankings.bundled)
    function, arguments = KINDS[kind]()
    compiled = inductor.compile(function, *arguments)
    torch.testing.assert_close(compiled.result, function(*arguments), rtol=2**-7, atol=1e-2)
    assert len(compiled.launched) == 1
    assert timed == []


@pytest.mark.parametrize("kind", KINDS)
def test_atens_measured_win_is_taken_without_timing_anything(
    inductor: InductorSession, rankings: Rankings, timed: list[str], kind: str
) -> None:
    inductor.use(rankings.aten)
    function, arguments = KINDS[kind]()
    with inductor.watch_choices() as seen:
        compiled = inductor.compile(function, *arguments)
    torch.testing.assert_close(compiled.result, function(*arguments), rtol=2**-7, atol=1e-2)
    assert compiled.launched == ()
    assert timed == []
    assert [len(names) for names in seen] == [1]
    assert nvgemm_runtime.stats().declared == 1, "it is no miss"


@pytest.mark.parametrize("faster", ["bundled", "aten"])
def test_atens_precise_sums_of_fp8_are_timed(
    inductor: InductorSession, rankings: Rankings, timed: list[str], faster: str
) -> None:
    """Its fast ones are what is measured."""
    inductor.use(getattr(rankings, faster))
    function, arguments = tensor_wise(is_fast=False)
    compiled = inductor.compile(function, *arguments)
    torch.testing.assert_close(compiled.result, function(*arguments), rtol=2**-7, atol=1e-2)
    assert "_scaled_mm" in timed
    assert len(timed) == 2


def test_of_atens_two_ways_to_add_a_bias_the_one_outside_of_graphs_is_taken(
    inductor: InductorSession, rankings: Rankings
) -> None:
    inductor.use(rankings.aten)
    function, (bias, a, b) = addmm()
    with inductor.watch_choices() as seen:
        compiled = inductor.compile(lambda c, a, b: function(c.expand(M, N), a, b), bias, a, b)
    torch.testing.assert_close(compiled.result, function(bias, a, b), rtol=2**-7, atol=1e-2)
    assert seen == [["bias_addmm"]]


def test_a_trusted_winner_for_swizzled_scales(
    inductor: InductorSession, rankings: Rankings, timed: list[str]
) -> None:
    inductor.use(rankings.bundled)
    fp4, e4m3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    a, scale_a = quantise(torch.randn(M, K), fp4, e4m3, 16)
    b, scale_b = quantise(torch.randn(N, K), fp4, e4m3, 16)

    def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        given = [scale_a], [2], [1], [scale_b], [2], [1]
        result: Tensor = torch.ops.aten._scaled_mm_v2(a, b, *given, None, BF16)
        return result

    compiled = inductor.compile(scaled, a, b.t(), swizzle(scale_a), swizzle(scale_b))
    wanted = dequantise(a, scale_a, 16) @ dequantise(b, scale_b, 16).t()
    torch.testing.assert_close(compiled.result, wanted.bfloat16(), rtol=2**-7, atol=1e-3)
    assert len(compiled.launched) == 1
    assert timed == []


@pytest.mark.slow
@pytest.mark.parametrize(("faster", "count"), [("bundled", 1), ("aten", 1), ("close", 3)])
def test_a_sum_with_its_activation_is_timed_with_the_fastest(
    inductor: InductorSession, rankings: Rankings, timed: list[str], faster: str, count: int
) -> None:
    """What Inductor has in its place is none of ATen's operators, whatever these were timed at."""
    inductor.use(getattr(rankings, faster))
    layer = torch.nn.Linear(K, N, dtype=BF16).requires_grad_(False)
    x = torch.randn(M, K, dtype=BF16)
    compiled = inductor.compile(lambda x: functional.relu(layer(x)), x)
    torch.testing.assert_close(compiled.result, functional.relu(layer(x)), rtol=2**-7, atol=1e-2)
    fused = [name for name in timed if name.startswith("nvgemm_addmm_relu_")]
    whole = [name for name in timed if name.startswith("nvgemm_aot_unfused_")]
    assert (len(fused), len(whole)) == (count, 1)


@pytest.mark.parametrize(("faster", "count"), [("bundled", 1), ("aten", 1), ("close", 3)])
def test_a_measured_product_decides_nothing_about_a_sum(
    inductor: InductorSession, rankings: Rankings, timed: list[str], faster: str, count: int
) -> None:
    inductor.use(getattr(rankings, faster))
    a, b = torch.randn(M, K, dtype=BF16), torch.randn(N, K, dtype=BF16).t()
    bias = torch.randn(N, dtype=BF16)
    inductor.slow_down_aten()
    compiled = inductor.compile(torch.addmm, bias, a, b)
    torch.testing.assert_close(compiled.result, torch.addmm(bias, a, b), rtol=2**-7, atol=1e-2)
    assert len(compiled.launched) == 1
    split = [name for name in timed if name.startswith("nvgemm_addmm_split_")]
    assert len(split) == count, "those that may be the fastest product"
    assert "addmm" in timed
