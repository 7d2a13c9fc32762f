"""Kernels that tuning throws out, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cpu_provider
from nvgemm_aot.bundle.content import read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.storage.cache import Cache
from nvgemm_aot.tuning import contenders
from nvgemm_aot.tuning.race import LEAST_SAMPLES
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
from nvgemm_runtime.launch import loader, native
from nvgemm_runtime.launch.loader import KernelLoader
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
    bench,
    build,
    doubts,
    header_of,
    operators,
    run,
)


@pytest.mark.parametrize("provider", [Lazy(), Failing(), LazyAtLargeSizes()])
def test_a_wrong_kernel_is_thrown_out_of_every_ranking(
    kernel_cache: Cache,
    tmp_path: Path,
    tuned_path: Path,
    dictated: DictatedTimer,
    provider: Behaving,
) -> None:
    tunable = build(PROBLEMS, tmp_path / "b", kernel_cache, provider)
    tuned = run(tunable, tuned_path, bench(dictated))
    header = header_of(tuned_path)
    assert {kernel.operator for kernel in header.kernels} == {"Cpu_16x16", "Cpu_1x1"}
    for ranking in header.rankings:
        assert operators(header, ranking) == ["Cpu_16x16", "Cpu_1x1"]
    named = {kernel.id for kernel in header_of(tunable).kernels if kernel.operator == "Cpu_8x32"}
    found = [set(outcome.wrong) for outcome in tuned.outcomes.values()]
    assert found[1:] == [named, named]
    assert found[0] == (set() if isinstance(provider, LazyAtLargeSizes) else named), (
        "m = 8 is computed right there"
    )


def test_a_wrong_kernel_is_not_in_an_estimated_ranking_either(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    tunable = build(PROBLEMS, tmp_path / "b", kernel_cache, Lazy())
    ticks = iter([0.0, 0.0, 99.0, 99.0])
    run(tunable, tuned_path, bench(dictated), budget_s=1.0, clock=lambda: next(ticks))
    header = header_of(tuned_path)
    assert [ranking.measured is None for ranking in header.rankings] == [False, True, True]
    assert all("Cpu_8x32" not in operators(header, ranking) for ranking in header.rankings)


def test_a_bundle_of_wrong_kernels_is_not_written(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    tunable = build(PROBLEMS[:1], tmp_path / "b", kernel_cache, AllLazy())
    wanted = r"3 of 3 kernels were thrown out.*elements are wrong"
    with pytest.raises(SuspectError, match=wanted):
        run(tunable, tuned_path, bench(dictated))
    with pytest.raises(TuningError, match=wanted):
        run(tunable, tuned_path, bench(dictated), accepts_suspect=True)
    assert not tuned_path.exists()


def test_more_than_half_of_a_bundle_is_suspect_and_written_only_on_request(
    kernel_cache: Cache,
    tmp_path: Path,
    tuned_path: Path,
    dictated: DictatedTimer,
) -> None:
    tunable = build(PROBLEMS, tmp_path / "b", kernel_cache, MostlyLazy())
    with pytest.raises(SuspectError, match=r"^suspect.* 2 of 3 kernels were thrown out, more than"):
        run(tunable, tuned_path, bench(dictated))
    assert not tuned_path.exists()
    measured = len(dictated.prepared)
    with pytest.raises(SuspectError, match="to measure again, remove that file or name another"):
        run(tunable, tuned_path, bench(dictated))
    assert len(dictated.prepared) == measured, "the state has the verdicts"
    tuned = run(tunable, tuned_path, bench(dictated), accepts_suspect=True)
    assert tuned.measured_now == 0, "what was measured was kept"
    assert tuned.suspicion is not None
    assert {kernel.operator for kernel in header_of(tuned_path).kernels} == {"Cpu_1x1"}


def test_all_kernels_of_one_signature_are_suspect_however_few(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    transposed = cpu_provider.problem("tn")
    others = [cpu_provider.problem(layout) for layout in ("tt", "nt")]
    tunable = build([transposed, *others], tmp_path / "b", kernel_cache, LazyWithTransposes())
    with pytest.raises(SuspectError, match=f"all 3 of {transposed.signature.key}, kernel"):
        run(tunable, tuned_path, bench(dictated))
    assert not tuned_path.exists()


def test_a_run_with_few_wrong_kernels_is_not_suspect(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    tunable = build(PROBLEMS, tmp_path / "b", kernel_cache, Lazy())
    assert run(tunable, tuned_path, bench(dictated)).suspicion is None


def test_a_kernel_that_breaks_the_device_is_left_out_when_run_again(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    tunable = build(PROBLEMS, tmp_path / "b", kernel_cache, Failing())
    (bad,) = (kernel.id for kernel in header_of(tunable).kernels if kernel.operator == "Cpu_8x32")

    dictated.broken_by = "Cpu_8x32"
    with pytest.raises(TuningError, match=f"{bad[:12]} leaves the GPU unusable.*illegal"):
        run(tunable, tuned_path, bench(dictated))
    assert not tuned_path.exists()
    dictated.last_run = ""  # as in a new process
    tuned = run(tunable, tuned_path, bench(dictated))
    assert set(tuned.broken) == {bad}
    assert bad not in {kernel.id for kernel in header_of(tuned_path).kernels}
    assert not tuned.unmeasured


def test_torchs_own_operator_that_fails_has_no_time(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(a: Any, b: Any, out: Any) -> Any:
        raise NotImplementedError("not on this device")

    monkeypatch.setattr(contenders, "aten_run", lambda _: failing)
    tuned = run(tunable, tuned_path, bench(dictated))
    assert all(outcome.aten is None for outcome in tuned.outcomes.values())
    assert all(not outcome.wrong for outcome in tuned.outcomes.values())


def test_a_kernel_that_cannot_be_timed_is_thrown_out(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    dictated.unpreparable = "Cpu_8x32"
    tuned = run(tunable, tuned_path, bench(dictated))
    for outcome in tuned.outcomes.values():
        assert list(outcome.wrong.values()) == ["RuntimeError: a launch may not be captured"]
    assert {kernel.operator for kernel in header_of(tuned_path).kernels} == {"Cpu_16x16", "Cpu_1x1"}


def test_a_kernel_that_breaks_the_device_while_it_is_timed_is_left_out_too(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    dictated.times = {**SLOW_FIRST, "Cpu_8x32": []}
    with pytest.raises(TuningError, match="leaves the GPU unusable: RuntimeError"):
        run(tunable, tuned_path, bench(dictated))
    run(tunable, tuned_path, bench(dictated))
    assert {kernel.operator for kernel in header_of(tuned_path).kernels} == {"Cpu_16x16", "Cpu_1x1"}


def test_an_aten_that_breaks_the_device_is_left_out_too(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    dictated.times = {**SLOW_FIRST, "aten": []}
    with pytest.raises(TuningError, match="ATen leaves the GPU unusable"):
        run(tunable, tuned_path, bench(dictated))
    tuned = run(tunable, tuned_path, bench(dictated))
    assert all(outcome.aten is None for outcome in tuned.outcomes.values())
    assert len(header_of(tuned_path).kernels) == 3


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


def test_a_kernel_that_cannot_be_loaded_is_thrown_out(
    tunable: Path,
    tuned_path: Path,
    dictated: DictatedTimer,
    unloadable: Callable[[Exception], None],
) -> None:
    unloadable(DriverError("no binary for\nthis GPU\x1b"))
    tuned = run(tunable, tuned_path, bench(dictated))
    for outcome in tuned.outcomes.values():
        assert list(outcome.wrong.values()) == ["DriverError: no binary for this GPU?"]
    assert {kernel.operator for kernel in header_of(tuned_path).kernels} == {"Cpu_16x16", "Cpu_1x1"}


@pytest.mark.parametrize("error", [ToolchainError("no launcher"), StorageError("cannot read")])
def test_what_is_no_fault_of_a_kernel_throws_none_out(
    tunable: Path,
    tuned_path: Path,
    dictated: DictatedTimer,
    unloadable: Callable[[Exception], None],
    error: Exception,
) -> None:
    unloadable(error)
    with pytest.raises(type(error), match=str(error)):
        run(tunable, tuned_path, bench(dictated))
    assert not tuned_path.exists()


def test_a_library_that_all_kernels_need_is_missed_before_any_is_blamed(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise DriverError("libneeded.so cannot be loaded")

    with monkeypatch.context() as patch:
        patch.setattr(loader, "LOADER", KernelLoader())  # which knows no kernel yet
        patch.setattr(native, "load", missing)
        with pytest.raises(DriverError, match="libneeded"):
            run(tunable, tuned_path, bench(dictated))
    assert list(tuned_path.parent.iterdir()) == []
    assert len(run(tunable, tuned_path, bench(dictated)).header.kernels) == 3


def test_why_no_kernel_is_left_is_said_as_it_was(
    kernel_cache: Cache,
    tmp_path: Path,
    tuned_path: Path,
    dictated: DictatedTimer,
    unloadable: Callable[[Exception], None],
) -> None:
    other = cpu_provider.problem("tn")
    tunable = build([*PROBLEMS, other], tmp_path / "b", kernel_cache)
    with Bundle(tunable) as bundle:
        content = read_content(bundle)
    ids = {kernel.id: kernel.operator for kernel in content.kernels}
    rankings = tuple(
        replace(one, kernels=tuple(k for k in one.kernels if ids[k[0]] == "Cpu_8x32"))
        if one.problem == other
        else one
        for one in content.rankings
    )
    write_bundle(tunable, replace(content, rankings=rankings))
    unloadable(DriverError("no binary"))
    run(tunable, tuned_path, bench(dictated))
    (reason,) = header_of(tuned_path).unserved.values()
    assert reason.text.startswith("all 1 kernels that were made for it were thrown out when tuned")
    assert reason.text.endswith(f": {other.key}: DriverError: no binary")


def test_a_problem_whose_kernels_all_broke_the_gpu_says_so(
    tunable: Path, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    with Bundle(tunable) as bundle:
        content = read_content(bundle)
    ids = {kernel.id: kernel.operator for kernel in content.kernels}
    first, *others = content.rankings
    first = replace(first, kernels=tuple(k for k in first.kernels if ids[k[0]] == "Cpu_8x32"))
    given = tmp_path / "given.nvgemm"
    write_bundle(given, replace(content, rankings=(first, *others)))
    dictated.times = {**SLOW_FIRST, "Cpu_8x32": []}
    with pytest.raises(TuningError, match="leaves the GPU unusable"):
        run(given, tuned_path, bench(dictated))
    tuned = run(given, tuned_path, bench(dictated))
    ((key, reason),) = tuned.unmeasured.items()
    assert key == first.problem.key
    assert "is thrown out" in reason
    assert "operands" not in reason
    (unserved,) = header_of(tuned_path).unserved.values()
    assert "it leaves the GPU unusable: RuntimeError: CUDA error" in unserved.text


NOISE = [200.0, 280.0, 240.0, 310.0, 220.0, 260.0]


def test_those_that_only_a_wrong_kernel_told_apart_are_uncertain(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    dictated.times = {"": [5000.0], "Cpu_8x32": [100.0], "Cpu_16x16": NOISE, "aten": NOISE[::-1]}
    tunable = build(PROBLEMS, tmp_path / "b", kernel_cache, LazyAtLargeSizes())
    run(tunable, tuned_path, bench(dictated))
    assert doubts(tuned_path)[8] == (LEFT_UNDECIDED,)


def test_a_slow_wrong_kernel_leaves_a_ranking_certain(
    kernel_cache: Cache, tmp_path: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    noise = [5000.0 + 10 * time for time in NOISE]
    dictated.times = {"": noise, "Cpu_8x32": noise, "Cpu_16x16": [100.0], "aten": noise}
    tunable = build(PROBLEMS, tmp_path / "b", kernel_cache, LazyAtLargeSizes())
    run(tunable, tuned_path, bench(dictated))
    assert set(doubts(tuned_path).values()) == {()}
    dictated.times = {**dictated.times, "aten": [50.0]}
    other = tmp_path / "other.nvgemm"
    run(tunable, other, bench(dictated))
    assert set(doubts(other).values()) == {()}, "ATen is faster than all of them"


def test_a_kernel_that_breaks_the_gpu_later_makes_earlier_rankings_uncertain(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer
) -> None:
    breaking = [100.0] * LEAST_SAMPLES
    dictated.times = {"": [5000.0], "Cpu_8x32": breaking, "Cpu_16x16": NOISE, "aten": NOISE[::-1]}
    ticks = iter([0.0, 1.0, 61.0, 61.0])
    run(tunable, tuned_path, bench(dictated), budget_s=60.0, clock=lambda: next(ticks))
    assert doubts_of_first(tuned_path) == ()
    dictated.times = {**dictated.times, "Cpu_8x32": []}
    with pytest.raises(TuningError, match="leaves the GPU unusable"):
        run(tunable, tuned_path, bench(dictated))
    run(tunable, tuned_path, bench(dictated))
    assert doubts_of_first(tuned_path) == (LEFT_UNDECIDED,)


def doubts_of_first(tunable: Path) -> tuple[str, ...]:
    measured = header_of(tunable).rankings[0].measured
    assert measured is not None
    return measured.doubts
