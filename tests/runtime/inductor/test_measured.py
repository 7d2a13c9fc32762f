"""torch.compile with measured rankings: what is offered, and what is not timed any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.select_algorithm import ExternKernelCaller  # our modules come behind it

import cpu_provider
import nvgemm_runtime
from inductor_session import Compiled, InductorSession
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.measuring.gpu import GpuState
from nvgemm_runtime.inductor.configuration import cache_key
from tuning_bench import DictatedTimer, DictatedWatch, bench, build, run

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("counted_anew")

WINNER = "Cpu_8x32"
"""The operator that is measured to be the fastest bundled one, and not estimated to be."""


class Rankings:
    """Bundles of three kernels for one problem, measured as a test wants it."""

    def __init__(self, path: Path, directory: Path) -> None:
        self._path = path
        self._directory = directory

    def measured(self, *, aten: float, others: Sequence[float] = (500.0,), **on: Any) -> Path:
        """With ATen at so many nanoseconds, the fastest kernel at 200, the others as sampled."""
        output = self._directory / f"tuned-{len(list(self._directory.iterdir()))}.nvgemm"
        timer = DictatedTimer({"": others, WINNER: [200.0], "aten": [aten]})
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


@dataclass(frozen=True)
class Trial:
    """Compiling the problem that was measured.

    Attributes:
        operands: Of that problem.
        timed: Names of the choices that Inductor times, in order.
    """

    inductor: InductorSession
    rankings: Rankings
    operands: tuple[Tensor, Tensor]
    timed: list[str]

    def use(self, *, trusts: str | None = None, **measured: Any) -> None:
        """Have a bundle measured and installed, and NVGEMM_AOT_TRUST_RANKING set."""
        self.inductor.use(self.rankings.measured(**measured))
        if trusts is not None:
            self.inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", trusts)

    def compile(self, **options: Any) -> Compiled:
        compiled = self.inductor.compile(torch.mm, *self.operands, **options)
        torch.testing.assert_close(compiled.result, torch.mm(*self.operands))
        return compiled


@pytest.fixture
def trial(
    inductor: InductorSession,
    rankings: Rankings,
    operands: tuple[Tensor, Tensor],
    timed: list[str],
) -> Trial:
    return Trial(inductor, rankings, operands, timed)


REQUIRED = {"nvgemm_aot_mode": "required"}


def test_only_the_winner_is_timed_beside_aten(trial: Trial) -> None:
    trial.use(aten=250.0)
    trial.inductor.slow_down_aten()
    assert trial.compile().launched == (WINNER,)
    assert trial.timed[0] == "mm"
    assert len(trial.timed) == 2


def test_nothing_joins_where_aten_was_measured_to_be_faster(trial: Trial) -> None:
    trial.use(aten=150.0)
    trial.inductor.slow_down_aten()
    assert trial.compile().launched == ()
    assert trial.timed == [], "there is one choice"
    assert nvgemm_runtime.stats().declared == 1, "it is no miss"


def test_an_aten_that_is_not_set_as_usual_is_timed(trial: Trial) -> None:
    trial.use(aten=150.0, trusts="1")
    torch.set_float32_matmul_precision("high")
    try:
        trial.compile()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert trial.timed[0] == "mm"
    assert len(trial.timed) == 2


@contextlib.contextmanager
def more_choices(of: Callable[[Any], Any]) -> Iterator[None]:
    """A choice more for each GEMM, made of ATen's, before bundled kernels join."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    before_us = get_algorithm_selector_cache().preprocessing_fns

    def add(choices: list[Any]) -> list[Any]:
        return [*choices, of(choices[0])]

    before_us.insert(0, add)
    try:
        yield
    finally:
        before_us.remove(add)


def test_atens_measured_win_is_taken_without_timing_other_ways_of_atens(trial: Trial) -> None:
    trial.use(aten=150.0, trusts="1")
    with more_choices(lambda aten: aten), trial.inductor.watch_choices() as seen:
        compiled = trial.compile()
    assert seen == [["mm"]]
    assert trial.timed == []
    assert compiled.launched == ()


@pytest.mark.parametrize("aten", [150.0, 250.0])
def test_what_another_backend_has_is_timed_though_rankings_are_trusted(
    trial: Trial, aten: float
) -> None:
    class OfAnotherBackend(ExternKernelCaller):  # type: ignore[misc]
        def __init__(self, aten: Any) -> None:
            super().__init__(aten.choice, aten.input_nodes, aten.layout, {"of": "another"})
            self.name = "other"

        def benchmark(self, *arguments: Any, out: Any) -> float:
            trial.timed.append(self.name)
            return 1e9

    trial.use(aten=aten, trusts="1")
    trial.inductor.slow_down_aten()
    with more_choices(OfAnotherBackend):
        compiled = trial.compile()
    assert trial.timed[:2] == ["mm", "other"]
    assert len(trial.timed) == (3 if aten == 250.0 else 2)
    assert compiled.launched == ((WINNER,) if aten == 250.0 else ())


def test_backends_are_told_apart_by_their_choices() -> None:
    from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
    from torch._inductor.select_algorithm import TritonTemplateCaller

    from nvgemm_runtime.inductor.reading import backends_beside_aten

    class OfAnotherBackend:
        pass

    def made(kind: type) -> Any:
        return object.__new__(kind)

    aten = made(ExternKernelCaller)
    aten.choice = SimpleNamespace(name="mm")
    assert backends_beside_aten([aten, aten]) == set()
    assert backends_beside_aten([aten, made(TritonTemplateCaller)]) == {"Triton"}
    assert backends_beside_aten([made(SubgraphChoiceCaller), aten]) == {"Triton"}
    with torch._inductor.config.patch(max_autotune_gemm_search_space="EXHAUSTIVE"):
        assert backends_beside_aten([made(TritonTemplateCaller)]) == {"Triton, EXHAUSTIVE"}
    assert backends_beside_aten([aten, OfAnotherBackend()]) == {"OfAnotherBackend"}


UNLIKE: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "with gaps": (lambda roomy: roomy.view(16, 128)[:, :64], 3),
    "at an odd address": (lambda roomy: roomy[1:1025].view(16, 64), 1),
}
"""Views as A, and how many kernels take them."""


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("aten", [150.0, 250.0])
def test_operands_unlike_those_that_were_measured_are_timed(
    trial: Trial, unlike: str, aten: float
) -> None:
    trial.use(aten=aten, trusts="1")
    (view, kernels), (_, b) = UNLIKE[unlike], trial.operands
    roomy = torch.randn(16 * 128)
    compiled = trial.inductor.compile(lambda roomy, b: view(roomy) @ b, roomy, b)
    torch.testing.assert_close(compiled.result, view(roomy) @ b)
    assert len(trial.timed) == 1 + kernels


def test_kernels_that_a_race_won_by_aten_left_together_are_timed(trial: Trial) -> None:
    """ATen is told apart at once, and bundled kernels overlap."""
    trial.use(aten=100.0, others=[190.0, 400.0, 210.0, 450.0, 300.0, 250.0])
    trial.compile(options=REQUIRED)
    assert len(trial.timed) == 4


def test_where_kernels_are_required_the_best_is_offered_though_aten_won(trial: Trial) -> None:
    trial.use(aten=150.0, trusts="1")
    trial.inductor.slow_down_aten()
    with trial.inductor.watch_choices() as seen:
        compiled = trial.compile(options=REQUIRED)
    (names,) = seen
    assert len(names) == 2
    assert compiled.launched == (WINNER,)


@pytest.mark.parametrize("trusts", ["0", "1"])
@pytest.mark.parametrize("why", ["another product", "a busy machine", "another size"])
def test_what_does_not_hold_here_skips_nothing(trial: Trial, trusts: str, why: str) -> None:
    how = {
        "another product": {"facts": replace(bench().facts, name="another CPU")},
        "a busy machine": {
            "watch": DictatedWatch([GpuState(utilization_percent=50, slowdowns=())])
        },
    }
    trial.use(aten=150.0, trusts=trusts, **how.get(why, {}))
    rows = 24 if why == "another size" else 16
    trial.inductor.compile(torch.mm, torch.randn(rows, 64), torch.randn(64, 32))
    assert len(trial.timed) == 4


def test_a_value_that_is_none_is_said_once_and_trusts_nothing(
    trial: Trial, caplog: pytest.LogCaptureFixture
) -> None:
    trial.use(aten=250.0, trusts="yes")
    trial.compile()
    assert len(trial.timed) == 2
    assert caplog.text.count("NVGEMM_AOT_TRUST_RANKING=yes: allowed are 0, 1") == 1


@pytest.mark.parametrize("variable", ["NVGEMM_AOT_TRUST_RANKING", "NVGEMM_AOT_KEEP_NVGEMM"])
def test_the_compile_caches_know_what_changes_choices(
    inductor: InductorSession,
    rankings: Rankings,
    variable: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    inductor.use(rankings.measured(aten=250.0))
    key = cache_key.CacheKeyPass()
    inductor.monkeypatch.delenv(variable, raising=False)
    unset = key.uuid()
    uuids = {}
    for value in ("", "0", "1"):
        inductor.monkeypatch.setenv(variable, value)
        uuids[value] = key.uuid()
    assert uuids["1"] != unset
    assert uuids[""] == uuids["0"] == unset
    assert variable not in caplog.text, "empty counts as not set"


def test_explanations_say_what_was_measured(
    trial: Trial, events: Callable[[], list[dict[str, Any]]]
) -> None:
    from nvgemm_aot.cli.programs.explain import explain_text
    from nvgemm_aot.workload.decisions import collect

    trial.use(aten=150.0)
    trial.compile()
    gemms = [gemm.to_json() for gemm in collect(events())]
    text = explain_text({"gemms": gemms, "unreadable_lines": 0, "failed": {}})
    assert "ATen, as measured" in text
    assert "measured once on cpu, 2026-11-21: 0.2 us, ATen 0.1 us" in text
    assert "nvgemm-aot tune" not in text
    assert "1 on ATen, as measured" in text
    by_triton = explain_text(
        {"gemms": [gemms[0] | {"fastest": "triton_mm_3"}]} | {"unreadable_lines": 0, "failed": {}}
    )
    assert "1 on others, because none was offered" in by_triton
    assert "as measured" not in by_triton


def test_explanations_say_how_to_settle_what_is_in_doubt(
    trial: Trial, events: Callable[[], list[dict[str, Any]]]
) -> None:
    from nvgemm_aot.cli.programs.explain import explain_text
    from nvgemm_aot.workload.decisions import collect

    busy = DictatedWatch([GpuState(utilization_percent=50, slowdowns=())])
    trial.use(aten=150.0, watch=busy)
    trial.compile()
    gemms = [gemm.to_json() for gemm in collect(events())]
    text = explain_text({"gemms": gemms, "unreadable_lines": 0, "failed": {}})
    (bundle,) = nvgemm_runtime.bundles()
    assert text.endswith(
        "to measure uncertain problems on this GPU:\n"
        f"  nvgemm-aot tune {bundle.path} -o tuned.nvgemm"
    )


def test_no_command_is_told_for_operands_that_no_measurement_is_of(
    trial: Trial, events: Callable[[], list[dict[str, Any]]]
) -> None:
    a, b = trial.operands
    apart = torch.randn(a.shape[0], 2 * a.shape[1])[:, : a.shape[1]]
    trial.use(aten=150.0, watch=DictatedWatch([GpuState(utilization_percent=50, slowdowns=())]))
    for first, is_told in ((a, True), (apart, False)):
        torch._dynamo.reset()
        trial.inductor.compile(torch.mm, first, b)
        met = [one for one in events() if one["event"] == "met"][-1]
        assert met["offered"]
        assert bool(met["doubtful"]) is is_told


def test_our_choice_alone_writes_the_same_code_as_when_it_wins(trial: Trial) -> None:
    trial.use(aten=250.0)
    trial.inductor.slow_down_aten()
    won = trial.compile()
    torch._dynamo.reset()
    trial.inductor.monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    alone = trial.compile()
    calls = [
        [line.strip() for line in each.code[0].splitlines() if "nvgemm_mm_" in line]
        for each in (won, alone)
    ]
    assert calls[0] == calls[1]
    assert len(calls[0]) >= 2
