"""Tuning on this machine's GPU, over two problems of an installed bundle.

Which kernel is fastest is not asserted, nor how fast: a wrong kernel must never win, and what is
written must be what torch.compile then goes by.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_arguments import exact_arguments, random_arguments
from gemm_reference import assert_close, assert_exact
from installed import installed_kernels

from nvgemm_aot.bundle.content import ProblemRanking, read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.rankings.export import export
from nvgemm_aot.rankings.file import read_rankings, write_rankings
from nvgemm_aot.tuning import contenders
from nvgemm_aot.tuning.confirming.confirm_kernels import confirm, confirm_bench
from nvgemm_aot.tuning.correctness.judgement import reference
from nvgemm_aot.tuning.correctness.random_operands import make_sets
from nvgemm_aot.tuning.measuring.gpu import UNKNOWN_DRIVER, gpu_bench
from nvgemm_aot.tuning.tune_bundles import Tuned, TuningOptions, tune
from nvgemm_aot.tuning.watchdog import tune_watched
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import APART
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Op, Problem, Signature
from nvgemm_runtime.launch.select import load_kernel
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView

SIGNATURE = "mm/tn/bf16xbf16/fp32/bf16"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two problems, the smallest and the largest of an installed bundle, with their kernels."""
    opened = {bundle.path: bundle for bundle, _ in installed_kernels()}
    for bundle in opened.values():
        content = read_content(bundle)
        first = [one for one in content.rankings if not one.is_further]
        rankings = [r for r in first if r.problem.signature.key == SIGNATURE]
        if len(rankings) >= 2:
            break
    else:
        pytest.skip(f"no installed bundle declares two problems of {SIGNATURE}")
    rankings.sort(key=lambda ranking: ranking.problem.flops)
    chosen = (rankings[0], rankings[-1])
    ranked = {id_ for ranking in chosen for id_, _ in ranking.kernels}
    kernels = tuple(kernel for kernel in content.kernels if kernel.id in ranked)
    path = tmp_path_factory.mktemp("small") / "small.nvgemm"
    write_bundle(path, replace(content, kernels=kernels, rankings=chosen))
    return path


def tuned_bundle(small: Path, output: Path, **options: Any) -> tuple[Tuned, Header]:
    tuned = tune([small], output, gpu_bench(), TuningOptions(**options))
    with Bundle(output) as bundle:
        bundle.check_body()
        return tuned, bundle.header


@pytest.fixture(scope="module")
def tuned(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuned, Header]:
    directory = tmp_path_factory.mktemp("tuned")
    directory.chmod(0o755)
    return tuned_bundle(small, directory / "tuned.nvgemm")


def test_every_kernel_and_aten_have_a_time(small: Path, tuned: tuple[Tuned, Header]) -> None:
    result, header = tuned
    assert not result.unmeasured
    assert not result.broken
    assert result.measured_now == 2
    with Bundle(small) as bundle:
        before = bundle.header
    assert [kernel.id for kernel in header.kernels] == [kernel.id for kernel in before.kernels]
    for ranking, former in zip(
        header.rankings_on(torch.cuda.get_device_name()),
        before.rankings_on(torch.cuda.get_device_name()),
    ):
        assert not result.outcomes[ranking.problem.key].wrong
        assert {place.kernel for place in ranking.kernels} == {
            place.kernel for place in former.kernels
        }
        measured = ranking.measured
        assert measured is not None
        assert measured.aten is not None
        assert measured.triton is None
        times = [place.time_ns for place in ranking.kernels if place.time_ns is not None]
        assert times == sorted(times)
        assert len(times) == len(ranking.kernels)


def test_the_source_names_this_gpu_and_its_software(tuned: tuple[Tuned, Header]) -> None:
    _, header = tuned
    here = header.rankings_on(torch.cuda.get_device_name())
    for source in {header.sources[ranking.source] for ranking in here}:
        assert source.kind == "measurement"
        assert source.gpu == torch.cuda.get_device_name()
        assert source.conditions is not None
        assert source.conditions.torch == torch.__version__
        assert source.conditions.cuda == torch.version.cuda
        assert source.conditions.driver != UNKNOWN_DRIVER


def test_the_winner_is_right(tuned: tuple[Tuned, Header]) -> None:
    _, header = tuned
    for ranking in header.rankings_on(torch.cuda.get_device_name()):
        kernel = header.kernels[ranking.kernels[0].kernel]
        for make, check in ((exact_arguments, assert_exact), (random_arguments, assert_close)):
            arguments = make(ranking.problem)
            load_kernel(kernel.id).launch(*arguments.operands(), *arguments.others)
            check(arguments.out, arguments)


def test_a_kernel_that_leaves_one_element_out_never_wins(
    small: Path, tuned: tuple[Tuned, Header], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, header = tuned
    fastest = {
        header.kernels[ranking.kernels[0].kernel].id
        for ranking in header.rankings_on(torch.cuda.get_device_name())
    }
    kernel_run = contenders.kernel_run

    def spoiled(bundle: Any, kernel: Any) -> Any:
        run = kernel_run(bundle, kernel)

        def spoiling(a: Any, b: Any, out: Any) -> Any:
            run(a, b, out)
            out[-1, -1] += 1.0 + 0.1 * out[-1, -1].abs()
            return out

        return spoiling if kernel.id in fastest else run

    monkeypatch.setattr(contenders, "kernel_run", spoiled)
    result, without = tuned_bundle(small, tmp_path / "tuned.nvgemm", accepts_suspect=True)
    assert not fastest & {kernel.id for kernel in without.kernels}
    named = {id_ for outcome in result.outcomes.values() for id_ in outcome.wrong}
    assert named == fastest


def test_a_budget_is_kept_and_the_rest_measured_later(small: Path, tmp_path: Path) -> None:
    output = tmp_path / "tuned.nvgemm"
    result, header = tuned_bundle(small, output, budget_s=0.0)
    assert len(result.unmeasured) == 2
    assert all(
        ranking.measured is None for ranking in header.rankings_on(torch.cuda.get_device_name())
    )
    result, header = tuned_bundle(small, output)
    assert all(
        ranking.measured is not None for ranking in header.rankings_on(torch.cuda.get_device_name())
    )
    before = output.read_bytes()
    result, _ = tuned_bundle(small, output, budget_s=0.0)
    assert result.measured_now == 0
    assert output.read_bytes() == before


def test_pruning_keeps_the_fastest(small: Path, tmp_path: Path) -> None:
    result, header = tuned_bundle(small, tmp_path / "tuned.nvgemm", prunes=True)
    assert result.pruned is not None
    assert result.pruned.declared_loss == 1.0
    for ranking in header.rankings_on(torch.cuda.get_device_name()):
        outcome = result.outcomes[ranking.problem.key]
        assert header.kernels[ranking.kernels[0].kernel].id == next(iter(outcome.kernels))
        assert ranking.measured is not None
        assert len(ranking.measured.spreads_ns) == len(ranking.kernels)


@pytest.mark.parametrize(
    "key",
    [
        "mm/nn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32",
        "mm/tn/fp8_e5m2xfp8_e5m2/fp32/bf16/e8m0_1x32",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16",
        "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e8m0_1x16",
    ],
)
def test_operands_with_scales_of_blocks_mean_the_same_on_the_cpu(key: str) -> None:
    """On any GPU: no kernel takes part."""
    problem = Problem(signature=Signature.parse(key), m=300, n=200, k=4000)
    operands = make_sets(problem, "cuda", seed=1, total_bytes=1)[0]
    on_cpu = [one.view(torch.uint8).cpu().view(one.dtype) for one in operands]
    found = reference(operands, problem.signature)
    assert torch.equal(found.cpu(), reference(on_cpu, problem.signature)), "exact in fp64"
    assert 0.5 < found.std() < 40


def test_a_kernel_that_hangs_on_the_gpu_is_dropped_and_the_others_are_measured(
    small: Path, tuned: tuple[Tuned, Header], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hanging_bench` has the kernel that won sleep on the GPU for minutes instead."""
    _, header = tuned
    hanging = header.kernels[
        header.rankings_on(torch.cuda.get_device_name())[0].kernels[0].kernel
    ].id
    monkeypatch.setenv("HANGING_KERNEL", hanging)
    output = tmp_path / "tuned.nvgemm"
    torch.cuda.empty_cache()  # what this process has kept, the processes of measuring need
    result = tune_watched(
        [small], output, TuningOptions(repeats=False), bench="hanging_bench:make", hang_s=10.0
    )
    assert [contender for contender, _ in result.hanging] == [hanging]
    assert "it hangs: it has not returned for 10 s" in result.broken[hanging]
    assert not result.unmeasured
    assert result.outcomes.keys() == {
        ranking.problem.key for ranking in header.rankings_on(torch.cuda.get_device_name())
    }
    with Bundle(output) as bundle:
        left = {kernel.id for kernel in bundle.header.kernels}
        assert left == {kernel.id for kernel in header.kernels} - {hanging}
        for ranking in bundle.header.rankings_on(torch.cuda.get_device_name()):
            assert ranking.measured is not None
            assert ranking.measured.aten is not None


def test_the_gpu_of_a_measurement_is_recorded(tuned: tuple[Tuned, Header]) -> None:
    _, header = tuned
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    own = header.rankings_on(torch.cuda.get_device_name())
    assert own
    for source in (header.sources[ranking.source] for ranking in own):
        assert source.conditions is not None
        assert source.conditions.launches == APART
        assert source.conditions.gpu_sha256 == hashlib.sha256(uuid.encode()).hexdigest()


def test_rankings_of_this_gpu_are_exported_with_its_digest(
    tuned: tuple[Tuned, Header], tmp_path: Path
) -> None:
    _, header = tuned
    path = tmp_path / "rankings.json"
    write_rankings(path, export([header]))
    entries = read_rankings(path).entries
    assert [entry.problem for entry in entries] == [
        one.problem for one in header.rankings_on(torch.cuda.get_device_name())
    ]
    for entry, ranking in zip(entries, header.rankings_on(torch.cuda.get_device_name())):
        assert entry.origin.conditions.gpu_sha256 is not None
        assert entry.origin.gpu == torch.cuda.get_device_name()
        winner = header.kernels[ranking.kernels[0].kernel]
        assert (entry.kernels[0][0].provider, entry.kernels[0][0].operator) == (
            winner.provider,
            winner.operator,
        )


def test_triton_is_asked_through_inductor(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    _, header = tuned_bundle(small, tmp_path / "tuned.nvgemm", triton=True)
    for ranking in header.rankings_on(torch.cuda.get_device_name()):
        assert ranking.measured is not None
        assert ranking.measured.triton is not None


PROGRAM = """
import json, os, sys
import torch
from torch._inductor.select_algorithm import ExternKernelCaller
m, n, k = map(int, sys.argv[1:])
timed, benchmark = [], ExternKernelCaller.benchmark
def noting(choice, *arguments, **options):
    timed.append(choice.name)
    return benchmark(choice, *arguments, **options)
ExternKernelCaller.benchmark = noting
a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
compiled = torch.compile(
    lambda a, b: a @ b,
    options={"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"},
)
result = compiled(a, b)
import nvgemm_runtime
error = float((result.double() - a.double() @ b.double()).norm() / (a.double() @ b.double()).norm())
print(json.dumps({"timed": timed, "won": list(nvgemm_runtime.stats().won), "error": error}))
"""


def compiled_elsewhere(path: Path, problem: Problem, cache: Path, trust: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "NVGEMM_AOT_BUNDLES": str(path),
        "NVGEMM_AOT_TRUST_RANKING": trust,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    command = [sys.executable, "-c", PROGRAM, *map(str, (problem.m, problem.n, problem.k))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(os.environ.get("NVGEMM_AOT") == "off", reason="the plug-in is off")
def test_torch_compile_goes_by_what_was_measured(
    tuned: tuple[Tuned, Header], tmp_path: Path
) -> None:
    result, header = tuned
    for number, ranking in enumerate(header.rankings_on(torch.cuda.get_device_name())):
        problem, measured = ranking.problem, ranking.measured
        assert problem.signature.op is Op.MM
        assert measured is not None
        assert measured.aten is not None
        if measured.doubts:
            pytest.skip(f"the GPU was disturbed: {measured.doubts}")
        winner = header.kernels[ranking.kernels[0].kernel].id
        time_ns = ranking.kernels[0].time_ns
        assert time_ns is not None
        is_ours = time_ns < measured.aten.time_ns
        usual = compiled_elsewhere(result.path, problem, tmp_path / f"usual{number}", "0")
        # ATen may be timed once more, as the plug-in times what it is compared with.
        timed = set(usual["timed"])
        assert len(timed) == (2 if is_ours else 0), f"must be ATen and the winner, or none: {timed}"
        trusted = compiled_elsewhere(result.path, problem, tmp_path / f"trusted{number}", "1")
        assert trusted["timed"] == []
        assert trusted["won"] == ([winner] if is_ours else [])
        assert max(usual["error"], trusted["error"]) < 4e-3


def test_a_measurement_with_another_torch_is_confirmed(
    tuned: tuple[Tuned, Header], tmp_path: Path
) -> None:
    """Both problems, whoever wins; their times count for the table, and agree with those tuned."""
    result, _ = tuned
    with Bundle(result.path) as bundle:
        content = read_content(bundle)
    older = tmp_path / "older.nvgemm"
    write_bundle(older, replace(content, rankings=tuple(map(_with_older_torch, content.rankings))))
    with Bundle(older) as bundle:
        bench = confirm_bench()
        confirmed = confirm([bundle], bench)
        assert confirmed.left_out == confirmed.rejected == {}
        views = [BundleView(name="older", header=bundle.header, opened=bundle)]
        index = Index(
            views,
            bench.facts,
            versions=bench.versions,
            confirmations=[confirmed.confirmations],
        )
    assert len(confirmed.confirmations.problems) == 2
    for key, times in confirmed.confirmations.problems.items():
        assert not times.doubts
        (usable,) = index.ranked_sizes(Problem.parse(key))[Problem.parse(key).m]
        assert usable.source.conditions == confirmed.confirmations.conditions
        aten = result.outcomes[key].aten
        assert aten is not None
        assert times.aten.time_ns == pytest.approx(aten.time_ns, rel=0.15)


def _with_older_torch(ranking: ProblemRanking) -> ProblemRanking:
    conditions = ranking.source.conditions
    if conditions is None:
        return ranking
    older = replace(conditions, torch="2.0.0+cu118")
    return replace(ranking, source=replace(ranking.source, conditions=older))
