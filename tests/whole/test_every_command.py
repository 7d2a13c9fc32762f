"""Every command meets every row of the support table and the kinds of problems of manifests.

What each says of a problem is held against what matching, the runtime's one decision, says of it.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from click.testing import CliRunner

import cpu_provider
import tuning_bench
from explained_rows import is_called_by_aten
from nvgemm_aot.cli.main import main
from nvgemm_aot.emulator.checking.every_signature import EVERY_SIGNATURE
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.workload import find_bundles
from nvgemm_aot.workload.coverage import gpu_facts
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import VerificationError
from nvgemm_runtime.gemm.epilogues import ADD, BIAS
from nvgemm_runtime.gemm.problem import DType, Layout, Problem
from nvgemm_runtime.gemm.roles import contiguous_bytes
from nvgemm_runtime.gemm.support import unavailable
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import Basis, BundleView, Match
from nvgemm_runtime.recording.declarable import ALIGNMENT_BYTES
from planned_rows import (
    CASES,
    MANIFESTS,
    ROWS,
    Case,
    Planned,
    Planner,
    every_case,
    is_plain,
    kind,
    manifest_of,
    representatives,
)
from repository import SUPPORT
from tuning_bench import DictatedTimer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("planned"))


@pytest.fixture
def planned(planner: Planner, case: Case) -> Planned:
    return planner.plan(case)


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def index_of(case: Case, *paths: Path) -> Index:
    views = []
    for path in paths:
        with Bundle(path) as bundle:
            views.append(BundleView(name=str(path), header=bundle.header))
    return Index(views, gpu_facts(case.target, views))


def found_as(index: Index, problem: Problem) -> str:
    """What matching says of a problem, or of its product where torch.compile splits a sum."""
    found = _match(index, problem)
    if isinstance(found, Match):
        return "declared" if found.basis is Basis.DECLARED else "signature"
    served = problem.signature
    if served.epilogue in (BIAS, ADD) and served.a.bits == 16:
        product = replace(served, epilogue=None, out=DType.FP32)
        if isinstance(_match(index, replace(problem, signature=product)), Match):
            return "signature"
    return "missed"


def _match(index: Index, problem: Problem) -> object:
    extents = contiguous_bytes(problem)
    return index.match(problem, min(ALIGNMENT_BYTES, extents & -extents))


@functools.cache
def covered(planned: Planned, *bundles: Path) -> dict[str, str]:
    """By problem, what ``coverage`` finds it as."""
    result = run("coverage", planned.manifest, *bundles, "--json")
    assert result.exit_code == 0, result.output
    [target] = json.loads(result.stdout)["targets"]
    return {gemm["gemm"]: gemm["status"] for gemm in target["gemms"]}


def test_the_cases_have_every_row_and_what_manifests_declare() -> None:
    planned = {kind(problem.signature) for case in CASES for problem in case.problems}
    of_one_type = [one for one in EVERY_SIGNATURE if one.a is one.b]
    assert planned >= {kind(one) for one in of_one_type}
    of_two_types = [one for one in EVERY_SIGNATURE if one.a is not one.b]
    some = [one for one in of_two_types if kind(one) in planned]
    assert {one.scales for one in some} == {one.scales for one in of_two_types}
    assert {one.a for one in some} == {one.a for one in of_two_types}
    for name in MANIFESTS:
        assert planned >= {kind(one.problem.signature) for one in manifest_of(name).declared}, name


@every_case
def test_a_plan_serves_each_problem_or_says_why_not(planned: Planned) -> None:
    asked = representatives(planned.case.problems)
    targets = planned.document["targets"]
    served = {one["problem"] for target in targets for one in target["problems"]}
    unserved = {one["problem"]: one["reason"] for one in planned.document["unserved"]}
    assert sorted([*served, *unserved]) == sorted(problem.key for problem in asked)
    assert all(unserved.values())
    index = index_of(planned.case, *filter(None, [planned.right]))
    matched = {problem.key for problem in asked if isinstance(_match(index, problem), Match)}
    assert matched == served


def test_only_where_an_operator_is_missing_is_a_row_unserved(planner: Planner) -> None:
    """On Hopper no block scales and no groups of fp8, and integers on sm_100a alone."""
    for case in CASES:
        unserved = {problem.signature for problem, _ in planner.plan(case).plan.unserved}
        for problem in representatives(case.problems):
            served = problem.signature
            is_there = {
                "sm_90a": unavailable(served, "sm_90a") is None,
                "sm_100f": not served.a.is_integer,
                "sm_100a": True,
            }[case.arch]
            if case.arch == "sm_90a" and is_plain(served) and served.a.bits < 16:
                continue  # what is listed for fp8 in other layouts than tn does not compile
            if case.arch == "sm_90a" and not is_plain(served) and _lacks_quack(case):
                continue  # cutlass_operators has plain products alone there
            assert (served in unserved) is not is_there, (case.id, served.key)


def _lacks_quack(case: Case) -> bool:
    return "quack" not in (manifest_of(case.name).providers or ("quack",))


def arrangements(planned: Planned) -> list[tuple[Path, ...]]:
    """The right bundle, one of plain kernels, and none; for rows both bundles as well."""
    right = () if planned.right is None else (planned.right,)
    both = [(*right, planned.plain)] if planned.case.name in ROWS else []
    return list(dict.fromkeys([right, (planned.plain,), (), *both]))


def test_shipped_manifests_are_found_by_name(planner: Planner) -> None:
    """And whole, as they come, are covered by what is planned for some of their sizes."""
    planned = planner.plan(Case(name="deepseek-v3", arch="sm_100f"))
    result = run("coverage", "deepseek-v3", planned.right, "--fail-under", "100", "--json")
    assert result.exit_code == 0, result.output
    [target] = json.loads(result.stdout)["targets"]
    assert len(target["gemms"]) == len(manifest_of("deepseek-v3").declared)


@every_case
def test_coverage_says_what_matching_says(
    planned: Planned, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including that kernels without scales, groups or epilogue serve nothing that has them."""
    use(monkeypatch)
    for bundles in arrangements(planned):
        index = index_of(case, *bundles)
        expected = {problem.key: found_as(index, problem) for problem in case.problems}
        assert covered(planned, *bundles) == expected
        if not bundles:
            assert set(expected.values()) == {"missed"}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ROWS])
def test_bundles_for_another_gpu_cover_nothing(
    planner: Planner, planned: Planned, case: Case
) -> None:
    arch = "sm_100f" if case.arch == "sm_90a" else "sm_90a"
    other = planner.plan(Case(name="quickstart", arch=arch)).right
    assert other is not None
    assert set(covered(planned, other).values()) == {"missed"}


@every_case
def test_the_gate_proposes_what_a_target_can_build(planned: Planned, case: Case) -> None:
    """Declared and built, the lines that it prints cover what is missing."""
    result = run("coverage", planned.manifest, planned.plain, "--fail-under", "100")
    _, _, proposed = result.stderr.partition("  gemms:\n")
    lines = [line.strip() for line in proposed.splitlines()]
    if not lines:
        return
    path = planned.plain.with_suffix(".yaml")
    path.write_text(f"version: 1\nname: x\ntargets: [{case.arch}]\ngemms:\n" + "\n".join(lines))
    for declared in load_manifest(path).declared:
        assert unavailable(declared.problem.signature, case.arch) is None


@every_case
def test_inspect_shows_each_problem(planned: Planned, case: Case) -> None:
    for path in filter(None, (planned.right, planned.plain)):
        document = json.loads(run("inspect", path, "--json").stdout)
        assert run("inspect", path).exit_code == 0
        index = index_of(case, path)
        signatures = {kernel["id"]: kernel["signature"] for kernel in document["kernels"]}
        for shown in document["problems"]:
            problem = Problem.parse(shown["problem"])
            assert {signatures[one["id"]] for one in shown["kernels"]} == {problem.signature.key}
            assert found_as(index, problem) == "declared"
        unserved = {one["problem"] for one in document["unserved"]}
        for key in unserved:
            assert index.match_ranked(Problem.parse(key), ALIGNMENT_BYTES) is None
        declared = {one["problem"] for one in document["problems"]} | unserved
        assert path == planned.plain or declared == {one.key for one in case.problems}


@every_case
def test_verify_looks_at_each_kernel(planned: Planned, case: Case) -> None:
    """And finds that these payloads are none; those of real kernels are in ``test_rows.py``."""
    for path in filter(None, (planned.right, planned.plain)):
        result = run("verify", path, "--no-disassemble", "--json")
        assert result.exit_code == VerificationError.exit_code
        [document] = json.loads(result.stdout)
        with Bundle(path) as bundle:
            kernels = {kernel.id: kernel.signature.key for kernel in bundle.header.kernels}
        assert {one["id"]: one["signature"] for one in document["kernels"]} == kernels
        assert {finding["kernel"] for finding in document["findings"]} >= kernels.keys()


@pytest.mark.parametrize("name", dict.fromkeys(case.name for case in CASES))
def test_a_wheel_covers_as_its_bundles_do(
    name: str, planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its file, and installed, where ``list`` shows it."""
    found = [planner.plan(case) for case in CASES if case.name == name]
    bundles = {planned: planned.right for planned in found if planned.right is not None}
    options = ("--name", name.replace("_", "-"), "--version", "1.0", "-o", tmp_path)
    assert run("wheel", *bundles.values(), *options).exit_code == 0
    [wheel] = tmp_path.glob("nvgemm_kernels_*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    for planned, path in bundles.items():
        expected = covered(planned, path)
        assert covered(planned, wheel) == expected
        use(monkeypatch, tmp_path / "site")
        assert covered.__wrapped__(planned) == expected
    shown = {one["target"]: one for one in json.loads(run("list", "--json").stdout)}
    assert {target.split("-")[0] for target in shown} == {planned.case.arch for planned in bundles}
    for path in bundles.values():
        with Bundle(path) as bundle:
            header = bundle.header
        one = shown[header.target.key]
        assert (one["kernels"], one["problems"]) == (len(header.kernels), len(header.rankings))


def use(monkeypatch: pytest.MonkeyPatch, *sites: Path) -> None:
    """Have the wheels of these directories installed, and no others."""
    found = list(distributions(path=[str(site) for site in sites]))
    monkeypatch.delenv("NVGEMM_AOT_BUNDLES", raising=False)
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: found)
    monkeypatch.setattr(find_bundles, "INSTALLATION", Installation())


PROGRAM = [sys.executable, str(SUPPORT / "explained_rows.py")]


@pytest.mark.parametrize(
    ("name", "arch", "bundle"),
    [
        ("every_row_sm100", "sm_100f", "right"),
        ("every_row_sm100", "sm_100f", "plain"),
        ("hopper_rows", "sm_90a", "right"),
        ("int8_sm100", "sm_100a", "right"),
    ],
)
def test_explain_says_of_tensors_what_coverage_says(
    planner: Planner,
    name: str,
    arch: str,
    bundle: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plug-in reads tensors, and coverage a manifest: both come to the same."""
    planned = planner.plan(Case(name=name, arch=arch))
    keys, path = tmp_path / "keys", getattr(planned, bundle)
    keys.write_text("\n".join(problem.key for problem in planned.case.problems))
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", str(path))
    result = run("explain", "--json", "--", *PROGRAM, arch, keys)
    assert result.exit_code == 0, result.output
    met = {one["gemm"]: one["basis"] for one in json.loads(result.stdout)["gemms"]}
    names = {"declared": "declared", "signature": "signature", "missed": "miss"}
    assert met == {key: names[status] for key, status in covered(planned, path).items()}


@pytest.mark.parametrize(
    ("name", "arch"), [("every_row_sm100", "sm_100f"), ("hopper_rows", "sm_90a")]
)
def test_what_a_program_calls_is_recorded_and_covered(
    name: str, arch: str, planner: Planner, tmp_path: Path
) -> None:
    """Every row that ATen has a call for."""
    planned = planner.plan(Case(name=name, arch=arch))
    called = [one for one in planned.case.problems if is_called_by_aten(one.signature)]
    keys, recorded = tmp_path / "keys", tmp_path / "recorded.yaml"
    keys.write_text("\n".join(problem.key for problem in called))
    options = ("--fake", "-o", recorded, "--target", arch)
    result = run("record", *options, "--", *PROGRAM, "calls", keys)
    assert result.exit_code == 0, result.output
    assert {one.problem for one in load_manifest(recorded).declared} == set(called)
    result = run("coverage", recorded, planned.right, "--fail-under", "100", "--declared-only")
    assert result.exit_code == 0, result.output
    document = json.loads(run("coverage", recorded, planned.plain, "--json").stdout)
    target, *_ = document["targets"]  # one for each product
    index = index_of(planned.case, planned.plain)
    assert {gemm["gemm"]: gemm["status"] for gemm in target["gemms"]} == {
        one.key: found_as(index, one) for one in called
    }


def test_tune_measures_each_row_that_it_is_given(
    kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kernels for the CPU, one of each kind, and as matching then finds them."""
    of_kind = {
        (one.op, one.scales, one.epilogue): one
        for one in (*cpu_provider.SIGNATURES, *cpu_provider.FUSED)
        if one.a is not DType.FP32 and one.layout is Layout.TN
    }
    problems = [cpu_provider.problem_of(one) for one in of_kind.values()]
    built = cpu_provider.build_bundle(problems, tmp_path, kernel_cache, candidates=1)
    assert run("verify", built.path).exit_code == 0
    bench = tuning_bench.bench(DictatedTimer({"": [2000.0], "aten": [2500.0]}))
    tuning_bench.measure_here(monkeypatch, bench)
    output = tmp_path / "tuned.nvgemm"
    result = run("tune", built.path, "-o", output, "--json")
    assert result.exit_code == 0, result.output
    keys = {problem.key for problem in problems}
    assert json.loads(result.stdout)["problems"].keys() == keys
    shown = json.loads(run("inspect", output, "--json").stdout)
    assert {one["problem"] for one in shown["problems"] if one["measured"]} == keys
    with Bundle(output) as bundle:
        index = Index([BundleView(name="tuned", header=bundle.header)], bench.facts)
    for problem in problems:
        found = index.match(problem, ALIGNMENT_BYTES)
        assert isinstance(found, Match)
        assert (found.basis, found.measured is not None) == (Basis.DECLARED, True), problem.key
