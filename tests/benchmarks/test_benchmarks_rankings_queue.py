"""Queue of rankings to measure: its rows, and continuing over runs."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

import cpu_provider
from benchmarks.rankings_queue import __main__ as queue
from benchmarks.rankings_queue import planning
from benchmarks.rankings_queue.rows import is_done_with, read_rows, write_rows
from nvgemm_aot.bundle.content import read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.manifest.parse import Declared, load_manifest
from nvgemm_aot.manifest.shipped_manifests import find_manifest
from nvgemm_aot.pipeline.pipeline import plan_build
from nvgemm_aot.rankings.assess import assess
from nvgemm_aot.rankings.entries import Rankings
from nvgemm_aot.rankings.file import read_rankings, write_rankings
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning import watchdog
from nvgemm_aot.tuning.measuring.grid import SERVING, Grid
from nvgemm_aot.tuning.tune_bundles import Tuned
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.gemm.problem import Op, Problem
from repository import ROOT
from tuning_bench import PROBLEMS

EXPERTS = ("gpt-oss-20b-experts", "qwen3-30b-a3b-experts", "mixtral-8x7b-experts")


def device_of(planned: planning.PlannedRow) -> str:
    (target,) = planned.work.targets
    return target.device.name


def test_the_queue_holds_what_is_to_be_measured_each_once_and_bf16_first() -> None:
    found = planning.read_queue()
    assert {one.row.manifest for one in found} == {
        *("llama-3.1-8b", "qwen3-8b", "llama-3.3-70b", "qwen3-30b-a3b", "hgemm-1000"),
        *("qwen3-32b", *EXPERTS),
    }
    on_h100 = [one for one in found if device_of(one) == "H100"]
    assert {device_of(one) for one in found} == {"H200", "H100"}
    assert {one.row.manifest for one in on_h100} == {
        *("llama-3.1-8b", "qwen3-8b", "llama-3.3-70b", "qwen3-30b-a3b", "qwen3-32b")
    }
    assert {of.signature.a.value for one in on_h100 for of in one.row.problems} == {"bf16"}
    whole = [one for one in found if not one.row.serving and "gated" not in one.row.name]
    dense = [one for one in whole if one not in on_h100 and one.row.manifest not in EXPERTS]
    dtypes = [one.row.problems[0].signature.a.value for one in dense]
    assert dtypes == sorted(dtypes), "bf16 before fp16"
    counts = Counter((device_of(one), of) for one in found for of in one.row.problems)
    assert set(counts.values()) == {1}
    for one in found:
        of_sums = {problem.signature.op for problem in one.row.problems} == {Op.GATHERED_MM}
        expected = 6 if one.row.manifest in EXPERTS and not of_sums else 8
        expected = 4 if one.row.serving else expected
        assert {entry.candidates for entry in one.work.declared} == {expected}
        usual = ("cutlass_operators", "quack")
        assert one.work.providers == (("gathered",) if of_sums else usual)
        assert [target.target.arch for target in one.work.targets] == ["sm_90a"]
    manifest = load_manifest(find_manifest(Path("llama-3.1-8b")))
    declared = {entry.problem for entry in manifest.declared}
    measured = planning.problems_of("llama-3.1-8b")
    assert declared < measured
    assert {problem.m for problem in measured - declared} == {m for m in SERVING if m < 8192} - {
        problem.m for problem in declared
    }
    tp8 = {one for one in planning.problems_of("llama-3.3-70b") if one.m.bit_count() == 1}
    declared = {
        entry.problem for entry in load_manifest(find_manifest(Path("llama-3.3-70b"))).declared
    }
    assert tp8 < declared
    assert len(planning.problems_of("hgemm-1000")) == 100


def test_rows_for_serving_are_sizes_between_that_engines_use() -> None:
    rows = [one for one in planning.read_queue() if one.row.serving]
    order = ("llama-3.1-8b", "qwen3-8b", "llama-3.3-70b", "qwen3-32b")
    assert [(device_of(one), one.row.manifest) for one in rows] == [
        (device, manifest) for device in ("H100", "H200") for manifest in order
    ]
    for one in rows:
        declared = {entry.problem for entry in one.work.declared}
        between = {*one.row.problems} - declared
        assert {problem.m for problem in between} <= {*SERVING}
        if one.row.manifest == "qwen3-32b":
            assert declared < {*one.row.problems}, "no earlier row measures them"
        else:
            assert declared.isdisjoint(one.row.problems)
        lines = {(problem.n, problem.k) for problem in between}
        assert lines == {(problem.n, problem.k) for problem in declared}
        for n, k in lines:
            sizes = {of.m for of in (*between, *declared) if (of.n, of.k) == (n, k)}
            most = 512 if n in (128256, 151936, 16032) else 8192
            assert sizes == {m for m in SERVING if m <= most}
        assert not one.row.neighbours
    shared = {(6144, 4096), (4096, 4096)}
    by_name = {one.row.name: {(of.n, of.k) for of in one.row.problems} for one in rows}
    assert shared < by_name["llama-3.1-8b-serving-h100"]
    assert shared.isdisjoint(by_name["qwen3-8b-serving-h100"])


@pytest.mark.parametrize("manifest", EXPERTS)
def test_all_products_of_experts_are_rows_of_the_queue(manifest: str) -> None:
    rows = [one.row for one in planning.read_queue() if one.row.manifest == manifest]
    declared = load_manifest(find_manifest(Path(manifest))).declared
    problems = [problem for row in rows for problem in row.problems]
    assert sorted(problems) == sorted(entry.problem for entry in declared)
    gathered = [{Op.GATHERED_GROUPED_MM}] if manifest.startswith("qwen3") else []
    assert [{one.signature.op for one in row.problems} for row in rows] == [
        {Op.GROUPED_MM, Op.K_GROUPED_MM}, *gathered, {Op.GATHERED_MM},
    ]  # fmt: skip
    assert not any(row.neighbours for row in rows)
    assert planning.problems_of(manifest) == {*problems}


def test_rows_keep_whether_neighbours_are_measured(tmp_path: Path) -> None:
    rows = [one.row for one in planning.read_queue()]
    write_rows(tmp_path, rows)
    assert read_rows(tmp_path) == rows
    assert {row.neighbours for row in rows} == {False, True}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> functools.partial[Result]:
    """Runs the benchmark over two CPU rows, with made-up times."""

    def row(name: str, problems: tuple[Problem, ...]) -> planning.PlannedRow:
        work = cpu_provider.manifest(problems, name=name)
        work = replace(work, providers=("recording_kernels:Recording",))
        return planning.planned_row(name, "some", work)

    found = [row("first", PROBLEMS[:2]), row("second", PROBLEMS[2:])]
    monkeypatch.setattr(planning, "read_queue", lambda: found)
    monkeypatch.setattr(
        planning, "problems_of", lambda name: {*PROBLEMS} if name == "some" else set()
    )
    tune_watched = watchdog.tune_watched

    def watched(*given: object, **how: object) -> Tuned:
        return tune_watched(*given, **how, bench="watched_benches:sound")  # type: ignore[arg-type]

    monkeypatch.setattr(watchdog, "tune_watched", watched)
    return functools.partial(CliRunner().invoke, queue.main)


@pytest.mark.slow
def test_measuring_goes_on_from_run_to_run_and_two_gpus_confirm(
    run: functools.partial[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles, one, two = (str(tmp_path / name) for name in ("bundles", "one", "two"))
    built = run(["build", bundles])
    assert built.exit_code == 0, built.output
    assert "3 kernels for 2 problems" in built.output
    status = run(["status", one])
    assert "first                             2        0        0          2" in status.output
    assert status.output.count("unmeasured, ") == 3
    monkeypatch.setenv("WATCHED_BENCH_UUID", "GPU-1")
    first = run(["measure", bundles, one, "--row", "first"])
    assert first.exit_code == 0, first.output
    assert "first: 2 measured now, 2 in all, 0 left" in first.output
    rest = run(["measure", bundles, one])
    assert "first: " not in rest.output, "it is done"
    assert "second: 1 measured now, 1 in all, 0 left" in rest.output
    assert "all                               3        3        0          0" in rest.output
    monkeypatch.setenv("WATCHED_BENCH_UUID", "GPU-2")
    assert run(["measure", bundles, two]).exit_code == 0
    exported = run(["export", one, two, "-o", str(tmp_path / "data")])
    assert exported.exit_code == 0, exported.output
    found = read_rankings(tmp_path / "data" / "some.json")
    assert len(found.entries) == 6
    assert {assess(group).standing for group in found.groups.values()} == {"confirmed"}
    assert "problems: 3 confirmed" in exported.output


def test_a_row_says_what_else_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        watchdog,
        "tune_watched",
        lambda paths, output, options: asked.append(
            (options.neighbours, options.grid, options.skips_confirmed)
        ),
    )
    row = planning.planned_row("one", "some", cpu_provider.manifest(PROBLEMS)).row
    for how in ({"neighbours": True}, {"neighbours": False}, {"serving": True}):
        queue._tune(replace(row, **how), tmp_path, tmp_path, None, repeats=True)
    assert asked == [(True, None, False), (False, None, False), (True, Grid.SERVING, True)]


@pytest.mark.slow
def test_a_row_for_serving_measures_and_exports_sizes_between(
    run: functools.partial[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles, results, data = (tmp_path / name for name in ("bundles", "results", "data"))
    (first, _) = planning.read_queue()
    between = replace(PROBLEMS[0], m=24)
    work = replace(first.work, declared=tuple(
        Declared(problem=one, candidates=3) for one in (PROBLEMS[1], PROBLEMS[2])
    ))  # fmt: skip
    planned = planning.planned_row(
        "first", "some", work, problems=[between], neighbours=False, serving=True
    )
    monkeypatch.setattr(planning, "read_queue", lambda: [planned])
    monkeypatch.setattr(planning, "problems_of", lambda name: {*PROBLEMS, between})
    assert run(["build", str(bundles)]).exit_code == 0
    assert "for 2 problems" in run(["build", str(bundles)]).output
    assert "0          1" in run(["status", str(results)]).output
    monkeypatch.setenv("WATCHED_BENCH_UUID", "GPU-1")
    measured = run(["measure", str(bundles), str(results)])
    assert "first: 3 measured now, 3 in all, 0 left" in measured.output
    assert "all                               1        1        0          0" in measured.output

    data.mkdir()
    assert run(["export", str(results), "-o", str(data)]).exit_code == 0
    found = read_rankings(data / "some.json")
    assert [entry.problem.m for entry in found.entries] == [16, 24, 32]
    write_rankings(data / "some.json", Rankings(entries=found.entries[:1]))
    again = run(["export", str(results), "-o", str(data)])
    assert again.exit_code == 0, again.output
    assert read_rankings(data / "some.json") == found, "added to what is there"
    monkeypatch.setattr(queue, "progress_of", lambda row, results: SimpleNamespace(outcomes={}))
    nothing = run(["export", str(results), "-o", str(tmp_path / "none")])
    assert "some: nothing is measured" in nothing.output, "of rankings that were built in"


@pytest.mark.slow
def test_a_row_that_fails_does_not_end_the_others(
    run: functools.partial[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles, results = (str(tmp_path / name) for name in ("bundles", "results"))
    run(["build", bundles])
    tune_watched = watchdog.tune_watched

    def failing(paths: list[Path], *given: object, **how: object) -> Tuned:
        if paths[0].name.startswith("first"):
            raise TuningError("8 measuring processes hung or died")
        return tune_watched(paths, *given, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(watchdog, "tune_watched", failing)
    found = run(["measure", bundles, results])
    assert "first: FAILED: 8 measuring processes hung or died" in found.output
    assert "second: 1 measured now, 1 in all, 0 left" in found.output
    assert "all                               3        1        0          2" in found.output
    assert "Error: rows that failed, see above: first" in found.output
    assert found.exit_code == 1


@pytest.mark.slow
def test_a_row_is_done_with_the_bundle_that_was_measured_alone(
    run: functools.partial[Result], tmp_path: Path
) -> None:
    bundles, results = tmp_path / "bundles", tmp_path / "results"
    run(["build", str(bundles)])
    assert run(["measure", str(bundles), str(results), "--row", "second"]).exit_code == 0
    (row,) = (row for row in read_rows(bundles) if row.name == "second")
    with Bundle(row.bundle(bundles)) as bundle:
        key = bundle.header.build_key
        content = read_content(bundle)
    assert is_done_with(row, results, key)
    write_bundle(row.bundle(bundles), replace(content, build_key="0" * 64))
    assert not is_done_with(row, results, "0" * 64)
    again = run(["measure", str(bundles), str(results), "--row", "second"])
    assert "second: FAILED: " in again.output, "its measurements are those of another bundle"
    assert "belongs to another tuning" in again.output
    assert "  done" not in again.output


@pytest.mark.slow
def test_a_used_up_budget_leaves_the_rest_to_the_next_run(
    run: functools.partial[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles, results = (str(tmp_path / name) for name in ("bundles", "results"))
    run(["build", bundles])
    ticks = iter([0.0, 0.0, 100.0])
    monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=ticks.__next__))
    stopped = run(["measure", bundles, results, "--budget", "50"])
    assert stopped.exit_code == 0, stopped.output
    assert "first: 2 measured now" in stopped.output
    assert "second: 1 measured now" not in stopped.output
    assert "unmeasured, second: " in stopped.output


def test_what_was_not_built_is_said(run: functools.partial[Result], tmp_path: Path) -> None:
    none, results, bundles = (str(tmp_path / name) for name in ("none", "results", "bundles"))
    found = run(["measure", none, results])
    assert found.exit_code == 1
    assert "rows.json is not there: build the bundles first" in found.output
    run(["build", bundles, "--row", "first"])
    found = run(["measure", bundles, results, "--row", "second"])
    assert found.exit_code == 0
    assert "second: left out: " in found.output
    unknown = run(["measure", bundles, results, "--row", "third"])
    assert unknown.exit_code == 2
    assert "no row is called third (known: first, second)" in unknown.output


def test_eight_candidates_of_a_problem_are_planned(tmp_path: Path) -> None:
    """Plans one problem without compiling."""
    work = planning.read_queue()[0].work
    work = replace(work, declared=work.declared[:1])
    (planned,) = plan_build(work, Cache(tmp_path / "cache"))
    (problem,) = planned.plan.problems
    assert len(problem.choices) == 8


def test_measuring_needs_nothing_of_the_compiler_side() -> None:
    script = (
        "import sys\n"
        "for name in ('pydantic', 'yaml', 'cutlass', 'nvMatmulHeuristics', 'wheel'):\n"
        "    sys.modules[name] = None\n"
        "import benchmarks.rankings_queue.__main__, benchmarks.rankings_queue.rows"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
