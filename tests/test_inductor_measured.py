"""torch.compile with measured rankings: what is offered, and what is not timed any more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cpu_provider
import nvgemm_runtime
from inductor_session import InductorSession
from nvgemm_aot.cache import Cache
from nvgemm_runtime.inductor import cache_key
from tuning_bench import DictatedTimer, DictatedWatch, bench, build, run

Tensor = torch.Tensor

WINNER = "Cpu_8x32"
"""The operator that is measured to be the fastest of ours, and not estimated to be."""


def gemm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@pytest.fixture(scope="module")
def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 64), torch.randn(64, 32)


class Rankings:
    """Bundles of three kernels for one problem, measured as a test wants it."""

    def __init__(self, path: Path, directory: Path) -> None:
        self._path = path
        self._directory = directory

    def measured(self, *, aten: float, **on: Any) -> Path:
        """With ATen at so many nanoseconds, and the fastest kernel at 200."""
        output = self._directory / f"tuned-{len(list(self._directory.iterdir()))}.nvgemm"
        timer = DictatedTimer({"": [500.0], WINNER: [200.0], "aten": [aten]})
        with pytest.MonkeyPatch.context() as patch:
            timer.watch_runs(patch)
            run(self._path, output, bench(timer, **on))
        return output


@pytest.fixture(scope="module")
def rankings(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Rankings:
    path = build([cpu_provider.problem()], tmp_path_factory.mktemp("b"), kernel_cache)
    directory = tmp_path_factory.mktemp("tuned")
    directory.chmod(0o755)
    return Rankings(path, directory)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the choices that Inductor times, in order."""
    from torch._inductor.select_algorithm import ExternKernelCaller

    names: list[str] = []
    benchmark = ExternKernelCaller.benchmark

    def noting(choice: Any, *arguments: Any, **options: Any) -> Any:
        names.append(choice.name)
        return benchmark(choice, *arguments, **options)

    monkeypatch.setattr(ExternKernelCaller, "benchmark", noting)
    return names


@pytest.fixture(autouse=True)
def counted_anew() -> Iterator[None]:
    nvgemm_runtime.reset_stats()
    yield
    nvgemm_runtime.reset_stats()


def test_only_the_winner_is_timed_beside_aten(
    inductor: InductorSession,
    rankings: Rankings,
    operands: tuple[Tensor, Tensor],
    timed: list[str],
) -> None:
    inductor.use(rankings.measured(aten=250.0))
    inductor.slow_down_aten()
    compiled = inductor.compile(gemm, *operands)
    torch.testing.assert_close(compiled.result, gemm(*operands))
    assert compiled.launched == (WINNER,)
    assert len(timed) == 2
    assert timed[0] == "mm"


def test_nothing_joins_where_aten_was_measured_to_be_faster(
    inductor: InductorSession,
    rankings: Rankings,
    operands: tuple[Tensor, Tensor],
    timed: list[str],
) -> None:
    inductor.use(rankings.measured(aten=150.0))
    inductor.slow_down_aten()
    compiled = inductor.compile(gemm, *operands)
    assert compiled.launched == ()
    assert timed == [], "there is one choice"
    assert nvgemm_runtime.stats().declared == 1, "it is no miss"


def test_a_trusted_winner_is_taken_without_timing_anything(
    inductor: InductorSession,
    rankings: Rankings,
    operands: tuple[Tensor, Tensor],
    timed: list[str],
) -> None:
    inductor.use(rankings.measured(aten=250.0))
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    with inductor.watch_choices() as seen:
        compiled = inductor.compile(gemm, *operands)
    torch.testing.assert_close(compiled.result, gemm(*operands))
    assert compiled.launched == (WINNER,)
    assert timed == []
    ((name,),) = seen
    assert name.startswith("nvgemm_mm_")


def test_atens_measured_win_is_taken_without_timing_triton(
    inductor: InductorSession,
    rankings: Rankings,
    operands: tuple[Tensor, Tensor],
    timed: list[str],
) -> None:
    """The other choices are stood in for by the ATen choice twice."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    inductor.use(rankings.measured(aten=150.0))
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    before_us = get_algorithm_selector_cache().preprocessing_fns

    def double(choices: list[Any]) -> list[Any]:
        return [*choices, *choices]

    before_us.insert(0, double)
    try:
        with inductor.watch_choices() as seen:
            compiled = inductor.compile(gemm, *operands)
    finally:
        before_us.remove(double)
    assert seen == [["mm"]]
    assert timed == []
    assert compiled.launched == ()
    torch.testing.assert_close(compiled.result, gemm(*operands))


def test_where_kernels_are_required_the_best_is_offered_though_aten_won(
    inductor: InductorSession, rankings: Rankings, operands: tuple[Tensor, Tensor]
) -> None:
    inductor.use(rankings.measured(aten=150.0))
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    inductor.slow_down_aten()
    options = {"options": {"nvgemm_aot_mode": "required"}}
    with inductor.watch_choices() as seen:
        compiled = inductor.compile(gemm, *operands, **options)
    (names,) = seen
    assert len(names) == 2
    assert compiled.launched == (WINNER,)


@pytest.mark.parametrize("trusts", ["0", "1"])
def test_times_of_another_product_skip_nothing(
    inductor: InductorSession,
    rankings: Rankings,
    operands: tuple[Tensor, Tensor],
    timed: list[str],
    trusts: str,
) -> None:
    facts = replace(bench().facts, name="another CPU")
    inductor.use(rankings.measured(aten=150.0, facts=facts))
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", trusts)
    inductor.compile(gemm, *operands)
    assert len(timed) == 4


def test_an_uncertain_ranking_skips_nothing(
    inductor: InductorSession,
    rankings: Rankings,
    operands: tuple[Tensor, Tensor],
    timed: list[str],
) -> None:
    from nvgemm_aot.tuning.gpu_state import GpuState

    busy = DictatedWatch([GpuState(utilization_percent=50, slowdowns=())])
    inductor.use(rankings.measured(aten=150.0, watch=busy))
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    inductor.compile(gemm, *operands)
    assert len(timed) == 4


def test_another_size_skips_nothing(
    inductor: InductorSession, rankings: Rankings, timed: list[str]
) -> None:
    inductor.use(rankings.measured(aten=150.0))
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    inductor.compile(gemm, torch.randn(24, 64), torch.randn(64, 32))
    assert len(timed) == 4


def test_a_value_that_is_none_is_said_once_and_trusts_nothing(
    inductor: InductorSession,
    rankings: Rankings,
    operands: tuple[Tensor, Tensor],
    timed: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    inductor.use(rankings.measured(aten=250.0))
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "yes")
    inductor.compile(gemm, *operands)
    assert len(timed) == 2
    assert caplog.text.count("NVGEMM_AOT_TRUST_RANKING=yes: allowed are 0, 1") == 1


def test_the_compile_caches_know_whether_rankings_are_trusted(
    inductor: InductorSession, rankings: Rankings
) -> None:
    inductor.use(rankings.measured(aten=250.0))
    key = cache_key.InstalledBundles()
    keys = []
    for value in ("0", "1", None):
        if value is None:
            inductor.monkeypatch.delenv("NVGEMM_AOT_TRUST_RANKING")
        else:
            inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", value)
        keys.append(key.uuid())
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


def test_explanations_say_what_was_measured(
    inductor: InductorSession,
    rankings: Rankings,
    operands: tuple[Tensor, Tensor],
    tmp_path: Path,
) -> None:
    from nvgemm_aot.explain import collect
    from nvgemm_aot.render_explain import explain_text

    inductor.use(rankings.measured(aten=150.0))
    events = tmp_path / "events.jsonl"
    inductor.monkeypatch.setenv("NVGEMM_AOT_EXPLAIN", str(events))
    inductor.compile(gemm, *operands)
    gemms = collect(json.loads(line) for line in events.read_text().splitlines())
    text = explain_text({"gemms": [met.to_json() for met in gemms], "unreadable_lines": 0})
    assert "not ours, as measured" in text
    assert "measured on cpu, 2026-11-21: 0.2 us, ATen 0.1 us" in text


def test_our_choice_alone_writes_the_same_code_as_when_it_wins(
    inductor: InductorSession, rankings: Rankings, operands: tuple[Tensor, Tensor]
) -> None:
    inductor.use(rankings.measured(aten=250.0))
    inductor.slow_down_aten()
    won = inductor.compile(gemm, *operands)
    torch._dynamo.reset()
    inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    alone = inductor.compile(gemm, *operands)
    calls = [
        [line.strip() for line in each.code[0].splitlines() if "nvgemm_mm_" in line]
        for each in (won, alone)
    ]
    assert calls[0] == calls[1]
    assert len(calls[0]) >= 2
