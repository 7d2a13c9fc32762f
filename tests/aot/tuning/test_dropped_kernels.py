"""Kernels that tuning throws out, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tuner import Tuner

import cpu_provider
from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.tuning import contenders
from nvgemm_aot.tuning.measuring.race import LEAST_SAMPLES
from nvgemm_aot.tuning.rewrite import LEFT_UNDECIDED
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import (
    DriverError,
    StorageError,
    SuspectError,
    ToolchainError,
    TuningError,
)
from nvgemm_runtime.launch.loading import loader, native
from nvgemm_runtime.launch.loading.loader import KernelLoader
from tuning_bench import (
    PROBLEMS,
    SLOW_FIRST,
    AllLazy,
    Behaving,
    DictatedTimer,
    Failing,
    Lazy,
    LazyAtLargeSizes,
    LazyWithTransposes,
    MostlyLazy,
    doubts,
    header_of,
)

OTHERS = {"Cpu_16x16", "Cpu_1x1"}
"""The kernels besides ``Cpu_8x32``."""


@pytest.mark.slow
@pytest.mark.parametrize("provider", [Lazy(), Failing(), LazyAtLargeSizes()])
def test_a_wrong_kernel_is_thrown_out_of_every_ranking(tuner: Tuner, provider: Behaving) -> None:
    tunable = tuner.build(provider=provider)
    tuned = tuner(tunable)
    assert tuner.kernels == OTHERS
    assert tuner.orders == [["Cpu_16x16", "Cpu_1x1"]] * 3
    named = {kernel.id for kernel in header_of(tunable).kernels if kernel.operator == "Cpu_8x32"}
    of_first = set() if isinstance(provider, LazyAtLargeSizes) else named  # m = 8 is right there
    assert [set(one.wrong) for one in tuned.outcomes.values()] == [of_first, named, named]
    assert tuned.suspicion is None, "one of three is not suspect"


def test_a_wrong_kernel_is_not_in_an_estimated_ranking_either(tuner: Tuner) -> None:
    tuner(tuner.build(provider=Lazy()), budget_s=1.0, ticks=[0.0, 0.0, 99.0, 99.0])
    rankings = tuner.header.rankings
    assert [ranking.measured is None for ranking in rankings] == [False, True, True]
    assert not any("Cpu_8x32" in order for order in tuner.orders)


def test_a_bundle_of_wrong_kernels_is_not_written(tuner: Tuner) -> None:
    tunable = tuner.build(PROBLEMS[:1], AllLazy())
    wanted = r"3 of 3 kernels were dropped.*elements are wrong"
    with pytest.raises(SuspectError, match=wanted):
        tuner(tunable)
    with pytest.raises(TuningError, match=wanted):
        tuner(tunable, accepts_suspect=True)
    assert not tuner.path.exists()


def test_more_than_half_of_a_bundle_is_suspect_and_written_only_on_request(tuner: Tuner) -> None:
    tunable = tuner.build(provider=MostlyLazy())
    with pytest.raises(SuspectError, match=r"^suspect.* 2 of 3 kernels were dropped, more than"):
        tuner(tunable)
    assert not tuner.path.exists()
    with pytest.raises(SuspectError, match="To measure again, remove that file or name another"):
        tuner(tunable)
    assert not tuner.timer.prepared, "the state has the verdicts"
    tuned = tuner(tunable, accepts_suspect=True)
    assert tuned.measured_now == 0, "what was measured was kept"
    assert tuned.suspicion is not None
    assert tuner.kernels == {"Cpu_1x1"}


@pytest.mark.slow
def test_all_kernels_of_one_signature_are_suspect_however_few(tuner: Tuner) -> None:
    transposed, *others = (cpu_provider.problem(layout) for layout in ("tn", "tt", "nt"))
    tunable = tuner.build([transposed, *others], LazyWithTransposes())
    with pytest.raises(SuspectError, match=f"all 3 of {transposed.signature.key}, kernel"):
        tuner(tunable)
    assert not tuner.path.exists()


@pytest.mark.slow
def test_a_kernel_that_breaks_the_device_is_left_out_when_run_again(tuner: Tuner) -> None:
    tunable = tuner.build(provider=Failing())
    (bad,) = (kernel.id for kernel in header_of(tunable).kernels if kernel.operator == "Cpu_8x32")
    tuner.timer.broken_by = "Cpu_8x32"
    with pytest.raises(TuningError, match=f"{bad[:12]} leaves the GPU unusable.*illegal"):
        tuner(tunable)
    assert not tuner.path.exists()
    tuner.timer.last_run = ""  # as in a new process
    tuned = tuner(tunable)
    assert (set(tuned.broken), tuned.unmeasured) == ({bad}, {})
    assert tuner.kernels == OTHERS


def test_torchs_own_operator_that_fails_has_no_time(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(a: Any, b: Any, out: Any) -> Any:
        raise NotImplementedError("not on this device")

    monkeypatch.setattr(contenders, "aten_run", lambda _: failing)
    outcomes = tuner().outcomes.values()
    assert [(outcome.aten, outcome.wrong) for outcome in outcomes] == [(None, {})] * 3


@pytest.mark.parametrize("name", ["Cpu_8x32", "aten"])
def test_what_breaks_the_device_while_it_is_timed_is_left_out_too(tuner: Tuner, name: str) -> None:
    tuner.timer.times = {**SLOW_FIRST, name: []}
    with pytest.raises(TuningError, match="leaves the GPU unusable: RuntimeError"):
        tuner()
    tuned = tuner()
    is_aten = name == "aten"
    assert all((outcome.aten is None) is is_aten for outcome in tuned.outcomes.values())
    assert tuner.kernels == OTHERS | ({"Cpu_8x32"} if is_aten else set())


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """``Cpu_8x32`` cannot be loaded, with such an error."""

    def spoil(error: Exception) -> None:
        load = KernelLoader.load

        def failing(self: KernelLoader, bundle: Bundle, kernel: Kernel) -> Any:
            if kernel.operator == "Cpu_8x32":
                raise error
            return load(self, bundle, kernel)

        monkeypatch.setattr(KernelLoader, "load", failing)

    return spoil


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_kernel_that_cannot_be_loaded_or_timed_is_thrown_out(
    tuner: Tuner, unloadable: Callable[[Exception], None], is_loaded: bool
) -> None:
    if is_loaded:
        tuner.timer.unpreparable = "Cpu_8x32"
    else:
        unloadable(DriverError("no binary for\nthis GPU\x1b"))
    tuned = tuner()
    fault = "RuntimeError: a launch may not be captured"
    if not is_loaded:
        fault = "DriverError: no binary for this GPU?"
    assert [[*outcome.wrong.values()] for outcome in tuned.outcomes.values()] == [[fault]] * 3
    assert tuner.kernels == OTHERS


@pytest.mark.parametrize("error", [ToolchainError("no launcher"), StorageError("cannot read")])
def test_what_is_no_fault_of_a_kernel_throws_none_out(
    tuner: Tuner, unloadable: Callable[[Exception], None], error: Exception
) -> None:
    unloadable(error)
    with pytest.raises(type(error), match=str(error)):
        tuner()
    assert not tuner.path.exists()


def test_a_library_that_all_kernels_need_is_missed_before_any_is_blamed(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise DriverError("libneeded.so cannot be loaded")

    with monkeypatch.context() as patch:
        patch.setattr(loader, "LOADER", KernelLoader())  # which knows no kernel yet
        patch.setattr(native, "load", missing)
        with pytest.raises(DriverError, match="libneeded"):
            tuner()
    assert list(tuner.path.parent.iterdir()) == []
    assert len(tuner().header.kernels) == 3


def only_bad_for_first(content: BundleContent) -> BundleContent:
    """Rank ``Cpu_8x32`` alone for the first problem."""
    (bad,) = (kernel.id for kernel in content.kernels if kernel.operator == "Cpu_8x32")

    def change(ranking: ProblemRanking) -> ProblemRanking:
        return replace(ranking, kernels=tuple(k for k in ranking.kernels if k[0] == bad))

    first, *others = content.rankings
    return replace(content, rankings=(change(first), *others))


def test_why_no_kernel_is_left_is_said_as_it_was(
    tuner: Tuner, unloadable: Callable[[Exception], None]
) -> None:
    unloadable(DriverError("no binary"))
    tuner(tuner.change(only_bad_for_first))
    (reason,) = tuner.header.unserved.values()
    assert reason.text.startswith("dropped when tuned: all of 1 kernel made for it")
    assert reason.text.endswith(": DriverError: no binary")


def test_a_problem_whose_kernels_all_broke_the_gpu_says_so(tuner: Tuner) -> None:
    given = tuner.change(only_bad_for_first)
    tuner.timer.times = {**SLOW_FIRST, "Cpu_8x32": []}
    with pytest.raises(TuningError, match="leaves the GPU unusable"):
        tuner(given)
    ((key, reason),) = tuner(given).unmeasured.items()
    assert key == PROBLEMS[0].key
    assert "is dropped" in reason
    assert "operands" not in reason
    (unserved,) = tuner.header.unserved.values()
    assert "it leaves the GPU unusable: RuntimeError: CUDA error" in unserved.text


NOISE = [200.0, 280.0, 240.0, 310.0, 220.0, 260.0]


@pytest.mark.slow
def test_those_that_only_a_wrong_kernel_told_apart_are_uncertain(tuner: Tuner) -> None:
    noise = {"Cpu_16x16": NOISE, "aten": NOISE[::-1]}
    tuner.timer.times = {"": [5000.0], "Cpu_8x32": [100.0], **noise}
    tuner(tuner.build(provider=LazyAtLargeSizes()))
    assert tuner.doubts[8] == (LEFT_UNDECIDED,)


def test_too_little_memory_is_no_fault_of_a_kernel_and_costs_times_back_to_back_alone(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(timer: DictatedTimer, calls: Any) -> Any:
        calls[0]()
        if timer.last_run == "Cpu_8x32":
            raise torch.OutOfMemoryError("tried to allocate 99 GiB")
        return lambda: 1.0

    monkeypatch.setattr(DictatedTimer, "_prepare_back_to_back", prepare)
    tuned = tuner()
    assert (tuned.broken, tuned.unmeasured, tuned.is_complete) == ({}, {}, True)
    assert "Cpu_8x32" in tuner.kernels
    assert [one.back_to_back for one in tuned.outcomes.values()] == [{}] * 3
    assert tuner().measured_now == 0


def test_a_slow_wrong_kernel_leaves_a_ranking_certain(tuner: Tuner) -> None:
    noise = [5000.0 + 10 * time for time in NOISE]
    tunable = tuner.build(provider=LazyAtLargeSizes())
    for aten in (noise, [50.0]):
        tuner.timer.times = {"": noise, "Cpu_8x32": noise, "Cpu_16x16": [100.0], "aten": aten}
        output = tuner.beside(f"{aten[0]}.nvgemm")
        tuner(tunable, output)
        assert set(doubts(output).values()) == {()}


def test_a_kernel_that_breaks_the_gpu_later_makes_earlier_rankings_uncertain(tuner: Tuner) -> None:
    def doubts_of_first() -> tuple[str, ...]:
        measured = tuner.header.rankings[0].measured
        assert measured is not None
        return measured.doubts

    times = {"": [5000.0], "Cpu_16x16": NOISE, "aten": NOISE[::-1]}
    tuner.timer.times = {**times, "Cpu_8x32": [100.0] * LEAST_SAMPLES}
    tuner(budget_s=60.0, ticks=[0.0, 1.0, 61.0, 61.0])
    assert doubts_of_first() == ()
    tuner.timer.times = {**times, "Cpu_8x32": []}
    with pytest.raises(TuningError, match="leaves the GPU unusable"):
        tuner()
    tuner()
    assert doubts_of_first() == (LEFT_UNDECIDED,)
