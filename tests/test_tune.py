"""Tuning bundles: what is measured, thrown out, doubted, kept over interruptions, and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cpu_kernels
import cpu_provider
from nvgemm_aot.bundle import encode_bundle, write_bundle
from nvgemm_aot.bundle_content import read_content
from nvgemm_aot.cache import Cache
from nvgemm_aot.storage import write_atomic
from nvgemm_aot.tuning import contenders, measuring
from nvgemm_aot.tuning.gpu_state import GpuState
from nvgemm_aot.tuning.measuring import UNDECIDED
from nvgemm_aot.tuning.race import MOST_ROUNDS
from nvgemm_aot.tuning.separation import LEAST_SAMPLES
from nvgemm_aot.tuning.state import state_path
from nvgemm_aot.tuning.tune import OUT_OF_BUDGET, PROGRAM
from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.epilogue import Epilogue
from nvgemm_runtime.errors import StorageError, TuningError
from nvgemm_runtime.format import Header, Ranking
from nvgemm_runtime.problem import DType, Op, Problem
from nvgemm_runtime.scales import ScaleRecipe
from synthetic_bundles import write_synthetic_bundle
from synthetic_facts import H200
from tuning_bench import (
    IDLE,
    AllLazy,
    Behaving,
    DictatedTimer,
    DictatedWatch,
    Failing,
    Lazy,
    LazyAtLargeSizes,
    LazyWithTransposes,
    Sleeper,
    bench,
    build,
    run,
)

FP8, FP4 = DType.FP8_E4M3, DType.FP4_E2M1
PROBLEMS = tuple(cpu_provider.problem(sizes=(m, 32, 64)) for m in (8, 16, 32))
SLOW_FIRST = {"": [500.0], "Cpu_16x16": [300.0], "Cpu_8x32": [200.0], "aten": [250.0]}
"""Times under which the estimate's order is wrong, and one kernel is faster than ATen."""


@pytest.fixture(scope="module")
def path(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three problems of one signature, three kernels each."""
    return build(PROBLEMS, tmp_path_factory.mktemp("tune"), kernel_cache)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "tuned.nvgemm"


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> DictatedTimer:
    timer = DictatedTimer(SLOW_FIRST)
    timer.watch_runs(monkeypatch)
    return timer


def header_of(path: Path) -> Header:
    with Bundle(path) as bundle:
        bundle.check_body()
        for kernel in bundle.header.kernels:
            bundle.payload(kernel)
        return bundle.header


def operators(header: Header, ranking: Ranking) -> list[str]:
    return [header.kernels[place.kernel].operator for place in ranking.kernels]


def doubts(path: Path) -> dict[int, tuple[str, ...]]:
    """By m, why a problem's ranking is uncertain."""
    found = {}
    for ranking in header_of(path).rankings:
        assert ranking.measured is not None
        found[ranking.problem.m] = ranking.measured.doubts
    return found


def test_addends_scales_and_groups_are_measured(
    kernel_cache: Cache, tmp_path: Path, output: Path
) -> None:
    served = {
        cpu_kernels.signature("tn", operand=DType.BF16, epilogue=Epilogue.BIAS): True,
        cpu_kernels.signature("tn", operand=DType.FP16, epilogue=Epilogue.BIAS_SILU): False,
        cpu_kernels.signature("tn", op=Op.BMM, epilogue=Epilogue.ADD): True,
        cpu_kernels.signature("tn", operand=FP8, scales=ScaleRecipe.FP32_TENSOR): True,
        cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16): True,
        cpu_kernels.signature("tn", operand=FP8, scales=ScaleRecipe.E8M0_1X32): False,
        cpu_kernels.signature("tn", operand=FP4, scales=ScaleRecipe.E8M0_1X32): False,
        cpu_kernels.signature("tn", operand=FP4, scales=ScaleRecipe.E4M3_1X16): False,
        cpu_kernels.signature("tn", operand=FP4, scales=ScaleRecipe.E8M0_1X16): False,
    }
    problems = [cpu_provider.problem_of(one) for one in served]
    path = build(problems, tmp_path / "b", kernel_cache)
    tuned = run(path, output, bench())
    assert {problem.key for problem in problems} == {*tuned.outcomes}
    for problem, has_aten in zip(problems, served.values()):
        outcome = tuned.outcomes[problem.key]
        assert (len(outcome.kernels), outcome.wrong) == (3, {})
        assert (outcome.aten is not None) == has_aten, problem.key


def test_a_problem_whose_kernels_cannot_be_launched_keeps_its_ranking(
    path: Path, tmp_path: Path, output: Path
) -> None:
    with Bundle(path) as bundle:
        content = read_content(bundle)
    later = "later:gemm(a,b,out)"
    given = tmp_path / "given.nvgemm"
    kernels = tuple(replace(kernel, calling_convention=later) for kernel in content.kernels)
    write_bundle(given, replace(content, kernels=kernels))
    tuned = run(given, output, bench())
    assert tuned.unmeasured.keys() == {problem.key for problem in PROBLEMS}
    assert all("none can be launched" in reason for reason in tuned.unmeasured.values())
    assert all(ranking.measured is None for ranking in header_of(output).rankings)


def test_what_no_kernel_is_left_for_is_named_with_the_reason(
    kernel_cache: Cache, tmp_path: Path, output: Path
) -> None:
    problems = (*PROBLEMS, cpu_provider.problem("tn"))
    path = build(problems, tmp_path / "b", kernel_cache, LazyWithTransposes())
    run(path, output, bench())
    header = header_of(output)
    assert [ranking.problem for ranking in header.rankings] == list(PROBLEMS)
    ((problem, reason),) = header.unserved.items()
    assert problem == problems[-1]
    assert reason == "all kernels that were made for it compute wrong results"


def test_reasons_of_the_build_stay(path: Path, tmp_path: Path, output: Path) -> None:
    problem = cpu_provider.problem("nn")
    with Bundle(path) as bundle:
        content = read_content(bundle)
    given = tmp_path / "given.nvgemm"
    write_bundle(given, replace(content, unserved={problem: "none compiles"}))
    run([given, path], output, bench())
    assert header_of(output).unserved == {problem: "none compiles"}
    run([path, given], output, bench())
    assert header_of(output).unserved == {problem: "none compiles"}


def test_everything_is_measured_by_the_clock_of_this_machine(
    kernel_cache: Cache, tmp_path: Path, output: Path
) -> None:
    problems = [
        cpu_provider.problem("tn"),
        cpu_provider.problem("nt", op=Op.BMM, operand=DType.BF16),
        cpu_provider.problem("tn", operand=DType.INT8),
        cpu_provider.problem("nn", op=Op.BMM, operand=DType.INT8),
    ]
    path = build(problems, tmp_path / "b", kernel_cache)
    before = header_of(path)
    tuned = run(path, output, bench())
    header = header_of(output)
    assert [kernel.id for kernel in header.kernels] == [kernel.id for kernel in before.kernels]
    assert header.build_key != before.build_key
    assert not tuned.unmeasured
    assert tuned.state is None
    assert not state_path(output).exists()
    has_aten = {
        ranking.problem: ranking.measured is not None and ranking.measured.aten is not None
        for ranking in header.rankings
    }
    assert has_aten == dict(zip(problems, (True, True, True, False))), "ATen has no bmm of int8"
    for ranking in header.rankings:
        assert len(ranking.kernels) == 3
        source = header.sources[ranking.source]
        assert (source.kind, source.by, source.gpu) == ("measurement", PROGRAM, "cpu")
        assert source.conditions is not None
        assert source.conditions.date == "2026-11-21"
        assert source.conditions.driver == "580.95.05"


def test_kernels_are_ranked_by_their_times_with_atens_beside(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    run(path, output, bench(timer))
    header = header_of(output)
    assert len(header.rankings) == len(PROBLEMS)
    for ranking in header.rankings:
        assert operators(header, ranking) == ["Cpu_8x32", "Cpu_16x16", "Cpu_1x1"]
        assert [place.time_ns for place in ranking.kernels] == [200, 300, 500]
        assert ranking.measured is not None
        assert ranking.measured.spreads_ns == (0, 0, 0)
        assert ranking.measured.aten is not None
        assert ranking.measured.aten.time_ns == 250
        assert ranking.measured.triton is None
        assert ranking.measured.doubts == ()


def test_the_same_measurement_gives_the_same_bytes(
    path: Path, tmp_path: Path, timer: DictatedTimer
) -> None:
    paths = [tmp_path / name for name in ("one.nvgemm", "two.nvgemm")]
    for each in paths:
        run(path, each, bench(timer))
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_what_is_told_apart_is_not_sampled_further(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    run(path, output, bench(timer))
    assert len(timer.sampled) == len(PROBLEMS) * 4 * LEAST_SAMPLES


@pytest.mark.parametrize("provider", [Lazy(), Failing(), LazyAtLargeSizes()])
def test_a_wrong_kernel_is_thrown_out_of_every_ranking(
    kernel_cache: Cache, tmp_path: Path, output: Path, timer: DictatedTimer, provider: Behaving
) -> None:
    path = build(PROBLEMS, tmp_path / "b", kernel_cache, provider)
    tuned = run(path, output, bench(timer))
    header = header_of(output)
    assert {kernel.operator for kernel in header.kernels} == {"Cpu_16x16", "Cpu_1x1"}
    for ranking in header.rankings:
        assert operators(header, ranking) == ["Cpu_16x16", "Cpu_1x1"]
    named = {kernel.id for kernel in header_of(path).kernels if kernel.operator == "Cpu_8x32"}
    found = [set(outcome.wrong) for outcome in tuned.outcomes.values()]
    assert found[1:] == [named, named]
    assert found[0] == (set() if isinstance(provider, LazyAtLargeSizes) else named), (
        "m = 8 is computed right there"
    )


def test_a_wrong_kernel_is_not_in_an_estimated_ranking_either(
    kernel_cache: Cache, tmp_path: Path, output: Path, timer: DictatedTimer
) -> None:
    path = build(PROBLEMS, tmp_path / "b", kernel_cache, Lazy())
    ticks = iter([0.0, 0.0, 99.0, 99.0])
    run(path, output, bench(timer), budget_s=1.0, clock=lambda: next(ticks))
    header = header_of(output)
    assert [ranking.measured is None for ranking in header.rankings] == [False, True, True]
    assert all("Cpu_8x32" not in operators(header, ranking) for ranking in header.rankings)


def test_a_bundle_of_wrong_kernels_is_not_written(
    kernel_cache: Cache, tmp_path: Path, output: Path, timer: DictatedTimer
) -> None:
    path = build(PROBLEMS[:1], tmp_path / "b", kernel_cache, AllLazy())
    with pytest.raises(TuningError, match="all kernels are wrong"):
        run(path, output, bench(timer))
    assert not output.exists()


def test_a_kernel_that_breaks_the_device_is_left_out_when_run_again(
    kernel_cache: Cache, tmp_path: Path, output: Path, timer: DictatedTimer
) -> None:
    path = build(PROBLEMS, tmp_path / "b", kernel_cache, Failing())
    (bad,) = (kernel.id for kernel in header_of(path).kernels if kernel.operator == "Cpu_8x32")

    timer.broken_by = "Cpu_8x32"
    with pytest.raises(TuningError, match=f"{bad[:12]} leaves the GPU unusable.*illegal"):
        run(path, output, bench(timer))
    assert not output.exists()
    timer.last_run = ""  # as in a new process
    tuned = run(path, output, bench(timer))
    assert set(tuned.broken) == {bad}
    assert bad not in {kernel.id for kernel in header_of(output).kernels}
    assert not tuned.unmeasured


def test_torchs_own_operator_that_fails_has_no_time(
    path: Path, output: Path, timer: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(a: Any, b: Any, out: Any) -> Any:
        raise NotImplementedError("not on this device")

    monkeypatch.setattr(contenders, "aten_run", lambda _: failing)
    tuned = run(path, output, bench(timer))
    assert all(outcome.aten is None for outcome in tuned.outcomes.values())
    assert all(not outcome.wrong for outcome in tuned.outcomes.values())


def test_a_kernel_that_cannot_be_timed_is_thrown_out(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    timer.unpreparable = "Cpu_8x32"
    tuned = run(path, output, bench(timer))
    for outcome in tuned.outcomes.values():
        assert list(outcome.wrong.values()) == ["RuntimeError: a launch may not be captured"]
    assert {kernel.operator for kernel in header_of(output).kernels} == {"Cpu_16x16", "Cpu_1x1"}


def test_a_kernel_that_breaks_the_device_while_it_is_timed_is_left_out_too(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    timer.times = {**SLOW_FIRST, "Cpu_8x32": []}
    with pytest.raises(TuningError, match="leaves the GPU unusable: RuntimeError"):
        run(path, output, bench(timer))
    run(path, output, bench(timer))
    assert {kernel.operator for kernel in header_of(output).kernels} == {"Cpu_16x16", "Cpu_1x1"}


def test_an_aten_that_breaks_the_device_is_left_out_too(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    timer.times = {**SLOW_FIRST, "aten": []}
    with pytest.raises(TuningError, match="ATen leaves the GPU unusable"):
        run(path, output, bench(timer))
    tuned = run(path, output, bench(timer))
    assert all(outcome.aten is None for outcome in tuned.outcomes.values())
    assert len(header_of(output).kernels) == 3


def test_a_budget_ends_between_problems_and_the_same_call_goes_on(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    ticks = iter([0.0, 1.0, 2.0, 61.0])
    tuned = run(path, output, bench(timer), budget_s=60.0, clock=lambda: next(ticks))
    assert len(tuned.outcomes) == 2
    assert list(tuned.unmeasured.values()) == [OUT_OF_BUDGET]
    assert tuned.state == state_path(output)
    header = header_of(output)
    kinds = [header.sources[ranking.source].kind for ranking in header.rankings]
    assert kinds == ["measurement", "measurement", "estimate"]
    timer.prepared.clear()
    tuned = run(path, output, bench(timer))
    assert len(timer.prepared) == 4, "one problem's contenders"
    assert len(tuned.outcomes) == 3
    assert tuned.state is None
    assert not state_path(output).exists()
    assert all(ranking.measured is not None for ranking in header_of(output).rankings)


def test_an_interruption_keeps_what_was_measured(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    timer.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        run(path, output, bench(timer))
    assert not output.exists()
    timer.interrupt_at = None
    timer.prepared.clear()
    tuned = run(path, output, bench(timer))
    assert len(tuned.outcomes) == 3
    assert len(timer.prepared) == 8, "two problems' contenders"


def test_a_damaged_state_is_named(path: Path, output: Path, timer: DictatedTimer) -> None:
    timer.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        run(path, output, bench(timer))
    state = state_path(output)
    whole = state.read_bytes()
    document = json.loads(whole)
    (key,) = document["outcomes"]
    document["outcomes"][key]["kernels"][0][1] = 0
    damaged = [b"", whole[:-9], b"[]", b"{}", b"\xff", json.dumps(document).encode()]
    for data in damaged:
        write_atomic(state, data)
        with pytest.raises(StorageError, match=f"{state.name}.*damaged.*remove it"):
            run(path, output, bench(timer))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"facts": replace(bench().facts, name="another CPU")}, "GPU"),
        ({"watch": DictatedWatch(driver="1.0")}, "driver"),
    ],
)
def test_a_state_of_another_tuning_is_refused(
    path: Path, output: Path, timer: DictatedTimer, change: dict[str, Any], named: str
) -> None:
    timer.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        run(path, output, bench(timer))
    with pytest.raises(TuningError, match=f"another tuning: its {named} is"):
        run(path, output, bench(timer, **change))
    with pytest.raises(TuningError, match="its choice of kernels is ranked, here it is all"):
        run(path, output, bench(timer), all_kernels=True)


def test_a_bundle_for_another_architecture_is_refused_before_anything_else(
    tmp_path: Path, output: Path
) -> None:
    path = write_synthetic_bundle(tmp_path / "b.nvgemm", "sm_100f")
    with pytest.raises(TuningError, match=r"sm_100f kernels do not run on NVIDIA H200, .* 9\.0"):
        run(path, output, bench(facts=H200))
    assert list(tmp_path.iterdir()) == [path]


def test_a_bundle_without_problems_is_refused(path: Path, tmp_path: Path, output: Path) -> None:
    with Bundle(path) as bundle:
        data, _ = encode_bundle(replace(read_content(bundle), rankings=()))
    bare = tmp_path / "bare.nvgemm"
    bare.write_bytes(data)
    with pytest.raises(TuningError, match=f"{bare}: no problem is declared"):
        run(bare, output, bench())


# What disturbs.


def test_a_busy_gpu_is_waited_for_and_then_doubted(
    path: Path, output: Path, timer: DictatedTimer, caplog: pytest.LogCaptureFixture
) -> None:
    busy, sleep = GpuState(utilization_percent=63, slowdowns=()), Sleeper()
    run(path, output, bench(timer, DictatedWatch([busy]), sleep))
    told = "the GPU was 63 % busy with other work"
    assert doubts(output) == {problem.m: (told,) for problem in PROBLEMS}
    waited = [nap for nap in sleep.naps if nap == measuring.PAUSE_S]
    assert len(waited) == measuring.ATTEMPTS
    assert told in caplog.text


def test_a_gpu_that_becomes_free_is_not_doubted(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    busy = GpuState(utilization_percent=63, slowdowns=())
    run(path, output, bench(timer, DictatedWatch([busy, busy, IDLE])))
    assert set(doubts(output).values()) == {()}


def test_others_that_come_meanwhile_make_the_whole_run_uncertain(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    busy = GpuState(utilization_percent=40, slowdowns=())
    run(path, output, bench(timer, DictatedWatch([IDLE, IDLE, IDLE, IDLE, busy])))
    assert all("when the run ended" in text for (text,) in doubts(output).values())


def test_a_throttled_gpu_is_measured_anew_and_then_doubted(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    hot = GpuState(utilization_percent=0, slowdowns=("hardware thermal slowdown",))
    # Idle before; the first problem is disturbed once, the second always, the third never.
    states = [IDLE, hot, IDLE, hot, hot, hot, IDLE]
    sleep = Sleeper()
    run(path, output, bench(timer, DictatedWatch(states), sleep))
    assert doubts(output) == {8: (), 16: ("hardware thermal slowdown",), 32: ()}
    assert sleep.naps.count(measuring.PAUSE_S) == 3


def test_times_that_vary_are_measured_anew_and_then_doubted(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    noise = [200.0, 280.0, 240.0, 310.0, 220.0, 260.0, 330.0]
    timer.times = {**SLOW_FIRST, "Cpu_8x32": noise, "aten": [*reversed(noise)]}
    run(path, output, bench(timer))
    assert set(doubts(output).values()) == {(UNDECIDED,)}
    of_aten = timer.sampled.count("aten")
    assert of_aten == len(PROBLEMS) * measuring.ATTEMPTS * MOST_ROUNDS


def tuned_again(
    path: Path, tmp_path: Path, timer: DictatedTimer, times: dict[str, list[float]], **on: Any
) -> Path:
    first, second = tmp_path / "first.nvgemm", tmp_path / "second.nvgemm"
    run(path, first, bench(timer))
    timer.times = {**timer.times, **times}
    run(first, second, bench(timer, **on))
    return second


def test_two_runs_that_agree_are_certain(path: Path, tmp_path: Path, timer: DictatedTimer) -> None:
    second = tuned_again(path, tmp_path, timer, {"Cpu_8x32": [206.0]}, today="2026-11-22")
    assert set(doubts(second).values()) == {()}
    (source,) = header_of(second).sources
    assert source.conditions is not None
    assert source.conditions.date == "2026-11-22"


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"Cpu_8x32": [400.0]}, "ATen was fastest, and kernel"),
        ({"": [100.0]}, "was fastest, and kernel"),
        ({"Cpu_8x32": [150.0]}, "took 150 ns, and 200 ns in the run of 2026-11-21"),
    ],
)
def test_two_runs_that_contradict_each_other_are_doubted(
    path: Path,
    tmp_path: Path,
    timer: DictatedTimer,
    times: dict[str, list[float]],
    said: str,
) -> None:
    second = tuned_again(path, tmp_path, timer, times)
    assert all(said in text for (text,) in doubts(second).values())
    third = tmp_path / "third.nvgemm"
    run(second, third, bench(timer))
    assert set(doubts(third).values()) == {()}, "it agrees with the second"


def test_equals_may_change_places(path: Path, tmp_path: Path, timer: DictatedTimer) -> None:
    others = {"": [50000.0], "Cpu_16x16": [30000.0]}
    timer.times = {**others, "Cpu_8x32": [20000.0], "aten": [20100.0]}
    second = tuned_again(path, tmp_path, timer, {"Cpu_8x32": [20150.0]})
    assert set(doubts(second).values()) == {()}


def test_runs_on_other_gpus_are_not_compared(
    path: Path, tmp_path: Path, timer: DictatedTimer
) -> None:
    facts = replace(bench().facts, name="another CPU")
    second = tuned_again(path, tmp_path, timer, {"Cpu_8x32": [400.0]}, facts=facts)
    assert set(doubts(second).values()) == {()}
    assert {source.gpu for source in header_of(second).sources} == {"another CPU"}


# Choosing kernels.


def test_all_kernels_of_a_signature_are_measured_where_asked(
    kernel_cache: Cache, tmp_path: Path, output: Path, timer: DictatedTimer
) -> None:
    few = build(PROBLEMS, tmp_path / "few", kernel_cache)
    with Bundle(few) as bundle:
        content = read_content(bundle)
    cut = tuple(replace(r, kernels=r.kernels[:1]) for r in content.rankings[:2])
    data, _ = encode_bundle(replace(content, rankings=(*cut, content.rankings[2])))
    few.write_bytes(data)
    run(few, output, bench(timer))
    assert [len(ranking.kernels) for ranking in header_of(output).rankings] == [1, 1, 3]
    run(few, output, bench(timer), all_kernels=True)
    assert [len(ranking.kernels) for ranking in header_of(output).rankings] == [3, 3, 3]


def test_kernels_that_operands_are_not_aligned_for_are_not_measured(
    path: Path, kernel_cache: Cache, tmp_path: Path, output: Path, timer: DictatedTimer
) -> None:
    odd = cpu_provider.problem(sizes=(8, 33, 64))
    mixed = build([odd, PROBLEMS[0]], tmp_path / "b", kernel_cache)
    run(mixed, output, bench(timer), all_kernels=True)
    header = header_of(output)
    by_n = {ranking.problem.n: operators(header, ranking) for ranking in header.rankings}
    assert by_n[33] == ["Cpu_1x1"]
    assert len(by_n[32]) == 3


def test_pruning_keeps_the_first_two_of_each_problem(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    tuned = run(path, output, bench(timer), prunes=True)
    header = header_of(output)
    assert {kernel.operator for kernel in header.kernels} == {"Cpu_8x32", "Cpu_16x16"}
    for ranking in header.rankings:
        assert operators(header, ranking) == ["Cpu_8x32", "Cpu_16x16"]
        assert ranking.measured is not None
        assert len(ranking.measured.spreads_ns) == 2
    assert tuned.pruned is not None
    assert len(tuned.pruned.dropped) == 1
    assert tuned.pruned.declared_loss == 1.0
    assert tuned.pruned.undeclared_loss == 1.0
    (dropped,) = tuned.pruned.dropped
    sizes = {kernel.id: kernel.span.stored_bytes for kernel in header_of(path).kernels}
    assert tuned.pruned_bytes == sizes[dropped]
    assert tuned.file_bytes == output.stat().st_size


def test_pruning_drops_nothing_that_an_estimate_ranks(
    path: Path, output: Path, timer: DictatedTimer
) -> None:
    ticks = iter([0.0, 1.0, 61.0, 61.0])
    run(path, output, bench(timer), prunes=True, budget_s=60.0, clock=lambda: next(ticks))
    header = header_of(output)
    assert len(header.kernels) == 3
    assert [len(ranking.kernels) for ranking in header.rankings] == [3, 3, 3]


def test_bundles_of_one_target_are_tuned_together(
    kernel_cache: Cache, tmp_path: Path, output: Path, timer: DictatedTimer
) -> None:
    paths = [
        build(problems, tmp_path / name, kernel_cache, name=name)
        for name, problems in (("one", PROBLEMS[:2]), ("two", PROBLEMS[1:]))
    ]
    run(paths, output, bench(timer))
    header = header_of(output)
    assert [ranking.problem for ranking in header.rankings] == sorted(PROBLEMS)
    assert len(header.kernels) == 3


def test_bundles_of_two_toolchains_are_not_tuned_together(
    path: Path, tmp_path: Path, output: Path
) -> None:
    with Bundle(path) as bundle:
        data, _ = encode_bundle(replace(read_content(bundle), toolchain={"cc": "another"}))
    other = tmp_path / "other.nvgemm"
    other.write_bytes(data)
    with pytest.raises(TuningError, match=f"{other}: toolchain is .*tune them one by one"):
        run([path, other], output, bench())


def test_problems_that_do_not_fit_into_memory_keep_their_ranking(
    path: Path, output: Path, timer: DictatedTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    make_sets = measuring.make_sets

    def lacking(problem: Problem, *arguments: Any, **options: Any) -> Any:
        if problem.m == 16:
            raise torch.OutOfMemoryError("tried to allocate 99 GiB")
        return make_sets(problem, *arguments, **options)

    monkeypatch.setattr(measuring, "make_sets", lacking)
    tuned = run(path, output, bench(timer))
    ((key, reason),) = tuned.unmeasured.items()
    assert key == PROBLEMS[1].key
    assert "99 GiB" in reason
    assert tuned.state is None, "another run would find the same"
    assert [ranking.measured is None for ranking in header_of(output).rankings] == [
        False, True, False
    ]  # fmt: skip
